/** View: one site over steps, as bands, one small chart per layer. */

import { seriesColour } from "./color.js";
import { Plot, fit, roomBelow } from "./chart.js";
import { choice, h, keepChildren, say, setOptions, toggle } from "./dom.js";
import { exact, short } from "./format.js";
import { Picker, placesOf } from "./picker.js";
import { STATS, histogramBins, parseReducer, quantiles, statsOf } from "./reducer.js";

const SMALL_HEIGHT = 168;

/** Bands over steps. */
export class BandsView {
  constructor(app) {
    this.app = app;
    this.id = "steps";
    this.title = "Over steps";
    this.picker = new Picker(
      (seen) => seen.reducer === "stats" || seen.reducer === "norm",
      () => app.changed(),
      ["layer.out", "mlp.out"],
    );
    this.layer = choice("Layers", () => app.changed());
    this.what = choice("Band", () => app.changed());
    this.isLog = true;
    this.isShared = true;
    const log = toggle("logarithmic", true, (isOn) => this.set({ isLog: isOn }));
    const shared = toggle("same scale", true, (isOn) => this.set({ isShared: isOn }));
    this.tools = h("div", { className: "tools" }, this.picker.root,
      h(
        "div",
        { className: "fields" },
        this.layer.root,
        this.what.root,
      ), h("div", { className: "toggles" }, log, shared));
    this.key = h("p", { className: "key" });
    this.grid = h("div", { className: "grid" });
    this.nothing = h("div");
    this.root = h("div", { className: "view" }, this.tools, this.nothing, this.key, this.grid);
    this.charts = new Map(); // text of the site -> {root, canvas, title}
  }

  set(values) {
    Object.assign(this, values);
    this.app.changed();
  }

  choose(wanted) {
    this.picker.choose(wanted);
  }

  isReady(run, step) {
    const { chosen } = this.picker;
    return chosen === undefined || placesOf(chosen).some(
      (place) => this.app.store.frame(run, step, chosen, place.text)
    );
  }

  prepare() {
    this.picker.update(this.app.watchedOf(), this.app.order);
  }

  render() {
    const { chosen } = this.picker;
    this.nothing.replaceChildren();
    [this.grid.hidden, this.key.hidden] = [chosen === undefined, chosen === undefined];
    if (chosen === undefined) {
      this.nothing.replaceChildren(this.app.nothingYet("No statistics are watched yet.", "layer.out | stats"));
      return;
    }
    const places = placesOf(chosen);
    const histogram = this.histogramOf(chosen);
    setOptions(this.layer.select, [["", `all ${places.length}`], ...places.map((place) => [place.text, place.label])],
      places.some((place) => place.text === this.layer.select.value) ? this.layer.select.value : "");
    const bands = [
      ["std", "mean ± standard deviation"],
      ...(histogram ? [["quartiles", "median, quartiles (histogram)"]] : []),
    ];
    setOptions(this.what.select, bands, histogram && this.what.select.value === "quartiles" ? "quartiles" : "std");
    const shown = this.layer.select.value ? places.filter((place) => place.text === this.layer.select.value) : places;
    this.what.root.hidden = chosen.reducer === "norm";
    this.series = shown.map(
      (place) => this.app.sides().map((side) => this.pointsOf(side.run, chosen, place, histogram))
    );
    this.sayKey();
    this.paint(shown);
  }

  /** A histogram of the same site that could give quartiles. */
  histogramOf(chosen) {
    const same = (seen) => seen.phase === chosen.phase && seen.kind === chosen.kind && seen.way === chosen.way;
    return [...this.app.watchedOf().values()].find(
      (seen) => same(seen) && parseReducer(seen.reducer).name === "histogram"
    );
  }

  sayKey() {
    if (this.picker.chosen.reducer === "norm") {
      say(this.key, "Euclidean norm over all values. A click goes to the step.");
      return;
    }
    const isQuartiles = this.what.select.value === "quartiles";
    const [band, line] = isQuartiles ? ["quartiles", "median"] : ["mean ± standard deviation", "mean"];
    const two = this.app.sides().length > 1 ? "; blue: run A, orange: run B" : "";
    const outer = this.app.sides().length > 1 ? "Thin lines" : "Light band";
    say(
      this.key,
      `${outer}: least to most; dark band: ${band}, line: ${line}; dashes: rms${two}. Finite values; NaN and ` +
        "infinities are marked at the foot. A click goes to the step.",
    );
  }

