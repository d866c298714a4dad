/** View: layers times tokens of a sample. */

import { fit, ink, write } from "./chart.js";
import { scaleOf } from "./color.js";
import { empty, h, say, setOptions } from "./dom.js";
import { exact, short } from "./format.js";
import { HeatPane, drawLegend } from "./heat_pane.js";
import { difference, numbersOf, pictureOf } from "./heat_model.js";
import { placesOf } from "./picker.js";
import { isColour, isSigned } from "./reducer.js";
import { View } from "./view.js";

const SCALES = [["log", "logarithmic"], ["linear", "linear"], ["middle", "middle 98 %"], ["layer", "each layer its own"]];

/** The heat map. */
export class HeatView extends View {
  constructor(app) {
    super(app, {
      id: "tokens",
      title: "Tokens",
      takes: (seen) => isColour(seen.reducer),
      first: ["layer.out", "mlp.out"],
      missing: ["Nothing is watched token by token yet.", "layer.out | tiles(1, rms) | train"],
    });
    this.row = this.choice("Sample", (key) => this.set({ key }));
    this.stretch = this.choice("Shown of each token", (wantedStretch) => this.set({ wantedStretch }));
    this.scale = this.choice("Colours");
    this.diffToggle = this.toggle("A − B", "isDifference");
    const toggles = [this.toggle("fit", "isFit"), this.toggle("tokens down", "isDown", window.innerWidth < 640), this.diffToggle];
    this.panes = [0, 1].map((side) => new HeatPane({
      hover: (cell, event) => this.hover(side, cell, event),
      pick: (cell) => this.set({ pin: cell, pinSide: side }),
    }));
    this.legend = h("canvas", { role: "img", "aria-label": "Legend of the colours" });
    this.reading = h("p", { className: "reading", "aria-live": "polite" });
    this.strip = h("canvas", { className: "strip", role: "img", "aria-label": "All values of the selected cell" });
    this.foot = h("div", { className: "heat-foot" }, h("div", {}, this.legend, this.reading), this.strip);
    this.body = h("div", { className: "panes" }, ...this.panes.map((pane) => pane.root));
    this.build({ fields: [this.row.root, this.stretch.root, this.scale.root], toggles }, this.body, this.foot);
    this.root.classList.add("heat");
    this.panes.forEach(({ scroll }, side) => scroll.addEventListener("scroll", () => this.follow(side)));
  }

  /** Both maps scroll together. */
  follow(side) {
    const [from, to] = [this.panes[side].scroll, this.panes[1 - side].scroll];
    if (this.panes[1].root.hidden) return;
    if (Math.abs(to.scrollLeft - from.scrollLeft) > 1) to.scrollLeft = from.scrollLeft;
    if (Math.abs(to.scrollTop - from.scrollTop) > 1) to.scrollTop = from.scrollTop;
  }

  prepare() {
    super.prepare();
    setOptions(this.scale.select, SCALES, this.scaleKind);
  }

  render() {
    const { chosen } = this.picker;
    this.pictures = chosen === undefined ? [] : this.app.sides().map((side) => this.pictureOf(side, chosen));
    this.showChoices(this.pictures.find((picture) => picture !== null));
    const isEmpty = !this.pictures[0];
    for (const element of this.shown) element.hidden = isEmpty;
    this.nothing.replaceChildren(...(isEmpty ? [this.whyEmpty(chosen)] : []));
    if (isEmpty) return;
    if (this.isDifference && this.pictures[1]) this.pictures = [difference(...this.pictures)];
    this.paint(chosen);
  }

  pictureOf({ run, step }, chosen) {
    const places = placesOf(chosen);
    return pictureOf(this.app.store, { run, step, chosen, places, key: this.key, show: this.stretchKind });
  }

  get stretchKind() {
    return this.stretch.select.value || "mean";
  }

  get scaleKind() {
    return this.scale.select.value || "log";
  }

