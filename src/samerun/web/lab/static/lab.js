// What the page does with the numbers: two benches for the exercise, four resumes from a checkpoint. A run's history is
// only ever added to; a control that is changed in the middle of a run takes effect at the next step, or at Reset.
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const SPACE = "http://www.w3.org/2000/svg";

  function make(tag, text = "", attributes = {}) {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  function draw(tag, attributes, text = "") {
    const element = document.createElementNS(SPACE, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  }

  function number(value) {
    if (!Number.isFinite(value)) return String(value).replace("-", "−").replace("Infinity", "∞");
    const rounded = Number(value.toPrecision(5)), size = Math.abs(rounded);
    return (size && (size < 1e-4 || size >= 1e7) ? rounded.toExponential() : String(rounded)).replaceAll("-", "−");
  }

  function rate(input) {
    const value = input.valueAsNumber, good = Number.isFinite(value);
    if (good) input.removeAttribute("aria-invalid");
    else input.setAttribute("aria-invalid", "true");
    return good ? value : null;
  }

  // What is to be said about controls whose values are not those of the run that is shown.
  function noteOn({ eta, x0, lastEta, began, moving }) {
    if (eta === null || x0 === null) return `${eta === null ? "η" : "x₀"} must be a number.`;
    const notes = [];
    if (moving && lastEta !== null && eta !== lastEta) notes.push(`η = ${number(eta)} applies from the next step on; the steps taken keep theirs.`);
    if (moving && x0 !== began) notes.push(`x₀ = ${number(x0)} applies at Reset; this run began at ${number(began)}.`);
    return notes.join(" ");
  }

  function ticks(span) {
    const rough = span / 4, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  }

  // ---------------------------------------------------------------- the exercise

  class Bench {
    constructor(root, changed) {
      this.root = root;
      this.name = root.dataset.bench;
      this.target = Number(root.dataset.eta);
      this.eta = root.querySelector(`#${this.name}-eta`);
      this.x0 = root.querySelector(`#${this.name}-x0`);
      this.inputs = all("[data-predict]", root);
      this.changed = changed;
      this.wasReset = false;
      root.querySelector("[data-do=reset]").addEventListener("click", () => { this.wasReset = true; this.reset(); });
      root.querySelector("[data-do=step]").addEventListener("click", () => this.step());
      for (const input of [this.eta, this.x0, ...this.inputs]) input.addEventListener("input", () => this.edited());
      this.reset();
    }

    get iteration() { return this.rows.length - 1; }

    reset() {
      const x0 = rate(this.x0);
      if (x0 === null) return this.show();
      this.rows = [{ x: x0, eta: null }];
      this.predictions = {};
      for (const input of this.inputs) { input.value = ""; input.readOnly = false; }
      this.show();
    }

    edited() {
      const x0 = rate(this.x0);
      if (!this.iteration && x0 !== null) this.rows = [{ x: x0, eta: null }];
      this.show();
    }

    step() {
      const eta = rate(this.eta);
      if (this.root.querySelector("[data-do=step]").disabled) return;
      const state = RULES.advance("gradient", eta, RULES.start(this.rows[this.iteration].x));
      this.rows.push({ x: state.x, eta });
      const input = this.inputs.find((other) => Number(other.dataset.predict) === this.iteration);
      if (input) {
        input.readOnly = true;
        if (Number.isFinite(input.valueAsNumber)) this.predictions[this.iteration] = input.valueAsNumber;
      }
      this.show();
    }

    // "right", "wrong", or what there is to say where no prediction was made.
    judged(iteration) {
      if (iteration > this.iteration) return "";
      if (!(iteration in this.predictions)) return [2, 3].includes(iteration) ? "none" : "";
      return RULES.isRight(this.predictions[iteration], this.rows[iteration].x) ? "right" : "wrong";
    }

    show() {
      const eta = rate(this.eta), x0 = rate(this.x0), now = this.rows[this.iteration];
      this.root.querySelector("[data-do=step]").disabled = eta === null || (!this.iteration && x0 === null);
      this.root.querySelector("[data-do=reset]").disabled = x0 === null;
      this.root.querySelector(".note").textContent = noteOn({ eta, x0, lastEta: now.eta, began: this.rows[0].x, moving: this.iteration > 0 });
      const values = { k: String(this.iteration), x: number(now.x), gradient: number(RULES.gradient("gradient", now)), loss: number((now.x * now.x) / 2) };
      for (const [key, text] of Object.entries(values)) this.root.querySelector(`[data-now=${key}]`).textContent = text;
      const judged = { right: " Prediction right.", wrong: " Prediction wrong." }[this.judged(this.iteration)] ?? "";
      this.root.querySelector("[data-say]").textContent = this.iteration ? `Iteration ${this.iteration}: position ${values.x}.${judged}` : "";
      for (const output of all("[data-mark]", this.root)) this.mark(output, this.judged(Number(output.dataset.mark)));
      this.root.querySelector("tbody").replaceChildren(...this.rows.map((row, k) => this.line(row, k)));
      this.todo(eta);
      this.changed();
    }

    mark(output, word) {
      output.textContent = { right: "✓", wrong: "✗", none: "not predicted" }[word] ?? "";
      if (word === "right" || word === "wrong") output.append(make("span", ` ${word}`, { class: "word" }));
      output.className = `mark ${{ right: "good", wrong: "bad" }[word] ?? "none"}`;
    }

    line(row, k) {
      const line = make("tr"), before = this.rows[k - 1];
      const step = make("td", row.eta === null ? "" : number(row.eta), { class: "num" });
      if (k > 1 && row.eta !== before.eta) step.prepend(make("span", "changed", { class: "changed" }));
      const judged = make("td"), word = this.judged(k);
      this.mark(judged, word);
      if (word === "none") judged.textContent = "–";
      if (k in this.predictions) judged.prepend(`${number(this.predictions[k])} `);
      line.append(make("th", String(k), { scope: "row" }), step, make("td", number(row.x), { class: "num" }), make("td", number(RULES.gradient("gradient", row)), { class: "num" }), judged);
      return line;
    }

    todo(eta) {
      const asSet = this.rows[0].x === 2 && this.rows.slice(1).every((row) => row.eta === this.target) && eta === this.target;
      const done = {
        reset: this.wasReset,
        set: this.wasReset && asSet,
        predict: this.inputs.every((input) => Number(input.dataset.predict) in this.predictions || (!input.readOnly && Number.isFinite(input.valueAsNumber))),
        step: asSet && this.iteration >= 3,
      };
      for (const item of all("[data-todo]", this.root)) item.classList.toggle("done", done[item.dataset.todo]);
    }

    plot(reach) {
      const svg = this.root.querySelector("svg"), width = svg.clientWidth || 480, height = svg.clientHeight || 240;
      const across = (x) => width / 2 + (x / reach) * (width / 2 - 14), up = (x) => height - 26 - ((x * x) / (reach * reach)) * (height - 46);
      const parts = [draw("line", { class: "axis", x1: 0, x2: width, y1: up(0), y2: up(0) })];
      const step = ticks(2 * reach);
      for (let place = Math.ceil(-reach / step); place * step <= reach; place++) {
        const x = across(place * step);
        parts.push(draw("line", { class: "axis", x1: x, x2: x, y1: up(0), y2: up(0) + 5 }), draw("text", { x, y: height - 6, "text-anchor": "middle" }, number(place * step)));
      }
      const curve = Array.from({ length: 81 }, (_, i) => { const x = (i / 40 - 1) * reach; return `${across(x).toFixed(1)} ${up(x).toFixed(1)}`; });
      parts.push(draw("path", { class: "curve", d: `M${curve.join("L")}` }));
      const shown = this.rows.map((row, k) => ({ x: row.x, k })).filter((row) => Math.abs(row.x) <= reach), here = shown.at(-1);
      parts.push(draw("path", { class: "path", d: shown.map((row, i) => `${i ? "L" : "M"}${across(row.x).toFixed(1)} ${up(row.x).toFixed(1)}`).join("") || "M0 0" }));
      if (here) {
        const reachBy = reach * 0.22, slope = (2 * here.x * (height - 46)) / (reach * reach), left = across(here.x - reachBy), right = across(here.x + reachBy);
        parts.push(draw("line", { class: "tangent", x1: left, x2: right, y1: up(here.x) + slope * reachBy, y2: up(here.x) - slope * reachBy }));
      }
      for (const row of shown) {
        const last = row === here, size = last ? 8 : 5, x = across(row.x), y = up(row.x), look = last ? "here" : "stop";
        parts.push(this.name === "A" ? draw("circle", { class: look, cx: x, cy: y, r: size }) : draw("rect", { class: look, x: x - size, y: y - size, width: 2 * size, height: 2 * size, rx: 2 }));
        if (row.k > this.iteration - 6) parts.push(draw("text", { class: "name", x: x + (row.x < 0 ? 11 : -11), y: y - 9, "text-anchor": row.x < 0 ? "start" : "end" }, String(row.k)));
      }
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("aria-label", `Run ${this.name} on the parabola: ${this.rows.slice(-6).map((row, i, part) => `iteration ${this.rows.length - part.length + i} at ${number(row.x)}`).join(", ")}`);
      svg.replaceChildren(...parts);
    }
  }

  function together(benches) {
    const [a, b] = benches.map((bench) => bench.rows), shared = Math.min(a.length, b.length);
    const equal = (k) => k < shared && (a[k].x === b[k].x || (Number.isNaN(a[k].x) && Number.isNaN(b[k].x)));
    const count = Math.max(a.length, b.length);
    const meet = Array.from({ length: shared }, (_, k) => k).slice(1).find((k) => equal(k) && k + 1 < shared && !equal(k + 1));
    const waiting = shared > 1 && equal(shared - 1) && meet === undefined;
    document.querySelector("#together tbody").replaceChildren(...Array.from({ length: count }, (_, k) => {
      const line = make("tr", "", { class: k === meet ? "meets" : k === meet + 1 ? "parts" : "" });
      const both = k < shared, word = !both ? "" : equal(k) ? "✓ equal" : "✗ different";
      const cell = make("td", word, { class: `mark ${equal(k) ? "good" : both ? "bad" : ""}` });
      line.append(make("th", String(k), { scope: "row" }), ...[a, b].map((rows) => make("td", k < rows.length ? number(rows[k].x) : "", { class: "num" })), cell);
      return line;
    }));
    const banner = document.getElementById("together-verdict");
    banner.className = `banner ${meet === undefined ? "" : "tone-bad"}`;
    if (meet !== undefined) {
      banner.textContent = `At iteration ${meet} both runs are at ${number(a[meet].x)}. The next update takes A to ${number(a[meet + 1].x)} and B to ${number(b[meet + 1].x)}: equal current values hide different continuation rules.`;
    } else if (waiting && a.some((row, k) => k && k < shared && row.eta !== b[k].eta)) {
      banner.textContent = `At iteration ${shared - 1} both runs are at ${number(a[shared - 1].x)}. Nothing in that number says which run it belongs to. Step both once more.`;
    } else if (shared > 1 && Array.from({ length: shared }, (_, k) => equal(k)).every(Boolean)) {
      banner.textContent = "So far both runs are the same run: the same start, the same learning rate, the same positions.";
    } else {
      banner.textContent = shared > 1 ? "Both runs have been in different places since they began. Go on with both." : "Step both runs; they are compared here, iteration by iteration.";
    }
  }

  // ---------------------------------------------------------------- a checkpoint, resumed twice

  class Seam {
    constructor(root) {
      this.root = root;
      this.rule = root.dataset.rule;
      this.eta = root.querySelector("[data-eta]");
      this.x0 = root.querySelector("[data-x0]");
      this.parts = all("[data-part]", root);
      root.querySelector("[data-do=reset]").addEventListener("click", () => this.reset());
      root.querySelector("[data-do=step]").addEventListener("click", () => this.step());
      for (const input of [this.eta, this.x0, ...this.parts]) input.addEventListener("input", () => this.edited());
      this.reset();
    }

    get update() { return this.rows.length - 1; }
    get lost() { return this.parts.filter((part) => !part.checked).map((part) => part.dataset.part); }

    // One row per update: the states of the control and, from the checkpoint on, of the candidate.
    reset() {
      const x0 = rate(this.x0);
      if (x0 !== null) this.rows = [{ control: RULES.start(x0), candidate: null, eta: null }];
      this.show();
    }

    edited() {
      const x0 = rate(this.x0);
      if (!this.update && x0 !== null) this.rows = [{ control: RULES.start(x0), candidate: null, eta: null }];
      this.show();
    }

    step() {
      const eta = rate(this.eta), now = this.rows[this.update];
      if (this.root.querySelector("[data-do=step]").disabled) return;
      const control = RULES.advance(this.rule, eta, now.control);
      let candidate = now.candidate && RULES.advance(this.rule, eta, now.candidate);
      if (this.update + 1 === RULES.checkpoint) candidate = RULES.forget(control, this.lost);
      this.rows.push({ control, candidate, eta });
      this.show();
    }

    show() {
      const eta = rate(this.eta), x0 = rate(this.x0), now = this.rows[this.update], resumed = this.update >= RULES.checkpoint;
      this.root.querySelector("[data-do=step]").disabled = eta === null || (!this.update && x0 === null);
      this.root.querySelector("[data-do=reset]").disabled = x0 === null;
      for (const part of this.parts) part.disabled = resumed;
      const note = noteOn({ eta, x0, lastEta: now.eta, began: this.rows[0].control.x, moving: this.update > 0 });
      this.root.querySelector(".note").textContent = note || (resumed ? "What the candidate restored was decided at the checkpoint; Reset to decide again." : "");
      this.root.querySelector("tbody").replaceChildren(...this.rows.map((row, k) => this.line(row, k)));
      this.verdict();
      this.plot();
    }

    hiddenText(state, part) {
      const symbol = this.parts.find((input) => input.dataset.part === part).dataset.symbol;
      if (this.rule === "samples") return `next: sample ${state.cursor % RULES.samples.length}`;
      if (this.rule === "schedule") return `k = ${state.index}`;
      return `${symbol} = ${number(state[part])}`;
    }

    cell(state, other) {
      const cell = make("td");
      if (!state) return cell;
      cell.append(make("b", number(state.x)));
      for (const part of RULES.hidden[this.rule]) {
        const off = other && !Object.is(state[part], other[part]);
        cell.append(make("span", this.hiddenText(state, part), { class: `hidden-part${off ? " off" : ""}` }));
      }
      return cell;
    }

    line(row, k) {
      const line = make("tr"), both = row.candidate !== null, equal = both && Object.is(row.control.x, row.candidate.x);
      const parted = k === this.parting();
      line.className = [k === RULES.checkpoint ? "seam" : "", k === RULES.checkpoint && this.lost.length ? "meets" : "", parted ? "parts" : ""].join(" ").trim();
      const step = make("td", row.eta === null ? "" : number(row.eta), { class: "num" });
      if (k > 1 && row.eta !== this.rows[k - 1].eta) step.prepend(make("span", "changed", { class: "changed" }));
      const head = make("th", String(k), { scope: "row" });
      if (k === RULES.checkpoint) head.append(make("span", "checkpoint", { class: "hidden-part small" }));
      line.append(head, step, this.cell(row.control, null), this.cell(row.candidate, row.control), this.sameMark(both, equal));
      return line;
    }

    sameMark(both, equal) {
      const cell = make("td", !both ? "" : equal ? "✓" : "✗", { class: `mark ${equal ? "good" : "bad"}` });
      if (both) cell.append(make("span", equal ? " equal" : " different", { class: "wide-only" }));
      return cell;
    }

    // The first update after the checkpoint at which x differs, if there is one.
    parting() {
      const found = this.rows.findIndex((row) => row.candidate && !Object.is(row.control.x, row.candidate.x));
      return found < 0 ? null : found;
    }

    verdict() {
      const banner = this.root.querySelector("[data-verdict]"), at = RULES.checkpoint, parted = this.parting(), now = this.rows[this.update];
      const names = (lost) => lost.map((part) => this.parts.find((input) => input.dataset.part === part).dataset.symbol).join(", ");
      let tone = "", text;
      if (this.update < at) {
        const left = at - this.update;
        text = `The source trains: ${left} more update${left > 1 ? "s" : ""} to the checkpoint.`;
      } else if (parted !== null) {
        const row = this.rows[parted];
        tone = "tone-bad";
        text = `Equal at update ${at}: x = ${number(this.rows[at].control.x)}, bit for bit. Different at update ${parted}: control ${number(row.control.x)}, candidate ${number(row.candidate.x)}. Nothing in x foretold it; ${names(this.lost)} did.`;
      } else if (!this.lost.length) {
        tone = "tone-good";
        text = this.update === at ? "The candidate restored everything. Step on." : `Equal at every update from ${at} to ${this.update}, bit for bit: everything that decides the next update was restored.`;
      } else if (this.update === at) {
        tone = "tone-warn";
        text = `Resumed. Both have x = ${number(now.control.x)}, bit for bit, so every evaluation of f agrees; the candidate lost ${names(this.lost)}. Will the next update agree?`;
      } else {
        tone = "tone-warn";
        text = `x is still equal at update ${this.update}, although the candidate lost ${names(this.lost)}.`;
      }
      banner.className = `banner ${tone}`;
      banner.textContent = text;
    }

    plot() {
      const svg = this.root.querySelector("svg"), width = svg.clientWidth || 520, height = svg.clientHeight || 210;
      const values = this.rows.flatMap((row) => [row.control, row.candidate]).filter((state) => state && Number.isFinite(state.x)).map((state) => state.x);
      let low = Math.min(0, ...values), high = Math.max(0, ...values);
      const margin = (high - low) * 0.08 || 1, last = Math.max(this.update, 2 * RULES.checkpoint);
      low -= margin; high += margin;
      const across = (k) => 40 + (k / last) * (width - 54), up = (x) => 8 + ((high - x) / (high - low)) * (height - 36);
      const parts = [], step = ticks(high - low), every = Math.ceil(last / 12);
      for (let place = Math.ceil(low / step); place * step <= high; place++) {
        const y = up(place * step);
        parts.push(draw("line", { class: "axis", x1: 40, x2: width - 8, y1: y, y2: y }), draw("text", { x: 34, y: y + 4, "text-anchor": "end" }, number(place * step)));
      }
      for (let k = 0; k <= last; k += every) parts.push(draw("text", { x: across(k), y: height - 6, "text-anchor": "middle" }, String(k)));
      parts.push(draw("line", { class: "seamline", x1: across(RULES.checkpoint), x2: across(RULES.checkpoint), y1: 6, y2: height - 26 }));
      parts.push(draw("text", { x: across(RULES.checkpoint) + 6, y: 16 }, "checkpoint"));
      for (const name of ["control", "candidate"]) {
        const points = this.rows.map((row, k) => ({ k, state: row[name] })).filter(({ state }) => state && Number.isFinite(state.x));
        const d = points.map(({ k, state }, i) => `${i ? "L" : "M"}${across(k).toFixed(1)} ${up(state.x).toFixed(1)}`).join("");
        if (d) parts.push(draw("path", { class: name, d }));
        for (const { k, state } of points) parts.push(draw("circle", { class: name, cx: across(k), cy: up(state.x), r: name === "control" ? 6 : 4 }));
      }
      const now = this.rows[this.update];
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("aria-label", `Position over updates. Update ${this.update}: control ${number(now.control.x)}${now.candidate ? `, candidate ${number(now.candidate.x)}` : ""}`);
      svg.replaceChildren(...parts);
    }
  }

  // ---------------------------------------------------------------- begin

  const agreed = RULES.selfCheck();
  if (agreed === null) {
    document.getElementById("broken").hidden = false;
    for (const control of all("button, input")) control.disabled = true;
    return;
  }
  document.getElementById("selfcheck").append(` ${agreed} states of samerun's own definition were recomputed here, bit for bit.`);
  const benches = [];
  const refresh = () => {
    if (benches.length < 2) return;
    const seen = benches.flatMap((bench) => bench.rows.map((row) => Math.abs(row.x))).filter((x) => x < 1e6);
    const reach = 1.12 * Math.max(2, ...seen);
    for (const bench of benches) bench.plot(reach);
    together(benches);
  };
  for (const root of all("[data-bench]")) benches.push(new Bench(root, refresh));
  refresh();
  const seams = all("[data-rule]").map((root) => new Seam(root));
  let queued = false;
  addEventListener("resize", () => {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; refresh(); for (const seam of seams) seam.plot(); });
  });
})();