  pointsOf(run, chosen, place, histogram) {
    const points = [];
    const isQuartiles = this.what.select.value === "quartiles" && histogram;
    const bins = isQuartiles ? histogramBins(histogram.reducer) : null;
    for (const step of this.app.store.run(run).stepList) {
      const frame = this.app.store.frame(run, step, chosen, place.text);
      if (frame === undefined) continue;
      if (chosen.reducer === "norm") {
        points.push(normPoint(step, frame.values[0]));
        continue;
      }
      const stats = (frame.stats ??= statsOf(frame.values));
      let [low, middle, high] = [stats.mean - stats.std, stats.mean, stats.mean + stats.std];
      const counts = isQuartiles && this.app.store.frame(
        run,
        step,
        { ...histogram, update: chosen.update },
        place.text,
      );
      if (isQuartiles) [low, middle, high] = counts ? quantiles(
        counts.values,
        bins.edges,
        [0.25, 0.5, 0.75],
      ) : [NaN, NaN, NaN];
      points.push({ step, stats, low, middle, high });
    }
    return points;
  }

  paint(places) {
    const isOne = places.length === 1;
    this.grid.classList.toggle("one", isOne);
    const keep = new Set(places.map((place) => place.text));
    for (const [text, chart] of this.charts) {
      if (keep.has(text)) continue;
      chart.root.remove();
      this.charts.delete(text);
    }
    const steps = this.series.flat(2).map((point) => point.step);
    const ends = [Math.min(...steps), Math.max(...steps)];
    const ys = (series) => series.flatMap(
      (points) => points.flatMap(({ stats, low, high }) => [stats.min, stats.max, stats.rms, low, high])
    );
    const all = this.isShared ? ys(this.series.flat()) : null;
    const charts = places.map((place) => this.chart(place));
    keepChildren(this.grid, charts.map((chart) => chart.root));
    const width = Math.max(160, charts[0].root.clientWidth - 26);
    const columns = Math.max(1, Math.round(this.grid.clientWidth / (width + 38)));
    const rows = Math.ceil(charts.length / columns);
    const room = roomBelow(this.app.main, this.grid, 0, 460 * rows) / rows;
    const height = Math.max(SMALL_HEIGHT, Math.min(isOne ? 460 : 240, room - 44));
    charts.forEach((chart, i) => {
      say(chart.title, places[i].text);
      this.draw(chart, this.series[i], { width, height, ends, ys: all ?? ys(this.series[i]) });
    });
  }

  chart(place) {
    if (this.charts.has(place.text)) return this.charts.get(place.text);
    const title = h("h3");
    const canvas = h("canvas", { role: "img" });
    const chart = { title, canvas, root: h("figure", { className: "chart" }, title, canvas), place };
    canvas.addEventListener("pointermove", (event) => this.hover(chart, event));
    canvas.addEventListener("pointerleave", () => this.app.tooltip.hide());
    canvas.addEventListener("click", (event) => this.app.time.go(this.nearest(chart, event)?.step));
    this.charts.set(place.text, chart);
    return chart;
  }

  draw(chart, series, { width, height, ends, ys }) {
    const context = fit(chart.canvas, width, height);
    const plot = new Plot(context, { left: 52, top: 8, right: width - 10, bottom: height - 22 }, ends, ys, this.isLog);
    [chart.plot, chart.series] = [plot, series];
    plot.axes(true);
    series.forEach((points, side) => {
      this.drawBands(plot, points, seriesColour(side), series.length > 1);
      plot.line(
        points.filter(({ stats }) => Number.isFinite(stats.rms)).map(({ step, stats }) => [step, stats.rms]),
        seriesColour(side),
        1,
        [3, 3],
      );
      plot.line(
        points.map(
          ({ step, middle, stats }) => [step, stats.nan > 0 ? NaN : stats.posinf + stats.neginf > 0 ? Infinity : middle]
        ),
        seriesColour(side),
        1.8,
      );
    });
    plot.cursor(this.app.step, this.app.marks);
    const last = series[0].at(-1);
    chart.canvas.setAttribute(
      "aria-label",
      last ? `${chart.place.text} at step ${last.step}: ${inWords(last.stats)}` : chart.place.text,
    );
  }

