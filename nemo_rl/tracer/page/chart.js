/** Canvases that are sharp on every screen, axes and lines. */

import { NOT_FINITE } from "./color.js";
import { clip, tick } from "./format.js";

export const FONT = "11px ui-sans-serif, system-ui, sans-serif";
export const MONO = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";

const MANY = 400; // steps in one line

/** A colour of the style sheet. */
export const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/**
 * Makes a canvas as sharp as the screen and clears it.
 * @returns {CanvasRenderingContext2D} in units of the style sheet
 */
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, hgt] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== hgt) {
    [canvas.width, canvas.height] = [w, hgt];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  return context;
}

/** Height that is left in a scrolling element below the top of another, within bounds. */
export function roomBelow(main, element, least, most) {
  const top = element.getBoundingClientRect().top - main.getBoundingClientRect().top + main.scrollTop;
  return Math.max(least, Math.min(most, main.clientHeight - top - 26));
}

/** Round numbers between two ends, about so many. */
function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= raw) ?? 10);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

/** The same for a scale that is logarithmic away from zero. */
function logTicks(low, high, unit, wanted) {
  const powers = [];
  for (let power = Math.floor(Math.log10(unit)); power <= 308 && 10 ** power <= Math.max(Math.abs(low), Math.abs(high)); power++) {
    powers.push(power);
  }
  const each = Math.max(1, Math.ceil((powers.length * (low < 0 && high > 0 ? 2 : 1)) / wanted));
  const chosen = powers.filter((_, i) => (powers.length - 1 - i) % each === 0).map((power) => 10 ** power);
  return [...chosen.map((x) => -x).reverse(), 0, ...chosen].filter((x) => x >= low && x <= high);
}

/** Axes over steps: places of numbers in a rectangle of a canvas. */
export class Plot {
  /**
   * @param {CanvasRenderingContext2D} context
   * @param {{left: number, top: number, right: number, bottom: number}} box
   * @param {number[]} xs ends of the steps
   * @param {number[]} ys all numbers that have to fit
   * @param {boolean} isLog
   */
  constructor(context, box, xs, ys, isLog) {
    this.context = context;
    this.box = box;
    [this.x0, this.x1] = xs[0] === xs[1] ? [xs[0] - 0.5, xs[1] + 0.5] : xs;
    const finite = ys.filter(Number.isFinite);
    let [low, high] = extremes(finite);
    this.unit = isLog ? unitOf(finite) : undefined;
    const pad = isLog ? 0 : (high - low || Math.abs(high) || 1) * 0.06;
    [low, high] = [low - pad, high + pad];
    if (low === high) [low, high] = [low - 1, high + 1];
    [this.low, this.high] = [low, high];
  }

  bend(value) {
    return this.unit === undefined ? value : Math.asinh(value / this.unit);
  }

  x(step) {
    const { left, right } = this.box;
    return left + ((step - this.x0) / (this.x1 - this.x0)) * (right - left);
  }

  y(value) {
    const { top, bottom } = this.box;
    const [low, high] = [this.bend(this.low), this.bend(this.high)];
    return bottom - ((this.bend(value) - low) / (high - low)) * (bottom - top);
  }

  /** The step nearest to a place. */
  stepAt(x) {
    const { left, right } = this.box;
    return this.x0 + ((x - left) / (right - left)) * (this.x1 - this.x0);
  }

