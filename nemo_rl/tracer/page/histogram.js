/** View: the histogram of a site at a step, and all of them over steps. */

import { colours, seriesColour } from "./color.js";
import { Plot, extremes, fit, ink, roomBelow, stroke } from "./chart.js";
import { choice, h, say, setOptions, toggle } from "./dom.js";
import { exact, short, whole } from "./format.js";
import { Picker, placesOf } from "./picker.js";
import { edgeText, groupsOf, sumOf } from "./histogram_bins.js";
import { histogramBins, parseReducer } from "./reducer.js";

const BOX = { left: 64, top: 10, right: 14, bottom: 26 };

/** Bars of one step above a map over all steps. */
export class HistogramView {
  constructor(app) {
    this.app = app;
    this.id = "histogram";
    this.title = "Histogram";
    this.picker = new Picker(
      (seen) => parseReducer(seen.reducer).name === "histogram",
      () => app.changed(),
      ["layer.out", "mlp.out"],
    );
    this.place = choice("Layer", () => app.changed());
    this.isLog = false;
    const log = toggle("logarithmic counts", false, (isOn) => {
      this.isLog = isOn;
      app.changed();
    });
    this.tools = h("div", { className: "tools" }, this.picker.root,
      h("div", { className: "fields" }, this.place.root), h("div", { className: "toggles" }, log));
    this.nothing = h("div");
    this.barTitle = h("h2", { className: "pane-title" });
    this.bars = h("canvas", { role: "img" });
    this.bars.addEventListener("pointermove", (event) => this.hover(event));
    this.bars.addEventListener("pointerleave", () => app.tooltip.hide());
    this.mapTitle = h("h2", { className: "pane-title" });
    this.map = h("canvas", { role: "img" });
    this.map.addEventListener("click", (event) => this.goto(event));
    this.body = h("div", {}, h("section", { className: "pane" }, this.barTitle, this.bars),
      h("section", { className: "pane" }, this.mapTitle, this.map));
    this.root = h("div", { className: "view" }, this.tools, this.nothing, this.body);
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
    this.body.hidden = chosen === undefined;
    this.nothing.replaceChildren();
    if (chosen === undefined) {
      this.nothing.replaceChildren(
        this.app.nothingYet("No histogram is watched yet.", "layer.out | histogram | train")
      );
      return;
    }
    const places = placesOf(chosen);
    const wanted = this.place.select.value;
    const middle = places[Math.floor(places.length / 2)].text;
    setOptions(
      this.place.select,
      places.map((place) => [place.text, place.label]),
      places.some((place) => place.text === wanted) ? wanted : middle,
    );
    this.bins = histogramBins(chosen.reducer);
    this.collect(chosen);
    this.paintBars(chosen);
    this.paintMap();
  }

  /** Counts of both runs at the step, of run A at all steps, and the bins that have any. */
  collect(chosen) {
    const { store } = this.app;
    const text = this.place.select.value;
    this.now = this.app.sides().map((side) => store.frame(side.run, side.step, chosen, text));
    const [first] = this.app.sides();
    this.history = store.run(first.run).stepList.map((step) => [step, store.frame(first.run, step, chosen, text)])
      .filter(([, frame]) => frame !== undefined).map(([step, frame]) => [step, Array.from(frame.values, Number)]);
    const used = [
      ...this.history.map(([, counts]) => counts),
      ...this.now.filter(Boolean).map((frame) => Array.from(frame.values, Number)),
    ];
    this.groups = groupsOf(used, this.bins);
    this.history = this.history.map(([step, counts]) => [step, this.groups.map((group) => sumOf(counts, group))]);
  }

  groupText({ first, last }) {
    const [low, high] = [this.bins.edges[first], this.bins.edges[last + 1]];
    return `${edgeText(low, this.bins.isLinear)} to ${edgeText(high, this.bins.isLinear)}`;
  }

  paintBars(chosen) {
    const width = this.body.clientWidth - 26;
    const height = Math.max(200, Math.min(340, this.app.main.clientHeight * 0.38));
    const context = fit(this.bars, width, height);
    const names = this.app.sides().map((_, i) => this.app.sideText(i)).join("  and  ");
    const none = this.now[0] === undefined ? "  ·  nothing at this step" : "";
    say(this.barTitle, `${names}  ·  ${chosen.phase}  ·  ${this.place.select.value}  ·  ${chosen.reducer}${none}`);
    const counts = this.now.map((frame) => (frame ? this.groups.map((group) => sumOf(frame.values, group)) : []));
    const most = Math.max(1, ...counts.flat());
    const plot = new Plot(
      context,
      { left: BOX.left, top: BOX.top, right: width - BOX.right, bottom: height - BOX.bottom },
      [0, 1],
      [0, most],
      this.isLog,
    );
    this.plot = plot;
    plot.axes();
    context.clearRect(BOX.left - 8, height - BOX.bottom + 2, width, BOX.bottom);
    const size = (plot.box.right - plot.box.left) / this.groups.length;
    counts.forEach((numbers, side) => numbers.forEach((count, i) => {
      const share = counts.length > 1 ? 0.5 : 1;
      context.fillStyle = seriesColour(side);
      const [y, foot] = [plot.y(count), plot.y(0)];
      context.fillRect(
        plot.box.left + i * size + side * size * 0.5,
        count > 0 ? Math.min(y, foot - 1) : foot,
        Math.max(1, size * share - 1),
        Math.max(count > 0 ? 1 : 0, foot - y),
      );
    }));
    this.binLabels(context, plot, size, height);
    this.bars.setAttribute("aria-label", `Histogram of ${this.place.select.value} at step ${this.app.step}`);
  }

