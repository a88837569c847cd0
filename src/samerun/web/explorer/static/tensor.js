// One tensor: who holds which part of it, what nobody holds, and how its values are spread.
import { ask, clamp, count, draw, link, make, name, shape, size } from "./dom.js";
import { findingCards } from "./findings.js";
import { spreadSection } from "./spread.js";

const HUES = 8, LISTED = 200;
const range = ([first, end], dim) => `${dim === null ? "" : `dim ${dim} `}${first}${end - first === 1 ? "" : ` to ${end - 1}`}`;

export async function showTensor({ place, key }, signal) {
  const facts = await ask("tensor", { place, key }, signal);
  const { picture } = facts;
  const fact = (term, ...text) => make("div", {}, make("dt", {}, term), make("dd", {}, ...text));
  const shown = make("div", {},
    make("section", {},
      make("h1", { tabindex: -1 }, name(facts.key, "span")),
      make("dl", { class: "facts" },
        fact("shape", shape(picture.shape)), fact("type", facts.dtype), fact("holds", `${count(facts.elements, "value")}, ${size(facts.bytes)}`),
        fact("pieces", count(picture.pieces.length + picture.left_out)),
        facts.original !== facts.name && fact("called in the files", name(facts.original)),
        facts.aliases.length > 0 && fact("shared with", facts.aliases.join(", ")),
        facts.siblings.length > 0 && fact("of the same parameter", facts.siblings.map((other, at) => [at ? ", " : "", link("tensor", { place, key: other }, {}, other.split(":")[0])]))),
      facts.findings.length > 0 && findingCards(facts.findings, { open: true })),
    make("section", { "aria-labelledby": "held" }, make("h2", { id: "held" }, "Who holds what"), ...drawPicture(picture)),
    spreadSection(place, facts, signal));
  return { shown, trail: [["", { stay: 1 }, "start"], ["checkpoint", { place }, "checkpoint"], ["tensor", { place, key }, facts.key]] };
}

// Every distinct box once, with all that hold it; then gaps and overlaps.
function parts(picture) {
  const boxes = new Map();
  picture.pieces.forEach((piece, at) => {
    const spot = picture.spots[at], place = JSON.stringify(spot);
    if (!boxes.has(place)) boxes.set(place, { ...spot, pieces: [] });
    boxes.get(place).pieces.push(piece);
  });
  const drawn = [...boxes.values()].filter(({ rows, columns }) => rows[1] > rows[0] && columns[1] > columns[0]);
  return [
    ...drawn.map((box) => ({ ...box, kind: box.pieces.some((piece) => piece.trouble) ? "unreadable" : "piece" })),
    ...picture.overlaps.map((spot) => ({ ...spot, kind: "overlap", pieces: [] })),
    ...picture.gaps.map((spot) => ({ ...spot, kind: "gap", pieces: [] })),
  ];
}

function describe(part, dims) {
  const [down, across] = dims;
  const where = across === null ? "the only value" : [down === null ? null : range(part.rows, down), range(part.columns, across)].filter(Boolean).join(", ");
  if (part.kind === "gap") return `in no piece: ${where}`;
  if (part.kind === "overlap") return `in several pieces that are no copies of each other: ${where}`;
  const holders = part.pieces.map((piece) => piece.holder);
  const shown = [...new Set(holders)].slice(0, 8).join("; ") + (holders.length > 8 ? ` and ${holders.length - 8} more` : "");
  const { trouble, file, offset_bytes: offset } = part.pieces[0];
  if (trouble) return `${where}: cannot be read, ${trouble}`;
  return `${shown}: ${where}${file ? ` · ${file}${offset === null ? "" : ` at byte ${offset.toLocaleString("en")}`}` : ""}`;
}

