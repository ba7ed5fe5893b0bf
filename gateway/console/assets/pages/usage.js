// Usage and cost: by tenant, model or day, and the files that a bill is made of.

import { all, get, query } from "../api.js";
import { TimeChart } from "../charts.js";
import { h, put } from "../dom.js";
import * as format from "../format.js";
import { card, empty, field, more, page, select, shown, table } from "../ui.js";

const DAY_S = 86400;
const SPANS = [["7", "7 days"], ["30", "30 days"], ["90", "90 days"]];
const GROUPS = [["tenant_id", "Tenant"], ["model", "Model"], ["key_id", "Key"], ["sla_class", "Class"], ["day", "Day"]];

/** Rows of the table at a time. */
const NUM_SHOWN = 100;

/** Lines of usage or cost, all pages of them: of fewer the sum would be wrong. */
async function linesOf(what, asked, signal) {
  const lines = [];
  let after = "";
  let first = null;
  do {
    const found = await get(`${what}?${query({ ...asked, limit: 1000, after })}`, { signal });
    first = first || found;
    lines.push(...found.data);
    after = found.has_more ? found.next_cursor : "";
  } while (after);
  return { ...first, data: lines };
}

export async function open({ me, closing }) {
  const span = select("days", SPANS, "30", { onchange: () => read() });
  const group = select("group", GROUPS, "tenant_id", { onchange: () => read() });
  const result = h("div", { class: "grid one" });
  const rows = h("div", { class: "grid one" });
  let charts = [];
  closing(() => charts.forEach((chart) => chart.close()));
  const names = Object.fromEntries((await all("tenants").catch(() => [])).map((each) => [each.id, each.name]));

  let asking = new AbortController();
  closing(() => asking.abort());
  const asked = async (words, signal) => {
    const until = Math.floor(Date.now() / 1000) + 60;
    const since = Math.floor(until / DAY_S) * DAY_S - (Number(span.value) - 1) * DAY_S;
    const [usage, costs] = await Promise.all(["usage", "costs"].map((what) => linesOf(what, { since, until, bucket: "day", ...words }, signal)));
    return { usage, costs, since };
  };
  /** The sum is there at once; a line for each key and day may take a while. Resolves with the sum. */
  const read = () => {
    asking.abort(); // what was asked for before is not wanted any more
    asking = new AbortController();
    const { signal } = asking;
    const word = group.value;
    shown(rows, () => asked(word === "day" ? {} : { group_by: word }, signal), (found) => drawRows(found, word));
    return shown(result, () => asked({}, signal), draw);
  };

  const none = () => ({ requests: 0, prompt: 0, cached: 0, completion: 0, reasoning: 0, engine: 0, cost: 0 });
  /** Sums by whatever ``keyOf`` says of a line. */
  function summed({ usage, costs }, keyOf, sums = new Map()) {
    const at = (line) => sums.get(keyOf(line)) || sums.set(keyOf(line), none()).get(keyOf(line));
    for (const line of usage.data) {
      const sum = at(line);
      sum.requests += line.num_requests;
      sum.prompt += line.num_prompt_tokens;
      sum.cached += line.num_cached_tokens;
      sum.completion += line.num_completion_tokens;
      sum.reasoning += line.num_reasoning_tokens;
      sum.engine += line.engine_us / 1e6;
    }
    for (const line of costs.data) at(line).cost += line.cost_micros;
    return sums;
  }

  function draw(found) {
    const { costs, since } = found;
    charts.forEach((chart) => chart.close());
    charts = [];
    if (!found.usage.data.length) return card("Nothing was used", [], empty("No request in this time", "Usage appears here with the first request that ends."));
    const days = new Map();
    for (let start = since; start < Date.now() / 1000; start += DAY_S) days.set(start, none());
    summed(found, (line) => line.starts_at - (line.starts_at % DAY_S), days);
    const total = [...days.values()].reduce((sum, each) => Object.fromEntries(Object.keys(sum).map((key) => [key, sum[key] + each[key]])), none());
    const times = [...days.keys()].sort((one, other) => one - other);
    const chart = (label, pick, show, colour, axis) => {
      const made = new TimeChart(label, [{ name: label, colour }], show, { bars: true, days: true, axis });
      made.set([times, times.map((time) => pick(days.get(time)))]);
      charts.push(made);
      return made.element;
    };
    const tile = (title, value, below) => h("div", { class: "tile" }, h("dt", {}, title), h("dd", {}, value, h("span", { class: "small" }, below || "\u00a0")));
    return [
      h("dl", { class: "tiles" },
        tile("Cost", [format.money(total.cost, costs.currency).split(" ")[0], h("small", {}, costs.currency)]), tile("Requests", format.compact(total.requests)),
        tile("Prompt tokens", format.compact(total.prompt), total.prompt ? `${format.percent(total.cached / total.prompt)} from the cache` : ""),
        tile("Completion tokens", format.compact(total.completion), total.reasoning ? `${format.compact(total.reasoning)} of reasoning` : ""),
        tile("Engine time", format.span(total.engine))),
      h("div", { class: "grid" },
        card("Cost by day", [], chart("Cost", (day) => day.cost / 1e6, (units) => format.money(1e6 * units, costs.currency), 1, (units) => String(units))),
        card("Completion tokens by day", [], chart("Tokens", (day) => day.completion, format.compact, 2))),
    ];
  }

  function drawRows(found, word) {
    const sums = [...summed(found, (line) => (word === "day" ? format.utcDay(line.starts_at) : line.group[word]))];
    if (!sums.length) return undefined;
    sums.sort((one, other) => (word === "day" ? other[0].localeCompare(one[0]) : other[1].cost - one[1].cost || other[1].completion - one[1].completion));
    const title = GROUPS.find(([key]) => key === word)[1];
    const place = h("div");
    const fill = (most) => put(place, table("Usage and cost", [
      { title, row: true, cut: true, cell: ([key]) => names[key] || key },
      { title: "Requests", num: true, cell: ([, each]) => format.count(each.requests) },
      { title: "Prompt", num: true, cell: ([, each]) => format.count(each.prompt) },
      { title: "of it cached", num: true, cell: ([, each]) => format.count(each.cached) },
      { title: "Completion", num: true, cell: ([, each]) => format.count(each.completion) },
      { title: "Engine", num: true, cell: ([, each]) => format.span(each.engine) },
      { title: "Cost", num: true, cell: ([, each]) => format.money(each.cost, found.costs.currency) },
    ], sums.slice(0, most)), sums.length > most && more(`The first ${format.count(most)} of ${format.count(sums.length)}.`, () => fill(most + NUM_SHOWN)));
    return card(`By ${title.toLowerCase()}`, [], fill(NUM_SHOWN));
  }

  // The files that a bill is made of, of whole days in UTC.
  const today = Date.now() / 1000;
  const from = h("input", { type: "date", name: "from", required: true, value: format.utcDay(today - 29 * DAY_S) });
  const to = h("input", { type: "date", name: "to", required: true, value: format.utcDay(today + DAY_S) });
  const what = select("what", [["costs", "Costs"], ["usage", "Requests"]], "costs");
  const kinds = select("format", [["csv", "CSV"], ["jsonl", "JSON lines"], ["parquet", "Parquet"], ["focus", "FOCUS 1.2"]], "csv");
  const file = h("a", { class: "button main", download: true }, "Export");
  const note = h("span", { class: "small soft" });
  function aim() {
    const isFocus = kinds.value === "focus";
    if (isFocus) what.value = "costs";
    what.disabled = isFocus;
    const fits = from.value && to.value && from.value < to.value;
    put(note, fits ? "" : "The last day is the one after the period.");
    if (fits) file.setAttribute("href", `/admin/v1/exports/${what.value}?${query({ from: from.value, to: to.value, format: kinds.value })}`);
    else file.removeAttribute("href");
  }
  for (const control of [from, to, what, kinds]) control.addEventListener("change", aim);
  aim();

  await read();
  return page("Usage and cost", "What was used and what it cost, to the last request. Days are those of UTC.", [],
    h("div", { class: "row" }, field("Period", span), field("Grouped by", group)),
    result, rows,
    card("Export", [], h("p", { class: "soft" }, "A closed day is the same bytes whenever it is exported."),
      h("div", { class: "row" }, field("What", what), field("Format", kinds), field("From", from), field("Up to, not included", to), h("div", { class: "buttons" }, file, note))));
}
