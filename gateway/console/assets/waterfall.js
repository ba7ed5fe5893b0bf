// Where one request's time went: a row for each part, with its bar, its times and what happened in it.

import { h, s } from "./dom.js";
import * as format from "./format.js";
import { note, swatch, table } from "./ui.js";

const WORDS = {
  receive: "Waited to be handled", auth: "Whose key it is", parse: "Body read", load: "Model loaded", render: "Prompt made", cache: "Looked for in the cache",
  admit: "Limits checked", queue: "Waited in line", route: "Worker chosen", worker: "With the worker", upstream: "With another server",
  shared: "Read along with an equal one", replay: "Told what was told before", stream: "Last words sent", settle: "Written into the ledger", "first token": "Until the first token",
};
const KINDS = [["the gateway", 2], ["waiting", 3], ["prefill", 4], ["decode", 1]];
const SOURCES = {
  trace: "As its trace tells it.",
  gateway: "As the gateway noted it. What a worker did in each of its steps is told of requests that have a trace.",
  ledger: "By its row in the ledger: part by part only the last requests are known, and only to the gateway process that had them.",
};
const WIDTH = 1000;

const short = (value) => (value < 0.95 ? `${Math.round(1000 * value)} µs` : format.ms(value));
const moment = (part, name) => part.moments.find((each) => each.name === name)?.at_ms;

/** A part as [from, to, which colour]: what a worker did first and then. */
function pieces(part, source) {
  const [from, to] = [part.at_ms, part.at_ms + part.duration_ms];
  if (part.name === "worker") {
    const bounds = [from, moment(part, "scheduled"), moment(part, "first token"), moment(part, "last token")].filter((at) => at !== undefined);
    return bounds.length < 4 ? [[from, to, 1]] : bounds.map((at, index) => [at, bounds[index + 1] ?? to, [3, 4, 1, 2][index]]);
  }
  if (source === "ledger" && part.name === "stream") return [[from, to, 1]];
  return [[from, to, { queue: 3, receive: 3, "first token": 4, shared: 1, upstream: 1 }[part.name] || 2]];
}

function bar(part, source, whole) {
  const x = (at) => (WIDTH * at) / whole;
  const ticks = part.moments.filter(({ name }) => name === "prefill chunk" || name === "preempted");
  return s("svg", { class: "fall", viewBox: `0 0 ${WIDTH} 16`, preserveAspectRatio: "none", "aria-hidden": "true" },
    pieces(part, source).map(([from, to, kind]) => s("rect", { class: `s${kind}`, x: Math.min(x(from), WIDTH - 3), y: 2, width: Math.max(3, x(to) - x(from)), height: 12 })),
    ticks.map((each) => s("rect", { class: each.name, x: x(each.at_ms) - 1, y: 0, width: 2, height: 16 })));
}

/** What is said of a part, in words. */
function said({ facts, moments }) {
  const fact = (name) => facts[`penstock.${name}`];
  const chunks = moments.filter(({ name }) => name === "prefill chunk").length;
  const drafted = fact("speculation.num_drafted_tokens");
  return [
    facts["error.type"], fact("worker"), fact("upstream"), fact("cache"),
    fact("worker.left") === "lost" && "the worker was lost", [fact("worker.left"), fact("upstream.left")].includes("moved") && "it went on elsewhere",
    fact("event_loop.lag_ms") > 1 && `event loop late by ${format.ms(fact("event_loop.lag_ms"))}`,
    fact("num_prompt_tokens") !== undefined && `${format.plural(fact("num_prompt_tokens"), "token")} of prompt`,
    fact("num_cached_tokens") > 0 && `${format.count(fact("num_cached_tokens"))} of them cached`,
    chunks > 0 && `prefilled in ${format.plural(chunks, "chunk")}`,
    fact("num_tokens") !== undefined && `${format.plural(fact("num_tokens"), "token")} of answer`,
    drafted > 0 && `${format.count(fact("speculation.num_accepted_tokens"))} of ${format.count(drafted)} drafts accepted`,
    fact("num_preemptions") > 0 && `preempted ${format.plural(fact("num_preemptions"), "time")}`,
  ].filter(Boolean).join(", ");
}

function happened(parts) {
  const all = parts.flatMap((part) => part.moments);
  return all.length > 0 && h("details", {}, h("summary", {}, "What happened when"), table("What happened when", [
    { title: "At", num: true, cell: (each) => short(each.at_ms) },
    { title: "What", row: true, cell: (each) => each.name },
    { title: "Of it", cell: ({ facts }) => Object.entries(facts).map(([name, value]) => `${name.replace("penstock.", "").replaceAll("_", " ")} ${typeof value === "number" ? format.rate(value) : value}`).join(", ") },
  ], all));
}

/** ``told``: the answer of requests/{id}/parts. */
export function waterfall({ source, parts, num_gateways: gateways }) {
  const whole = Math.max(...parts.map((part) => part.at_ms + part.duration_ms), 1e-6);
  const others = source === "ledger" && gateways > 1 ? ` ${format.plural(gateways, "process", "processes")} answer here; another may know more.` : "";
  return h("figure", { "aria-label": `Where ${short(whole)} went` },
    h("figcaption", {}, h("ul", { class: "legend" }, KINDS.map(([name, kind]) => h("li", {}, swatch(kind), name)), h("li", {}, `${short(whole)} in all`))),
    table("Where the time went", [
      { title: "Part", row: true, nowrap: true, cell: (part) => [part.level ? "↳ " : "", source === "ledger" && part.name === "stream" ? "Further tokens" : WORDS[part.name] || part.name] },
      { title: "From", num: true, cell: (part) => short(part.at_ms) },
      { title: "Took", num: true, cell: (part) => short(part.duration_ms) },
      { title: "Bar", unseen: true, wide: true, cell: (part) => bar(part, source, whole) },
      { title: "What is known of it", cell: said },
    ], parts),
    happened(parts),
    note(SOURCES[source] + others));
}
