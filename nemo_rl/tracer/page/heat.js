/** View: layers times tokens of a sample. */

import { scaleOf } from "./color.js";
import { fit, ink } from "./chart.js";
import { choice, empty, h, say, setOptions, toggle } from "./dom.js";
import { exact, short } from "./format.js";
import { HeatPane, drawLegend } from "./heat_pane.js";
import { difference, numbersOf, pictureOf } from "./heat_model.js";
import { Picker, placesOf } from "./picker.js";
import { isColour, isSigned } from "./reducer.js";

const SCALES = [
  ["log", "logarithmic"],
  ["linear", "linear"],
  ["middle", "middle 98 %"],
  ["layer", "each layer its own"],
];

/** The heat map. */
export class HeatView {
  constructor(app) {
    this.app = app;
    this.id = "tokens";
    this.title = "Tokens";
    const changed = () => app.changed();
    this.picker = new Picker((seen) => isColour(seen.reducer), changed, ["layer.out", "mlp.out"]);
    this.row = choice("Sample", (value) => this.set({ key: value }));
    this.stretch = choice("Shown of each token", (value) => this.set({ wantedStretch: value }));
    this.scale = choice("Colours", (value) => this.set({ scale: value }));
    this.isFit = false;
    this.isDifference = false;
    this.fitToggle = toggle("fit", false, (isOn) => this.set({ isFit: isOn }));
    this.downToggle = toggle("tokens down", window.innerWidth < 640, (isOn) => this.set({ isDown: isOn }));
    this.isDown = window.innerWidth < 640;
    this.diffToggle = toggle("A − B", false, (isOn) => this.set({ isDifference: isOn }));
    this.tools = h("div", { className: "tools" }, this.picker.root,
      h("div", { className: "fields" }, this.row.root, this.stretch.root, this.scale.root),
      h("div", { className: "toggles" }, this.fitToggle, this.downToggle, this.diffToggle));
    this.panes = [0, 1].map((side) => new HeatPane({
      hover: (cell, event) => this.hover(side, cell, event),
      pick: (cell) => this.set({ pin: cell, pinSide: side }),
    }));
    this.legend = h("canvas", { role: "img", "aria-label": "Legend of the colours" });
    this.reading = h("p", { className: "reading", "aria-live": "polite" });
    this.strip = h("canvas", { className: "strip", role: "img", "aria-label": "All numbers of the chosen cell" });
    this.foot = h("div", { className: "heat-foot" }, h("div", {}, this.legend, this.reading), this.strip);
    this.body = h("div", { className: "panes" }, this.panes[0].root, this.panes[1].root);
    this.nothing = h("div", { hidden: true });
    this.root = h("div", { className: "view heat" }, this.tools, this.nothing, this.body, this.foot);
    this.panes[0].scroll.addEventListener("scroll", () => this.follow(0));
    this.panes[1].scroll.addEventListener("scroll", () => this.follow(1));
  }

  /** Both maps scroll together. */
  follow(side) {
    const [from, to] = [this.panes[side].scroll, this.panes[1 - side].scroll];
    if (this.panes[1].root.hidden) return;
    if (Math.abs(to.scrollLeft - from.scrollLeft) > 1) to.scrollLeft = from.scrollLeft;
    if (Math.abs(to.scrollTop - from.scrollTop) > 1) to.scrollTop = from.scrollTop;
  }

  set(values) {
    Object.assign(this, values);
    this.app.changed();
  }

  choose(wanted) {
    this.picker.choose(wanted);
  }

  /** Whether a step has something to show, so that the newest step is not shown before its pictures have come. */
  isReady(run, step) {
    const { chosen } = this.picker;
    return chosen === undefined || placesOf(chosen).some(
      (place) => this.app.store.frame(run, step, chosen, place.text)
    );
  }

  prepare() {
    this.picker.update(this.app.watchedOf(), this.app.order);
    setOptions(this.scale.select, SCALES, this.scaleKind);
  }

  render() {
    const { chosen } = this.picker;
    this.pictures = chosen === undefined ? [] : this.app.sides().map((side) => this.pictureOf(side, chosen));
    const first = this.pictures.find((picture) => picture !== null);
    this.showChoices(first);
    const hasPictures = first !== undefined && this.pictures[0] !== null;
    [this.nothing.hidden, this.body.hidden, this.foot.hidden] = [hasPictures, !hasPictures, !hasPictures];
    if (!hasPictures) {
      this.nothing.replaceChildren(this.whyEmpty(chosen));
      return;
    }
    if (this.isDifference && this.pictures[1]) this.pictures = [difference(this.pictures[0], this.pictures[1])];
    this.paint(chosen);
  }

  pictureOf(side, chosen) {
    const places = placesOf(chosen);
    return pictureOf(
      this.app.store,
      { run: side.run, step: side.step, chosen, places, key: this.key, show: this.shown },
    );
  }

