// What the page can do beyond being read: values under the pointer, zoom, the list of tensors. Everything that comes
// from a run is put into the page as text (textContent), never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.documentElement.classList.add("js");
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function make(tag, text = "", attributes = {}) {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  function number(value, digits) {
    if (value === null) return "–";
    if (typeof value === "string") return value;
    const rounded = Number(value.toPrecision(digits)), size = Math.abs(rounded);
    return size && (size < 1e-3 || size >= 1e9) ? rounded.toExponential() : String(rounded);
  }

  // Calls draw at most once per frame.
  function eachFrame(draw) {
    let waiting = false;
    return () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; draw(); });
    };
  }

  // ---------------------------------------------------------------- charts

  const WIDTH = 1000, HEIGHT = 100, MAX_DOTS = 80, MAX_POINTS = 2000, FEW = 24;
  const charts = [];
  for (const chart of Object.values(data.charts)) for (const { series } of chart.panels) for (const one of series) {
    one.values ??= series[one.as].values; // the very same numbers are stored once
  }
  const finite = (value) => typeof value === "number";

  function namesOf({ from, count, tensors: rows, each }) {
    if (rows) return rows.map((row) => data.tensors.name[row]);
    return each ?? Array.from({ length: count }, (_, index) => String(from + index));
  }

  class Plot {
    constructor(figure, chart) {
      Object.assign(this, { figure, chart });
      this.plot = figure.querySelector(".plot");
      this.canvases = all(".canvas", figure);
      this.readout = figure.querySelector(".readout");
      this.names = namesOf(chart.names);
      this.whole = [0, this.names.length];
      this.range = this.whole;
      this.at = null;
      this.show = eachFrame(() => this.drawHair());
      this.listen();
    }

    listen() {
      const { plot, figure } = this;
      for (const [name, value] of Object.entries({
        tabindex: 0, role: "slider", "aria-orientation": "horizontal", "aria-valuemin": 1, "aria-valuemax": this.names.length,
        "aria-valuenow": 1, "aria-valuetext": `${this.names.length} values, arrow keys move`,
      })) plot.setAttribute(name, value);
      plot.addEventListener("pointermove", (event) => {
        this.move(this.indexAt(event));
        if (this.dragFrom !== undefined) this.drawPick(event);
      });
      plot.addEventListener("pointerleave", () => { if (this.dragFrom === undefined) this.move(null); });
      plot.addEventListener("blur", () => this.move(null));
      plot.addEventListener("keydown", (event) => this.key(event));
      if (this.names.length > FEW) {
        figure.querySelector(".zoom").hidden = false;
        plot.addEventListener("pointerdown", (event) => {
          if (event.button === 0 && event.pointerType === "mouse") {
            this.dragFrom = this.indexAt(event);
            plot.setPointerCapture(event.pointerId);
          }
        });
        plot.addEventListener("pointerup", (event) => this.drop(event));
        for (const button of all("[data-zoom]", figure)) {
          button.addEventListener("click", () => this.zoomBy(button.dataset.zoom));
        }
      }
      const details = figure.querySelector("details");
      details.addEventListener("toggle", () => { if (details.open) this.list(details.querySelector(".values")); });
    }

    indexAt(event) {
      const box = this.canvases[0].getBoundingClientRect();
      const [from, to] = this.range;
      return clamp(Math.floor(from + ((event.clientX - box.left) / box.width) * (to - from)), from, to - 1);
    }

    key(event) {
      const [from, to] = this.range;
      const now = this.at === null ? from - 1 : this.at;
      const page = Math.max(1, Math.round((to - from) / 10));
      const moves = { ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1,
        PageUp: now + page, PageDown: now - page, Home: from, End: to - 1 };
      if (event.key in moves) this.move(clamp(moves[event.key], from, to - 1));
      else if (event.key === "Escape") this.move(null);
      else if (this.names.length > FEW && "+=-0".includes(event.key)) {
        this.zoomBy({ "+": "in", "=": "in", "-": "out", 0: "all" }[event.key]);
      } else return;
      event.preventDefault();
    }

    // Moves the hair of this chart, and of every chart with the same updates.
    move(index) {
      const peers = this.chart.synced ? charts.filter((other) => other.chart.synced) : [this];
      const name = index === null ? null : this.names[index];
      for (const peer of peers) {
        peer.at = peer === this || name === null ? index : peer.names.indexOf(name) < 0 ? null : peer.names.indexOf(name);
        peer.show();
      }
    }

    drawHair() {
      const [from, to] = this.range, visible = this.at !== null && this.at >= from && this.at < to;
      for (const hair of all(".hair", this.figure)) {
        hair.style.display = visible ? "block" : "none";
        if (visible) hair.style.left = `${((this.at - from + 0.5) / (to - from)) * 100}%`;
      }
      this.readout.replaceChildren(...(visible ? this.describe(this.at) : []));
      if (visible) {
        this.plot.setAttribute("aria-valuenow", this.at + 1);
        this.plot.setAttribute("aria-valuetext", this.readout.textContent);
      }
    }

    describe(index) {
      const parts = [make("b", `${this.chart.x.split(",")[0]} ${this.names[index]}`)];
      let deviation = null, limit = null;
      for (const panel of this.chart.panels) for (const series of panel.series) {
        const value = series.values[index];
        if (value === null) continue;
        if (series.style === "deviation") deviation = value;
        if (series.style === "limit") { limit = value; continue; }
        if (series.style === "noise") continue;
        parts.push(` · ${series.label} `, make("b", number(value, panel.scale === "log" ? 3 : 9)));
      }
      if (deviation !== null && limit !== null) {
        const over = !finite(deviation) || deviation > limit;
        parts.push(make("span", ` ${over ? "exceeds" : "of"} ${number(limit, 3)}${over ? "" : " allowed"}`, { class: over ? "over" : "" }));
      }
      return parts;
    }

    list(place) {
      if (place.firstChild) return;
      const columns = this.chart.panels.flatMap((panel) => panel.series.map((series) => ({ ...series, digits: panel.scale === "log" ? 3 : 9 })));
      const table = make("table"), head = make("tr"), body = make("tbody");
      head.append(make("th", this.chart.x, { scope: "col" }), ...columns.map((column) => make("th", column.label, { scope: "col", class: "num" })));
      const thead = make("thead"); thead.append(head); table.append(thead, body);
      const more = make("button", "show more", { type: "button", class: "button" });
      let shown = 0;
      const grow = () => {
        const end = Math.min(shown + 200, this.names.length);
        for (; shown < end; shown++) {
          const row = make("tr");
          row.append(make("th", this.names[shown], { scope: "row" }), ...columns.map((column) => make("td", number(column.values[shown], column.digits), { class: "num" })));
          body.append(row);
        }
        more.hidden = shown >= this.names.length;
      };
      more.addEventListener("click", grow);
      grow();
      place.append(table, more);
    }

    drawPick(event) {
      const [from, to] = this.range, ends = [this.dragFrom, this.indexAt(event)].sort((a, b) => a - b);
      for (const pick of all(".pick", this.figure)) {
        pick.style.display = "block";
        pick.style.left = `${((ends[0] - from) / (to - from)) * 100}%`;
        pick.style.width = `${((ends[1] + 1 - ends[0]) / (to - from)) * 100}%`;
      }
    }

    drop(event) {
      const [from, to] = [this.dragFrom, this.indexAt(event)].sort((a, b) => a - b);
      this.dragFrom = undefined;
      for (const pick of all(".pick", this.figure)) pick.style.display = "none";
      if (to - from >= 2) this.zoom(from, to + 1);
    }

    zoomBy(what) {
      const [from, to] = this.range, span = to - from, middle = this.at === null ? (from + to) / 2 : this.at;
      if (what === "all") return this.zoom(...this.whole);
      const wanted = clamp(Math.round(what === "in" ? span / 2 : span * 2), Math.min(5, this.names.length), this.names.length);
      const start = clamp(Math.round(middle - wanted / 2), 0, this.names.length - wanted);
      return this.zoom(start, start + wanted);
    }

    // Zooms this chart and every chart with the same updates.
    zoom(from, to) {
      const peers = this.chart.synced ? charts.filter((other) => other.chart.synced && other.names.length === this.names.length) : [this];
      for (const peer of peers) { peer.range = [from, to]; peer.redraw(); peer.show(); }
    }

    redraw() {
      const [from, to] = this.range;
      all(".panel", this.figure).forEach((element, place) => {
        const panel = this.chart.panels[place];
        const shown = panel.series.map((series) => ({ ...series, values: series.values.slice(from, to) }));
        const axis = fitAxis(panel.scale, shown.flatMap((series) => series.values.filter(finite)));
        const ticks = valueTicks(axis);
        const kept = (style) => shown.filter((series) => series.style === style);
        for (const style of new Set(shown.map((series) => series.style))) {
          const lines = all(`path.line.${style}`, element), dots = all(`path.dots.${style}`, element);
          kept(style).forEach((series, index) => {
            const points = series.values.map((value, i) => (finite(value) ? [((i + 0.5) / (to - from)) * WIDTH, axis.place(value)] : null));
            lines[index]?.setAttribute("d", linePath(points));
            dots[index]?.setAttribute("d", to - from <= MAX_DOTS ? points.filter(Boolean).map(([x, y]) => `M${x} ${y}h0`).join("") : "");
            const most = series.style === "deviation" ? kept("limit")[0]?.values : undefined;
            const marked = series.values.flatMap((value, i) => {
              const out = typeof value === "string" || (finite(value) && finite(most?.[i]) && value > most[i]);
              return out ? [`M${((i + 0.5) / (to - from)) * WIDTH} ${finite(value) ? axis.place(value) : 0}h0`] : [];
            });
            dots[index]?.nextElementSibling?.setAttribute("d", marked.slice(0, MAX_DOTS).join(""));
          });
        }
        const limit = kept("limit")[0];
        if (limit) {
          const width = WIDTH / (to - from);
          const tops = limit.values.map((value) => (finite(value) ? axis.place(value) : null));
          element.querySelector(".band")?.setAttribute("d", tops.map((top, i) => (top === null ? "" : `M${i * width} ${HEIGHT}V${top}H${(i + 1) * width}V${HEIGHT}Z`)).join(""));
          element.querySelector(".edge")?.setAttribute("d", linePath(tops.map((top, i) => (top === null ? null : [(i + 0.5) * width, top]))));
        }
        element.querySelector(".grid").setAttribute("d", ticks.map((tick) => `M0 ${tick.at}H${WIDTH}`).join(""));
        element.querySelector(".yaxis").replaceChildren(...ticks.map((tick) => make("span", tick.label, { style: `top:${tick.at}%` })));
      });
      const step = Math.max(1, Math.ceil((to - from) / 8)), labels = [];
      for (let index = from; index < to; index += step) {
        labels.push(make("span", this.names[index], { style: `left:${((index - from + 0.5) / (to - from)) * 100}%` }));
      }
      this.figure.querySelector(".xaxis").replaceChildren(...labels);
    }
  }

  function fitAxis(scale, values) {
    let low, high;
    if (scale === "log") {
      const positive = values.filter((value) => value > 0);
      const top = Math.ceil(Math.log10(positive.reduce((a, b) => Math.max(a, b), 0)) + 0.1);
      high = 10 ** top;
      low = 10 ** (Math.max(Math.floor(Math.log10(positive.reduce((a, b) => Math.min(a, b), Infinity))), top - 16) - 1);
      if (!positive.length) [low, high] = [1e-9, 1e-6];
    } else {
      low = values.reduce((a, b) => Math.min(a, b), Infinity);
      high = values.reduce((a, b) => Math.max(a, b), -Infinity);
      if (!values.length) [low, high] = [0, 1];
      const margin = (high - low) * 0.08 || Math.abs(high) * 0.05 || 1;
      low -= margin; high += margin;
    }
    const share = (value) => scale === "log" ? (value <= low ? 0 : Math.log(value / low) / Math.log(high / low)) : (value - low) / (high - low);
    return { scale, low, high, place: (value) => Number((HEIGHT * (1 - clamp(share(value), 0, 1))).toFixed(2)) };
  }

  function valueTicks(axis) {
    const ticks = [];
    if (axis.scale === "log") {
      const low = Math.round(Math.log10(axis.low)) + 1, high = Math.round(Math.log10(axis.high));
      ticks.push({ at: HEIGHT, label: "0" });
      for (let power = low; power <= high; power += Math.max(1, Math.ceil((high - low) / 4))) ticks.push({ at: axis.place(10 ** power), label: power ? `1e${power}` : "1" });
      return ticks;
    }
    const rough = (axis.high - axis.low) / 4, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999999);
    for (let count = Math.ceil(axis.low / step); count * step <= axis.high; count++) {
      ticks.push({ at: axis.place(count * step), label: String(Number((count * step).toPrecision(6))) });
    }
    return ticks;
  }

  // At most MAX_POINTS points: the lowest and highest of every stretch, so that no spike is lost.
  function linePath(points) {
    let kept = points;
    if (points.length > MAX_POINTS) {
      kept = [];
      const size = Math.ceil((points.length / MAX_POINTS) * 2);
      for (let start = 0; start < points.length; start += size) {
        const part = points.slice(start, start + size), known = part.filter(Boolean);
        if (known.length < part.length) kept.push(null);
        if (!known.length) continue;
        const least = known.reduce((a, b) => (b[1] < a[1] ? b : a)), most = known.reduce((a, b) => (b[1] > a[1] ? b : a));
        kept.push(...(least === most ? [least] : [least, most].sort((a, b) => a[0] - b[0])));
      }
    }
    return kept.map((point, place) => {
      if (!point) return "";
      const alone = !kept[place - 1], last = !kept[place + 1];
      return `${alone ? "M" : "L"}${point[0].toFixed(2)} ${point[1]}${alone && last ? "h0" : ""}`;
    }).join("");
  }

  for (const figure of all("[data-chart]")) {
    const chart = data.charts[figure.dataset.chart];
    if (chart) charts.push(new Plot(figure, chart));
    else all("details", figure).forEach((details) => details.remove());
  }

  // ---------------------------------------------------------------- who owns which slice

  const shape = document.getElementById("shape");
  shape?.addEventListener("change", () => {
    for (const figure of all("[data-owner]")) figure.hidden = figure.dataset.owner !== shape.value;
  });

  // ---------------------------------------------------------------- samples

  const stripReadout = document.getElementById("strip-readout");
  for (const strip of all("[data-strip]")) {
    const row = data.strips[Number(strip.dataset.strip)], picture = strip.querySelector("svg");
    let at = -1;
    const show = (index) => {
      at = clamp(index, 0, row.ids.length - 1);
      const other = row.destination[at], when = row.updates[at];
      const below = other === null ? "" : `, in the candidate on replica ${other}${when === row.update ? "" : ` in update ${when}`}`;
      stripReadout.replaceChildren(
        make("b", `sample ${row.ids[at]}`), ` · update ${row.update}, place ${at + 1} of ${row.ids.length} · in the control on replica ${row.source[at]}${below}`,
      );
    };
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      show(Math.floor(((event.clientX - box.left) / box.width) * row.ids.length));
    });
    picture.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      show(at + move);
      event.preventDefault();
    });
  }

  // ---------------------------------------------------------------- tensors

  const tensors = data.tensors, PAGE = 10, MORE = 200;
  if (tensors) {
    const body = document.querySelector("#tensor-table tbody"), more = document.getElementById("tensor-more");
    const find = document.getElementById("tensor-find"), odd = document.getElementById("tensor-odd");
    const count = document.getElementById("tensor-count");
    const word = (index) => (index === null ? "" : tensors.agreements[index]);
    const used = (row) => {
      const deviation = tensors.deviation[row], limit = tensors.limit[row];
      return deviation === null ? -1 : !finite(deviation) ? Infinity : limit ? deviation / limit : deviation;
    };
    const differs = (row) => [tensors.agreement[row], ...tensors.slot[row]].some((index) => index !== null && !["equal", "unseen"].includes(word(index)));
    const size = (row) => tensors.shape[row].reduce((a, b) => a * b, 1);
    const columns = [
      { title: "name", key: (row) => tensors.name[row], cell: (row) => { const cell = make("th", "", { scope: "row" }); cell.append(nameOf(row)); return cell; } },
      { title: "shape", key: size, cell: (row) => make("td", tensors.shape[row].join(" × ") || "scalar") },
      { title: "type", key: (row) => tensors.dtype[row], cell: (row) => make("td", tensors.dtypes[tensors.dtype[row]] + (tensors.trains[row] === false ? ", frozen" : "")) },
      { title: "values", key: (row) => tensors.agreement[row], cell: (row) => agreement(tensors.agreement[row]) },
      ...tensors.slots.map((slot, place) => ({ title: slot, key: (row) => tensors.slot[row][place] ?? 9, cell: (row) => agreement(tensors.slot[row][place]) })),
      { title: "first change", key: (row) => (finite(tensors.moved[row]) ? tensors.moved[row] : -1), cell: (row) => make("td", tensors.moved[row] === null ? "" : number(tensors.moved[row], 4), { class: "num" }) },
      { title: "its deviation", key: used, cell: (row) => deviationCell(row) },
    ];
    let order = tensors.name.map((_, index) => index), sorted = null, descending = false, rows = order, shown = 0;

    // A long name may break behind its dots.
    function nameOf(row) {
      const code = make("code");
      tensors.name[row].split(/(?<=[.])/).forEach((part, place) => code.append(...(place ? [make("wbr"), part] : [part])));
      return code;
    }

    function agreement(index) {
      const text = word(index), good = text === "equal";
      return make("td", text === "unseen" ? "–" : good ? "✓" : text && `✗ ${text}`, { class: `mark ${good ? "good" : text === "unseen" || !text ? "none" : "bad"}`, "aria-label": text });
    }

    function deviationCell(row) {
      const deviation = tensors.deviation[row], limit = tensors.limit[row];
      if (deviation === null) return make("td", "");
      const over = limit !== null && (!finite(deviation) || deviation > limit);
      const text = limit === null ? `${number(deviation, 3)}, no band` : `${number(deviation, 3)} of ${number(limit, 3)}`;
      return make("td", text, { class: `num${over ? " mark bad" : ""}` });
    }

    function refresh() {
      const text = find.value.trim().toLowerCase();
      rows = order.filter((row) => (!text || tensors.name[row].toLowerCase().includes(text)) && (!odd.checked || differs(row)));
      count.textContent = `${rows.length.toLocaleString("en")} of ${tensors.total.toLocaleString("en")}`;
      body.replaceChildren();
      shown = 0;
      grow(PAGE);
    }

    function grow(step) {
      const end = Math.min(shown + step, rows.length), part = document.createDocumentFragment();
      for (; shown < end; shown++) {
        const line = make("tr");
        line.append(...columns.map((column) => column.cell(rows[shown])));
        part.append(line);
      }
      body.append(part);
      more.hidden = shown >= rows.length;
    }

    function sortBy(column, cell) {
      descending = sorted === column ? !descending : ["its deviation", "first change", "shape"].includes(column.title);
      sorted = column;
      const keys = tensors.name.map((_, row) => column.key(row)), sign = descending ? -1 : 1;
      order = tensors.name.map((_, row) => row).sort((a, b) => (keys[a] < keys[b] ? -sign : keys[a] > keys[b] ? sign : a - b));
      for (const other of all("#tensor-table thead th")) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
      refresh();
    }

    const head = make("tr");
    for (const column of columns) {
      const cell = make("th", "", { scope: "col" }), button = make("button", column.title, { type: "button" });
      button.addEventListener("click", () => sortBy(column, cell));
      cell.append(button);
      head.append(cell);
    }
    document.querySelector("#tensor-table thead").append(head);
    more.addEventListener("click", () => grow(MORE));
    find.addEventListener("input", eachFrame(refresh));
    odd.addEventListener("change", refresh);
    refresh();
  }

  // ---------------------------------------------------------------- printing: explanations are open on paper

  let closed = [];
  addEventListener("beforeprint", () => { closed = all("details:not([open])"); closed.filter((d) => !d.closest(".chart")).forEach((d) => { d.open = true; }); });
  addEventListener("afterprint", () => closed.forEach((d) => { d.open = false; }));
})();