  showChoices(picture) {
    const keys = picture?.keys ?? [];
    setOptions(this.row.select, keys.map((key) => [key, key]), picture?.key ?? "");
    const width = picture?.width ?? 1;
    const numbers = Array.from({ length: Math.min(width, 4096) }, (_, i) => [String(i), `number ${i}`]);
    const all = width === 1 ? [["0", "its number"]] : [["mean", "mean of all"], ["absmax", "largest size"], ...numbers];
    const wanted = this.wantedStretch;
    setOptions(this.stretch.select, all, all.some(([value]) => value === wanted) ? wanted : all[0][0]);
    this.stretch.root.hidden = width === 1;
    this.diffToggle.hidden = this.app.sides().length < 2;
    if (this.diffToggle.hidden) this.isDifference = false;
  }

  paint(chosen) {
    const isSide = this.pictures.filter((picture) => picture !== null);
    const flat = isSide.flatMap((picture) => Array.from(picture.values));
    const signed = this.isDifference || (isSigned(chosen.reducer) && this.stretchKind !== "absmax");
    const kind = this.scaleKind;
    this.overall = scaleOf(flat, { kind: kind === "layer" ? "linear" : kind, isSigned: signed });
    const perLayer = kind === "layer" ? isSide[0].places.map((_, row) => this.layerScale(isSide, row, signed)) : null;
    const isDiverging = perLayer ? perLayer.some((scale) => scale.isDiverging) : this.overall.isDiverging;
    this.panes.forEach((pane, side) => {
      const picture = this.pictures[side] ?? null;
      pane.root.hidden = side >= this.pictures.length;
      if (pane.root.hidden) return;
      const what = this.isDifference ? "A − B" : this.app.sideText(side);
      const title = [what, chosen.phase, chosen.kind + chosen.way, chosen.reducer, ...this.gaps(picture)];
      say(pane.title, title.join("  ·  "));
      const shape = { isFit: this.isFit, isDown: this.isDown, pin: this.pin, isDiverging };
      pane.canvas.setAttribute("aria-label", this.describe(picture, what));
      if (picture) pane.set(picture, { ...shape, scales: (row) => perLayer?.[row] ?? this.overall });
    });
    this.paintFoot(isSide, isDiverging, perLayer !== null);
  }

  describe(picture, what) {
    if (picture === null) return `${what}: nothing at this step`;
    return `Heat map of ${what}: ${picture.places.length} layers times ${picture.tokens.length} tokens of ${picture.key}`;
  }

  gaps(picture) {
    if (picture === null) return ["nothing at this step"];
    const missing = [...new Set(picture.headers.flatMap((header) => header.missing))];
    const dropped = Math.max(...picture.headers.map((header) => header.dropped));
    const parts = missing.length ? [`ranks ${missing.join(", ")} missing`] : [];
    if (dropped > 0) parts.push(`${dropped} frames dropped`);
    return parts.length ? [parts.join(", ")] : [];
  }

  layerScale(pictures, row, signed) {
    const numbers = pictures.flatMap((picture) => {
      const size = picture.tokens.length;
      return Array.from(picture.values.subarray(row * size, (row + 1) * size));
    });
    return scaleOf(numbers, { kind: "linear", isSigned: signed });
  }

  paintFoot(pictures, isDiverging, isPerLayer) {
    const notFinite = pictures.some((p) => p.values.some((value, i) => p.present[i] && !Number.isFinite(value)));
    const missing = pictures.some((picture) => picture.present.includes(0));
    const ends = isPerLayer ? ["least of its layer", "", "most"] : undefined;
    const width = Math.min(520, this.foot.clientWidth > 900 ? 520 : this.foot.clientWidth - 24);
    drawLegend(this.legend, { ...this.overall, isDiverging }, { notFinite, missing, ends }, width, 34);
    const picture = this.pictures[this.pinSide ?? 0] ?? this.pictures[0];
    this.say(picture, this.panes[0].hovered ?? this.pin);
    this.paintStrip(picture);
  }

