// Tenants, their keys, and how their limits stand.

import { all, call, get, post, query } from "../api.js";
import { h, put } from "../dom.js";
import * as format from "../format.js";
import { attempt, button, card, dialog, empty, field, form, input, lead, link, meter, more, note, page, secret, select, shown, submit, sure, table, tag } from "../ui.js";

const LIMITS = {
  requests_per_minute: "Requests a minute", tokens_per_minute: "Tokens a minute",
  tokens_per_day: "Tokens a day", concurrent_requests: "Requests at once",
};

/** More tenants than one sees at a glance can be looked for. */
const NUM_SEEN = 10;
/** Rows of a table at a time. */
const NUM_SHOWN = 100;

export async function open({ me, values, closing }) {
  const canChange = me.role !== "billing_reader";
  const list = h("div");
  const chosen = h("div", { class: "grid one", "data-chosen": true });
  let tenants = [];
  let policies = [];

  const read = async () => { [tenants, policies] = await Promise.all([all("tenants?order=desc"), all("policies")]); };

  const find = input("find", { type: "search", placeholder: "Name or id", "aria-label": "Find a tenant", value: values.find || "", oninput: () => put(list, draw()) });

  function draw(most = NUM_SHOWN) {
    if (!tenants.length) return empty("No tenant yet", "A tenant is a team that requests are made for, and who pays.", canChange && button("New tenant", create, "main"));
    const word = find.value.trim().toLowerCase();
    const found = tenants.filter((each) => each.name.toLowerCase().includes(word) || each.id === word);
    if (!found.length) return empty("No such tenant", "None of them is called so.");
    const rows = table("Tenants", [
      { title: "Name", row: true, cut: true, cell: (each) => h("a", { href: link("tenants", { find: find.value, id: each.id }), "aria-current": each.id === values.id ? "true" : undefined }, each.name) },
      { title: "State", cell: (each) => (each.disabled_at ? tag("disabled", "bad") : tag("active", "good")) },
      { title: "Policy", cell: (each) => h("a", { href: link("policies", { name: each.policy }) }, each.policy) },
      { title: "Id", cell: (each) => h("code", { class: "soft" }, each.id) },
      { title: "Made", nowrap: true, cell: (each) => format.at(each.created_at) },
    ], found.slice(0, most), { chosen: (each) => each.id === values.id });
    return [rows, found.length > most && more(`The newest ${format.count(most)} of ${format.count(found.length)}.`, () => put(list, draw(most + NUM_SHOWN)))];
  }

  const policyChoice = (value) => select("policy", policies.map((each) => [each.name, each.name]), value);

  async function create() {
    const made = await dialog("New tenant", (close) => form([
      field("Name", input("name", { required: true, autofocus: true, maxlength: 128 }), "As people call the team."),
      field("Policy", policyChoice("default"), "Its limits, budget, classes, models and prices."),
    ], async (said) => close(await post("tenants", said)), [submit("Create tenant"), button("Cancel", () => close())]));
    if (made) location.hash = link("tenants", { id: made.id });
  }

  async function edit(tenant) {
    const { etag } = await call("GET", `tenants/${tenant.id}`);
    const changed = await dialog(`Change ${tenant.name}`, (close) => form([
      field("Name", input("name", { value: tenant.name, maxlength: 128 })),
      field("Policy", policyChoice(tenant.policy)),
    ], async (said) => { await call("PATCH", `tenants/${tenant.id}`, { body: said, etag }); close(true); },
    [submit("Save"), button("Cancel", () => close())]));
    if (changed) await again();
  }

  async function able(tenant, disabled) {
    if (disabled && !await sure(`Disable ${tenant.name}?`, "None of its keys opens anything until it is enabled again. What it owes stays.", "Disable")) return;
    await attempt(async () => {
      const { etag } = await call("GET", `tenants/${tenant.id}`);
      await call("PATCH", `tenants/${tenant.id}`, { body: { disabled }, etag });
    }, disabled ? "Disabled" : "Enabled");
    await again();
  }

  const again = async () => { await shown(list, read, () => draw()); await detail(); lead(chosen); };

  // One tenant

  async function detail() {
    put(chosen);
    const tenant = tenants.find((each) => each.id === values.id);
    if (!tenant) return values.id ? put(chosen, note("There is no such tenant.", "bad")) : undefined;
    const keys = h("div");
    const limits = h("div");
    const readKeys = () => {
      const found = [];
      const budgets = {}; // by the id of a key: how it stands, or why that is not known
      let after = "";
      const next = async () => {
        const asked = query({ tenant_id: tenant.id, order: "desc", limit: NUM_SHOWN, after });
        const part = await get(`keys?${asked}`);
        if (part.data.some((key) => hasBudget(tenant, key))) {
          try { for (const each of (await get(`key_budgets?${asked}`)).data) budgets[each.key_id] = each.budget && drawBudget("Budget", each.budget); }
          catch (error) { for (const key of part.data) budgets[key.id] = note(error.message, "bad"); }
        }
        found.push(...part.data);
        after = part.has_more ? part.next_cursor : "";
      };
      const drawn = () => [drawKeys(tenant, found, budgets, readKeys), after && more(`The newest ${format.count(found.length)}.`, async () => { await next(); put(keys, drawn()); })];
      return shown(keys, next, drawn);
    };
    put(chosen,
      card(tenant.name, canChange && [
        button("Change", () => attempt(() => edit(tenant))),
        button(tenant.disabled_at ? "Enable" : "Disable", () => able(tenant, !tenant.disabled_at), tenant.disabled_at ? "" : "bad"),
        h("a", { class: "button", href: link("requests", { tenant_id: tenant.id }) }, "Requests"),
      ], h("h3", {}, "Limits used now"), limits),
      card("Keys", canChange && [button("New key", () => newKey(tenant, readKeys), "main")], keys));
    let reading = false;
    const readLimits = async () => {
      if (reading || document.hidden) return;
      reading = true;
      try { put(limits, drawLimits(await get(`tenants/${tenant.id}/limits`))); } catch (error) { put(limits, note(error.message, "bad")); }
      reading = false;
    };
    const timer = setInterval(readLimits, 3000);
    closing(() => clearInterval(timer));
    await Promise.all([readKeys(), readLimits()]);
  }

  const drawBudget = (title, budget) => meter(title, budget.used_micros, budget.amount_micros,
    `${title} of the ${budget.period}: ${format.money(budget.used_micros, budget.currency)} of ${format.money(budget.amount_micros, budget.currency)}`);

  function drawLimits({ ceilings, budget }) {
    if (!ceilings.length && !budget) return empty("No ceiling", "The policy sets neither limits nor a budget.");
    const name = (each) => `${LIMITS[each.limit] || each.limit}${each.model ? `, ${each.model}` : ""}`;
    return h("div", { class: "tiles" },
      ceilings.map((each) => h("div", {}, meter(name(each), each.used, each.ceiling, `${name(each)}: ${format.count(each.used)} of ${format.count(each.ceiling)}`))),
      budget && h("div", {}, drawBudget("Budget", budget)));
  }

  /** Its own, or what the policy has for each key. */
  const hasBudget = (tenant, key) => !key.revoked_at && (key.narrowing?.budget || policies.find((each) => each.name === tenant.policy)?.document.key_budget);

  function drawKeys(tenant, keys, budgets, read) {
    if (!keys.length) return empty("No key yet", "A key lets programs ask in the name of this tenant.");
    const now = Date.now() / 1000;
    const state = (key) => (key.revoked_at ? tag("revoked", "bad") : key.expires_at && key.expires_at <= now ? tag("expired", "warn") : key.expires_at ? tag(`until ${format.at(key.expires_at)}`, "warn") : tag("active", "good"));
    return table("Keys", [
      { title: "Name", row: true, cut: true, cell: (key) => key.name },
      { title: "State", cell: state },
      { title: "Key", nowrap: true, cell: (key) => (key.last_four ? h("code", {}, `${key.prefix}…${key.last_four}`) : h("span", { class: "soft" }, "not kept")) },
      { title: "Made", nowrap: true, cell: (key) => format.at(key.created_at) },
      ...(keys.some((key) => hasBudget(tenant, key)) ? [{ title: "Budget", cell: (key) => hasBudget(tenant, key) && budgets[key.id] }] : []),
      { title: "Actions", unseen: true, cell: (key) => canChange && !key.revoked_at && h("div", { class: "buttons" },
        button("Rotate", () => rotate(key, read), "quiet", { "aria-label": `Rotate ${key.name}` }),
        button("Revoke", async () => {
          if (await sure(`Revoke ${key.name}?`, "Programs that use it are refused from now on, everywhere within a second.", "Revoke")) {
            await attempt(() => call("DELETE", `keys/${key.id}`), "Revoked");
            await read();
          }
        }, "quiet bad", { "aria-label": `Revoke ${key.name}` })) },
    ], keys);
  }

  const showSecret = (title, made) => dialog(title, (close) => [
    note("This is the only time that the key is shown. Keep it where secrets are kept.", "warn"),
    secret(made.key, "The new key"),
    h("div", { class: "buttons" }, button("Done", () => close(), "main")),
  ]);

  async function newKey(tenant, read) {
    const made = await dialog(`New key of ${tenant.name}`, (close) => form([
      field("Name", input("name", { required: true, autofocus: true, maxlength: 128 }), "What will use it."),
      field("Ends after", select("days", [["", "never"], ["1", "a day"], ["30", "30 days"], ["90", "90 days"], ["365", "a year"]], ""), "", "expires_at"),
      field("Networks", input("networks", { placeholder: "10.0.0.0/8, 192.168.1.0/24" }), "Where its requests may come from; empty: anywhere."),
      field("Budget", input("amount", { inputmode: "decimal", placeholder: "5.00" }), "What it may spend of its tenant's money; empty: what the policy has for each key, or all of it.", "narrowing.budget.amount"),
      field("For each", select("period", [["day", "day"], ["week", "week"], ["month", "month"]], "month"), "", "narrowing.budget.period"),
    ], async (said) => close(await post("keys", {
      tenant_id: tenant.id, name: said.name,
      networks: said.networks.split(/[\s,]+/).filter(Boolean),
      expires_at: said.days ? Math.floor(Date.now() / 1000) + 86400 * Number(said.days) : null,
      narrowing: said.amount ? { budget: { amount: said.amount, period: said.period } } : null,
    })), [submit("Create key"), button("Cancel", () => close())]));
    if (!made) return;
    await showSecret(`The key ${made.name}`, made);
    await read();
  }

  async function rotate(key, read) {
    const made = await dialog(`Rotate ${key.name}`, (close) => form([
      h("p", { class: "soft" }, "A new key with the same rights; the old one goes on for a while, so that programs can be changed over."),
      field("The old key ends", select("overlap_s", [["0", "at once"], ["3600", "in an hour"], ["86400", "in a day"], ["604800", "in a week"]], "86400"), "", "overlap_s"),
    ], async (said) => close(await post(`keys/${key.id}/rotate`, { overlap_s: Number(said.overlap_s) })), [submit("Rotate"), button("Cancel", () => close())]));
    if (!made) return;
    await showSecret(`The key ${made.name}`, made);
    await read();
  }

  await read();
  put(list, draw());
  await detail();
  return page("Tenants and keys", "Teams that requests are made for, the keys they ask with, and what they have used of their limits.",
    canChange && button("New tenant", create, "main"), card(`Tenants (${format.count(tenants.length)})`, tenants.length > NUM_SEEN && find, list), chosen);
}
