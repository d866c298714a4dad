/** View: the histogram of a site at a step, and all of them over steps. */

import { Chart, extremes, fit, ink, roomBelow, write } from "./chart.js";
import { colours, seriesColour } from "./color.js";
import { h, pane, paneTitle, say } from "./dom.js";
import { exact, short, tick, whole } from "./format.js";
import { histogramBins, parseReducer } from "./reducer.js";
import { View } from "./view.js";

const BOX = { left: 64, top: 6, right: 14, bottom: 22 };
const LEAST_SHARE = 0.005; // of the highest bar: a lower one would not be seen
const BESIDE = 2; // empty bins kept beside those with counts
const IN_THE_MIDDLE = 0.002; // of all values may be drawn as one bin around zero

/** Bars of one step above a map over all steps. */
export class HistogramView extends View {
  constructor(app) {
    super(app, {
      id: "histogram",
      title: "Histogram",
      takes: (seen) => parseReducer(seen.reducer).name === "histogram",
      first: ["layer.out", "mlp.out"],
      missing: ["No watch of a histogram yet.", "layer.out | histogram | train"],
    });
    this.place = this.choice("Layer");
    [this.barTitle, this.mapTitle] = [paneTitle(), paneTitle()];
    this.bars = new Chart(app, (at) => this.tell(this.groups[at]));
    this.map = h("canvas", { role: "img", onclick: (event) => this.goto(event) });
    this.build(
      { fields: [this.place.root], toggles: [this.toggle("logarithmic counts", "isLog")] },
      pane(this.barTitle, this.bars.root),
      pane(this.mapTitle, this.map),
    );
  }

  draw(chosen, places) {
    this.site = this.choosePlace(this.place, places, places[Math.floor(places.length / 2)]);
    this.bins = histogramBins(chosen.reducer);
    this.width = this.root.clientWidth - 26;
    this.collect(chosen);
    this.paintBars(chosen);
    this.paintMap();
  }

  /** Counts of both runs at the step, of run A at all steps, and the bins that have any. */
  collect(chosen) {
    const numbers = (frame) => Array.from(frame.values, Number);
    const sides = this.app.sides();
    this.now = sides.map((side) => this.app.store.frame(side.run, side.step, chosen, this.site));
    this.history = this.framesOf(sides[0].run, chosen, this.site).map(([step, frame]) => [step, numbers(frame)]);
    const all = [...this.history.map(([, counts]) => counts), ...this.now.filter(Boolean).map(numbers)];
    this.groups = groupsOf(all, this.bins);
    this.history = this.history.map(([step, counts]) => [step, this.groups.map((group) => sumOf(counts, group))]);
  }

  /** The number below a group of bins. */
  edgeOf(at) {
    const group = this.groups[at];
    return group ? edgeText(this.bins.edges[group.first], this.bins.isLinear) : "";
  }

  paintBars(chosen) {
    const sides = this.now.map((_, i) => this.app.sideText(i)).join("  and  ");
    const none = this.now[0] === undefined ? "  ·  nothing at this step" : "";
    say(this.barTitle, `${sides}  ·  ${chosen.phase}  ·  ${this.site}  ·  ${chosen.reducer}${none}`);
    const counts = this.now.map((frame) => this.groups.map((group) => (frame ? sumOf(frame.values, group) : 0)));
    const least = this.isLog ? 0 : LEAST_SHARE * Math.max(...counts.flat());
    const share = 1 / counts.length;
    this.bars.set({
      lines: counts.map((numbers, side) => ({
        points: numbers.map((count, at) => [at + side * share, count && Math.max(count, least)]),
        colour: seriesColour(side),
        bars: [share, 1],
      })),
      labels: (at) => this.edgeOf(at),
      isLog: this.isLog,
      width: this.width,
      height: Math.max(200, Math.min(340, this.app.main.clientHeight * 0.38)),
      text: `Histogram of ${this.site} at step ${this.app.step}`,
    });
  }

  paintMap() {
    say(this.mapTitle, "Run A over steps: logarithm of counts, from dark to light; values upwards");
    const { width, history, groups } = this;
    const height = roomBelow(this.app.main, this.map, 150, 360);
    const context = fit(this.map, width, height);
    if (history.length === 0) return;
    const [right, bottom] = [width - BOX.right, height - BOX.bottom];
    const [across, down] = [(right - BOX.left) / history.length, (bottom - BOX.top) / groups.length];
    const x = (i) => BOX.left + i * across;
    const most = Math.log1p(Math.max(1, extremes(history.flatMap(([, counts]) => counts))[1]));
    const shades = colours(false);
    history.forEach(([, counts], i) => counts.forEach((count, at) => {
      if (count === 0) return;
      context.fillStyle = shades[Math.round((255 * Math.log1p(count)) / most)];
      context.fillRect(x(i), bottom - (at + 1) * down, across + 0.5, down + 0.5);
    }));
    const each = Math.max(1, Math.ceil(16 / down));
    for (let at = 1; at < groups.length; at += each) {
      write(context, this.edgeOf(at), BOX.left - 8, bottom - at * down, { align: "right" });
    }
    const steps = Math.max(1, Math.ceil(50 / across));
    history.forEach(([step], i) => {
      if (i % steps === 0) write(context, String(step), x(i + 0.5), bottom + 6, { align: "center", base: "top" });
    });
    const at = history.findIndex(([step]) => step === this.app.step);
    if (at < 0) return;
    [context.strokeStyle, context.lineWidth] = [ink("accent"), 2];
    context.strokeRect(x(at), BOX.top, across, bottom - BOX.top);
  }