  say(picture, cell) {
    if (!cell || !picture || cell.row >= picture.places.length || cell.column >= picture.tokens.length) {
      say(this.reading, "Hover over a cell for its value; click to pin it.");
      return;
    }
    const token = picture.tokens[cell.column];
    const value = this.valueText(picture, cell);
    say(this.reading, `${picture.places[cell.row].text}, token ${token.position} “${token.text}”: ${value}`);
  }

  valueText(picture, { row, column }) {
    const place = row * picture.tokens.length + column;
    return picture.present[place] ? exact(picture.values[place]) : "nothing came";
  }

  /** All numbers of the kept cell, as bars. */
  paintStrip(picture) {
    const isKept = this.pin && picture && !this.isDifference;
    const numbers = isKept ? numbersOf(picture, this.pin.row, this.pin.column) : null;
    this.strip.hidden = numbers === null || numbers.length < 2;
    if (this.strip.hidden) return;
    const width = Math.max(120, Math.min(420, this.foot.clientWidth - 560));
    const context = fit(this.strip, width, 66);
    write(context, `its ${numbers.length} numbers, from left to right`, 0, 0, { base: "top" });
    const finite = Array.from(numbers).filter(Number.isFinite);
    const [low, high] = [Math.min(0, ...finite), Math.max(0, ...finite)];
    const y = (value) => 64 - ((value - low) / (high - low || 1)) * 46;
    const bar = width / numbers.length;
    context.fillStyle = ink("accent");
    numbers.forEach((value, i) => {
      const height = Math.max(1, Math.abs(y(value) - y(0)));
      if (Number.isFinite(value)) context.fillRect(i * bar, Math.min(y(value), y(0)), Math.max(1, bar - 1), height);
    });
  }

  hover(side, cell, event) {
    const picture = this.pictures?.[side];
    if (!cell || !picture || !event) {
      this.app.tooltip.hide();
      this.say(picture, this.pin);
      return;
    }
    const token = picture.tokens[cell.column];
    const pairs = [["value", this.valueText(picture, cell)], ["token", token.text], ["id", String(token.id)],
      ["position", String(token.position)], ["site", picture.places[cell.row].text], ["sample", picture.key]];
    const value = picture.values[cell.row * picture.tokens.length + cell.column];
    if (this.isDifference) pairs.unshift(["A − B", ""]);
    this.app.tooltip.show(short(value), pairs, event);
    this.say(picture, cell);
  }

  whyEmpty(chosen) {
    if (chosen === undefined) return this.app.nothingYet(...this.missing);
    const text = `${chosen.kind}, ${chosen.reducer} was not looked at in ${chosen.phase} of this step.`;
    return empty("Nothing at this step", text);
  }

  canvases() {
    const shown = this.panes.filter((pane) => !pane.root.hidden);
    return [...shown.map(({ title, canvas }) => ({ title: title.textContent, canvas })), { title: "", canvas: this.legend }];
  }

  /** Every number of the maps, in columns. */
  numbers() {
    const sample = ["sample", "position", "token_id", "token", "number", "value"];
    const ofSide = (picture, side) => (picture === null ? [] : this.numbersOfSide(picture, side));
    return { columns: ["run", "step", "phase", "site", "reducer", ...sample], rows: (this.pictures ?? []).flatMap(ofSide) };
  }

  numbersOfSide(picture, side) {
    const { phase, reducer } = this.picker.chosen;
    const { run, step } = this.app.sides()[side];
    const of = this.isDifference ? "A - B" : run;
    const isOne = this.stretchKind !== "mean" && this.stretchKind !== "absmax";
    return picture.places.flatMap((place, row) => picture.tokens.flatMap(({ position, id, text }, column) => {
      const at = row * picture.tokens.length + column;
      if (!picture.present[at]) return [];
      const start = [of, step, phase, place.text, reducer, picture.key, position, id, text];
      if (picture.width === 1) return [[...start, 0, exact(picture.values[at])]];
      const numbers = isOne ? null : numbersOf(picture, row, column);
      if (numbers === null) return [[...start, this.stretchKind, exact(picture.values[at])]];
      return Array.from(numbers, (value, i) => [...start, i, exact(value)]);
    }));
  }
}
