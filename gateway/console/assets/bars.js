// Before and after, as pairs of bars with their values beside them.

import { h, s } from "./dom.js";
import { swatch, table } from "./ui.js";

/** ``rows``: [name, before, after]; ``show``: a value as text. */
export function pairs(title, rows, show) {
  const most = Math.max(...rows.flatMap(([, before, after]) => [before || 0, after || 0]), 1e-9);
  const bar = (value, kind) => h("div", { class: "bar" }, s("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: kind, width: Math.max(value ? 0.5 : 0, (100 * (value || 0)) / most), height: 8 })));
  return h("figure", { class: "card" },
    h("figcaption", {}, h("h3", {}, title)),
    h("ul", { class: "legend" }, h("li", {}, swatch(4), "now"), h("li", {}, swatch(1), "with the change")),
    rows.map(([name, before, after]) => h("div", { class: "meter" },
      h("div", { class: "small" }, h("strong", {}, name), ` ${show(before)} → ${show(after)}`), bar(before, "s4"), bar(after, "s1"))),
    h("details", {}, h("summary", {}, "Show as a table"), table(title, [
      { title: "", row: true, cell: (row) => row[0] },
      { title: "Now", num: true, cell: (row) => show(row[1]) },
      { title: "With the change", num: true, cell: (row) => show(row[2]) },
    ], rows)));
}
