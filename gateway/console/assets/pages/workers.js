// Workers: drain, resume, and what each has in its batch and its KV blocks.

import { get, post } from "../api.js";
import { h, put, s } from "../dom.js";
import * as format from "../format.js";
import { attempt, button, card, empty, facts, link, note, page, shown, swatch, table, tag } from "../ui.js";

const CELLS = 512;
const ACROSS = 64;

/** All blocks as so many cells: those of the largest requests, of others, cached, free. */
function blockMap(batch) {
  const total = batch.num_blocks || 1;
  const cells = Math.min(CELLS, total);
  const down = Math.ceil(cells / ACROSS);
  const groups = batch.requests.slice(0, 4).map((each, index) => [`s${[1, 3, 4, 5][index]}`, each.num_blocks]);
  let left = batch.num_used_blocks;
  for (const group of groups) { group[1] = Math.min(left, group[1]); left -= group[1]; }
  groups.push(["s-line", left], ["s2", batch.num_cached_blocks]);
  const rects = [];
  let block = 0;
  let cell = 0;
  for (const [kind, num] of groups) {
    block += num;
    for (const end = Math.round((block / total) * cells); cell < end; cell += 1) rects.push(rect(cell, kind));
  }
  for (; cell < cells; cell += 1) rects.push(rect(cell, "s0"));
  const text = `Of ${format.count(total)} KV blocks ${format.count(batch.num_used_blocks)} are in use, ${format.count(batch.num_cached_blocks)} cached, ${format.count(batch.num_free_blocks)} free.`;
  return h("figure", {}, s("svg", { class: "blocks", viewBox: `0 0 ${ACROSS * 12} ${down * 12}`, role: "img", "aria-label": text }, rects),
    h("ul", { class: "legend" },
      batch.requests.slice(0, 4).map((each, index) => h("li", {}, swatch([1, 3, 4, 5][index]), h("code", {}, `…${each.request_id.slice(-6)}`))),
      h("li", {}, s("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" }, s("rect", { class: "s-line", width: 12, height: 12, rx: 3 })), "others in use"), h("li", {}, swatch(2), "cached prefixes"), h("li", {}, swatch(0), "free")),
    h("p", { class: "small soft" }, `${text}${total > cells ? ` A cell stands for ${(total / cells).toFixed(1)} of them.` : ""}`));
}

const rect = (cell, kind) => s("rect", { class: kind, x: (cell % ACROSS) * 12, y: Math.floor(cell / ACROSS) * 12, width: 12, height: 12, rx: 2 });

export async function open({ closing, values }) {
  const list = h("div");
  const one = h("div", { class: "grid one", "data-chosen": true });
  let workers = [];
  let chosen = values.name || "";

  const read = async () => {
    workers = (await get("workers")).data;
    if (!workers.some((each) => each.name === chosen)) chosen = workers[0]?.name || "";
    return workers;
  };

  function draw() {
    if (!workers.length) return empty("No worker", "No model is loaded at the moment, or all of them are served elsewhere.");
    return table("Workers", [
      { title: "Worker", row: true, cut: true, cell: (each) => h("a", { href: link("workers", { name: each.name }) }, each.name) },
      { title: "Model", cell: (each) => each.model },
      { title: "State", cell: (each) => (each.resting ? tag("drained", "warn") : tag(each.state, each.state === "ready" ? "good" : "warn")) },
      { title: "Device", cell: (each) => (each.facts ? `${each.facts.device}, ${each.facts.dtype}` : format.NONE) },
      { title: "Running", num: true, cell: (each) => format.count(each.load?.num_running) },
      { title: "Waiting", num: true, cell: (each) => format.count(each.load?.num_waiting) },
      { title: "Step", num: true, cell: (each) => format.ms(each.load?.step_ms) },
      { title: "Actions", unseen: true, cell: (each) => h("div", { class: "buttons" }, each.resting
        ? button("Resume", () => rest(each, "resume", "It is given requests again"), "", { "aria-label": `Resume ${each.name}` })
        : button("Drain", () => rest(each, "drain", "It is given nothing new"), "", { "aria-label": `Drain ${each.name}` })) },
    ], workers, { chosen: (each) => each.name === chosen });
  }

  const rest = async (worker, word, done) => {
    await attempt(() => post(`workers/${encodeURIComponent(worker.name)}/${word}`), done);
    await shown(list, read, draw);
    list.querySelector(`[aria-label$="${CSS.escape(worker.name)}"]`)?.focus();
  };

  const map = h("div");
  const sharers = h("div");
  const about = h("div");

  let framed = "";
  /** What is said of the chosen one, under its name. */
  function frame() {
    if (chosen === framed) return;
    framed = chosen;
    for (const each of [map, sharers, about]) put(each);
    put(one, chosen && card(`Batch and blocks of ${chosen}`, [tag("every second", "good live")], map, h("h3", {}, "Requests"), sharers, h("h3", {}, "Worker"), about));
  }

  async function look() {
    if (!chosen || document.hidden) return;
    try {
      const [batch, worker] = await Promise.all([get(`workers/${encodeURIComponent(chosen)}/batch`), get(`workers/${encodeURIComponent(chosen)}`)]);
      put(map, blockMap(batch));
      if (!sharers.contains(document.activeElement)) {
        put(sharers, batch.requests.length ? table("Requests in the batch", [
          { title: "Request", row: true, cell: (each) => h("code", {}, each.request_id) },
          { title: "Class", cell: (each) => each.sla_class },
          { title: "Does", cell: (each) => tag(each.state, each.state === "decode" ? "good" : "") },
          { title: "Prompt", num: true, cell: (each) => format.count(each.num_prompt_tokens) },
          { title: "Written", num: true, cell: (each) => format.count(each.num_completion_tokens) },
          { title: "Blocks", num: true, cell: (each) => format.count(each.num_blocks) },
          { title: "Age", num: true, cell: (each) => format.span(each.age_s) },
        ], batch.requests.slice(0, 50)) : empty("The batch is empty", "Requests that this gateway has there are listed as they come."));
      }
      const { load, facts: said } = worker;
      put(about, facts([
        ["Process", said ? said.pid : format.NONE], ["Lives", format.count(worker.num_lives)],
        ["Sequences at most", format.count(said?.max_sequences)], ["Tokens a sequence", format.count(said?.max_model_tokens)],
        ["Steps since start", format.compact(load?.num_steps)], ["Busy since start", format.span(load?.busy_s)],
        ["Preemptions", format.count(load?.num_preemptions)],
        ["Drafts accepted", load?.num_drafted_tokens ? format.percent(load.num_accepted_tokens / load.num_drafted_tokens) : format.NONE],
      ]));
    } catch (error) {
      put(map, note(error.message, "bad"));
    }
  }

  const [{ data: gateways }] = await Promise.all([get("queues"), read()]);
  put(list, draw());
  frame();
  await look();
  let ticks = 0;
  const timer = setInterval(async () => {
    ticks += 1;
    await look();
    if (ticks % 3 === 0 && !document.hidden && !list.contains(document.activeElement)) {
      try { await read(); put(list, draw()); frame(); } catch { /* it is said below */ }
    }
  }, 1000);
  closing(() => clearInterval(timer));
  const others = gateways.length > 1 ? ` ${gateways.length} gateways answer here: these are the workers of one of them, as it sees them; the overview has those of all.` : "";
  return page("Workers", `The processes that compute. One that is drained is given nothing new; what it has goes on elsewhere where there is room.${others}`, [], card("Workers", [], list), one);
}
