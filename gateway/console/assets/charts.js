// Charts by uPlot, in the page's colours, each with a legend of its latest values and a table of the same.

import uPlot from "./vendor/uplot.js";
import { h, put } from "./dom.js";
import * as format from "./format.js";
import { swatch, table } from "./ui.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const charts = new Set();

/** The theme changed. */
export function recolour() {
  for (const chart of charts) chart.redrawn();
}

/** Lines over time; ``series``: [{name, colour: 1..5, fill}], ``show``: a value as text. */
export class TimeChart {
  constructor(label, series, show, options = {}) {
    this.label = label;
    this.series = series;
    this.show = show;
    this.options = { height: 192, ...options };
    this.data = [[], ...series.map(() => [])];
    this.plot = null;
    this.place = h("div", { class: "chart", role: "img", "aria-label": label });
    this.legend = h("ul", { class: "legend" });
    this.values = series.map((each, index) => {
      const value = h("b", {}, "–");
      this.legend.append(h("li", {}, swatch(each.colour || index + 1), each.name, value));
      return value;
    });
    this.rows = h("div", {});
    this.alternative = h("details", { ontoggle: () => this.tabled() }, h("summary", {}, "Show as a table"), this.rows);
    this.element = h("figure", {}, this.legend, this.place, this.alternative);
    this.observer = new ResizeObserver(() => this.sized());
    this.observer.observe(this.place);
    charts.add(this);
  }

  /** ``data``: times in seconds, then one list for each series. */
  set(data) {
    this.data = data;
    this.values.forEach((value, index) => {
      const list = data[index + 1];
      const text = list.length ? this.show(list[list.length - 1]) : "–";
      if (value.textContent !== text) value.textContent = text;
    });
    if (this.plot) this.plot.setData(data);
    else this.sized();
    if (this.alternative.open && !this.options.live) this.tabled();
  }

  sized() {
    const width = Math.floor(this.place.clientWidth);
    if (!width) return;
    if (this.plot) {
      if (this.plot.width !== width) this.plot.setSize({ width, height: this.options.height });
    } else if (this.data[0].length) {
      this.plot = new uPlot(this.shape(width), this.data, this.place);
    }
  }

  redrawn() {
    if (!this.plot) return;
    this.plot.destroy();
    this.plot = null;
    this.sized();
  }

  shape(width) {
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const bars = this.options.bars && uPlot.paths.bars({ size: [0.7, 48] });
    return {
      width,
      height: this.options.height,
      legend: { show: false },
      padding: [12, 28, 0, 0],
      cursor: { drag: { x: false, y: false }, points: { size: 6 }, y: false },
      // The bars of the first and the last day are as wide as the others.
      scales: { x: { time: true, ...(this.options.days ? { range: (plot, low, high) => [low - 43200, high + 43200] } : {}) }, y: { range: (plot, low, high) => [0, this.options.max ?? (high > 0 ? high * 1.1 : 1)] } },
      axes: [
        { ...axis, size: 28, gap: 8, grid: { show: false }, space: 72, values: this.options.days ? (plot, marks) => marks.map((mark) => new Date(1000 * mark).toISOString().slice(5, 10)) : [[60, "{HH}:{mm}", null, null, null, null, null, null, 1], [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]], ...(this.options.days ? { incrs: [86400, 7 * 86400, 28 * 86400] } : {}) },
        { ...axis, size: 64, values: (plot, marks) => marks.map((mark) => (this.options.axis || this.show)(mark)), space: 40 },
      ],
      series: [{}, ...this.series.map((each, index) => {
        const stroke = colour(`--c${each.colour || index + 1}`);
        return { label: each.name, stroke, width: bars ? 0 : 1.75, fill: bars ? stroke : each.fill ? `${stroke}22` : undefined, points: { show: this.options.points }, spanGaps: false, ...(bars ? { paths: bars } : {}) };
      })],
    };
  }

  tabled() {
    if (!this.alternative.open) return;
    const [times, ...lists] = this.data;
    const last = times.map((at, index) => index).slice(-60).reverse();
    const time = (at) => (this.options.days ? format.utcDay(at) : format.at(at).slice(11));
    put(this.rows, table(this.label, [
      { title: this.options.days ? "Day" : "Time", row: true, cell: (index) => time(times[index]) },
      ...this.series.map((each, which) => ({ title: each.name, num: true, cell: (index) => this.show(lists[which][index]) })),
    ], last));
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
    charts.delete(this);
  }
}
