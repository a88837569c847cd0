// Two checkpoints compared, what deviates most first.
import { ask, count, follow, link, make, name, number, shape } from "./dom.js";

const PAGE = 100;

export async function showDiff(values, signal) {
  const { place, other } = values;
  const { places } = await ask("start", {}, signal);
  const known = places.filter((item) => item.kind === "checkpoint"), title = (wanted) => known.find((item) => item.name === wanted)?.title ?? wanted;
  const pick = (id, chosen) => make("select", { id }, known.map((item) => make("option", { value: item.name, selected: item.name === chosen }, item.title)));
  const [one, two] = [pick("one", place), pick("two", other)];
  const limit = (id) => make("input", { type: "number", id, min: 0, step: "any", value: values[id] ?? 0 });
  const tolerances = [limit("rtol"), limit("atol")];
  const result = make("div"), status = make("span", { class: "small", role: "status" }), bar = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "comparing" });
  const button = make("button", { type: "submit", class: "button", id: "compare" }, "Compare");
  let work = null;
  const form = make("form", { class: "controls", on: { submit: (event) => { event.preventDefault(); compare(); } } },
    make("label", {}, "A ", one), make("label", {}, "B ", two), make("label", {}, "relative ", tolerances[0]), make("label", {}, "absolute ", tolerances[1]), button, bar, status);

  async function compare() {
    if (work) { work.abort(); return; }
    const asked = { place: one.value, other: two.value, rtol: tolerances[0].value, atol: tolerances[1].value };
    history.replaceState(null, "", `#/diff?${new URLSearchParams(asked)}`);
    work = new AbortController();
    button.textContent = "Cancel";
    result.replaceChildren();
    bar.hidden = false;
    try {
      const found = await follow("diff", asked, AbortSignal.any([signal, work.signal]), (event) => {
        if (event.total) bar.value = event.done / event.total;
        if (event.what) status.textContent = event.what;
      });
      status.textContent = "";
      result.replaceChildren(show(found, asked, title));
    } catch (error) {
      if (signal.aborted) return;
      status.textContent = work.signal.aborted ? "cancelled" : "";
      if (!work.signal.aborted) result.replaceChildren(await trouble(error));
    }
    button.textContent = "Compare";
    bar.hidden = true;
    work = null;
  }

  const shown = make("section", {}, make("h1", { tabindex: -1 }, "Two checkpoints compared"),
    make("p", { class: "lead" }, "As logical state: whatever wrote them, however they are cut up. Within a tolerance of zero, bit for bit but for the sign of zero."), form, result);
  if (place && other) compare();
  return { shown, trail: [["", { stay: 1 }, "start"], ["diff", values, "compare"]] };
}

async function trouble(error) {
  const { findingCards } = await import("./findings.js");
  return error.findings ? findingCards(error.findings, { open: true }) : make("p", {}, error.message);
}

function show(found, asked, title) {
  const alike = found.compared - found.values.length - found.left_out - found.shape.length;
  const plain = (caption, rows, text) => rows.length > 0 && make("div", { class: "scroll" }, make("table", {}, make("caption", {}, `${caption}: ${count(rows.length)}`),
    make("tbody", {}, rows.slice(0, 200).map((row) => make("tr", {}, text(row))), rows.length > 200 && make("tr", {}, make("td", {}, `and ${count(rows.length - 200)} more`)))));
  const told = (value) => (Array.isArray(value) ? shape(value) : value === null ? "nothing" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const sides = (row) => [make("th", { scope: "row" }, name(row.key)), make("td", {}, told(row.a)), make("td", {}, told(row.b))];
  const only = (place) => (key) => make("th", { scope: "row" }, link("tensor", { place, key }, {}, name(key)));
  return make("div", { id: "result" },
    make("div", { class: `verdict ${found.equal ? "promote" : "reject"}` }, make("p", { class: "word" }, found.equal ? "EQUAL" : "DIFFERENT"),
      make("p", { class: "sentence" }, found.equal ? `${count(found.compared, "tensor")}, parameter groups, progress and scheduler.`
        : `${count(Math.max(0, alike))} of ${count(found.compared)} compared tensors are equal.`)),
    found.values.length > 0 && deviations(found, asked),
    plain(`only in A, ${title(asked.place)}`, found.only_in_a, only(asked.place)),
    plain(`only in B, ${title(asked.other)}`, found.only_in_b, only(asked.other)),
    plain("another shape", found.shape, sides), plain("another type", found.dtype, sides), plain("other settings", found.settings, sides),
    plain("other objects, for information", found.objects, sides));
}

// A bar's length is the deviation's order of magnitude: 1e-16 is nothing, 1 is all.
const length = (value) => (typeof value === "string" ? 100 : Math.min(100, Math.max(2, (100 * (16 + Math.log10(Math.max(value, 1e-16)))) / 16)));

function deviations(found, asked) {
  const body = make("tbody"), more = make("button", { type: "button", class: "button" }, "show more");
  let shown = 0;
  const grow = () => {
    for (const row of found.values.slice(shown, shown + PAGE)) {
      body.append(make("tr", {}, make("th", { scope: "row" }, link("tensor", { place: asked.other, key: row.key }, {}, name(row.key))),
        make("td", { class: "share" }, make("span", { class: "bar", "aria-hidden": "true" }, make("i", { class: "bad", at: { width: `${length(row.rel_l2)}%` } }))),
        make("td", { class: "num" }, number(row.rel_l2, 3)), make("td", { class: "num" }, number(row.max_abs, 3)), make("td", { class: "num" }, count(row.changed))));
    }
    shown = Math.min(found.values.length, shown + PAGE);
    more.hidden = shown >= found.values.length;
  };
  more.addEventListener("click", grow);
  grow();
  const titles = ["tensor", "deviation, by order of magnitude", "relative to its norm", "largest", "values that differ"];
  return make("div", { class: "scroll" }, make("table", { class: "deviations" }, make("caption", {}, "other values, what deviates most first"),
    make("thead", {}, make("tr", {}, titles.map((text, at) => make("th", { scope: "col", class: at > 1 && "num" }, text)))), body), more,
  found.left_out > 0 && make("p", { class: "small" }, `and ${count(found.left_out)} more, which deviate less; samerun diff --json lists all`));
}