  /** Of one run filled; of two the outer one is two lines, so that both are seen. */
  drawBands(plot, points, colour, isTwo) {
    if (!isTwo) plot.band(points.map(({ step, stats }) => [step, stats.min, stats.max]), colour, 0.16);
    const seen = points.filter(({ stats }) => Number.isFinite(stats.min));
    if (isTwo) for (const name of ["min", "max"]) plot.line(
      seen.map(({ step, stats }) => [step, stats[name]]),
      colour,
      0.7,
    );
    plot.band(points.map(({ step, low, high }) => [step, low, high]), colour, isTwo ? 0.2 : 0.34);
  }

  nearest(chart, event) {
    const step = chart.plot.stepAt(event.clientX - chart.canvas.getBoundingClientRect().left);
    const points = chart.series.find((found) => found.length > 0) ?? [];
    return points.reduce(
      (best, point) => (best === undefined || Math.abs(point.step - step) < Math.abs(best.step - step) ? point : best),
      undefined,
    );
  }

  hover(chart, event) {
    const near = this.nearest(chart, event);
    if (near === undefined) return;
    const pairs = chart.series.flatMap((points, side) => {
      const point = points.find((other) => other.step === near.step);
      const head = chart.series.length > 1 ? [[`run ${"AB"[side]}`, point ? "" : "nothing"]] : [];
      if (point === undefined) return head;
      if (this.picker.chosen.reducer === "norm") return [...head, ["norm", exact(point.middle)]];
      const names = ["mean", "std", "rms", "min", "max", "count", "zeros", "nan", "posinf", "neginf"];
      if (this.picker.chosen.reducer === "norm") {
      say(this.key, "Euclidean norm over all values. A click goes to the step.");
      return;
    }
    const middle = this.what.select.value === "quartiles" ? [
      ["quartiles", [point.low, point.middle, point.high].map(short).join(" | ")]
    ] : [];
      return [...head, ...names.map((name) => [name, exact(point.stats[name])]), ...middle];
    });
    this.app.tooltip.show(`${chart.place.text}, step ${near.step}`, pairs, event);
  }

  canvases() {
    return [...this.charts.values()].map((chart) => ({ title: chart.title.textContent, canvas: chart.canvas }));
  }

  /** All ten numbers per step, and what is made of them. */
  numbers() {
    const { chosen } = this.picker;
    const derived = [
      "mean",
      "std",
      "rms",
      ...(this.what.select.value === "quartiles" ? ["quartile_1", "median", "quartile_3"] : []),
    ];
    const isNorm = chosen?.reducer === "norm";
    const columns = ["run", "step", "phase", "site", ...(isNorm ? ["norm"] : [...STATS, ...derived])];
    if (chosen === undefined) return { columns, rows: [] };
    const rows = [
      ...this.charts.values()
    ].flatMap((chart) => chart.series.flatMap((points, side) => points.map((point) => {
      const { stats, low, middle, high } = point;
      const more = derived.length > 3 ? [low, middle, high] : [];
      const frame = this.app.store.frame(this.app.sides()[side].run, point.step, chosen, chart.place.text);
      const numbers = isNorm ? frame.values : [...frame.values, stats.mean, stats.std, stats.rms, ...more];
      return [this.app.sides()[side].run, point.step, chosen.phase, chart.place.text, ...Array.from(numbers, exact)];
    })));
    return { columns, rows };
  }
}

const inWords = ({ mean, rms, min, max }) =>
  `mean ${short(mean)}, rms ${short(rms)}, from ${short(min)} to ${short(max)}`;

/** A norm drawn as stats are: a line alone. */
function normPoint(step, value) {
  const none = {
    min: NaN,
    max: NaN,
    rms: NaN,
    nan: Number.isNaN(value) ? 1 : 0,
    posinf: value === Infinity ? 1 : 0,
    neginf: 0,
    mean: value,
  };
  return { step, stats: none, low: NaN, middle: value, high: NaN };
}
