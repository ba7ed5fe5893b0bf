// What happens at the moment, by one stream of snapshots.

import { TimeChart } from "../charts.js";
import { h, put, s } from "../dom.js";
import * as format from "../format.js";
import { watch } from "../live.js";
import { card, empty, link, page, swatch, table, tag } from "../ui.js";

const NUM_COLOURS = 5;
const SHARE = { live: true, max: 1.05, axis: (each) => (each > 1 ? "" : `${Math.round(100 * each)} %`) };
const PER_S = (text) => (value) => `${format.rate(value)} ${text}`;

function tile(title, unit) {
  const value = h("span", {}, "–");
  const more = h("span", { class: "small" }, "\u00a0");
  const element = h("div", { class: "tile" }, h("dt", {}, title), h("dd", {}, value, unit && h("small", {}, unit), more));
  const set = (text, below = "\u00a0") => {
    if (value.textContent !== text) value.textContent = text;
    if (more.textContent !== below) more.textContent = below;
  };
  return { element, set };
}

const share = (worker) => (worker ? worker.num_used_blocks / (worker.num_blocks || 1) : null);

/** What a worker is told by from one snapshot to the next. One at an address is all gateways' own; of others each gateway may have one of this name. */
const place = ({ name, gateway }) => (name.includes("@") ? name : `${gateway} ${name}`);

/** Its name, and where another one has the same the host and the process of its gateway. */
const label = (worker, workers) => (workers.filter(({ name }) => name === worker.name).length > 1
  ? `${worker.name} of ${worker.gateway.replace(/:[^:]*$/, "")}` : worker.name);

/** KV in use, as lines: one for each worker or, of more than there are colours, the fullest, the middle and the emptiest. */
function kvInUse(snapshots) {
  const all = snapshots[snapshots.length - 1].workers;
  if (all.length <= NUM_COLOURS) {
    return all.map((worker, index) => ({ name: label(worker, all), colour: 1 + index, values: snapshots.map(({ workers }) => share(workers.find((each) => place(each) === place(worker)))) }));
  }
  const sorted = snapshots.map(({ workers }) => workers.map(share).sort((one, other) => one - other));
  const lines = [["fullest worker", 3, (all) => all[all.length - 1]], ["middle", 4, (all) => all[all.length >> 1]], ["emptiest", 1, (all) => all[0]]];
  return lines.map(([name, colour, pick]) => ({ name, colour, values: sorted.map((all) => pick(all) ?? null) }));
}

/** Used, cached and free blocks of one worker. */
function kvBar(worker) {
  const all = worker.num_blocks || 1;
  const used = (100 * worker.num_used_blocks) / all;
  const cached = (100 * worker.num_cached_blocks) / all;
  const text = `${format.percent(worker.num_used_blocks / all)} used, ${format.percent(worker.num_cached_blocks / all)} cached`;
  return h("div", { class: "meter" }, h("div", { class: "bar", role: "img", "aria-label": text },
    s("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
      s("rect", { class: "fill", width: used, height: 8 }), s("rect", { class: "fill cached", x: used, width: cached, height: 8 }))));
}

