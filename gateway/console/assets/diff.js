// What changed between two texts, line by line (the longest common subsequence).

import { h } from "./dom.js";

export function lines(before, after) {
  const a = before.split("\n");
  const b = after.split("\n");
  const lengths = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { found.push([" ", a[i]]); i += 1; j += 1; }
    else if (i < a.length && (j === b.length || lengths[i + 1][j] >= lengths[i][j + 1])) { found.push(["-", a[i]]); i += 1; }
    else { found.push(["+", b[j]]); j += 1; }
  }
  return found;
}

/** A document as text, its words in order. */
export const written = (document) => JSON.stringify(sorted(document), null, 2);

function sorted(value) {
  if (Array.isArray(value)) return value.map(sorted);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
}

/** The difference as an element. */
export function shownDiff(before, after, label) {
  const found = lines(before, after);
  const changed = found.filter(([kind]) => kind !== " ").length;
  const kinds = { "+": "ins", "-": "del", " ": "div" };
  const words = { "+": "added: ", "-": "removed: " };
  return h("figure", {}, h("div", { class: "diff", tabindex: "0", role: "group", "aria-label": label },
    found.map(([kind, text]) => h(kinds[kind], {}, words[kind] && h("span", { class: "unseen" }, words[kind]), `${kind} ${text}`))),
  h("p", { class: "small soft" }, changed ? `${changed} lines differ.` : "They say the same."));
}
