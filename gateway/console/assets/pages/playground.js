// A chat with any model, or with two beside each other: what each token was worth, and what each answer cost.

import { all, call, get, infer, post } from "../api.js";
import { h, newId, put, s, say } from "../dom.js";
import * as format from "../format.js";
import { button, card, check, empty, field, form, input, link, note, page, select, submit } from "../ui.js";

const KEY_S = 3600;
const LOW = Math.log(0.1);
const MID = Math.log(0.5);

/** Events of a stream, as JSON. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The connection was lost before the answer was complete.");
    });
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

/** Of each token that is shown, what the model said of it. */
const entries = new WeakMap();

function token(entry) {
  const kind = entry.logprob < LOW ? "low" : entry.logprob < MID ? "mid" : "high";
  const made = h("span", { "data-p": kind, tabindex: "-1" }, entry.token);
  entries.set(made, entry);
  return made;
}

/** How likely a token was, and what else could have been. */
function likelihood({ token: written, logprob, top_logprobs: top }) {
  const line = (each) => h("div", { class: each.token === written ? "this" : undefined }, h("code", {}, JSON.stringify(each.token)),
    s("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { class: "s0", width: 100, height: 8 }), s("rect", { class: "s1", width: 100 * Math.exp(each.logprob), height: 8 })),
    h("span", { class: "num" }, format.percent(Math.exp(each.logprob))));
  const others = (top || []).filter((each) => each.token !== written);
  return [line({ token: written, logprob }), h("span", { class: "soft" }, `log-probability ${logprob.toPrecision(3)}${others.length ? "; most likely besides:" : ""}`), others.map(line)];
}

/** ``answer``, whose tokens tell how likely they were when they are pointed at, or reached by the arrow keys. */
function explained(answer) {
  const tip = h("div", { class: "likely", role: "tooltip", id: newId("tip"), hidden: true });
  const hide = () => { tip.hidden = true; };
  const show = (each) => {
    const entry = entries.get(each);
    if (!entry) return hide();
    put(tip, likelihood(entry));
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(each.offsetLeft, answer.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${each.offsetTop + each.offsetHeight + 4}px`;
    return each.setAttribute("aria-describedby", tip.id);
  };
  answer.addEventListener("pointerover", (event) => show(event.target));
  answer.addEventListener("pointerleave", () => show(answer.querySelector(":focus")));
  answer.addEventListener("focusin", (event) => show(event.target));
  answer.addEventListener("focusout", hide);
  answer.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    const all = [...answer.querySelectorAll("[data-p]")];
    all[Math.max(0, Math.min(all.length - 1, all.indexOf(document.activeElement) + step))]?.focus();
  });
  return h("div", { class: "told" }, answer, tip);
}

function pane(number, models) {
  const choice = select(`model${number}`, models.map((each) => [each.name, each.name]), models[0]?.name);
  const talk = h("div", { class: "talk" });
  const answer = h("div", { class: "answer", role: "group", "aria-label": `Answer of ${number === 1 ? "the first" : "the second"} model`, tabindex: "0" });
  const below = h("div", {});
  const thought = h("div", { class: "thought" });
  const reasoning = h("details", { hidden: true }, h("summary", {}, "Reasoning"), thought);
  put(answer, h("span", { class: "soft" }, "The answer appears here."));
  let history = [];
  const element = card(number === 1 ? "Answer" : "Second answer", [], field(number === 1 ? "Model" : "Model to compare", choice), talk, reasoning, explained(answer), below);

  /** Whether the answer is complete. */
  async function ask(text, values, key, signal) {
    const messages = [...(values.system ? [{ role: "system", content: values.system }] : []), ...history, { role: "user", content: text }];
    const body = { model: choice.value, messages, stream: true, logprobs: true, top_logprobs: 4 };
    for (const name of ["temperature", "max_tokens", "top_p", "seed"]) if (values[name]) body[name] = Number(values[name]);
    put(answer, h("span", { class: "soft" }, "Waiting for the first token …"));
    put(below);
    forget();
    answer.setAttribute("aria-busy", "true");
    let said = "";
    let receipt = null;
    const began = performance.now();
    let first = null;
    try {
      for await (const event of events(await infer("/v1/chat/completions", body, key, signal))) {
        if (event.error) throw new Error(event.error.message);
        receipt = event.penstock?.receipt || receipt;
        const [delta] = event.choices || [];
        if (!delta) continue;
        const entries = delta.logprobs?.content || [];
        const thinks = delta.delta?.reasoning_content || "";
        const piece = delta.delta?.content || delta.delta?.refusal || "";
        if (!thinks && !piece && !entries.length) continue;
        if (first === null) first = performance.now() - began;
        if (thinks) {
          reasoning.hidden = false;
          thought.append(thinks);
          if (!said) put(answer, h("span", { class: "soft" }, "Reasoning …"));
        }
        if (!piece) continue;
        if (!said) put(answer);
        said += piece;
        answer.append(...(entries.length && entries.map((each) => each.token).join("") === piece ? entries.map(token) : [document.createTextNode(piece)]));
      }
      if (!said) put(answer, h("span", { class: "soft" }, "The answer has no text."));
      history = [...history, { role: "user", content: text }, { role: "assistant", content: said }];
      put(below, told(receipt, first));
      return true;
    } catch (error) {
      put(below, error.name === "AbortError" ? note("Stopped. What was written until then is in the ledger.", "warn") : note(error.message, "bad"));
      if (!said) put(answer, h("span", { class: "soft" }, "There is no answer."));
      return false;
    } finally {
      answer.removeAttribute("aria-busy");
    }
  }

  function told(receipt, first) {
    if (!receipt) return h("p", { class: "small soft" }, `First token after ${format.ms(first)}.`);
    return h("dl", { class: "facts small" }, [
      ["Cost", format.money(1e6 * receipt.cost.value, receipt.cost.currency)], ["Tokens", `${format.count(receipt.prompt_tokens)} in, ${format.count(receipt.completion_tokens)} out`],
      ["Waited", format.ms(receipt.queue_ms)], ["Prefill", format.ms(receipt.prefill_ms)], ["Decode", format.ms(receipt.decode_ms)],
      ["Receipt", h("a", { href: link("requests", { request_id: receipt.request_id, show: "1" }) }, "in the ledger")],
    ].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  /** The last answer becomes a part of the talk. */
  function settle() {
    put(talk, history.map((each) => h("div", { class: "said" }, h("strong", { class: "small soft" }, each.role === "user" ? "You" : "Model"), h("div", {}, each.content))));
  }
  function forget() {
    put(thought);
    reasoning.hidden = true;
  }
  function clear() {
    history = [];
    forget();
    put(talk);
    put(below);
    put(answer, h("span", { class: "soft" }, "The answer appears here."));
  }
  return { element, ask, settle, clear };
}

export async function open({ closing }) {
  const [models, tenants] = await Promise.all([get("models").then((found) => found.data), all("tenants?disabled=false")]);
  if (!models.length) return page("Playground", "", [], card("No model", [], empty("No model is served", "The settings name none.")));
  if (!tenants.length) return page("Playground", "", [], card("No tenant", [], empty("No tenant yet", "Answers are given in the name of a tenant.", h("a", { class: "button main", href: link("tenants") }, "Tenants"))));
  const keys = new Map();
  const revoke = () => {
    const made = [...keys.values()];
    keys.clear();
    return Promise.all(made.map((key) => call("DELETE", `keys/${key.id}`, { quiet: true, keepalive: true }).catch(() => {})));
  };
  addEventListener("pagehide", revoke);
  closing(() => { removeEventListener("pagehide", revoke); return revoke(); });

  async function keyOf(tenantId, pasted) {
    if (pasted) return pasted;
    const known = keys.get(tenantId);
    if (known && known.expires_at > Date.now() / 1000 + 60) return known.key;
    const made = await post("keys", { tenant_id: tenantId, name: "Playground", scopes: { endpoints: ["chat.completions"] }, expires_at: Math.floor(Date.now() / 1000) + KEY_S });
    keys.set(tenantId, made);
    return made.key;
  }

  const panes = [pane(1, models), pane(2, models)];
  const both = check("both", "Two side by side", false);
  const place = h("div", { class: "grid one side-by-side" }, panes[0].element);
  const isBoth = () => both.querySelector("input").checked;
  both.addEventListener("change", () => {
    place.classList.toggle("one", !isBoth());
    put(place, panes[0].element, isBoth() && panes[1].element);
  });
  let abort = null;
  closing(() => abort?.abort());
  const anew = button("New conversation", () => panes.forEach((each) => each.clear()));
  const stop = button("Stop", () => abort?.abort(), "bad", { disabled: true });
  const prompt = h("textarea", { class: "prose", name: "prompt", rows: 3, required: true, placeholder: "Tell me a story about a fox." });
  const asked = form([
    field("Message", prompt, "Ctrl+Enter sends it."),
    h("div", { class: "row" },
      field("In the name of", select("tenant", tenants.map((each) => [each.id, each.name]), tenants[0].id), "A key of an hour is made for it, and revoked when you leave."),
      field("Or a key of a tenant", input("key", { type: "password", autocomplete: "off" }), "It stays on this page.")),
    h("div", { class: "row" },
      field("Temperature", input("temperature", { type: "number", min: 0, max: 2, step: 0.1, value: "0.7" }), "Empty: the model's own."),
      field("Tokens at most", input("max_tokens", { type: "number", min: 1, step: 1, value: "128" }), "Empty: as many as fit."),
      field("Top p", input("top_p", { type: "number", min: 0, max: 1, step: 0.05, value: "" })),
      field("Seed", input("seed", { type: "number", step: 1, value: "" }))),
    field("System message", h("textarea", { class: "prose", name: "system", rows: 2 })),
    both,
  ], async (values) => {
    const text = values.prompt.trim();
    if (!text) throw Object.assign(new Error("Write a message."), { fields: [{ name: "prompt", message: "Write a message." }] });
    const key = await keyOf(values.tenant, values.key.trim());
    abort = new AbortController();
    stop.disabled = false;
    anew.disabled = true;
    const asking = isBoth() ? panes : panes.slice(0, 1);
    try {
      asking.forEach((each) => each.settle());
      const complete = await Promise.all(asking.map((each) => each.ask(text, values, key, abort.signal)));
      say(complete.every(Boolean) ? "The answer is complete." : "The answer is not complete.");
    } finally {
      stop.disabled = true;
      anew.disabled = false;
    }
  }, [submit("Send"), stop, anew]);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); asked.requestSubmit(); }
  });
  return page("Playground", "Answers are computed, limited and billed as any others of the tenant. Point at a token, or go there by the arrow keys, to see how likely it was.", [],
    place, card("Ask", [], asked));
}
