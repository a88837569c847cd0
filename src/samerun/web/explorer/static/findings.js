// Findings with their explanations, worst first, as the report shows them.
import { count, link, make, prose } from "./dom.js";

const TONES = { error: "tone-bad", warning: "tone-warn" };

function instance(item, place) {
  const where = item.tensor && place !== undefined
    ? link("tensor", { place, key: item.tensor }, { class: "place" }, item.place)
    : item.place && make("span", { class: "place" }, item.place);
  const versus = item.expected !== null || item.found !== null;
  return make("li", {},
    make("span", { class: "message" }, item.message), " ", where,
    versus && make("dl", { class: "versus" }, make("dt", {}, "expected"), make("dd", {}, item.expected ?? "nothing"), make("dt", {}, "found"), make("dd", {}, item.found ?? "nothing")),
    item.hint && make("p", { class: "likely" }, item.hint));
}

function card(group, place, open) {
  const follow = Object.entries(group.consequences).map(([code, times]) => (times > 1 ? `${code} (${times})` : code));
  return make("article", { class: `finding ${group.severity} ${TONES[group.severity] ?? ""}` },
    make("header", {}, make("h3", {}, prose(group.title)), make("span", { class: "small" }, make("code", {}, group.code), ` ${group.severity}`)),
    make("ul", {}, group.instances.map((item) => instance(item, place))),
    group.more > 0 && make("p", { class: "small" }, `and ${count(group.more)} more of these`),
    group.hint && make("p", { class: "likely" }, group.hint),
    follow.length > 0 && make("p", { class: "small" }, `these follow from it: ${follow.join(", ")}`),
    group.meaning && make("details", { open }, make("summary", {}, "what it means, how to see it, what to do"),
      make("dl", { class: "explain" },
        make("dt", {}, "What it means"), make("dd", {}, prose(group.meaning)),
        make("dt", {}, "How to see it"), make("dd", {}, prose(group.see)),
        make("dt", {}, "What to do"), make("dd", {}, prose(group.do)))));
}

export function findingCards(groups, { place, open = false } = {}) {
  return make("div", { class: "findings" }, groups.map((group, index) => card(group, place, open && index === 0)));
}

// What blocks is open to read; what only informs is folded away.
export function findingsSection(groups, place) {
  if (!groups.length) return make("p", { class: "small" }, "Nothing was noticed.");
  const blocking = groups.filter((group) => group.severity === "error"), others = groups.filter((group) => group.severity !== "error");
  const told = ["warning", "note"].map((word) => [others.filter((group) => group.severity === word).length, word]).filter(([times]) => times);
  return make("div", {},
    blocking.length > 0 && findingCards(blocking, { place, open: true }),
    others.length > 0 && make("details", { class: "fold", open: others.length <= 1 && !blocking.length },
      make("summary", {}, told.map(([times, word]) => count(times, word)).join(", ")), findingCards(others, { place })));
}