  binLabels(context, plot, size, height) {
    context.fillStyle = ink("muted");
    context.strokeStyle = ink("muted");
    context.lineWidth = 1;
    context.textAlign = "center";
    context.textBaseline = "top";
    const each = Math.max(1, Math.ceil(44 / size));
    for (let at = 1; at < this.groups.length; at += each) {
      const x = plot.box.left + at * size;
      stroke(context, [[x, plot.box.bottom], [x, plot.box.bottom + 4]]);
      context.fillText(
        edgeText(this.bins.edges[this.groups[at].first], this.bins.isLinear),
        x,
        height - BOX.bottom + 8,
      );
    }
  }

  paintMap() {
    say(this.mapTitle, "Run A over steps: logarithm of counts, from dark to light; values upwards");
    const width = this.body.clientWidth - 26;
    const bins = this.groups.length;
    const height = roomBelow(this.app.main, this.map, 150, 360);
    const context = fit(this.map, width, height);
    if (this.history.length === 0) return;
    const box = { left: BOX.left, top: 6, right: width - BOX.right, bottom: height - 22 };
    this.mapBox = box;
    const [across, down] = [(box.right - box.left) / this.history.length, (box.bottom - box.top) / bins];
    const most = Math.log1p(Math.max(1, extremes(this.history.flatMap(([, counts]) => counts))[1]));
    const table = colours(false);
    this.history.forEach(([, counts], i) => {
      counts.forEach((count, at) => {
        if (count === 0) return;
        context.fillStyle = table[Math.round((255 * Math.log1p(count)) / most)];
        context.fillRect(box.left + i * across, box.bottom - (at + 1) * down, across + 0.5, down + 0.5);
      });
    });
    this.mapLabels(context, box, across, down);
  }

  mapLabels(context, box, across, down) {
    context.fillStyle = ink("muted");
    context.textBaseline = "middle";
    context.textAlign = "right";
    const each = Math.max(1, Math.ceil(16 / down));
    for (let at = 1; at < this.groups.length; at += each) {
      context.fillText(
        edgeText(this.bins.edges[this.groups[at].first], this.bins.isLinear),
        box.left - 8,
        box.bottom - at * down,
      );
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const steps = Math.max(1, Math.ceil(50 / across));
    this.history.forEach(([step], i) => {
      if (i % steps === 0) context.fillText(String(step), box.left + (i + 0.5) * across, box.bottom + 6);
    });
    const at = this.history.findIndex(([step]) => step === this.app.step);
    if (at < 0) return;
    context.strokeStyle = ink("accent");
    context.lineWidth = 2;
    context.strokeRect(box.left + at * across, box.top, across, box.bottom - box.top);
  }

  goto(event) {
    const x = event.clientX - this.map.getBoundingClientRect().left - this.mapBox.left;
    const at = Math.floor((x / (this.mapBox.right - this.mapBox.left)) * this.history.length);
    this.app.time.go(this.history[at]?.[0]);
  }

  hover(event) {
    if (!this.plot) return;
    const { left, right } = this.plot.box;
    const x = event.clientX - this.bars.getBoundingClientRect().left;
    const group = this.groups[Math.floor(((x - left) / (right - left)) * this.groups.length)];
    if (group === undefined) return;
    const pairs = this.now.flatMap((frame, side) => {
      if (frame === undefined) return [];
      const total = Array.from(frame.values, Number).reduce((sum, number) => sum + number, 0);
      const name = this.now.length > 1 ? `run ${"AB"[side]}` : "values";
      const count = sumOf(frame.values, group);
      return [[name, whole(count)], ["share", short(count / total)]];
    });
    this.app.tooltip.show(this.groupText(group), pairs, event);
  }

  canvases() {
    return [
      { title: this.barTitle.textContent, canvas: this.bars },
      { title: this.mapTitle.textContent, canvas: this.map },
    ];
  }

  /** Counts of every bin of the step. */
  numbers() {
    const columns = ["run", "step", "phase", "site", "reducer", "low", "high", "count"];
    const rows = (this.now ?? []).flatMap((frame, side) => {
      if (frame === undefined) return [];
      const { run, step } = this.app.sides()[side];
      const { phase, reducer } = this.picker.chosen;
      const { edges } = this.bins;
      return Array.from(
        frame.values,
        (count, bin) => [
          run,
          step,
          phase,
          this.place.select.value,
          reducer,
          exact(edges[bin]),
          exact(edges[bin + 1]),
          exact(count),
        ],
      );
    });
    return { columns, rows };
  }
}
