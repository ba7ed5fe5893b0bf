// Policies: edited with validation, compared, tried on what was recorded, applied, rolled back.

import { all, call, post } from "../api.js";
import { pairs } from "../bars.js";
import { shownDiff, written } from "../diff.js";
import { h, put, say } from "../dom.js";
import * as format from "../format.js";
import { attempt, button, card, dialog, empty, field, form, input, lead, link, loading, note, page, select, shown, submit, table, tag, toast } from "../ui.js";

const SPANS = [["3600", "the last hour"], ["86400", "the last day"], ["604800", "the last week"]];
const REASONS = {
  model_not_found: "no such model", context_length_exceeded: "too long", requests: "requests a minute", tokens: "tokens a minute or a day",
  concurrent_requests: "requests at once", budget: "budget", queue_full: "line full", slow_down: "first token too late", queue_timeout: "waited too long",
};

/** What was written of a policy and not applied when its page was left, or the session ended; for whoever wrote it. */
let unsaved = null;

export async function open({ me, values, closing }) {
  const canChange = me.role !== "billing_reader";
  const list = h("div");
  const one = h("div", { class: "grid one", "data-chosen": true });
  let policies = [];
  let writing = () => unsaved;
  closing(() => { unsaved = writing(); });
  const name = () => values.name || policies[0]?.name;

  function draw() {
    if (!policies.length) return empty("No policy yet", "");
    return table("Policies", [
      { title: "Name", row: true, cell: (each) => h("a", { href: link("policies", { name: each.name }) }, each.name) },
      { title: "Version", num: true, cell: (each) => each.version },
      { title: "Class", cell: (each) => tag(each.document.sla_class || "standard") },
      { title: "Limits", cell: (each) => Object.entries(each.document.limits || {}).map(([what, most]) => `${what.replaceAll("_", " ")} ${format.compact(most)}`).join(", ") || h("span", { class: "soft" }, "none") },
      { title: "Changed", nowrap: true, cell: (each) => format.at(each.created_at) },
    ], policies, { chosen: (each) => each.name === name() });
  }

  async function create() {
    const made = await dialog("New policy", (close) => form([
      field("Name", input("name", { required: true, autofocus: true, maxlength: 64 }), "Letters, digits and . _ : / -"),
      field("Begins as", select("as", [["", "an empty one"], ...policies.map((each) => [each.name, each.name])], "")),
    ], async (said) => close(await post("policies", { name: said.name, document: policies.find((each) => each.name === said.as)?.document || {} })),
    [submit("Create policy"), button("Cancel", () => close())]));
    if (made) location.hash = link("policies", { name: made.name });
  }

  /** ``kept``: what was written, and of which version. */
  async function detail(kept) {
    const chosen = name();
    if (!chosen) return;
    put(one, card(chosen, [], loading()));
    const [{ body: current, etag }, versions] = await Promise.all([
      call("GET", `policies/${encodeURIComponent(chosen)}`), all(`policies/${encodeURIComponent(chosen)}/versions?order=desc`),
    ]);
    put(one, editor(current, etag, kept), history(current, versions, etag));
  }

  const read = async () => { policies = await all("policies"); };
  const again = async (kept) => { await shown(list, read, draw); await detail(kept); lead(one); };

  // Editing

  function parsed(text) {
    try {
      const found = JSON.parse(text);
      if (found === null || typeof found !== "object" || Array.isArray(found)) throw new Error("it is no object");
      return found;
    } catch (error) {
      const message = `This is no JSON: ${error.message}`;
      throw Object.assign(new Error(message), { fields: [{ name: "document", message }] });
    }
  }

  /** A refusal names fields such as document.limits.x: all of them belong to the one text. */
  function atText(error) {
    if (error.fields?.length) error.fields = [{ name: "document", message: error.fields.map((each) => `${each.name.replace(/^document\.?/, "") || "document"}: ${each.message}`).join("; ") }];
    return error;
  }

  function editor(current, etag, kept) {
    const text = h("textarea", { name: "document", rows: 16, spellcheck: "false", readonly: !canChange });
    text.value = kept?.text ?? written(current.document);
    const meanwhile = kept && (kept.version === current.version
      ? "What you wrote before is here again, and does not count yet."
      : `Version ${current.version} was made meanwhile, and what you wrote does not count yet. The difference shows what it would change; Apply puts it in the place of that version.`);
    if (kept) say(meanwhile);
    const why = input("note", { maxlength: 1024, value: kept?.note ?? "" });
    writing = () => {
      if (text.value !== written(current.document) || why.value) return { key_id: me.session.key_id, name: current.name, version: kept?.version ?? current.version, text: text.value, note: why.value };
      return unsaved?.name === current.name ? null : unsaved;
    };
    const span = select("span", SPANS, "86400");
    const results = h("div", { "aria-live": "polite" });
    const guarded = async (work) => { try { return await work(); } catch (error) { throw atText(error); } };
    const edited = form([
      kept && note(meanwhile, "warn"),
      field("Document", text, "Limits, budget, classes, models, cache, prices and weight. What is left out is as the reference says.", "document"),
      field("Note", why, "Why; it stays with the version."),
      h("div", { class: "row" }, field("Try it on", span, "What would have become of the requests that the ledger has of that time."), button("Try the change", () => tryIt(), "", { "data-try": true })),
      results,
    ], async (said) => guarded(async () => {
      const document = parsed(text.value);
      let made;
      try {
        made = (await call("PUT", `policies/${encodeURIComponent(current.name)}`, { body: { document, note: said.note }, etag })).body;
      } catch (error) {
        if (error.status === 412) return again({ version: current.version, text: text.value, note: said.note });
        throw error;
      }
      toast(`Version ${made.version} counts from now on`);
      await again();
    }), canChange && [submit("Apply"), button("Show the difference", () => compare("What would change", current.document, text.value)), button("Start over", () => { text.value = written(current.document); why.value = ""; put(results); })]);

    async function tryIt() {
      put(results, loading());
      const wrongs = edited.querySelector("[data-field=document] .wrong");
      wrongs.textContent = "";
      text.removeAttribute("aria-invalid");
      try {
        const document = parsed(text.value);
        const until = Math.floor(Date.now() / 1000) + 1;
        const recorded = { since: until - Number(span.value), until };
        const path = `policies/${encodeURIComponent(current.name)}/trial`;
        const [before, after] = [await post(path, { recorded }), await post(path, { document, recorded })];
        put(results, trial(before, after));
      } catch (error) {
        const meant = atText(error).fields?.filter((each) => each.name === "document" && !/recorded/.test(each.message)) || [];
        if (meant.length) {
          text.setAttribute("aria-invalid", "true");
          wrongs.textContent = meant[0].message;
          put(results);
          text.focus();
        } else put(results, note(error.message, "bad"));
      }
    }

    return card(`${current.name}, version ${current.version}`, [tag("counts now", "good")], edited);
  }

  function trial(before, after) {
    const [now, then] = [before.outcome.total, after.outcome.total];
    const money = (micros) => format.money(micros, after.currency);
    const refused = (part) => Object.values(part.refused).reduce((sum, each) => sum + each, 0);
    const reasons = [...new Set([...Object.keys(now.refused), ...Object.keys(then.refused)])].sort();
    const classes = [...new Set([...Object.keys(before.outcome.classes), ...Object.keys(after.outcome.classes)])];
    const percentiles = (which) => ["p50", "p90", "p99"].map((share) => [share, now[which][share], then[which][share]]);
    return h("section", { class: "grid one", "aria-label": "Result of the trial" },
      h("h3", {}, `Of ${format.plural(now.num_requests, "recorded request")}`),
      h("div", { class: "grid" },
        pairs("Requests", [["Admitted", now.num_admitted, then.num_admitted], ["Refused", refused(now), refused(then)], ...reasons.map((reason) => [`Refused: ${REASONS[reason]}`, now.refused[reason] || 0, then.refused[reason] || 0])], format.count),
        pairs("Cost", [["All", now.cost_micros, then.cost_micros]], money),
        pairs("Time to first token", percentiles("ttft_ms"), format.ms),
        pairs("Time per further token", percentiles("tpot_ms"), format.ms),
        pairs("Admitted by class", classes.map((each) => [each, before.outcome.classes[each]?.num_admitted, after.outcome.classes[each]?.num_admitted]), format.count),
        pairs("Workers busy", [["Share of the time", before.outcome.utilisation, after.outcome.utilisation]], format.percent)));
  }

  // History

  function compare(title, before, text) {
    return attempt(async () => {
      const after = typeof text === "string" ? written(parsed(text)) : written(text);
      await dialog(title, (close) => [shownDiff(written(before), after, title), h("div", { class: "buttons" }, button("Close", () => close(), "main"))], true);
    });
  }

  function history(current, versions, etag) {
    const before = (version) => versions.find((each) => each.version < version.version);
    return card("Versions", [], table("Versions", [
      { title: "Version", row: true, cell: (each) => each.version },
      { title: "State", cell: (each) => (each.current ? tag("counts now", "good") : tag("past")) },
      { title: "Made", nowrap: true, cell: (each) => format.at(each.created_at) },
      { title: "By", cell: (each) => (each.created_by_name ? h("span", { title: each.created_by }, each.created_by_name) : h("code", { class: "soft" }, each.created_by)) },
      { title: "Note", cell: (each) => each.note || h("span", { class: "soft" }, format.NONE) },
      { title: "Actions", unseen: true, cell: (each) => h("div", { class: "buttons" },
        before(each) && button("Difference", () => compare(`Version ${before(each).version} to ${each.version}`, before(each).document, each.document), "quiet", { "aria-label": `What version ${each.version} changed` }),
        canChange && !each.current && button("Roll back", () => rollback(current, each, etag), "quiet", { "aria-label": `Roll back to version ${each.version}` })) },
    ], versions));
  }

  async function rollback(current, version, etag) {
    const agreed = await dialog(`Roll back to version ${version.version}?`, (close) => [
      h("p", {}, "Its document counts again, as a new version. This is what changes:"),
      shownDiff(written(current.document), written(version.document), "What changes"),
      h("div", { class: "buttons" }, button("Roll back", () => close(true), "main"), button("Cancel", () => close(false))),
    ], true);
    if (!agreed) return;
    await attempt(() => call("POST", `policies/${encodeURIComponent(current.name)}/rollback`, { body: { version: version.version }, etag }), `Version ${version.version} counts again`);
    await attempt(again);
  }

  await read();
  put(list, draw());
  await detail(unsaved?.name === name() && unsaved.key_id === me.session.key_id ? unsaved : undefined);
  return page("Policies", "What tenants may do, as documents with versions. A change can be tried on recorded requests before it counts.",
    canChange && button("New policy", create, "main"),
    card("Policies", [], list), one);
}
