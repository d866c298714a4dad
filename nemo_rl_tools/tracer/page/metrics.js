/** View: metrics of the run, such as reward and loss, as small lines. */

import { ChartGrid, valueAt } from "./chart.js";
import { seriesColour } from "./color.js";
import { empty, field, h, say } from "./dom.js";
import { exact, short } from "./format.js";
import { View } from "./view.js";

const HEIGHT = 130;
const FIRST = ["reward", "loss", "accuracy", "kl", "entropy", "grad_norm"];

/** One small chart per metric. */
export class MetricsView extends View {
  constructor(app) {
    super(app, { id: "metrics", title: "Metrics" });
    const changed = () => app.changed();
    this.filter = h("input", { type: "search", placeholder: "reward, loss", "aria-label": "Names", oninput: changed });
    this.grid = new ChartGrid(app, (name, step) => [
      `${name}, step ${step}`,
      this.lines(name).map((line, side) => [`run ${"AB"[side]}`, exact(valueAt(line, step) ?? "nothing")]),
    ]);
    this.build({ fields: [field("Names", this.filter)], toggles: [this.toggle("logarithmic", "isLog")] }, this.grid.root);
  }

  names() {
    const words = this.filter.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    const all = new Set(this.app.sides().flatMap((side) => [...this.app.store.run(side.run).metrics.keys()]));
    const isWanted = (name) => words.length === 0 || words.some((word) => name.toLowerCase().includes(word));
    return [...all].filter(isWanted).sort(byWeight);
  }

  /** Points of each run. */
  lines(name) {
    const metrics = this.app.sides().map((side) => this.app.store.run(side.run).metrics.get(name) ?? []);
    return metrics.map((points) => [...points].sort((a, b) => a[0] - b[0]));
  }

  render() {
    const names = this.names();
    const none = this.filter.value
      ? ["No metric has such a name", "Clear the field to see all."]
      : ["No metrics yet", "They come at the end of each step."];
    this.nothing.replaceChildren(...(names.length === 0 ? [empty(...none)] : []));
    const { all, width } = this.grid.show(names);
    all.forEach(({ chart, now }, i) => {
      const lines = this.lines(names[i]);
      const at = lines.map((line) => short(line.findLast(([step]) => step <= this.app.step)?.[1]));
      say(now, at.join("  |  "));
      chart.set({
        lines: lines.map((points, side) => ({ points, colour: seriesColour(side), width: 1.6 })),
        isLog: this.isLog,
        width,
        height: HEIGHT,
        text: `${names[i]} over steps, now ${at.join(" and ")}`,
      });
    });
  }

  canvases() {
    return this.grid.canvases();
  }

  numbers() {
    const rows = this.names().flatMap((name) => this.lines(name).flatMap((line, side) =>
      line.map(([step, value]) => [this.app.sides()[side].run, step, name, exact(value)])));
    return { columns: ["run", "step", "metric", "value"], rows };
  }
}

function byWeight(a, b) {
  const weight = (name) => FIRST.findIndex((word) => name.toLowerCase().includes(word)) >>> 0; // none: behind all
  return weight(a) - weight(b) || (a < b ? -1 : 1);
}
