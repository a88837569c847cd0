// The start: every checkpoint and run directory in what was named.
import { ask, count, link, make, name, size } from "./dom.js";

const view = (place) => (place.kind === "run" ? "run" : "checkpoint");

export async function showStart(values, signal) {
  const { places, named } = await ask("start", {}, signal);
  if (places.length === 1 && !values.stay) return { replace: `#/${view(places[0])}?place=${encodeURIComponent(places[0].name)}` };
  const runs = places.filter((place) => place.kind === "run"), checkpoints = places.filter((place) => place.kind !== "run");
  const shown = make("section", {},
    make("h1", { tabindex: -1 }, "What is here"),
    make("p", { class: "lead" }, "In ", named.map((path, index) => [index ? ", " : "", make("code", {}, path)]), ". Everything is only read."),
    runs.length > 0 && runTable(runs),
    checkpoints.length > 0 && checkpointTable(checkpoints, signal),
    !places.length && make("p", {}, "No checkpoint and no run directory was found in it."));
  return { shown, trail: [["", {}, "start"]] };
}

function runTable(runs) {
  return make("div", { class: "scroll" }, make("table", {}, make("caption", {}, "Run directories"),
    make("thead", {}, make("tr", {}, ["run", "verdict", "now"].map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, runs.map((place) => make("tr", {},
      make("th", { scope: "row" }, link("run", { place: place.name }, {}, name(place.title, "span"))),
      make("td", {}, verdict(place.state?.verdict)),
      make("td", {}, place.state?.busy ? `running: ${place.state.stage ?? "between stages"}` : place.state?.stage ? `stopped at ${place.state.stage}` : "finished or not begun"))))));
}

export function verdict(word) {
  const tone = { promote: "good", reject: "bad", abstain: "warn" }[word];
  return make("span", { class: `mark ${tone ?? "none"}` }, word ? word.toUpperCase() : "not judged");
}

function checkpointTable(places, signal) {
  const body = make("tbody"), waiting = [];
  for (const place of places) {
    const told = make("td", { colspan: 4, class: "small" }, place.kind === "unreadable" ? make("span", { class: "mark bad" }, `✗ ${place.about}`) : "…");
    const title = link("checkpoint", { place: place.name }, {}, name(place.title, "span"));
    const row = make("tr", { class: place.kind === "unreadable" && "fail" }, make("th", { scope: "row" }, title), told);
    body.append(row);
    if (place.kind !== "unreadable") waiting.push([place, row, told]);
  }
  summarise(waiting, signal);
  return make("div", { class: "scroll" }, make("table", { class: "places" }, make("caption", {}, "Checkpoints"),
    make("thead", {}, make("tr", {}, ["checkpoint", "update", "complete", "can resume", "holds"].map((title) => make("th", { scope: "col" }, title)))), body));
}

// One after another, so that a folder of a hundred checkpoints does not read all of them at once.
async function summarise(waiting, signal) {
  for (const [place, row, told] of waiting) {
    try {
      const facts = await ask("checkpoint", { place: place.name }, signal);
      const mark = (good, text) => make("td", {}, make("span", { class: `mark ${good === true ? "good" : good === null ? "warn" : "bad"}` }, text));
      told.replaceWith(
        make("td", {}, facts.progress.update === null ? "unknown" : count(facts.progress.update)),
        mark(facts.complete, facts.complete ? "✓ yes" : "✗ no"),
        mark({ yes: true, partial: null, no: false }[facts.resumable.verdict], { yes: "✓ yes", partial: "partly", no: "✗ no" }[facts.resumable.verdict]),
        make("td", { class: "small" }, `${facts.format}, ${count(facts.counts.tensors, "tensor")}, ${size(facts.counts.bytes)}`));
    } catch (error) {
      if (signal.aborted) return;
      row.classList.add("fail");
      told.replaceChildren(make("span", { class: "mark bad" }, `✗ ${error.findings?.[0]?.instances[0]?.message ?? error.message}`));
    }
  }
}
