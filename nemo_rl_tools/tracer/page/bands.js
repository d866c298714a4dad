/** View: one site over steps, as bands, one small chart per layer. */

import { ChartGrid, roomBelow, spanOf } from "./chart.js";
import { seriesColour } from "./color.js";
import { note, say, setOptions } from "./dom.js";
import { exact, short } from "./format.js";
import { STATS, histogramBins, parseReducer, quantiles, statsOf } from "./reducer.js";
import { View } from "./view.js";

const SMALL_HEIGHT = 168;
const TOLD = ["mean", "std", "rms", "min", "max", "count", "zeros", "nan", "posinf", "neginf"];
const NO_QUARTILES = [NaN, NaN, NaN];

/** Bands over steps. */
export class BandsView extends View {
  constructor(app) {
    super(app, {
      id: "steps",
      title: "Over steps",
      takes: (seen) => seen.reducer === "stats" || seen.reducer === "norm",
      first: ["layer.out", "mlp.out"],
      missing: ["No watch of statistics yet.", "layer.out | stats"],
    });
    [this.layer, this.what] = [this.choice("Layers"), this.choice("Band")];
    this.key = note("");
    this.grid = new ChartGrid(app, (name, step) => this.tell(name, step));
    const toggles = [this.toggle("logarithmic", "isLog", true), this.toggle("same scale", "isShared", true)];
    this.build({ fields: [this.layer.root, this.what.root], toggles }, this.key, this.grid.root);
    this.series = new Map(); // text of the site -> points of each run
  }

  get isNorm() {
    return this.picker.chosen?.reducer === "norm";
  }

  get isQuartiles() {
    return this.what.select.value === "quartiles";
  }

  draw(chosen, places) {
    const histogram = this.histogramOf(chosen);
    const all = { text: "", label: `all ${places.length}` };
    const layer = this.choosePlace(this.layer, [all, ...places], all);
    const bands = [["std", "mean ± standard deviation"]];
    if (histogram) bands.push(["quartiles", "median, quartiles (histogram)"]);
    setOptions(this.what.select, bands, histogram && this.isQuartiles ? "quartiles" : "std");
    this.what.root.hidden = this.isNorm;
    const shown = places.filter((place) => !layer || place.text === layer).map((place) => place.text);
    const sides = this.app.sides();
    const pointsOf = (text) => sides.map((side) => this.pointsOf(side.run, chosen, text, histogram));
    this.series = new Map(shown.map((text) => [text, pointsOf(text)]));
    say(this.key, this.keyText());
    this.paint(shown);
  }

  /** A histogram of the same site that could give quartiles. */
  histogramOf(chosen) {
    const same = (seen) => seen.phase === chosen.phase && seen.kind === chosen.kind && seen.way === chosen.way;
    const isIt = (seen) => same(seen) && parseReducer(seen.reducer).name === "histogram";
    return [...this.app.watchedOf().values()].find(isIt);
  }

  keyText() {
    if (this.isNorm) return "Euclidean norm over all values. Click to go to the step.";
    const [band, line] = this.isQuartiles ? ["quartiles", "median"] : ["mean ± standard deviation", "mean"];
    const isTwo = this.app.sides().length > 1;
    return `${isTwo ? "Thin lines" : "Light band"}: least to most; dark band: ${band}, line: ${line}; dashes: rms` +
      `${isTwo ? "; blue: run A, orange: run B" : ""}. Finite values; NaN and infinities are marked at the foot. ` +
      "Click to go to the step.";
  }

  pointsOf(run, chosen, text, histogram) {
    const bins = this.isQuartiles && histogram ? histogramBins(histogram.reducer) : null;
    return this.framesOf(run, chosen, text).map(([step, frame]) => {
      if (this.isNorm) return { step, stats: {}, middle: frame.values[0], shown: frame.values[0] };
      const stats = (frame.stats ??= statsOf(frame.values));
      let [low, middle, high] = [stats.mean - stats.std, stats.mean, stats.mean + stats.std];
      if (bins) {
        const counts = this.app.store.frame(run, step, { ...histogram, update: chosen.update }, text);
        [low, middle, high] = counts ? quantiles(counts.values, bins.edges, [0.25, 0.5, 0.75]) : NO_QUARTILES;
      }
      const shown = stats.nan > 0 ? NaN : stats.posinf + stats.neginf > 0 ? Infinity : middle;
      return { step, stats, low, middle, high, shown };
    });
  }

