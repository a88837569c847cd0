// A run directory: its stages, and the job that runs now, looked at again every second while something runs.
import { ask, count, draw, make, number, recordOf } from "./dom.js";
import { findingsSection } from "./findings.js";
import { verdict } from "./start.js";

const EVERY = 1000, IDLE = 5000;
const WORDS = { promote: "PROMOTE", reject: "REJECT", abstain: "ABSTAIN" };
const STATES = { pass: "✓ passed", fail: "✗ failed", skipped: "skipped", running: "running", interrupted: "interrupted", waiting: "not run" };

export async function showRun({ place }, signal) {
  const parts = Object.fromEntries(["head", "now", "stages", "found"].map((part) => [part, make("div")]));
  let known = await ask("run", { place }, signal);
  const show = () => {
    replaced(parts.head, headline(known, place));
    replaced(parts.now, known.running && runningJob(known.running));
    replaced(parts.stages, stageList(known, place));
    replaced(parts.found, known.findings.length > 0 && make("section", { "aria-labelledby": "found" }, make("h2", { id: "found" }, ["reject", "abstain"].includes(known.verdict) ? "Why" : "What was noticed"), findingsSection(known.findings)));
  };
  show();
  watch();

  async function watch() {
    while (!signal.aborted) {
      await new Promise((resolve) => { setTimeout(resolve, known.busy || known.running ? EVERY : IDLE); signal.addEventListener("abort", resolve, { once: true }); });
      if (signal.aborted) return;
      if (document.hidden) continue;
      try {
        known = await ask("run", { place }, signal);
        show();
      } catch {
        if (!signal.aborted) replaced(parts.now, make("p", { class: "mark bad" }, "The run directory or the explorer's server does not answer; trying again."));
      }
    }
  }

  const shown = make("div", {}, parts.head, parts.now, make("section", { "aria-labelledby": "stages" }, make("h2", { id: "stages" }, "Stages, cheapest first"), parts.stages), parts.found);
  return { shown, trail: [["", { stay: 1 }, "start"], ["run", { place }, known.title]] };
}

// Only what has changed is exchanged, so that focus, selection and open details stay where they are.
const drawn = new WeakMap();

function replaced(element, content) {
  const text = content ? content.outerHTML : "";
  if (drawn.get(element) === text) return;
  drawn.set(element, text);
  const opened = new Set([...element.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute("href") ?? document.activeElement.id : null;
  element.replaceChildren(...(content ? [content] : []));
  for (const summary of element.querySelectorAll("details > summary")) if (opened.has(summary.textContent)) summary.parentElement.open = true;
  if (focused) [...element.querySelectorAll("a[href], [id]")].find((item) => (item.getAttribute("href") ?? item.id) === focused)?.focus();
}

function headline(run, place) {
  const tone = run.verdict ?? "none", stage = run.stages.find((item) => item.status === "running");
  const failed = run.stages.find((item) => item.status === "fail");
  const word = WORDS[run.verdict] ?? (run.running ? "RUNNING" : failed ? "STOPPED" : "NOT JUDGED");
  const sentence = run.verdict ? { promote: "Every criterion was examined and holds.", reject: "Something does not hold.", abstain: "What was seen does not suffice." }[run.verdict]
    : stage ? `${stage.title}: ${stage.question}` : failed ? `Stage ${failed.name} failed; later stages were not run.` : "There is no verdict yet.";
  return make("section", { class: `verdict ${tone}`, "aria-label": "Verdict" }, make("h1", { tabindex: -1 }, run.title),
    make("p", { class: "word" }, word), make("p", { class: "sentence" }, sentence),
    make("dl", { class: "facts" },
      run.label && make("div", {}, make("dt", {}, "declared as"), make("dd", {}, run.label)),
      make("div", {}, make("dt", {}, "sealed"), make("dd", {}, run.sealed ? "✓ yes" : "nothing yet")),
      make("div", {}, make("dt", {}, "samerun"), make("dd", {}, run.busy ? "at work here now" : run.busy === false ? "not at work now" : "unknown whether it is at work")),
      run.report && make("div", {}, make("dt", {}, "pictures"), make("dd", {}, make("a", { href: recordOf(place, "report.html"), target: "_blank", rel: "noopener" }, "the report, as of now")))));
}

function stageList(run, place) {
  const evidence = (file, text) => file && make("a", { href: recordOf(place, file), target: "_blank", rel: "noopener" }, make("code", {}, text));
  return make("ol", { class: "stages" }, run.stages.map((stage) => make("li", { class: stage.name === "07-judge" && run.verdict ? run.verdict : stage.status },
    make("b", {}, stage.title),
    make("span", { class: "status" }, stage.name === "07-judge" && run.verdict ? verdict(run.verdict) : STATES[stage.status],
      stage.seconds ? make("span", { class: "time" }, ` ${stage.seconds.toFixed(1)} s`) : null, make("span", { class: "records" }, evidence(stage.evidence, "result"), " ", evidence(stage.log, "log"))))));
}

function runningJob(job) {
  const share = job.expected ? job.updates / job.expected : null;
  const text = job.expected === null ? "" : `${count(job.updates)} of ${count(job.expected, "update")}`;
  return make("section", { "aria-labelledby": "now", class: "now" }, make("h2", { id: "now" }, "Now"),
    make("p", {}, make("b", {}, [job.stage, job.part].filter(Boolean).join(", ")), text && `: ${text}`,
      job.last && `, loss ${number(job.last.loss, 6)}${job.last.grad_norm === null ? "" : `, gradient norm ${number(job.last.grad_norm)}`} in update ${count(job.last.update)}`,
      job.silent_seconds > 60 && make("span", { class: "mark warn" }, ` · silent for ${Math.round(job.silent_seconds)} s`)),
    share !== null && make("progress", { max: 1, value: Math.min(1, share), "aria-label": text }),
    job.chart && lossChart(job.chart),
    job.log && make("details", { open: true }, make("summary", {}, "end of its log"), make("pre", { class: "log", tabindex: 0 }, job.log)));
}

function lossChart(chart) {
  const paths = chart.lines.flatMap((line) => [draw("path", { class: `line ${line.style}`, d: line.path }), line.dots && draw("path", { class: `dots ${line.style}`, d: line.dots })]);
  const grid = chart.ticks.map((tick) => `M0 ${tick.percent}H1000`).join("");
  const words = chart.lines.map((line) => line.label).reverse().join(" over ");
  return make("figure", { class: "chart" }, make("div", { class: "ptitle" }, `loss: ${words}`),
    make("div", { class: "panel" }, make("div", { class: "yaxis", "aria-hidden": "true" }, chart.ticks.map((tick) => make("span", { at: { top: `${tick.percent}%` } }, tick.label))),
      make("div", { class: "canvas" }, draw("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": `Loss, ${words}, updates ${chart.first} to ${chart.last}` }, draw("path", { class: "grid", d: grid }), paths))),
    make("div", { class: "xaxis", "aria-hidden": "true" }, make("span", { class: "from" }, chart.first), make("span", { class: "to" }, chart.last)));
}