  get shown() {
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
    const signed = this.isDifference || (isSigned(chosen.reducer) && this.shown !== "absmax");
    const kind = this.scaleKind;
    this.overall = scaleOf(flat, { kind: kind === "layer" ? "linear" : kind, isSigned: signed });
    const perLayer = kind === "layer" ? isSide[0].places.map((_, row) => this.layerScale(isSide, row, signed)) : null;
    const isDiverging = perLayer ? perLayer.some((scale) => scale.isDiverging) : this.overall.isDiverging;
    this.panes.forEach((pane, side) => {
      const picture = this.pictures[side] ?? null;
      pane.root.hidden = side >= this.pictures.length;
      if (pane.root.hidden) return;
      const what = this.isDifference ? "A − B" : this.app.sideText(side);
      say(
        pane.title,
        `${what}  ·  ${chosen.phase}  ·  ${chosen.kind}${chosen.way}  ·  ${chosen.reducer}${this.gapText(picture)}`,
      );
      const pin = this.pinSide === side || this.pictures.length > 1 ? this.pin : this.pin ?? null;
      const shape = { isFit: this.isFit, isDown: this.isDown, pin, isDiverging };
      pane.canvas.setAttribute("aria-label", this.describe(picture, what));
      if (picture) pane.set(picture, { ...shape, scales: (row) => perLayer?.[row] ?? this.overall });
    });
    this.paintFoot(isSide, isDiverging, perLayer !== null);
  }

  describe(picture, what) {
    if (picture === null) return `${what}: nothing at this step`;
    return `Heat map of ${what}: ${picture.places.length} layers times ${picture.tokens.length} tokens of ${picture.key}`;
  }

  gapText(picture) {
    if (picture === null) return "  ·  nothing at this step";
    const missing = [...new Set(picture.headers.flatMap((header) => header.missing))];
    const dropped = Math.max(...picture.headers.map((header) => header.dropped));
    const parts = missing.length ? [`ranks ${missing.join(", ")} missing`] : [];
    if (dropped > 0) parts.push(`${dropped} frames dropped`);
    return parts.length ? `  ·  ${parts.join(", ")}` : "";
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
    drawLegend(
      this.legend,
      { ...this.overall, isDiverging },
      { notFinite, missing, ends },
      this.foot.clientWidth > 900 ? 520 : Math.min(520, this.foot.clientWidth - 24),
      34,
    );
    const picture = this.pictures[this.pinSide ?? 0] ?? this.pictures[0];
    this.say(picture, this.panes[0].hovered ?? this.pin);
    this.paintStrip(picture);
  }

  say(picture, cell) {
    if (!cell || !picture || cell.row >= picture.places.length || cell.column >= picture.tokens.length) {
      say(this.reading, "Point at a cell for its exact number; a click keeps it.");
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
    const numbers = this.pin && picture && !this.isDifference ? numbersOf(
      picture,
      this.pin.row,
      this.pin.column,
    ) : null;
    this.strip.hidden = numbers === null || numbers.length < 2;
    if (this.strip.hidden) return;
    const width = Math.max(120, Math.min(420, this.foot.clientWidth - 560));
    const context = fit(this.strip, width, 66);
    context.fillStyle = ink("muted");
    context.textBaseline = "top";
    context.fillText(`its ${numbers.length} numbers, from left to right`, 0, 0);
    const finite = Array.from(numbers).filter(Number.isFinite);
    const [low, high] = [Math.min(0, ...finite), Math.max(0, ...finite)];
    const y = (value) => 64 - ((value - low) / (high - low || 1)) * 46;
    context.fillStyle = ink("accent");
    const bar = width / numbers.length;
    numbers.forEach((value, i) => {
      if (Number.isFinite(value)) context.fillRect(
        i * bar,
        Math.min(y(value), y(0)),
        Math.max(1, bar - 1),
        Math.max(1, Math.abs(y(value) - y(0))),
      );
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
    if (chosen !== undefined) return empty(
      "Nothing at this step",
      `${chosen.kind}, ${chosen.reducer} was not looked at in ${chosen.phase} of this step.`,
    );
    return this.app.nothingYet("Nothing is watched token by token yet.", "layer.out | tiles(1, rms) | train");
  }

  canvases() {
    const titles = this.panes.map((pane) => pane.title.textContent);
    return [
      ...this.panes.flatMap((pane, i) => (pane.root.hidden ? [] : [{ title: titles[i], canvas: pane.canvas }])),
      { title: "", canvas: this.legend },
    ];
  }

  /** Every number of the maps, in columns. */
  numbers() {
    const rows = (this.pictures ?? []).flatMap(
      (picture, side) => (picture === null ? [] : this.numbersOfSide(picture, side))
    );
    return {
      columns: [
        "run",
        "step",
        "phase",
        "site",
        "reducer",
        "sample",
        "position",
        "token_id",
        "token",
        "number",
        "value",
      ],
      rows,
    };
  }

  numbersOfSide(picture, side) {
    const { chosen } = this.picker;
    const { run, step } = this.app.sides()[side];
    const of = this.isDifference ? "A - B" : run;
    return picture.places.flatMap((place, row) => picture.tokens.flatMap((token, column) => {
      const at = row * picture.tokens.length + column;
      if (!picture.present[at]) return [];
      const start = [
        of,
        step,
        chosen.phase,
        place.text,
        chosen.reducer,
        picture.key,
        token.position,
        token.id,
        token.text,
      ];
      if (picture.width === 1) return [[...start, 0, exact(picture.values[at])]];
      const isOne = this.shown !== "mean" && this.shown !== "absmax";
      const numbers = isOne ? null : numbersOf(picture, row, column);
      if (numbers === null) return [[...start, this.shown, exact(picture.values[at])]];
      return Array.from(numbers, (value, i) => [...start, i, exact(value)]);
    }));
  }
}
