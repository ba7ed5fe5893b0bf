// The ledger: searched, and one request as a waterfall with its receipt.

import { all, get, query } from "../api.js";
import { h, put } from "../dom.js";
import * as format from "../format.js";
import { button, card, empty, facts, field, form, input, link, more, page, select, shown, submit, table, tag } from "../ui.js";
import { waterfall } from "../waterfall.js";

const SPANS = [["", "at any time"], ["3600", "in the last hour"], ["86400", "in the last day"], ["604800", "in the last week"]];
const NUM = 50;

const status = (row) => (row.corrects ? tag("correction", "warn") : row.status === 200 ? tag("200", "good") : tag(String(row.status), row.status === 499 ? "warn" : "bad"));

function receipt(row, names) {
  const tpot = row.ttft_ms !== null && row.num_completion_tokens > row.num_sequences ? (row.duration_ms - row.ttft_ms) / (row.num_completion_tokens / row.num_sequences - 1) : null;
  return facts([
    ["Tenant", names[row.tenant_id] || row.tenant_id], ["Key", h("code", {}, row.key_id)], ["Model", row.model], ["Endpoint", row.endpoint],
    ["Ended", row.finish_reason || format.NONE], ["Class", row.sla_class], ["Cache", row.cache], ["Policy", `${row.policy_name}, version ${row.policy_version}`],
    ["Prompt", format.plural(row.num_prompt_tokens, "token")], ["of it cached", format.plural(row.num_cached_tokens, "token")],
    ["Completion", format.plural(row.num_completion_tokens, "token")], ["of it reasoning", format.plural(row.num_reasoning_tokens, "token")],
    ["Drafts accepted", row.num_drafted_tokens ? `${format.count(row.num_accepted_tokens)} of ${format.count(row.num_drafted_tokens)}` : format.NONE],
    ["TTFT", format.ms(row.ttft_ms)], ["TPOT", format.ms(tpot)], ["In all", format.ms(row.duration_ms)],
    ["Engine", format.ms(row.engine_us / 1000)], ["KV blocks held", `${format.rate(row.kv_block_ms / 1000)} block s`],
    ["Cost", format.money(row.cost_micros, row.currency)], ["Price version", row.price_version || format.NONE],
    ["Settled", format.at(row.settled_at)], ["End user", row.end_user || format.NONE], ["Trace", row.trace_id ? h("code", {}, row.trace_id) : format.NONE],
    ["Chain", `${row.chain}, position ${format.count(row.position)}`], ...Object.entries(row.metadata || {}).map(([name, value]) => [`metadata ${name}`, value]),
    ...(row.reason ? [["Reason", row.reason]] : []),
  ]);
}

export async function open({ values, again }) {
  const tenants = await all("tenants").catch(() => []);
  const names = Object.fromEntries(tenants.map((each) => [each.id, each.name]));
  const rows = h("div");
  const one = h("div", { class: "grid one" });
  const found = [];
  let cursor = null;

  const tenant = select("tenant_id", [["", "any"], ...tenants.map((each) => [each.id, each.name])], values.tenant_id || "");
  const search = form([h("div", { class: "fields" },
    field("Tenant", tenant),
    field("Model", input("model", { value: values.model || "" })),
    field("Ended", select("failed", [["", "anyhow"], ["false", "well"], ["true", "badly"]], values.failed || "")),
    field("Settled", select("within", SPANS, values.within || "")),
    field("Slower than, ms", input("min_duration_ms", { inputmode: "numeric", value: values.min_duration_ms || "" })),
    field("Request id", input("request_id", { value: values.request_id || "" })),
    field("Trace id", input("trace_id", { value: values.trace_id || "" })),
    field("End user", input("end_user", { value: values.end_user || "" })))],
  async (said) => {
    if (said.min_duration_ms && !(Number(said.min_duration_ms) >= 0)) {
      const message = "Milliseconds, such as 250.";
      throw Object.assign(new Error(message), { fields: [{ name: "min_duration_ms", message }] });
    }
    const aim = link("requests", Object.fromEntries(Object.entries(said).filter(([, value]) => value)));
    if (location.hash === aim) await again(); // the same once more: there may be new ones
    else location.hash = aim;
  },
  [submit("Search"), h("a", { class: "button quiet", href: link("requests"), onclick: () => { if (location.hash === link("requests")) again(); } }, "Clear")]);

  async function read(after) {
    const { within, show, ...asked } = values;
    const since = within ? Math.floor(Date.now() / 1000) - Number(within) : "";
    const page = await get(`ledger/rows?${query({ ...asked, since, order: "desc", limit: NUM, after })}`);
    found.push(...page.data);
    cursor = page.next_cursor;
    return found;
  }

  function draw() {
    if (!found.length) return empty("No such request", "The ledger has none that fits. Requests appear here as soon as they have ended.");
    return [table("Requests", [
      { title: "Settled", row: true, nowrap: true, cell: (row) => format.at(row.settled_at) },
      { title: "Tenant", cut: true, cell: (row) => names[row.tenant_id] || row.tenant_id },
      { title: "Model", cut: true, cell: (row) => row.model },
      { title: "Status", cell: status },
      { title: "Tokens in", num: true, cell: (row) => format.count(row.num_prompt_tokens) },
      { title: "out", num: true, cell: (row) => format.count(row.num_completion_tokens) },
      { title: "TTFT", num: true, cell: (row) => format.ms(row.ttft_ms) },
      { title: "In all", num: true, cell: (row) => format.ms(row.duration_ms) },
      { title: "Cost", num: true, cell: (row) => format.money(row.cost_micros, row.currency) },
      { title: "Details", unseen: true, cell: (row) => h("div", { class: "buttons" }, button("Show", () => detail(row), "quiet", { "aria-label": `Show request ${row.request_id}` })) },
    ], found), cursor && more(`The newest ${format.count(found.length)}.`, async () => { await read(cursor); put(rows, draw()); })];
  }

  function detail(row) {
    const title = h("code", {}, row.request_id);
    const parts = h("div");
    const shownCard = card("One request", [status(row), button("Close", () => put(one), "quiet")], h("p", {}, title), parts, h("h3", {}, "Receipt"), receipt(row, names));
    if (!row.corrects) shown(parts, () => get(`requests/${row.request_id}/parts`), waterfall);
    shownCard.setAttribute("tabindex", "-1");
    put(one, shownCard);
    shownCard.scrollIntoView({ block: "nearest" });
    shownCard.focus({ preventScroll: true });
  }

  await shown(rows, () => read(""), draw);
  if (values.show && found.length) detail(found[0]);
  return page("Requests", "Every request that has ended, as the ledger has it.", [], card("Search", [], search), one, card("Requests", [], rows));
}