  /** Lines and numbers of both axes. */
  axes(isSmall = false) {
    const { context, box } = this;
    context.font = FONT;
    context.fillStyle = ink("muted");
    context.strokeStyle = ink("line");
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const wanted = Math.max(2, Math.floor((box.bottom - box.top) / (isSmall ? 22 : 36)));
    const values = this.unit === undefined ? ticks(this.low, this.high, wanted) : logTicks(
      this.low,
      this.high,
      this.unit,
      wanted,
    );
    let last = Infinity;
    for (const value of values) {
      const y = Math.round(this.y(value)) + 0.5;
      stroke(context, [[box.left, y], [box.right, y]]);
      if (last - y < 12) continue;
      context.fillText(tick(Math.abs(value) < 1e-15 * this.high ? 0 : value), box.left - 6, y);
      last = y;
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    const across = Math.max(2, Math.floor((box.right - box.left) / (isSmall ? 44 : 72)));
    for (const step of ticks(this.x0, this.x1, across).filter(Number.isInteger)) {
      context.fillText(String(step), this.x(step), box.bottom + 5);
    }
  }

  /** A line through points; NaN leaves a gap and a mark at the foot, infinities a mark at their end. */
  line(points, colour, width = 1.5, dash = []) {
    const { context } = this;
    context.strokeStyle = colour;
    // Of many steps a thick line would be a surface.
    context.lineWidth = points.length > MANY ? Math.min(width, 0.8) : width;
    context.lineJoin = "round";
    context.setLineDash(dash);
    const pieces = [[]];
    for (const [step, value] of points) {
      if (Number.isFinite(value)) pieces.at(-1).push([this.x(step), this.y(value)]);
      else pieces.push([]);
    }
    for (const piece of pieces) {
      if (piece.length === 1) dot(context, piece[0], width * 1.2, colour);
      else stroke(context, piece);
    }
    context.setLineDash([]);
    for (const [step, value] of points) {
      const y = value === Infinity ? this.box.top + 4 : this.box.bottom - 4;
      if (!Number.isFinite(value)) dot(context, [this.x(step), y], 3, NOT_FINITE);
    }
  }

  /** The space between two lines. */
  band(points, colour, alpha) {
    const { context } = this;
    context.fillStyle = colour;
    context.globalAlpha = alpha;
    let piece = [];
    const close = () => {
      if (piece.length > 0) {
        const wide = piece.length > 1 ? 0 : 2;
        context.beginPath();
        for (const [step, , high] of piece) context.lineTo(this.x(step) - wide, this.y(high));
        for (const [step, low] of piece.reverse()) context.lineTo(this.x(step) + wide, this.y(low));
        context.fill();
      }
      piece = [];
    };
    for (const point of points) {
      if (Number.isFinite(point[1]) && Number.isFinite(point[2])) piece.push(point);
      else close();
    }
    close();
    context.globalAlpha = 1;
  }

  /** Where the step is that is shown, and where somebody has set marks. */
  cursor(step, marks = []) {
    for (const mark of marks.filter((one) => one.step >= this.x0 && one.step <= this.x1)) this.mark(mark);
    if (step < this.x0 || step > this.x1) return;
    this.context.strokeStyle = ink("accent");
    this.context.lineWidth = 1;
    const x = Math.round(this.x(step)) + 0.5;
    stroke(this.context, [[x, this.box.top], [x, this.box.bottom]]);
  }

  mark({ step, label }) {
    const { context, box } = this;
    const x = Math.round(this.x(step)) + 0.5;
    context.strokeStyle = ink("muted");
    context.fillStyle = ink("muted");
    context.setLineDash([2, 3]);
    stroke(context, [[x, box.top], [x, box.bottom]]);
    context.setLineDash([]);
    context.font = FONT;
    context.textBaseline = "top";
    context.textAlign = x > (box.left + box.right) / 2 ? "right" : "left";
    context.fillText(clip(label, 24), x + (context.textAlign === "right" ? -4 : 4), box.top);
  }
}

/** Least and most of numbers, however many; 0 and 1 of none. */
export function extremes(numbers) {
  if (numbers.length === 0) return [0, 1];
  return numbers.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
}

function unitOf(numbers) {
  const sizes = numbers.map(Math.abs).filter((x) => x > 0).sort((a, b) => a - b);
  if (sizes.length === 0) return 1;
  return 10 ** Math.floor(Math.log10(Math.max(sizes[Math.floor(sizes.length / 10)], sizes.at(-1) * 1e-8)));
}

/** A line through places. */
export function stroke(context, places) {
  context.beginPath();
  for (const [x, y] of places) context.lineTo(x, y);
  context.stroke();
}

/** A filled circle. */
export function dot(context, [x, y], radius, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

/** Diagonal lines that say: nothing is known here. */
export function hatch(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = ink("line");
  context.lineWidth = 1;
  for (let at = -height; at < width; at += 6) stroke(context, [[x + at, y + height], [x + at + height, y]]);
  context.restore();
}