export async function open({ closing }) {
  const tiles = {
    requests: tile("Requests", "/s"), tokens: tile("Tokens written", "/s"), open: tile("Under way"),
    ttft: tile("TTFT, median"), tpot: tile("TPOT, median"), kept: tile("Promises kept"),
  };
  const charts = {
    requests: new TimeChart("Requests a second", [{ name: "Ended" , fill: true }, { name: "Failed", colour: 3 }], PER_S("/s"), { live: true }),
    tokens: new TimeChart("Tokens a second", [{ name: "Written", fill: true }, { name: "Prompt", colour: 4 }], PER_S("/s"), { live: true }),
    ttft: new TimeChart("Time to the first token, of the last minute", [{ name: "p50" }, { name: "p90", colour: 4 }, { name: "p99", colour: 3 }], format.ms, { live: true }),
    tpot: new TimeChart("Time for each further token, of the last minute", [{ name: "p50" }, { name: "p90", colour: 4 }, { name: "p99", colour: 3 }], format.ms, { live: true }),
  };
  const classPlaces = { queue: h("div"), kept: h("div") };
  let classCharts = null;
  const kvPlace = h("div");
  let kvChart = null;
  const noWorker = () => empty("No worker at the moment", "Models are being loaded, or their workers start again.");
  const nobody = () => empty("Nobody asks at the moment", "Tenants with requests in the last minute are listed here.");
  const workers = h("div", {}, noWorker());
  const tenants = h("div", {}, nobody());
  const live = h("span", { class: "tag" }, "Connecting");
  let tablesAt = 0;

  const stop = watch((snapshots, state) => {
    const isLive = state === "live";
    const text = isLive ? "Live" : "Connection lost, trying again";
    if (live.textContent !== text) {
      live.textContent = text;
      live.className = isLive ? "tag good live" : "tag warn live";
    }
    const last = snapshots[snapshots.length - 1];
    if (!last || document.hidden) return;
    const times = snapshots.map((each) => each.at);
    const list = (pick) => snapshots.map(pick);
    const ended = last.classes.reduce((sum, each) => sum + each.num_ended, 0);
    const kept = last.classes.reduce((sum, each) => sum + each.num_kept, 0);
    const waiting = last.classes.reduce((sum, each) => sum + each.num_waiting, 0);
    tiles.requests.set(format.rate(last.requests_per_s), last.failures_per_s ? `${format.rate(last.failures_per_s)} /s failed` : "none failed");
    tiles.tokens.set(format.rate(last.decode_tokens_per_s), `${format.rate(last.prefill_tokens_per_s)} /s of prompts`);
    tiles.open.set(format.count(last.num_open), `${format.count(waiting)} in line`);
    tiles.ttft.set(format.ms(last.ttft_ms.p50), `p99 ${format.ms(last.ttft_ms.p99)}`);
    tiles.tpot.set(format.ms(last.tpot_ms.p50), `p99 ${format.ms(last.tpot_ms.p99)}`);
    tiles.kept.set(ended ? format.percent(kept / ended) : format.NONE, `of ${format.compact(ended)} a minute`);
    charts.requests.set([times, list((each) => each.requests_per_s), list((each) => each.failures_per_s)]);
    charts.tokens.set([times, list((each) => each.decode_tokens_per_s), list((each) => each.prefill_tokens_per_s)]);
    for (const name of ["ttft", "tpot"]) {
      charts[name].set([times, ...["p50", "p90", "p99"].map((share) => list((each) => each[`${name}_ms`][share]))]);
    }
    if (!classCharts) {
      const series = last.classes.map((each, index) => ({ name: each.sla_class, colour: 1 + (index % NUM_COLOURS) }));
      classCharts = {
        queue: new TimeChart("Requests in line, by class", series, format.count, { live: true, axis: (number) => (Number.isInteger(number) ? format.compact(number) : "") }),
        kept: new TimeChart("Promises kept in the last minute, by class", series, format.percent, SHARE),
      };
      for (const name of Object.keys(classCharts)) put(classPlaces[name], classCharts[name].element);
    }
    const names = last.classes.map((each) => each.sla_class);
    const byClass = (pick) => names.map((name, index) => list((each) => {
      const one = each.classes[index];
      return one && one.sla_class === name ? pick(one) : null;
    }));
    classCharts.queue.set([times, ...byClass((each) => each.num_waiting)]);
    classCharts.kept.set([times, ...byClass((each) => each.attainment)]);
    const lines = kvInUse(snapshots);
    if (kvChart?.series.map((each) => each.name).join() !== lines.map((each) => each.name).join()) {
      kvChart?.close();
      kvChart = new TimeChart("KV blocks in use, by worker", lines, format.percent, SHARE);
      put(kvPlace, lines.length > 0 && kvChart.element);
    }
    kvChart.set([times, ...lines.map((each) => each.values)]);
    if (last.at >= tablesAt && last.at < tablesAt + 1) return;
    tablesAt = last.at;
    const isRead = (place) => place.contains(document.activeElement) || (getSelection().type === "Range" && place.contains(getSelection().anchorNode));
    if (!isRead(workers)) {
      put(workers, !last.workers.length ? noWorker() : table("Workers", [
        { title: "Worker", row: true, cut: true, cell: (each) => label(each, last.workers) },
        { title: "State", cell: (each) => tag(each.state, each.state === "ready" ? "good" : "warn") },
        { title: "Running", num: true, cell: (each) => format.count(each.num_running) },
        { title: "Tokens/s", num: true, cell: (each) => format.rate(each.decode_tokens_per_s) },
        { title: "KV blocks", num: true, cell: (each) => `${format.compact(each.num_used_blocks)} of ${format.compact(each.num_blocks)}` },
        { title: "KV use", cell: kvBar },
      ], last.workers));
    }
    if (!isRead(tenants)) {
      put(tenants, !last.tenants.length ? nobody() : table("Tenants", [
        { title: "Tenant", row: true, cut: true, cell: (each) => h("a", { href: link("requests", { tenant_id: each.tenant_id }) }, each.name) },
        { title: "Under way", num: true, cell: (each) => format.count(each.num_open) },
        { title: "Ended", num: true, cell: (each) => format.count(each.num_ended) },
        { title: "Tokens", num: true, cell: (each) => format.compact(each.num_completion_tokens) },
      ], last.tenants.slice(0, 10)));
    }
  });
  closing(stop);
  closing(() => [...Object.values(charts), ...Object.values(classCharts || {}), kvChart].forEach((chart) => chart?.close()));

  return page("Overview", "", [live],
    h("dl", { class: "tiles" }, Object.values(tiles).map((each) => each.element)),
    h("div", { class: "grid" },
      card("Requests", [], charts.requests.element),
      card("Tokens", [], charts.tokens.element),
      card("Time to first token", [], charts.ttft.element),
      card("Time per further token", [], charts.tpot.element),
      card("Queue by class", [], classPlaces.queue),
      card("Promises kept by class", [], classPlaces.kept),
      card("KV in use by worker", [], kvPlace),
      card("Busiest tenants of the last minute", [], tenants),
      h("div", { class: "whole" }, card("Workers", [h("ul", { class: "legend" }, h("li", {}, swatch(1), "in use"), h("li", {}, swatch(2), "cached prefixes"))], workers))));
}
