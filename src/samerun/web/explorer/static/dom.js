// Elements, words and requests. Everything that comes from a checkpoint becomes text (text nodes, attributes), never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "at") for (const [property, length] of Object.entries(value)) element.style.setProperty(property, length);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return element;
}

// make("p", { class: "small" }, "text", element): `on` has listeners, `at` style properties.
export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// ---------------------------------------------------------------- words

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let place = 0;
  while (bytes >= 1024 && place < units.length - 1) { bytes /= 1024; place += 1; }
  return `${place ? bytes.toFixed(bytes < 10 ? 2 : 1) : bytes} ${units[place]}`;
}

export const count = (value, one, many) => `${value.toLocaleString("en")}${one ? ` ${value === 1 ? one : many ?? `${one}s`}` : ""}`;
export const shape = (sizes) => sizes.join(" × ") || "scalar";

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return { nan: "not a number", inf: "∞", "-inf": "−∞" }[value] ?? value;
  const rounded = Number(value.toPrecision(digits)), magnitude = Math.abs(rounded);
  return (magnitude && (magnitude < 1e-3 || magnitude >= 1e9) ? rounded.toExponential() : String(rounded)).replace("-", "−").replace("e−", "e-");
}

// A long name may break behind its dots.
export function name(text, tag = "code") {
  const element = make(tag);
  text.split(/(?<=[.:/])/).forEach((part, place) => element.append(...(place ? [make("wbr"), part] : [part])));
  return element;
}

// Text of the catalogue: what stands in backticks is code.
export const prose = (text) => text.split("`").map((part, odd) => (odd % 2 ? make("code", {}, part) : part));

export function say(text) {
  document.getElementById("said").textContent = text;
}

// ---------------------------------------------------------------- addresses

const given = (values) => Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
const written = (values) => new URLSearchParams(given(values).map(([key, value]) => [key, value === true ? "1" : String(value)])).toString();

export const address = (view, values = {}) => `#/${view}${given(values).length ? `?${written(values)}` : ""}`;
export const link = (view, values, attributes, ...children) => make("a", { href: address(view, values), ...attributes }, ...children);

export const recordOf = (place, file) => `run/${place.split("/").map(encodeURIComponent).join("/")}/-/${file.split("/").map(encodeURIComponent).join("/")}`;

// What the server refused, with its findings.
export class Refused extends Error {
  constructor(findings) {
    super(findings[0]?.title ?? "refused");
    this.findings = findings;
  }
}

// The server does not answer any more.
export class Gone extends Error {
  constructor() {
    super("The explorer's server does not answer any more. Start samerun ui again, and open the address that it prints.");
  }
}

async function request(where, signal) {
  try {
    return await fetch(where, { signal });
  } catch (error) {
    throw error instanceof TypeError ? new Gone() : error; // TypeError is how fetch says that nobody answers
  }
}

export async function ask(what, values, signal) {
  const response = await request(`api/${what}?${written(values)}`, signal);
  if (response.ok) return response.json();
  if (response.headers.get("Content-Type")?.startsWith("application/json")) throw new Refused((await response.json()).findings);
  throw new Error(await response.text());
}

// Long work, event by event. Aborting the signal ends it on the server too. Returns the last event.
export async function follow(what, values, signal, told) {
  const response = await request(`stream/${what}?${written(values)}`, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", last = null;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      last = JSON.parse(line);
      if (last.kind === "refused") throw new Refused(last.findings);
      if (last.kind === "failed") throw new Error(last.message);
      told(last);
    }
  }
  return last;
}

// ---------------------------------------------------------------- keys

// One stop of the Tab key for a group of elements; arrow keys, Home and End move inside it.
export function roving(group, selector, { across = true, moved = () => {} } = {}) {
  const items = () => [...group.querySelectorAll(selector)];
  const settle = (chosen) => items().forEach((item) => item.setAttribute("tabindex", item === chosen ? "0" : "-1"));
  settle(items()[0]);
  group.addEventListener("focusin", (event) => { const item = event.target.closest(selector); if (item) { settle(item); moved(item); } });
  group.addEventListener("keydown", (event) => {
    const all = items(), at = all.indexOf(event.target.closest(selector));
    const steps = { ArrowDown: 1, ArrowUp: -1, ...(across ? { ArrowRight: 1, ArrowLeft: -1 } : {}) };
    const to = event.key in steps ? at + steps[event.key] : { Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    all[clamp(to, 0, all.length - 1)].focus();
  });
}

// Calls draw at most once in so many milliseconds, with the last arguments.
export function later(milliseconds, call) {
  let waiting;
  return (...values) => { clearTimeout(waiting); waiting = setTimeout(() => call(...values), milliseconds); };
}
