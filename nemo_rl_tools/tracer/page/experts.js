/** View: load of experts: how many tokens each got in each layer, and how even that is over steps. */

import { Chart, FONT, fit, hatch, ink, roomBelow, valueAt, write } from "./chart.js";
import { colours, inkOn, lineColour, scaleOf, seriesColour } from "./color.js";
import { h, pane, paneTitle, say } from "./dom.js";
import { exact, short, whole } from "./format.js";
import { drawLegend } from "./heat_pane.js";
import { evenness } from "./reducer.js";
import { View } from "./view.js";

const LEFT = 66;
const TOP = 24;
const RIGHT = 76;
const EVENNESS = "Evenness of the load over steps (entropy, 1 is even)";

/** Loads as a heat map and their evenness as lines. */
export class ExpertsView extends View {
  constructor(app) {
    super(app, {
      id: "experts",
      title: "Experts",
      takes: (seen) => seen.reducer === "counts",
      first: ["moe.topk_ids"],
      missing: ["No watch of the load of experts, or the model has no experts.", "moe.topk_ids | counts"],
    });
    this.sides = [0, 1].map((side) => {
      const title = paneTitle();
      const canvas = h("canvas", { role: "img", onpointermove: (event) => this.hover(side, event) });
      canvas.addEventListener("pointerleave", () => app.tooltip.hide());
      return { title, canvas, root: pane(title, canvas) };
    });
    this.legend = h("canvas", { className: "legend", role: "img", "aria-label": "Legend of the colours" });
    this.lines = new Chart(app, (step) => this.tell(step));
    this.body = h(
      "div",
      {},
      h("div", { className: "pair" }, ...this.sides.map((side) => side.root)),
      this.legend,
      pane(EVENNESS, this.lines.root),
    );
    this.build({ toggles: [this.toggle("tokens instead of shares", "isCount")] }, this.body);
  }

  draw(chosen, places) {
    this.places = places;
    this.collect(chosen);
    const shown = this.loads.flat().filter(Boolean).flatMap((frame) => this.loadOf(frame));
    this.scale = this.isCount ? scaleOf(shown, { kind: "linear", isSigned: false }) : shareScale(shown);
    // Before anything is measured: what is hidden gives its room to the other.
    this.sides.forEach((side, i) => (side.root.hidden = i >= this.loads.length));
    this.loads.forEach((_, i) => this.paintSide(i));
    const ends = this.isCount ? undefined : ["0", "even", `${short(this.scale.most)}×`];
    const missing = this.loads.flat().includes(undefined);
    drawLegend(this.legend, this.scale, { missing, ends }, Math.min(520, this.body.clientWidth - 24), 34);
    this.paintLines();
  }

  /** Loads at the step, and evenness per side, layer and step; the number of experts is the longest count seen. */
  collect(chosen) {
    const sides = this.app.sides();
    const frames = sides.map(({ run }) => this.places.map((place) => this.framesOf(run, chosen, place.text)));
    this.experts = Math.max(1, ...frames.flat(2).map(([, frame]) => frame.values.length));
    const evenOf = (points) => points.map(([step, frame]) => [step, evenness(frame.values, this.experts)]);
    this.even = frames.map((layers) => layers.map(evenOf));
    this.loads = frames.map((layers, i) => layers.map((points) => valueAt(points, sides[i].step)));
  }

  /** Loads of a layer: as counts, or as multiples of an even load. */
  loadOf(frame) {
    const counts = Array.from({ length: this.experts }, (_, i) => Number(frame.values[i] ?? 0));
    if (this.isCount) return counts;
    const total = counts.reduce((sum, count) => sum + count, 0);
    return counts.map((count) => (total > 0 ? (count / total) * this.experts : NaN));
  }

  paintSide(i) {
    const [side, layers] = [this.sides[i], this.loads[i]];
    const what = this.isCount ? "tokens per expert" : "share of each expert, 1 is an even share";
    say(side.title, `${this.app.sideText(i)}  ·  ${what}`);
    const width = side.root.clientWidth - 26;
    const cell = Math.max(4, (width - LEFT - RIGHT) / this.experts);
    const deep = Math.max(14, Math.min(30, 200 / layers.length));
    const context = fit(side.canvas, width, TOP + deep * layers.length + 6);
    side.at = { cell, deep };
    layers.forEach((frame, row) => this.paintRow(context, frame, row, side.at, width));
    for (let expert = 0; expert < this.experts; expert += Math.ceil(26 / cell)) {
      write(context, String(expert), LEFT + (expert + 0.5) * cell, TOP - 12, { align: "center" });
    }
    write(context, "evenness", width - 4, TOP - 12, { align: "right" });
    const text = `Load of ${this.experts} experts in ${layers.length} layers, ${this.app.sideText(i)}`;
    side.canvas.setAttribute("aria-label", text);
  }

