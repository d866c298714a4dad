/** View: metrics of the run, such as reward and loss, as small lines. */

import { seriesColour } from "./color.js";
import { Plot, fit } from "./chart.js";
import { empty, h, keepChildren, say, toggle } from "./dom.js";
import { exact, short } from "./format.js";

const HEIGHT = 130;

/** One small chart per metric. */
export class MetricsView {
  constructor(app) {
    this.app = app;
    this.id = "metrics";
    this.title = "Metrics";
    this.isLog = false;
    this.filter = h(
      "input",
      { type: "search", placeholder: "reward, loss", "aria-label": "Names", oninput: () => app.changed() },
    );
    const log = toggle("logarithmic", false, (isOn) => {
      this.isLog = isOn;
      app.changed();
    });
    this.tools = h(
      "div",
      { className: "tools" },
      h("label", { className: "field" }, h("span", {}, "Names"), this.filter),
      h("div", { className: "toggles" }, log),
    );
    this.nothing = h("div");
    this.grid = h("div", { className: "grid" });
    this.root = h("div", { className: "view" }, this.tools, this.nothing, this.grid);
    this.charts = new Map();
  }

  choose() {}

  prepare() {}

  isReady() {
    return true;
  }

  names() {
    const words = this.filter.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    const all = new Set(this.app.sides().flatMap((side) => [...this.app.store.run(side.run).metrics.keys()]));
    return [...all].filter(
      (name) => words.length === 0 || words.some((word) => name.toLowerCase().includes(word))
    ).sort(byWeight);
  }

  render() {
    const names = this.names();
    const none = this.filter.value ? [
      "No metric has such a name",
      "Clear the field to see all.",
    ] : ["No metrics yet", "They come at the end of each step."];
    this.nothing.replaceChildren(...(names.length === 0 ? [empty(...none)] : []));
    for (const [name, chart] of this.charts) {
      if (names.includes(name)) continue;
      chart.root.remove();
      this.charts.delete(name);
    }
    const charts = names.map((name) => this.chart(name));
    keepChildren(this.grid, charts.map((chart) => chart.root));
    const width = Math.max(150, (charts[0]?.root.clientWidth ?? 0) - 26);
    charts.forEach((chart, i) => this.paint(chart, names[i], width));
  }

  chart(name) {
    if (!this.charts.has(name)) {
      const [title, now] = [h("h3", { textContent: name }), h("output", { className: "now" })];
      const canvas = h("canvas", { role: "img" });
      const chart = {
        canvas,
        now,
        root: h("figure", { className: "chart" }, h("div", { className: "chart-head" }, title, now), canvas),
      };
      canvas.addEventListener("pointermove", (event) => this.hover(chart, name, event));
      canvas.addEventListener("pointerleave", () => this.app.tooltip.hide());
      canvas.addEventListener("click", (event) => this.app.time.go(this.nearest(chart, event)));
      this.charts.set(name, chart);
    }
    return this.charts.get(name);
  }

  paint(chart, name, width) {
    const lines = this.app.sides().map(
      (side) => [...(this.app.store.run(side.run).metrics.get(name) ?? [])].sort((a, b) => a[0] - b[0])
    );
    chart.lines = lines;
    const steps = lines.flat().map(([step]) => step);
    const values = lines.flat().map(([, value]) => value);
    const context = fit(chart.canvas, width, HEIGHT);
    chart.plot = new Plot(
      context,
      { left: 50, top: 8, right: width - 8, bottom: HEIGHT - 20 },
      [Math.min(...steps), Math.max(...steps)],
      values,
      this.isLog,
    );
    chart.plot.axes(true);
    lines.forEach((line, side) => chart.plot.line(line, seriesColour(side), 1.6));
    chart.plot.cursor(this.app.step, this.app.marks);
    const at = lines.map((line) => short(line.findLast(([step]) => step <= this.app.step)?.[1]));
    say(chart.now, at.join("  |  "));
    chart.canvas.setAttribute("aria-label", `${name} over steps, now ${at.join(" and ")}`);
  }

  nearest(chart, event) {
    const near = chart.plot.stepAt(event.clientX - chart.canvas.getBoundingClientRect().left);
    const steps = chart.lines.flat().map(([step]) => step);
    return steps.reduce((best, step) => (Math.abs(step - near) < Math.abs(best - near) ? step : best), steps[0]);
  }

  hover(chart, name, event) {
    const step = this.nearest(chart, event);
    const pairs = chart.lines.map(
      (line, side) => [`run ${"AB"[side]}`, exact(line.find(([at]) => at === step)?.[1] ?? "nothing")]
    );
    this.app.tooltip.show(`${name}, step ${step}`, pairs, event);
  }

  canvases() {
    return [...this.charts].map(([name, chart]) => ({ title: name, canvas: chart.canvas }));
  }

  numbers() {
    const rows = [...this.charts].flatMap(
      ([name, chart]) => chart.lines.flatMap(
        (line, side) => line.map(([step, value]) => [this.app.sides()[side].run, step, name, exact(value)])
      )
    );
    return { columns: ["run", "step", "metric", "value"], rows };
  }
}

const FIRST = ["reward", "loss", "accuracy", "kl", "entropy", "grad_norm"];

function byWeight(a, b) {
  const weight = (name) => {
    const at = FIRST.findIndex((word) => name.toLowerCase().includes(word));
    return at < 0 ? FIRST.length : at;
  };
  return weight(a) - weight(b) || (a < b ? -1 : 1);
}
