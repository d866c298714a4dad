/** View: load of experts: how many tokens each got in each layer, and how even that is over steps. */

import { colours, inkOn, lineColour, scaleOf, seriesColour } from "./color.js";
import { FONT, Plot, fit, hatch, ink, roomBelow } from "./chart.js";
import { h, say, toggle } from "./dom.js";
import { exact, short, whole } from "./format.js";
import { drawLegend } from "./heat_pane.js";
import { Picker, placesOf } from "./picker.js";
import { evenness } from "./reducer.js";

const LEFT = 66;
const TOP = 24;
const RIGHT = 76;

/** Loads as a heat map and their evenness as lines. */
export class ExpertsView {
  constructor(app) {
    this.app = app;
    this.id = "experts";
    this.title = "Experts";
    this.picker = new Picker((seen) => seen.reducer === "counts", () => app.changed(), ["moe.topk_ids"]);
    this.isCount = false;
    const counts = toggle("tokens instead of shares", false, (isOn) => {
      this.isCount = isOn;
      app.changed();
    });
    this.tools = h("div", { className: "tools" }, this.picker.root, h("div", { className: "toggles" }, counts));
    this.nothing = h("div");
    this.sides = [0, 1].map((side) => this.makeSide(side));
    this.legend = h("canvas", { className: "legend", role: "img", "aria-label": "Legend of the colours" });
    this.lineTitle = h(
      "h2",
      { className: "pane-title", textContent: "Evenness of the load over steps (entropy, 1 is even)" },
    );
    this.lines = h("canvas", { role: "img", "aria-label": "Evenness of the load over steps" });
    this.lines.addEventListener("pointermove", (event) => this.hoverLines(event));
    this.lines.addEventListener("pointerleave", () => app.tooltip.hide());
    this.lines.addEventListener("click", (event) => app.time.go(this.stepAt(event)));
    this.body = h("div", {}, h("div", { className: "pair" }, ...this.sides.map((side) => side.root)), this.legend,
      h("section", { className: "pane" }, this.lineTitle, this.lines));
    this.root = h("div", { className: "view" }, this.tools, this.nothing, this.body);
  }