  paintRow(context, frame, row, { cell, deep }, width) {
    const [y, middle] = [TOP + row * deep, TOP + (row + 0.5) * deep];
    context.font = FONT;
    write(context, this.places[row].label, LEFT - 8, middle, { align: "right" });
    if (frame === undefined) return hatch(context, LEFT, y, cell * this.experts, deep - 1);
    const shades = colours(this.scale.isDiverging);
    this.loadOf(frame).forEach((value, expert) => {
      const isKnown = Number.isFinite(value);
      const colour = isKnown ? shades[Math.round(255 * this.scale.place(value))] : ink("line");
      context.fillStyle = colour;
      context.fillRect(LEFT + expert * cell, y, cell - (cell > 6 ? 1 : 0), deep - 1);
      if (cell < 40 || !isKnown) return;
      const text = this.isCount ? whole(value) : value.toFixed(2);
      write(context, text, LEFT + (expert + 0.5) * cell, middle, { colour: inkOn(colour), align: "center" });
    });
    const even = evenness(frame.values, this.experts).toFixed(4);
    write(context, even, width - 4, middle, { colour: ink("text"), align: "right" });
  }

  paintLines() {
    const isTwo = this.even.length > 1;
    this.lines.set({
      lines: this.even.flatMap((layers, side) => layers.map((points, row) => ({
        points,
        colour: isTwo ? seriesColour(side) : lineColour(row, layers.length),
        width: 1.6,
        dash: side === 1 ? [4, 3] : undefined,
      }))),
      width: this.body.clientWidth - 26,
      height: roomBelow(this.app.main, this.lines.root, 150, 340),
      right: RIGHT,
      text: EVENNESS,
      paint: (context, box, y) => this.paintNames(context, box, y),
    });
  }

  /** Names of the layers at the ends of their lines: they do not overlap, and those below still have room. */
  paintNames(context, box, y) {
    const ends = this.even[0].map((line, row) => [row, line.at(-1)?.[1]]).filter(([, value]) => Number.isFinite(value));
    ends.sort((a, b) => b[1] - a[1]);
    let last = -Infinity;
    for (const [i, [row, value]] of ends.entries()) {
      const lowest = box.bottom - 12 * (ends.length - 1 - i);
      last = Math.max(Math.min(y(value), lowest), last + 12);
      const colour = this.even.length > 1 ? ink("muted") : lineColour(row, this.places.length);
      write(context, this.places[row].label, box.right + 8, last, { colour });
    }
  }

  tell(step) {
    const pairs = this.even.flatMap((layers, side) => layers.map((line, row) => {
      const name = `${this.even.length > 1 ? `${"AB"[side]} ` : ""}${this.places[row].label}`;
      return [name, exact(valueAt(line, step) ?? "nothing")];
    }));
    return [`step ${step}`, pairs];
  }

  hover(i, event) {
    const { at, canvas } = this.sides[i];
    const box = canvas.getBoundingClientRect();
    const expert = Math.floor((event.clientX - box.left - LEFT) / at.cell);
    const row = Math.floor((event.clientY - box.top - TOP) / at.deep);
    const frame = this.loads[i][row];
    if (frame === undefined || expert < 0 || expert >= this.experts) return this.app.tooltip.hide();
    const count = frame.values[expert] ?? 0n;
    const total = Array.from(frame.values, Number).reduce((sum, number) => sum + number, 0);
    const share = total > 0 ? Number(count) / total : NaN;
    const pairs = [["tokens", exact(count)], ["share", exact(share)], ["of an even share", short(share * this.experts)]];
    this.app.tooltip.show(`${this.places[row].text}, expert ${expert}`, pairs, event);
  }

  canvases() {
    const maps = this.sides.filter((side) => !side.root.hidden);
    return [
      ...maps.map(({ title, canvas }) => ({ title: title.textContent, canvas })),
      { title: "", canvas: this.legend },
      { title: EVENNESS, canvas: this.lines.canvas },
    ];
  }

  /** Counts per expert and layer of the step. */
  numbers() {
    const columns = ["run", "step", "phase", "site", "expert", "tokens", "evenness_of_layer"];
    const rows = (this.loads ?? []).flatMap((layers, side) => layers.flatMap((frame, row) => {
      if (frame === undefined) return [];
      const { run, step } = this.app.sides()[side];
      const start = [run, step, this.picker.chosen.phase, this.places[row].text];
      const even = exact(evenness(frame.values, this.experts));
      const line = (_, expert) => [...start, expert, exact(frame.values[expert] ?? 0n), even];
      return Array.from({ length: this.experts }, line);
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