  paint(names) {
    this.grid.root.classList.toggle("one", names.length === 1);
    const { all, width } = this.grid.show(names);
    const columns = Math.max(1, Math.round(this.grid.root.clientWidth / (width + 38)));
    const rows = Math.ceil(all.length / columns);
    const room = roomBelow(this.app.main, this.grid.root, 0, 460 * rows) / rows;
    const height = Math.max(SMALL_HEIGHT, Math.min(names.length === 1 ? 460 : 240, room - 44));
    const drawn = names.map((name) => this.linesOf(this.series.get(name)));
    const span = this.isShared ? spanOf(drawn.flatMap(({ lines }) => lines), this.isLog) : undefined;
    all.forEach(({ chart }, i) => {
      const last = this.series.get(names[i])[0]?.at(-1);
      const text = last ? `${names[i]} at step ${last.step}: ${inWords(last.stats)}` : names[i];
      chart.set({ ...drawn[i], isLog: this.isLog, span, width, height, text });
    });
  }

  /** Of one run the outer band is filled; of two it is two lines, so that both are seen. */
  linesOf(series) {
    const isTwo = series.length > 1;
    const [lines, bands] = [[], []];
    series.forEach((points, side) => {
      const line = (value, width, more) => lines.push({
        points: points.map((point) => [point.step, value(point)]),
        colour: seriesColour(side),
        width,
        ...more,
      }) - 1;
      const finite = (value) => (Number.isFinite(value) ? value : null);
      const [most, least] = ["max", "min"].map((name) => line(({ stats }) => finite(stats[name]), isTwo ? 0.7 : 0));
      const [high, low] = ["high", "low"].map((name) => line((point) => finite(point[name]), 0));
      bands.push(...(isTwo ? [] : [[most, least, "29"]]), [high, low, isTwo ? "33" : "57"]);
      line(({ stats }) => finite(stats.rms), 1, { dash: [3, 3] });
      line(({ shown }) => shown, 1.8, { isInner: !this.isNorm });
    });
    return { lines, bands };
  }

  tell(name, step) {
    const pairs = this.series.get(name).flatMap((points, side) => {
      const point = points.find((other) => other.step === step);
      const head = this.sideName(side) ? [[this.sideName(side), point ? "" : "nothing"]] : [];
      if (point === undefined) return head;
      if (this.isNorm) return [...head, ["norm", exact(point.middle)]];
      const { stats, low, middle, high } = point;
      const quartiles = this.isQuartiles ? [["quartiles", [low, middle, high].map(short).join(" | ")]] : [];
      return [...head, ...TOLD.map((word) => [word, exact(stats[word])]), ...quartiles];
    });
    return [`${name}, step ${step}`, pairs];
  }

  canvases() {
    return this.grid.canvases();
  }

  /** All ten numbers per step, and what is made of them. */
  numbers() {
    const { chosen } = this.picker;
    const quartiles = this.isQuartiles ? ["quartile_1", "median", "quartile_3"] : [];
    const names = this.isNorm ? ["norm"] : [...STATS, "mean", "std", "rms", ...quartiles];
    const rows = [...(chosen ? this.series : [])].flatMap(([text, series]) => series.flatMap((points, side) => points.map((point) => {
      const { run } = this.app.sides()[side];
      const { stats, low, middle, high, step } = point;
      const { values } = this.app.store.frame(run, step, chosen, text);
      const more = this.isNorm ? [] : [stats.mean, stats.std, stats.rms, ...(this.isQuartiles ? [low, middle, high] : [])];
      return [run, step, chosen.phase, text, ...Array.from(values, exact), ...more.map(exact)];
    })));
    return { columns: ["run", "step", "phase", "site", ...names], rows };
  }
}

const inWords = ({ mean, rms, min, max }) =>
  `mean ${short(mean)}, rms ${short(rms)}, from ${short(min)} to ${short(max)}`;
