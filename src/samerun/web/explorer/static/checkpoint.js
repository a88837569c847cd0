// A checkpoint: whether it can resume, what was noticed, where its bytes are, and its tensors.
import { ask, count, follow, link, make, size } from "./dom.js";
import { findingsSection } from "./findings.js";
import { tensorBrowser } from "./tensors.js";

const WORDS = { yes: "CAN RESUME", partial: "CAN RESUME IN PART", no: "CANNOT RESUME" };
const TONES = { yes: "promote", partial: "abstain", no: "reject" };
const SENTENCES = {
  yes: "Everything that a run needs to go on is here.",
  partial: "Model and optimizer are here; something else that decides the next update is not.",
  no: "A run cannot go on from here as the same run.",
};

// What one looks for in a parameter group, before everything else that it has.
const LOOKED_FOR = ["lr", "initial_lr", "weight_decay", "betas", "momentum", "eps"];

export async function showCheckpoint(values, signal) {
  const { place } = values;
  const facts = await ask("checkpoint", { place }, signal);
  const title = facts.path.split("/").filter(Boolean).slice(-2).join("/");
  const found = make("div", {}, findingsSection(facts.findings, place));
  const shown = make("div", {},
    headline(facts, title),
    make("section", { "aria-labelledby": "found" }, make("h2", { id: "found" }, "What was noticed"), found, deepCheck(place, facts, found, signal)),
    make("section", { "aria-labelledby": "sizes" }, make("h2", { id: "sizes" }, "Where the bytes are"),
      make("div", { class: "columns" }, bars("by role", facts.parts), bars("by type", facts.dtypes))),
    await tensorBrowser(place, values, facts, signal),
    settings(facts),
    await compareWith(place, signal));
  return { shown, trail: [["", { stay: 1 }, "start"], ["checkpoint", { place }, title]] };
}

function headline(facts, title) {
  const { verdict, have, lack } = facts.resumable, { progress, topology, counts } = facts;
  const layout = topology?.layout && Object.entries(topology.layout).map(([axis, ranks]) => `${axis}=${ranks}`).join(", ");
  const done = [["update", progress.update], ["samples", progress.samples], ["tokens", progress.tokens], ["epoch", progress.epoch]]
    .filter(([, value]) => value !== null).map(([what, value]) => `${what} ${count(value)}`).join(", ");
  const fact = (term, ...text) => make("div", {}, make("dt", {}, term), make("dd", {}, ...text));
  return make("section", { class: `verdict ${TONES[verdict]}`, "aria-label": "Verdict" },
    make("h1", { tabindex: -1 }, title),
    make("p", { class: "word" }, WORDS[verdict]),
    make("p", { class: "sentence" }, facts.complete ? SENTENCES[verdict] : "Values are missing or cannot be read.",
      lack.length > 0 && ` Not in it: ${lack.join(", ")}.`),
    make("dl", { class: "facts" },
      fact("every value in a file", facts.complete ? "✓ yes" : "✗ no", facts.broken > 0 && `, ${count(facts.broken, "tensor")} damaged`),
      fact("progress", done || "unknown"),
      fact("format", facts.format),
      fact("written by", topology ? `${count(topology.world_size, "rank")}${layout ? ` (${layout})` : ""}${topology.inferred ? ", inferred" : ""}` : "an unknown number of ranks"),
      fact("holds", `${count(counts.tensors, "tensor")}, ${count(counts.elements)} values, ${size(counts.bytes)} in ${count(facts.pieces, "piece")}, ${count(counts.files, "file")}`),
      fact("for a resume", have.join(", ") || "nothing")));
}

function bars(title, rows) {
  const most = Math.max(1, ...rows.map((row) => row.bytes));
  return make("div", { class: "scroll" }, make("table", { class: "sizes" }, make("caption", {}, title),
    make("tbody", {}, rows.map((row) => make("tr", {},
      make("th", { scope: "row" }, make("code", {}, row.name)),
      make("td", { class: "share" }, make("span", { class: "bar", "aria-hidden": "true" }, make("i", { class: "used", at: { width: `${(100 * row.bytes) / most}%` } }))),
      make("td", { class: "num" }, size(row.bytes)),
      make("td", { class: "num small" }, count(row.tensors, "tensor")))))));
}

// `samerun inspect --deep`: every byte, on demand.
function deepCheck(place, facts, found, signal) {
  const status = make("span", { class: "small", role: "status" });
  const bar = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "reading" });
  const button = make("button", { type: "button", class: "button" }, `Read every byte (${size(facts.counts.bytes)})`);
  let work = null;
  button.addEventListener("click", async () => {
    if (work) { work.abort(); return; }
    work = new AbortController();
    button.textContent = "Cancel";
    bar.hidden = false;
    try {
      const last = await follow("deep", { place }, AbortSignal.any([signal, work.signal]), (event) => { if (event.total) bar.value = event.done / event.total; });
      found.replaceChildren(findingsSection(last.findings, place));
      status.textContent = { true: "✓ undamaged: every checksum agrees", false: "✗ damaged, see above", null: "read to the end; the files hold no evidence that decides whether they are undamaged" }[last.intact];
      button.remove();
    } catch (error) {
      status.textContent = work.signal.aborted ? "cancelled" : error.message;
      button.textContent = "Read every byte";
    }
    bar.hidden = true;
    work = null;
  });
  return make("p", { class: "controls" }, button, bar, status);
}

function settings(facts) {
  if (!facts.groups.length) return null;
  const found = new Set(facts.groups.flatMap((group) => Object.keys(group.hyperparameters)));
  const names = [...new Set([...LOOKED_FOR.filter((key) => found.has(key)), ...found])];
  return make("section", { "aria-labelledby": "groups" }, make("h2", { id: "groups" }, "Parameter groups"),
    make("div", { class: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "group"), make("th", { scope: "col", class: "num" }, "parameters"), names.map((key) => make("th", { scope: "col" }, key)))),
      make("tbody", {}, facts.groups.map((group, index) => make("tr", {}, make("th", { scope: "row" }, index), make("td", { class: "num" }, count(group.count)),
        names.map((key) => make("td", {}, group.hyperparameters[key] ?? "–"))))))));
}

async function compareWith(place, signal) {
  const others = (await ask("start", {}, signal)).places.filter((other) => other.kind === "checkpoint" && other.name !== place);
  if (!others.length) return null;
  return make("section", { "aria-labelledby": "compare" }, make("h2", { id: "compare" }, "Compare"),
    make("p", { class: "lead" }, "Tensor by tensor, in any formats and layouts."),
    make("ul", {}, others.slice(0, 50).map((other) => make("li", {}, link("diff", { place, other: other.name }, {}, `with ${other.title}`)))));
}