function drawPicture(picture) {
  const { dims: [down, across], extent: [rows, columns] } = picture;
  const shown = parts(picture), holders = [...new Set(picture.pieces.filter((piece) => !piece.trouble).map((piece) => piece.holder))];
  const hue = (holder) => `hue${Number(/^rank (\d+)$/.exec(holder)?.[1] ?? Math.max(0, holders.indexOf(holder))) % HUES}`;
  const readout = make("output", { class: "readout" }, "Point at a part, or move with the arrow keys.");
  const at = (span, length) => [(100 * span[0]) / length, (100 * (span[1] - span[0])) / length];
  let chosen = -1;

  const rectangles = shown.map((part, index) => {
    const [top, height] = at(part.rows, rows || 1), [left, width] = at(part.columns, columns || 1);
    const classes = { piece: hue(part.pieces[0]?.holder), unreadable: "unreadable", gap: "gap", overlap: "overlap" }[part.kind];
    return draw("rect", { class: `part ${classes}`, x: `${left}%`, y: `${top}%`, width: `${width}%`, height: `${height}%`, on: { pointerenter: () => choose(index) } });
  });
  function choose(index) {
    rectangles[chosen]?.classList.remove("chosen");
    chosen = index;
    rectangles[index].classList.add("chosen");
    readout.textContent = describe(shown[index], picture.dims);
    canvas.setAttribute("aria-label", `${summary}. Part ${index + 1} of ${shown.length}: ${readout.textContent}`);
  }
  const lost = picture.missing_elements, twice = picture.shared_elements;
  const summary = [
    `${count(picture.pieces.length + picture.left_out, "piece")}, held by ${holders.length === 1 ? holders[0] : count(holders.length, "holder")}`,
    lost ? `${count(lost, "value")} in no piece` : lost === 0 ? "nothing missing" : "coverage was not counted",
    twice ? `${count(twice, "value")} in several pieces` : null,
  ].filter(Boolean).join("; ");
  const stripes = (id) => draw("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, draw("rect", { width: 8, height: 8 }), draw("rect", { class: "stripe", width: 3, height: 8 }));
  const canvas = draw("svg", { class: "parts", tabindex: 0, role: "img", "aria-label": `${summary}. Arrow keys move from part to part` },
    draw("defs", {}, ["lost", "twice"].map(stripes)),
    rectangles);
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const to = event.key in steps ? chosen + steps[event.key] : { Home: 0, End: shown.length - 1 }[event.key];
    if (to === undefined || !shown.length) return;
    event.preventDefault();
    choose(clamp(to, 0, shown.length - 1));
  });
  const labels = shown.filter((part) => part.kind !== "overlap" && part.pieces.length !== 0 || part.kind === "gap").slice(0, 64).map((part) => {
    const [top, height] = at(part.rows, rows || 1), [left, width] = at(part.columns, columns || 1);
    if (width < 11 || (down !== null && height < 9)) return null;
    const text = part.kind === "gap" ? "missing" : part.kind === "unreadable" ? "unreadable" : part.pieces.length > 1 ? `${part.pieces[0].holder} +${part.pieces.length - 1}` : part.pieces[0].holder;
    return make("span", { "aria-hidden": "true", at: { left: `${left + width / 2}%`, top: `${top + height / 2}%` } }, text);
  });
  const tall = down === null ? 3.5 : clamp((rows / Math.max(columns, 1)) * 40, 8, 26);
  const axis = (dim, length) => (dim === null ? "" : `dimension ${dim}: 0 to ${Math.max(0, length - 1).toLocaleString("en")}`);
  return [
    make("p", {}, summary, ". ", !picture.exact && make("span", { class: "small" }, "The parts are cut along more dimensions, or more often, than can be drawn; gaps are counted, not drawn.")),
    shown.length > 0 && make("figure", { class: "held" },
      make("div", { class: "frame", at: { height: `${tall}rem` } }, canvas, labels),
      make("figcaption", { class: "small" }, [axis(down, rows) && `down: ${axis(down, rows)}`, axis(across, columns) && `across: ${axis(across, columns)}`].filter(Boolean).join(" · ")),
      readout),
    make("p", { class: "legend" }, holders.slice(0, 24).map((holder) => make("span", {}, make("i", { class: `swatch ${hue(holder)}` }), holder)),
      holders.length > 24 && make("span", {}, `and ${holders.length - 24} more`),
      shown.some((part) => part.kind === "unreadable") && make("span", {}, make("i", { class: "swatch unread" }), "cannot be read"),
      picture.gaps.length > 0 && make("span", {}, make("i", { class: "swatch lost" }), "in no piece"),
      picture.overlaps.length > 0 && make("span", {}, make("i", { class: "swatch twice" }), "in several pieces")),
    pieceTable(picture),
  ].filter(Boolean);
}

function pieceTable(picture) {
  const rows = picture.pieces.slice(0, LISTED), left = picture.pieces.length + picture.left_out - rows.length;
  const box = ({ offsets, sizes }) => `[${offsets.map((first, dim) => `${first}:${first + sizes[dim]}`).join(", ")}]`;
  return make("details", {}, make("summary", {}, "pieces as a table"), make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ["piece", "holder", "box", "file", "at byte"].map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, rows.map((piece) => make("tr", { class: piece.trouble && "fail" }, make("th", { scope: "row" }, piece.number), make("td", {}, piece.holder),
      make("td", {}, make("code", {}, box(piece))), make("td", {}, piece.trouble || name(piece.file)), make("td", { class: "num" }, piece.offset_bytes === null ? "–" : count(piece.offset_bytes))))))),
  left > 0 && make("p", { class: "small" }, `and ${count(left)} more`));
}
