// The tensors of a checkpoint: a tree of their names, the sizes below a node, and a table that the server searches, sorts
// and pages, so that ten thousand of them cost what a hundred do.
import { address, ask, count, later, link, make, name, roving, shape, size } from "./dom.js";

const PAGE = 100;
const COLUMNS = [["name", "tensor"], ["shape", "shape"], ["dtype", "type"], ["bytes", "size"], ["pieces", "pieces"]];
const LARGE_FIRST = new Set(["shape", "bytes", "pieces"]);
const KEPT = ["find", "part", "dtype", "under", "broken", "sort", "descending", "first"];

export async function tensorBrowser(place, values, facts, signal) {
  const state = Object.fromEntries(KEPT.map((key) => [key, values[key] ?? ""]));
  const tree = make("ul", { role: "tree", "aria-label": "Names", class: "tree" });
  const tiles = make("div", { class: "tiles", role: "group", "aria-label": "Sizes, largest first" });
  const table = make("table", { class: "tensors" }, make("caption", { class: "visually-hidden" }, "Tensors"));
  const told = make("span", { class: "small", role: "status" });
  const where = make("p", { class: "under small" });
  const pages = make("p", { class: "controls" });
  const choice = () => ({ place, find: state.find, part: state.part, dtype: state.dtype, broken: state.broken });

  async function refresh({ names = true } = {}) {
    history.replaceState(null, "", address("checkpoint", { place, ...state }));
    try {
      const rows = ask("tensors", { ...choice(), under: state.under, sort: state.sort, descending: state.descending, first: state.first || 0, count: PAGE }, signal);
      const nodes = ask("tree", { ...choice(), under: state.under }, signal);
      const top = names ? ask("tree", choice(), signal) : null;
      showRows(await rows);
      showTiles(await nodes);
      if (top) showTree(await top);
    } catch (error) {
      if (!signal.aborted) told.textContent = error.message;
    }
  }

  const change = (changes, options) => { Object.assign(state, { first: "" }, changes); return refresh(options); };

  // ------------------------------------------------------------ table

  function showRows({ first, count: total, bytes, rows }) {
    told.textContent = `${count(total, "tensor")}, ${size(bytes)}`;
    const sorted = (column) => (state.sort !== column ? null : state.descending ? "descending" : "ascending");
    const head = make("tr", {}, COLUMNS.map(([column, title]) => make("th", { scope: "col", "aria-sort": sorted(column), class: ["bytes", "pieces"].includes(column) && "num" },
      make("button", { type: "button", "data-sort": column, on: { click: () => sortBy(column) } }, title))));
    const body = rows.map((row) => make("tr", { class: row.codes.length && "fail" },
      make("th", { scope: "row" }, link("tensor", { place, key: row.key }, {}, name(row.key)), row.codes.length > 0 && make("span", { class: "small mark bad" }, ` ✗ ${row.codes.join(", ")}`)),
      make("td", {}, shape(row.shape)), make("td", {}, row.dtype), make("td", { class: "num" }, size(row.bytes)), make("td", { class: "num" }, count(row.pieces))));
    const held = document.activeElement?.dataset?.sort;
    table.replaceChildren(table.caption, make("thead", {}, head), make("tbody", {}, body.length ? body : make("tr", {}, make("td", { colspan: 5 }, "no tensor like that"))));
    if (held) table.querySelector(`[data-sort="${held}"]`)?.focus();
    const turned = pages.contains(document.activeElement) && document.activeElement.textContent;
    const turn = (label, to, possible) => make("button", { type: "button", class: "button", disabled: !possible, on: { click: () => turnTo(to) } }, label);
    pages.replaceChildren(...(total > PAGE ? [
      turn("previous", first - PAGE, first > 0), turn("next", first + PAGE, first + PAGE < total),
      make("span", { class: "small" }, `rows ${count(first + 1)} to ${count(Math.min(first + PAGE, total))} of ${count(total)}`)] : []));
    if (turned) [...pages.querySelectorAll("button:enabled")].sort((a) => (a.textContent === turned ? -1 : 1))[0]?.focus();
    where.replaceChildren(...(state.under ? ["below ", make("code", {}, state.under), " ", make("button", { type: "button", class: "button", on: { click: () => change({ under: "" }).then(settle) } }, "show all")] : []));
  }

  const turnTo = async (first) => { state.first = Math.max(0, first) || ""; await refresh({ names: false }); table.parentElement.scrollTop = 0; };

  function sortBy(column) {
    const again = state.sort === column;
    change({ sort: column, descending: (again ? !state.descending : LARGE_FIRST.has(column)) ? 1 : "" }, { names: false });
  }

  // ------------------------------------------------------------ sizes

  function showTiles({ tiles: parts, nodes }) {
    tiles.replaceChildren(...(nodes.length < 2 ? [] : parts.map(({ prefix, label, bytes, box: [left, top, width, height] }) => {
      const broken = nodes.some((node) => node.prefix === prefix && node.broken);
      return make("button", { type: "button", class: `tile${broken ? " broken" : ""}${width > 9 && height > 14 ? "" : " tiny"}`, "aria-disabled": prefix === null && "true",
        "aria-label": `${label}, ${size(bytes)}${broken ? ", damaged" : ""}`, title: `${prefix ?? label}: ${size(bytes)}`,
        at: { left: `${left}%`, top: `${top}%`, width: `${width}%`, height: `${height}%` },
        on: { click: () => prefix !== null && change({ under: prefix }, { names: false }).then(settle) } },
      width > 9 && height > 14 && make("span", {}, label), width > 9 && height > 26 && make("small", {}, size(bytes)));
    })));
    tiles.hidden = nodes.length < 2;
    if (!tiles.hidden) roving(tiles, ".tile");
  }

  // What was pressed is gone: the focus goes to what has taken its place.
  function settle() {
    mark();
    (tiles.querySelector(".tile") ?? where.querySelector("button"))?.focus();
  }

  // ------------------------------------------------------------ tree

  function item(node, level) {
    const label = make("span", { class: "label" }, name(node.label, "span"), make("small", {}, ` ${count(node.tensors)} · ${size(node.num_bytes)}`), node.broken > 0 && make("small", { class: "mark bad" }, " ✗"));
    const element = make("li", { role: "treeitem", tabindex: -1, "aria-level": level, "aria-selected": "false", "aria-expanded": node.leaf ? null : "false", "data-prefix": node.prefix,
      "aria-label": `${node.label}, ${count(node.tensors, "tensor")}, ${size(node.num_bytes)}${node.broken ? ", damaged" : ""}` }, label);
    label.addEventListener("click", () => { element.focus(); choose(element); });
    return element;
  }

  function showTree({ nodes, left_out: left }) {
    tree.replaceChildren(...nodes.map((node) => item(node, 1)), ...(left ? [make("li", { role: "none", class: "small" }, `and ${count(left)} more: search for them`)] : []));
    tree.querySelector("[role=treeitem]")?.setAttribute("tabindex", "0");
    mark();
  }

  function mark() {
    for (const element of tree.querySelectorAll("[role=treeitem]")) element.setAttribute("aria-selected", String(element.dataset.prefix === state.under));
  }

  async function choose(element) {
    const again = state.under === element.dataset.prefix;
    expand(element, again ? element.getAttribute("aria-expanded") !== "true" : true);
    if (!again) { await change({ under: element.dataset.prefix }, { names: false }); mark(); }
  }

  async function expand(element, open) {
    if (!element.hasAttribute("aria-expanded")) return;
    element.setAttribute("aria-expanded", String(open));
    let group = element.querySelector(":scope > ul");
    if (open && !group) {
      group = make("ul", { role: "group" });
      element.append(group);
      const { nodes } = await ask("tree", { ...choice(), under: element.dataset.prefix }, signal);
      group.append(...nodes.map((node) => item(node, Number(element.getAttribute("aria-level")) + 1)));
    }
    if (group) group.hidden = !open;
  }

  tree.addEventListener("focusin", (event) => {
    for (const element of tree.querySelectorAll("[tabindex='0']")) element.setAttribute("tabindex", "-1");
    event.target.setAttribute("tabindex", "0");
  });
  tree.addEventListener("keydown", (event) => {
    const here = event.target.closest("[role=treeitem]");
    if (!here) return;
    const all = [...tree.querySelectorAll("[role=treeitem]")].filter((element) => !element.parentElement.closest("ul[hidden]"));
    const at = all.indexOf(here), open = here.getAttribute("aria-expanded");
    const go = (element) => element?.focus();
    const keys = {
      ArrowDown: () => go(all[at + 1]), ArrowUp: () => go(all[at - 1]), Home: () => go(all[0]), End: () => go(all.at(-1)),
      ArrowRight: () => (open === "false" ? expand(here, true) : open === "true" && go(all[at + 1])),
      ArrowLeft: () => (open === "true" ? expand(here, false) : go(here.parentElement.closest("[role=treeitem]"))),
      Enter: () => choose(here), " ": () => choose(here),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });

  // ------------------------------------------------------------ controls

  const search = later(150, () => change({ find: find.value.trim(), under: "" }));
  const find = make("input", { type: "search", id: "find", autocomplete: "off", spellcheck: "false", placeholder: "parts of a name", value: state.find, on: { input: search } });
  const pick = (key, rows) => make("select", { id: key, on: { change: (event) => change({ [key]: event.target.value }) } },
    make("option", { value: "" }, "all"), rows.map((row) => make("option", { value: row.name, selected: state[key] === row.name }, row.name)));
  const broken = facts.broken > 0 && make("label", {}, make("input", { type: "checkbox", id: "broken", checked: Boolean(state.broken), on: { change: (event) => change({ broken: event.target.checked ? 1 : "", under: "" }) } }), " only damaged");
  await refresh();
  return make("section", { "aria-labelledby": "tensors" }, make("h2", { id: "tensors" }, "Tensors"),
    make("div", { class: "controls" }, make("label", {}, "find ", find), make("label", {}, "role ", pick("part", facts.parts)), make("label", {}, "type ", pick("dtype", facts.dtypes)), broken, told),
    where, tiles,
    make("div", { class: "browser" },
      make("details", { class: "names", open: matchMedia("(min-width: 900px)").matches }, make("summary", {}, "names as a tree"), tree),
      make("div", {}, make("div", { class: "scroll rows", tabindex: 0, role: "region", "aria-label": "Table of tensors" }, table), pages)));
}
