/** Draws one heat map: only what is in sight, so that long samples and deep models scroll well. */

import { NOT_FINITE, colours, inkOn } from "./color.js";
import { FONT, MONO, fit, hatch, ink, write } from "./chart.js";
import { h, pane, paneTitle } from "./dom.js";
import { clip, short, tick } from "./format.js";

const READABLE = 20; // along the tokens
const LAYER_SIZE = { across: [15, 64], down: [26, 120] };
const SLANT = -Math.PI / 3;
const LONGEST = 14; // characters of a token beside its cells
const LONGEST_ABOVE = 11;

/** A scrolling canvas. Calls `on.hover(cell, event)` and `on.pick(cell)`; a cell is `{row, column}` or null. */
export class HeatPane {
  constructor(on) {
    this.canvas = h("canvas", { tabIndex: 0, role: "img" });
    this.space = h("div", { className: "heat-space" });
    this.scroll = h("div", { className: "heat-scroll" }, this.canvas, this.space);
    this.title = paneTitle();
    this.root = pane(this.title, this.scroll);
    this.on = on;
    this.hovered = null;
    this.scroll.addEventListener("scroll", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("click", (event) => on.pick(this.cellAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** Takes a picture and how it is shown: `{scales: function(row), isFit, isDown, pin, isDiverging}`. */
  set(picture, how) {
    [this.picture, this.how] = [picture, how];
    this.draw();
  }

  layout() {
    const { picture, how } = this;
    const [width, height] = [this.scroll.clientWidth, this.scroll.clientHeight];
    const left = how.isDown ? 132 : 66;
    const along = (how.isDown ? height - 26 : width - left - 60) / Math.max(1, picture.tokens.length);
    const size = Math.max(how.isFit ? 1 : READABLE, Math.min(along, how.isDown && !how.isFit ? 24 : 40));
    const top = how.isDown || size < 11 ? 26 : headOf(picture.tokens);
    const [least, most] = how.isFit ? [4, 120] : LAYER_SIZE[how.isDown ? "down" : "across"];
    const room = (how.isDown ? width - left - 8 : height - top - 8) / Math.max(1, picture.places.length);
    const deep = Math.max(least, Math.min(most, room));
    const [cellWidth, cellHeight] = how.isDown ? [deep, size] : [size, deep];
    const [columns, rows] = [picture.tokens.length, picture.places.length];
    const [across, down] = how.isDown ? [rows, columns] : [columns, rows];
    const total = [left + across * cellWidth + (how.isDown ? 4 : 60), top + down * cellHeight + 4];
    return { width, height, left, top, cellWidth, cellHeight, across, down, total };
  }

  draw() {
    if (!this.picture || this.scroll.clientWidth === 0) return;
    const at = (this.at = this.layout());
    this.space.style.width = `${at.total[0]}px`;
    this.space.style.height = `${Math.max(0, at.total[1] - at.height)}px`;
    const context = fit(this.canvas, at.width, at.height);
    const { scrollLeft, scrollTop } = this.scroll;
    const first = [Math.floor(scrollLeft / at.cellWidth), Math.floor(scrollTop / at.cellHeight)];
    const last = [
      Math.min(at.across, Math.ceil((scrollLeft + at.width - at.left) / at.cellWidth)),
      Math.min(at.down, Math.ceil((scrollTop + at.height - at.top) / at.cellHeight)),
    ];
    context.save();
    context.beginPath();
    context.rect(at.left, at.top, at.width, at.height);
    context.clip();
    for (let y = first[1]; y < last[1]; y++) for (let x = first[0]; x < last[0]; x++) this.cell(context, x, y);
    this.mark(context, this.how.pin, 2);
    this.mark(context, this.hovered, 1.5);
    context.restore();
    this.labels(context, first, last);
  }

  /** Number of layer and token of a column and a line of the canvas. */
  turned(x, y) {
    return this.how.isDown ? [x, y] : [y, x];
  }

  corner(x, y) {
    return [
      this.at.left + x * this.at.cellWidth - this.scroll.scrollLeft,
      this.at.top + y * this.at.cellHeight - this.scroll.scrollTop,
    ];
  }

  cell(context, x, y) {
    const { picture, how, at } = this;
    const [row, column] = this.turned(x, y);
    const place = row * picture.tokens.length + column;
    const [left, top] = this.corner(x, y);
    const gap = Math.min(at.cellWidth, at.cellHeight) > 8 ? 1 : 0;
    const [width, height] = [at.cellWidth - gap, at.cellHeight - gap];
    if (picture.present[place] === 0) {
      if (gap) hatch(context, left, top, width, height);
      return;
    }
    const value = picture.values[place];
    const isFinite = Number.isFinite(value);
    const fill = isFinite ? colours(how.isDiverging)[Math.round(255 * how.scales(row).place(value))] : NOT_FINITE;
    context.fillStyle = fill;
    context.fillRect(left, top, width + (gap ? 0 : 0.5), height + (gap ? 0 : 0.5));
    if (at.cellHeight < 13 || at.cellWidth < (isFinite ? 46 : 24)) return;
    context.font = FONT;
    const colour = isFinite ? inkOn(fill) : "#fff";
    write(context, short(value), left + width / 2, top + height / 2 + 0.5, { colour, align: "center" });
  }

  mark(context, cell, width) {
    if (!cell) return;
    const [x, y] = this.how.isDown ? [cell.row, cell.column] : [cell.column, cell.row];
    const [left, top] = this.corner(x, y);
    context.strokeStyle = ink("text");
    context.lineWidth = width;
    context.strokeRect(left - 0.5, top - 0.5, this.at.cellWidth, this.at.cellHeight);
  }

  labels(context, first, last) {
    const [above, beside] = this.how.isDown ? ["layerAbove", "tokenBeside"] : ["tokenAbove", "layerBeside"];
    for (let x = first[0]; x < last[0]; x++) if (this.corner(x, 0)[0] >= this.at.left - 4) this[above](context, x);
    for (let y = first[1]; y < last[1]; y++) if (this.corner(0, y)[1] >= this.at.top - 4) this[beside](context, y);
  }

  /** Whether a layer or a token is under the pointer or kept: its text is then bold. */
  emphasis(context, { row, column }, font) {
    const isIt = [this.hovered, this.how.pin].some((cell) => cell && (row === undefined ? cell.column === column : cell.row === row));
    context.font = isIt ? `600 ${font}` : font;
    return { isIt, colour: ink(isIt ? "text" : "muted") };
  }

  tokenAbove(context, column) {
    const { at, picture } = this;
    const middle = this.corner(column, 0)[0] + at.cellWidth / 2;
    const { isIt, colour } = this.emphasis(context, { column }, MONO.replace("12px", "11px"));
    const { position, text } = picture.tokens[column];
    if (at.cellWidth < 11) {
      if (!isIt && column % Math.ceil(60 / at.cellWidth) !== 0) return;
      write(context, String(position), middle, at.top - 6, { colour, align: "center", base: "bottom" });
      return;
    }
    context.save();
    context.translate(middle, at.top - 6);
    context.rotate(SLANT);
    write(context, clip(text, LONGEST_ABOVE), 0, 0, { colour });
    context.restore();
  }

  tokenBeside(context, column) {
    const { at, picture } = this;
    if (at.cellHeight < 10 && column % Math.ceil(14 / at.cellHeight) !== 0) return;
    const { colour } = this.emphasis(context, { column }, MONO);
    const y = this.corner(0, column)[1] + at.cellHeight / 2;
    write(context, clip(picture.tokens[column].text, LONGEST), at.left - 8, y, { colour, align: "right" });
  }

  layerBeside(context, row) {
    const { at, picture } = this;
    const isThin = at.cellHeight < 12 && row % Math.ceil(14 / at.cellHeight) !== 0;
    if (isThin && this.hovered?.row !== row) return;
    const { colour } = this.emphasis(context, { row }, FONT);
    const y = this.corner(0, row)[1] + at.cellHeight / 2;
    write(context, clip(picture.places[row].label, 10), at.left - 8, y, { colour, align: "right" });
  }

  layerAbove(context, row) {
    const { at, picture } = this;
    if (at.cellWidth < 24 && row % Math.ceil(28 / at.cellWidth) !== 0) return;
    const { colour } = this.emphasis(context, { row }, FONT);
    const { label, layer } = picture.places[row];
    const text = layer !== null && at.cellWidth < 60 ? `L${layer}` : clip(label, 14);
    const x = this.corner(row, 0)[0] + at.cellWidth / 2;
    write(context, text, x, at.top - 6, { colour, align: "center", base: "bottom" });
  }

  /** Middle of a cell in the window. */
  placeOf(row, column) {
    const [left, top] = this.how.isDown ? this.corner(row, column) : this.corner(column, row);
    const box = this.canvas.getBoundingClientRect();
    return { x: box.left + left + this.at.cellWidth / 2, y: box.top + top + this.at.cellHeight / 2 };
  }

  /** The cell under the pointer, or null. */
  cellAt(event) {
    if (!this.picture || !this.at) return null;
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    if (px < this.at.left || py < this.at.top) return null;
    const x = Math.floor((px - this.at.left + this.scroll.scrollLeft) / this.at.cellWidth);
    const y = Math.floor((py - this.at.top + this.scroll.scrollTop) / this.at.cellHeight);
    if (x >= this.at.across || y >= this.at.down) return null;
    const [row, column] = this.turned(x, y);
    return { row, column };
  }

  hover(event) {
    const cell = this.cellAt(event);
    const isSame = cell?.row === this.hovered?.row && cell?.column === this.hovered?.column;
    this.hovered = cell;
    if (!isSame) this.draw();
    this.on.hover(cell, event);
  }

  leave() {
    this.hovered = null;
    this.draw();
    this.on.hover(null);
  }

  /** Shift and arrows go from cell to cell. */
  key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!event.shiftKey || move === undefined || !this.picture) return;
    event.preventDefault();
    event.stopPropagation();
    const [dRow, dColumn] = this.turned(...move);
    const from = this.how.pin ?? { row: 0, column: 0 };
    const within = (value, size) => Math.min(size - 1, Math.max(0, value));
    const [rows, columns] = [this.picture.places.length, this.picture.tokens.length];
    this.on.pick({ row: within(from.row + dRow, rows), column: within(from.column + dColumn, columns) });
  }
}

/** Room for slanted tokens. */
function headOf(tokens) {
  const longest = tokens.reduce((most, token) => Math.max(most, Math.min(LONGEST_ABOVE, token.text.length)), 2);
  return Math.round(16 - Math.sin(SLANT) * 6.7 * longest);
}

/** A legend: the colour map with its ends, and what is in no map. */
export function drawLegend(canvas, scale, flags, width, height) {
  const context = fit(canvas, width, height);
  const table = colours(scale.isDiverging);
  const barWidth = Math.min(260, width * 0.5);
  for (let i = 0; i < barWidth; i++) {
    context.fillStyle = table[Math.round((255 * i) / barWidth)];
    context.fillRect(i, 4, 1.5, 10);
  }
  [0, 0.5, 1].forEach((share, i) => {
    const text = flags.ends?.[i] ?? tick(scale.value(share));
    write(context, text, share * barWidth, 19, { align: ["left", "center", "right"][i], base: "top" });
  });
  let x = barWidth + 18;
  for (const [text, isShown, colour] of [["NaN, ±∞", flags.notFinite, NOT_FINITE], ["nothing came", flags.missing]]) {
    if (!isShown || x > width - 60) continue;
    [context.fillStyle, context.strokeStyle, context.lineWidth] = [colour, ink("line"), 1];
    if (colour) context.fillRect(x, 4, 14, 10);
    else {
      hatch(context, x, 4, 14, 10);
      context.strokeRect(x, 4, 14, 10);
    }
    write(context, text, x + 20, 9);
    x += 34 + context.measureText(text).width;
  }
}