  makeSide(side) {
    const title = h("h2", { className: "pane-title" });
    const canvas = h("canvas", { role: "img" });
    canvas.addEventListener("pointermove", (event) => this.hover(side, event));
    canvas.addEventListener("pointerleave", () => this.app.tooltip.hide());
    return { title, canvas, root: h("section", { className: "pane" }, title, canvas) };
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
        this.app.nothingYet("The load of experts is not watched, or the model has none.", "moe.topk_ids | counts")
      );
      return;
    }
    this.places = placesOf(chosen);
    this.collect(chosen);
    this.loads = this.app.sides().map(
      (side) => this.places.map((place) => this.app.store.frame(side.run, side.step, chosen, place.text))
    );
    const shown = this.loads.flat().filter(Boolean).flatMap((frame) => this.shown(frame));
    this.scale = this.isCount ? scaleOf(shown, { kind: "linear", isSigned: false }) : shareScale(shown);
    // Before anything is measured: what is hidden gives its room to the other.
    this.sides.forEach((side, i) => (side.root.hidden = i >= this.loads.length));
    this.sides.forEach((side, i) => this.paintSide(side, i));
    const ends = this.isCount ? undefined : ["0", "even", `${short(this.scale.most)}×`];
    const missing = this.loads.flat().includes(undefined);
    drawLegend(this.legend, this.scale, { missing, ends }, Math.min(520, this.body.clientWidth - 24), 34);
    this.paintLines();
  }

  /** Evenness per side, layer and step; the number of experts is the longest count seen. */
  collect(chosen) {
    const { store } = this.app;
    const frames = this.app.sides().map(({ run }) => this.places.map((place) => store.run(run).stepList
      .map((step) => [step, store.frame(run, step, chosen, place.text)]).filter(([, frame]) => frame !== undefined)));
    this.experts = Math.max(1, ...frames.flat(2).map(([, frame]) => frame.values.length));
    this.even = frames.map(
      (layers) => layers.map((points) => points.map(([step, frame]) => [step, evenness(frame.values, this.experts)]))
    );
  }

  /** Loads of a layer: as counts, or as multiples of an even load. */
  shown(frame) {
    const counts = Array.from({ length: this.experts }, (_, i) => Number(frame.values[i] ?? 0));
    if (this.isCount) return counts;
    const total = counts.reduce((sum, count) => sum + count, 0);
    return counts.map((count) => (total > 0 ? (count / total) * this.experts : NaN));
  }

  paintSide(side, i) {
    if (side.root.hidden) return;
    const layers = this.loads[i];
    say(
      side.title,
      `${this.app.sideText(i)}  ·  ${this.isCount ? "tokens per expert" : "share of each expert, 1 is an even share"}`,
    );
    const width = side.root.clientWidth - 26;
    const cell = Math.max(4, (width - LEFT - RIGHT) / this.experts);
    const deep = Math.max(14, Math.min(30, 200 / layers.length));
    const height = TOP + deep * layers.length + 6;
    const context = fit(side.canvas, width, height);
    side.at = { cell, deep };
    context.textBaseline = "middle";
    layers.forEach((frame, row) => this.paintRow(context, frame, row, side.at, width));
    context.fillStyle = ink("muted");
    context.textAlign = "center";
    const each = Math.ceil(26 / cell);
    for (let expert = 0; expert < this.experts; expert += each) context.fillText(
      String(expert),
      LEFT + (expert + 0.5) * cell,
      TOP - 12,
    );
    context.textAlign = "right";
    context.fillText("evenness", width - 4, TOP - 12);
    side.canvas.setAttribute(
      "aria-label",
      `Load of ${this.experts} experts in ${layers.length} layers, ${this.app.sideText(i)}`,
    );
  }

  paintRow(context, frame, row, { cell, deep }, width) {
    const y = TOP + row * deep;
    context.font = FONT;
    context.fillStyle = ink("muted");
    context.textAlign = "right";
    context.fillText(this.places[row].label, LEFT - 8, y + deep / 2);
    if (frame === undefined) {
      hatch(context, LEFT, y, cell * this.experts, deep - 1);
      return;
    }
    const table = colours(this.scale.isDiverging);
    this.shown(frame).forEach((value, expert) => {
      const colour = Number.isFinite(value) ? table[Math.round(255 * this.scale.place(value))] : ink("line");
      context.fillStyle = colour;
      context.fillRect(LEFT + expert * cell, y, cell - (cell > 6 ? 1 : 0), deep - 1);
      if (cell < 40 || !Number.isFinite(value)) return;
      context.fillStyle = inkOn(colour);
      context.textAlign = "center";
      context.fillText(this.isCount ? whole(value) : value.toFixed(2), LEFT + (expert + 0.5) * cell, y + deep / 2);
    });
    context.fillStyle = ink("text");
    context.textAlign = "right";
    context.fillText(evenness(frame.values, this.experts).toFixed(4), width - 4, y + deep / 2);
  }

  paintLines() {
    const width = this.body.clientWidth - 26;
    const height = roomBelow(this.app.main, this.lines, 150, 340);
    const context = fit(this.lines, width, height);
    const points = this.even.flat(2);
    if (points.length === 0) return;
    const steps = points.map(([step]) => step);
    const box = { left: 52, top: 8, right: width - RIGHT, bottom: height - 22 };
    this.plot = new Plot(
      context,
      box,
      [Math.min(...steps), Math.max(...steps)],
      points.map(([, value]) => value),
      false,
    );
    this.plot.axes();
    this.even.forEach((layers, side) => layers.forEach((line, row) => {
      const colour = this.even.length > 1 ? seriesColour(side) : lineColour(row, layers.length);
      this.plot.line(line, colour, 1.6, side === 1 ? [4, 3] : []);
    }));
    const ends = this.even[0].map((line, row) => [row, line.at(-1)?.[1]]).filter(([, value]) => Number.isFinite(value));
    context.textAlign = "left";
    context.textBaseline = "middle";
    ends.sort((a, b) => b[1] - a[1]);
    let last = -Infinity;
    for (const [i, [row, value]] of ends.entries()) {
      // Names do not overlap, and those below still have room.
      const lowest = box.bottom - 12 * (ends.length - 1 - i);
      const y = (last = Math.max(Math.min(this.plot.y(value), lowest), last + 12));
      context.fillStyle = this.even.length > 1 ? ink("muted") : lineColour(row, this.places.length);
      context.fillText(this.places[row].label, width - RIGHT + 8, y);
    }
    this.plot.cursor(this.app.step, this.app.marks);
  }

  stepAt(event) {
    const near = this.plot.stepAt(event.clientX - this.lines.getBoundingClientRect().left);
    const steps = [...new Set(this.even.flat(2).map(([step]) => step))];
    return steps.reduce((best, step) => (Math.abs(step - near) < Math.abs(best - near) ? step : best), steps[0]);
  }

  hoverLines(event) {
    if (!this.plot) return;
    const step = this.stepAt(event);
    const pairs = this.even.flatMap((layers, side) => layers.map((line, row) => {
      const name = `${this.even.length > 1 ? `${"AB"[side]} ` : ""}${this.places[row].label}`;
      return [name, exact(line.find(([at]) => at === step)?.[1] ?? "nothing")];
    }));
    this.app.tooltip.show(`step ${step}`, pairs, event);
  }

  hover(i, event) {
    const { at, canvas } = this.sides[i];
    const box = canvas.getBoundingClientRect();
    const expert = Math.floor((event.clientX - box.left - LEFT) / at.cell);
    const row = Math.floor((event.clientY - box.top - TOP) / at.deep);
    const frame = this.loads[i][row];
    if (frame === undefined || expert < 0 || expert >= this.experts) {
      this.app.tooltip.hide();
      return;
    }
    const count = frame.values[expert] ?? 0n;
    const total = Array.from(frame.values, Number).reduce((sum, number) => sum + number, 0);
    const share = total > 0 ? Number(count) / total : NaN;
    this.app.tooltip.show(`${this.places[row].text}, expert ${expert}`,
      [["tokens", exact(count)], ["share", exact(share)], ["of an even share", short(share * this.experts)]], event);
  }

  canvases() {
    const maps = this.sides.filter((side) => !side.root.hidden).map(
      (side) => ({ title: side.title.textContent, canvas: side.canvas })
    );
    return [...maps, { title: "", canvas: this.legend }, { title: this.lineTitle.textContent, canvas: this.lines }];
  }

  /** Counts per expert and layer of the step. */
  numbers() {
    const columns = ["run", "step", "phase", "site", "expert", "tokens", "evenness_of_layer"];
    const rows = (this.loads ?? []).flatMap((layers, side) => layers.flatMap((frame, row) => {
      if (frame === undefined) return [];
      const { run, step } = this.app.sides()[side];
      const even = exact(evenness(frame.values, this.experts));
      return Array.from(
        { length: this.experts },
        (_, expert) => [
          run,
          step,
          this.picker.chosen.phase,
          this.places[row].text,
          expert,
          exact(frame.values[expert] ?? 0n),
          even,
        ],
      );
    }));
    return { columns, rows };
  }
}

/** Even loads in the middle; below and above reach as far as the largest. */
function shareScale(shares) {
  const most = Math.max(1.5, ...shares.filter(Number.isFinite));
  const place = (share) => (share <= 1 ? share / 2 : 0.5 + (share - 1) / (2 * (most - 1)));
  return { most, isDiverging: true, place, value: (at) => (at <= 0.5 ? at * 2 : 1 + (at - 0.5) * 2 * (most - 1)) };
}