  goto(event) {
    const x = event.clientX - this.map.getBoundingClientRect().left - BOX.left;
    const at = Math.floor((x / (this.width - BOX.left - BOX.right)) * this.history.length);
    this.app.time.go(this.history[at]?.[0]);
  }

  tell(group) {
    if (group === undefined) return undefined;
    const [low, high] = [group.first, group.last + 1].map((bin) => edgeText(this.bins.edges[bin], this.bins.isLinear));
    const pairs = this.now.flatMap((frame, side) => {
      if (frame === undefined) return [];
      const total = sumOf(frame.values, { first: 0, last: frame.values.length - 1 });
      const count = sumOf(frame.values, group);
      return [[this.sideName(side, "values"), whole(count)], ["share", short(count / total)]];
    });
    return [`${low} to ${high}`, pairs];
  }

  canvases() {
    return [[this.barTitle, this.bars.canvas], [this.mapTitle, this.map]].map(([{ textContent }, canvas]) => ({ title: textContent, canvas }));
  }

  /** Counts of every bin of the step. */
  numbers() {
    const columns = ["run", "step", "phase", "site", "reducer", "low", "high", "count"];
    const rows = (this.now ?? []).flatMap((frame, side) => {
      const { run, step } = this.app.sides()[side];
      const { phase, reducer } = this.picker.chosen;
      const start = [run, step, phase, this.site, reducer];
      const ends = (bin) => [this.bins.edges[bin], this.bins.edges[bin + 1]].map(exact);
      return Array.from(frame?.values ?? [], (count, bin) => [...start, ...ends(bin), exact(count)]);
    });
    return { columns, rows };
  }
}

/**
 * Groups of bins, each drawn as one bar: all bins between the ends that have counts; around zero those that hold next
 * to nothing are one bar.
 * @param {number[][]} all counts of every step
 * @param {{edges: number[], isLinear: boolean}} bins
 * @returns {Array<{first: number, last: number}>}
 */
function groupsOf(all, bins) {
  const size = bins.edges.length - 1;
  const sums = new Float64Array(size);
  for (const counts of all) counts.forEach((count, bin) => (sums[bin] += count));
  const used = sums.findIndex((sum) => sum > 0);
  const last = sums.findLastIndex((sum) => sum > 0);
  const from = Math.max(0, (used < 0 ? 0 : used) - BESIDE);
  const to = Math.min(size - 1, (last < 0 ? size - 1 : last) + BESIDE);
  const middle = bins.isLinear ? -1 : middleWidth(sums);
  const centre = (size - 1) / 2;
  const groups = [];
  for (let bin = from; bin <= to; bin++) {
    if (Math.abs(bin - centre) > middle) groups.push({ first: bin, last: bin });
    else if (groups.at(-1)?.isMiddle) groups.at(-1).last = bin;
    else groups.push({ first: bin, last: bin, isMiddle: true });
  }
  return groups;
}

function middleWidth(sums) {
  const centre = (sums.length - 1) / 2;
  const allowed = IN_THE_MIDDLE * sums.reduce((sum, count) => sum + count, 0);
  let [width, held] = [0, sums[centre]];
  while (width + 1 < centre && held + sums[centre - width - 1] + sums[centre + width + 1] <= allowed) {
    width += 1;
    held += sums[centre - width] + sums[centre + width];
  }
  return held <= allowed ? width : 0;
}

/** Counts of a group. */
function sumOf(counts, { first, last }) {
  let sum = 0;
  for (let bin = first; bin <= last; bin++) sum += Number(counts[bin]);
  return sum;
}

/** A number at the edge of a bin; powers of two are written as such. */
function edgeText(value, isLinear) {
  if (!Number.isFinite(value)) return value > 0 ? "+∞" : "−∞";
  if (isLinear || value === 0) return tick(value);
  const power = String(Math.round(Math.log2(Math.abs(value))));
  return `${value < 0 ? "−" : ""}2${power.replace(/./g, (digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)])}`;
}
