// Which view is shown: the part of the address behind `#`. Leaving a view ends whatever it still waits for.
import { Gone, link, make, Refused, say } from "./dom.js";
import { findingCards } from "./findings.js";
import { showStart } from "./start.js";
import { showCheckpoint } from "./checkpoint.js";
import { showTensor } from "./tensor.js";
import { showDiff } from "./diff.js";
import { showRun } from "./run.js";

const VIEWS = { "": showStart, checkpoint: showCheckpoint, tensor: showTensor, diff: showDiff, run: showRun };
const content = document.getElementById("content"), crumbs = document.getElementById("crumbs");
let leaving = new AbortController();
let first = true;

function failure(error) {
  if (error instanceof Refused) return make("section", {}, make("h1", { tabindex: -1 }, "This cannot be shown"), findingCards(error.findings, { open: true }));
  return make("section", {}, make("h1", { tabindex: -1 }, error instanceof Gone ? "The explorer has ended" : "This cannot be shown"), make("p", {}, error.message));
}

async function show() {
  const text = location.hash;
  if (text && !text.startsWith("#/")) return; // an anchor inside the view
  leaving.abort();
  leaving = new AbortController();
  const [view, query = ""] = text.slice(2).split("?"), values = Object.fromEntries(new URLSearchParams(query));
  const here = leaving.signal;
  content.setAttribute("aria-busy", "true");
  let trail = [["", {}, "start"]], shown;
  try {
    const made = await (VIEWS[view] ?? showStart)(values, here);
    if (here.aborted) return;
    if (made.replace) { location.replace(made.replace); return; }
    ({ shown } = made);
    trail = made.trail ?? trail;
  } catch (error) {
    if (here.aborted) return;
    shown = failure(error);
  }
  content.removeAttribute("aria-busy");
  content.replaceChildren(shown);
  crumbs.replaceChildren(...trail.map(([where, query, label], place) =>
    (place + 1 < trail.length ? link(where, query, {}, label) : make("span", { "aria-current": "page" }, label))));
  const title = content.querySelector("h1");
  document.title = `${title?.textContent ?? "explorer"} · samerun`;
  say(title?.textContent ?? "");
  if (!first) (title ?? content).focus();
  first = false;
  scrollTo(0, 0);
}

addEventListener("hashchange", show);
show();
