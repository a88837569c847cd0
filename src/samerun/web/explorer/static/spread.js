// Moments and histogram of a tensor: read on demand in blocks, with progress, until done or cancelled.
import { clamp, count, draw, follow, make, number, size } from "./dom.js";
import { findingCards } from "./findings.js";

export function spreadSection(place, facts, signal) {
  const result = make("div"), status = make("span", { class: "small", role: "status" });
  const bar = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "reading" });
  const button = make("button", { type: "button", class: "button", id: "read" }, "Read the values");
  let work = null;
  button.addEventListener("click", async () => {
    if (work) { work.abort(); return; }
    work = new AbortController();
    button.textContent = "Cancel";
    status.textContent = "";
    bar.hidden = false;
    try {
      const values = await follow("values", { place, key: facts.key }, AbortSignal.any([signal, work.signal]), (event) => { if (event.total) bar.value = event.done / event.total; });
      result.replaceChildren(...show(values));
      status.textContent = `${count(values.seen, "value")} read`;
      button.textContent = "Read again";
    } catch (error) {
      if (signal.aborted) return;
      status.textContent = work.signal.aborted ? "cancelled" : error.message;
      button.textContent = "Read the values";
    }
    bar.hidden = true;
    work = null;
  });
  return make("section", { "aria-labelledby": "values" }, make("h2", { id: "values" }, "Values"),
    make("p", { class: "lead" }, `Reads ${size(facts.bytes)} twice, in blocks: once for the range, once to count.`),
    make("p", { class: "controls" }, button, bar, status), result);
}

function show(values) {
  const notFinite = values.nan + values.positive_infinite + values.negative_infinite;
  const incomplete = values.seen !== values.elements;
  const rows = [
    ["smallest, largest", `${number(values.min, 6)}, ${number(values.max, 6)}`], ["mean", number(values.mean, 6)], ["standard deviation", number(values.std, 6)],
    ["root mean square", number(values.rms, 6)], ["norm", number(values.norm, 6)], ["skewness", number(values.skewness)], ["kurtosis", number(values.kurtosis)],
    ["smallest magnitude but zero", number(values.smallest)], ["zeros", count(values.zeros)], ["negative", count(values.negative)],
    ["not finite", notFinite ? `${count(values.nan)} not a number, ${count(values.positive_infinite)} ∞, ${count(values.negative_infinite)} −∞` : "0"],
  ];
  return [
    incomplete && make("p", { class: "mark bad" }, `${count(values.seen)} of ${count(values.elements)} values could be read: the numbers are of those.`),
    values.findings.length > 0 && findingCards(values.findings),
    values.magnitudes && make("p", { class: "small" }, "Complex values are counted by their magnitude."),
    make("div", { class: "columns" }, histogram(values),
      make("div", { class: "scroll" }, make("table", {}, make("caption", {}, "Moments, of what is finite"), make("tbody", {}, rows.map(([term, text]) => make("tr", { class: term === "not finite" && notFinite && "fail" }, make("th", { scope: "row" }, term), make("td", { class: "num" }, text))))))),
  ].filter(Boolean);
}

function histogram(values) {
  const place = make("div"), kinds = [["linear", "values"], ["decades", "magnitudes, in decades"]].filter(([kind]) => values[kind]);
  if (!kinds.length) return make("p", {}, "There is no finite value to count.");
  const show = (kind) => place.replaceChildren(drawBars(values[kind], kind, values.finite));
  const radios = kinds.map(([kind, label], index) => make("label", {}, make("input", { type: "radio", name: "scale", value: kind, checked: index === 0, on: { change: () => show(kind) } }), ` ${label}`));
  show(kinds[0][0]);
  return make("figure", { class: "histogram" }, make("figcaption", {}, make("fieldset", { class: "controls" }, make("legend", { class: "visually-hidden" }, "what is counted"), radios)), place);
}

function drawBars({ low, high, counts }, kind, finite) {
  const most = Math.max(1, ...counts), width = 100 / counts.length, step = (high - low) / counts.length;
  const edge = (index) => (kind === "decades" ? number(10 ** (low + index * step), 3) : number(low + index * step, 4));
  const readout = make("output", { class: "readout" }, "Point at a bar, or move with the arrow keys.");
  let chosen = -1;
  const bars = counts.map((times, index) => {
    const height = times ? Math.max(1, (100 * times) / most) : 0;
    return draw("rect", { class: "count", x: index * width, y: 100 - height, width: width * 0.92, height });
  });
  const summary = `Histogram of ${count(finite, "value")} from ${edge(0)} to ${edge(counts.length)}; the fullest of ${counts.length} bins, ${edge(counts.indexOf(most))} to ${edge(counts.indexOf(most) + 1)}, holds ${count(most)}`;
  const choose = (index) => {
    bars[chosen]?.classList.remove("chosen");
    chosen = clamp(index, 0, counts.length - 1);
    bars[chosen].classList.add("chosen");
    readout.replaceChildren(make("b", {}, `${edge(chosen)} to ${edge(chosen + 1)}`), ` · ${count(counts[chosen], "value")}`);
    canvas.setAttribute("aria-valuenow", chosen + 1);
    canvas.setAttribute("aria-valuetext", readout.textContent);
  };
  const canvas = draw("svg", { class: "bars", viewBox: "0 0 100 100", preserveAspectRatio: "none", tabindex: 0, role: "slider", "aria-label": summary, "aria-valuemin": 1, "aria-valuemax": counts.length, "aria-valuenow": 1, "aria-valuetext": "arrow keys move from bin to bin" }, bars);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    choose(Math.floor(((event.clientX - box.left) / box.width) * counts.length));
  });
  canvas.addEventListener("keydown", (event) => {
    const to = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: counts.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
  });
  return make("div", {}, canvas, make("div", { class: "ends small" }, make("span", {}, edge(0)), make("span", {}, kind === "decades" ? "" : edge(counts.length / 2)), make("span", {}, edge(counts.length))), readout);
}
