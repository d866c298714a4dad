/** Charts over steps by uPlot, and what pictures of our own are drawn with: sharp canvases, hatching, colours. */

import { NOT_FINITE } from "./color.js";
import { h, keepChildren } from "./dom.js";
import { clip, tick } from "./format.js";

export const FONT = "11px ui-sans-serif, system-ui, sans-serif";
export const MONO = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";

const MANY = 400; // steps in one line
const ROUND = Array.from({ length: 180 }, (_, i) => Number(`${[1, 2, 5][i % 3]}e${Math.floor(i / 3) - 30}`)); // between numbers of an axis
const MIN_WIDTH = 150;
const DRAG_PX = 8;
const LABEL_PX = 12; // from one number beside an axis to the next

const inks = new Map(); // theme and name -> colour: asking the browser takes longer than drawing a line

/** A colour of the style sheet. */
export function ink(name) {
  const key = `${document.documentElement.dataset.theme} ${name}`;
  const ask = () => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  if (!inks.has(key)) inks.set(key, ask());
  return inks.get(key);
}

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

/** Least and most of numbers, however many; 0 and 1 of none. */
export function extremes(numbers) {
  let [low, high] = numbers.length ? [Infinity, -Infinity] : [0, 1];
  for (const x of numbers) {
    if (x < low) low = x;
    if (x > high) high = x;
  }
  return [low, high];
}

/** A line through places. */
function stroke(context, places) {
  context.beginPath();
  for (const [x, y] of places) context.lineTo(x, y);
  context.stroke();
}

/** Text of a colour of the style sheet at a place, aligned as said. */
export function write(context, text, x, y, { colour = ink("muted"), align = "left", base = "middle" } = {}) {
  [context.fillStyle, context.textAlign, context.textBaseline] = [colour, align, base];
  context.fillText(text, x, y);
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

/** Number of a step among points, or undefined. */
export const valueAt = (points, step) => points.find(([at]) => at === step)?.[1];

/**
 * One chart. The pointer tells exact numbers, a click goes to the step, dragging zooms, a double click zooms out.
 *
 * `set` draws `lines`: `{points: [[x, y], ...], colour, width, dash, bars: [share of the room, align]}`, x ascending;
 * null leaves a gap, NaN and infinities a gap and a mark. `bands` are filled between two lines: `[upper, lower, alpha]`.
 * `span` (of `spanOf`) fixes the y axis. With `labels(x)` x are no steps. `paint(context, box, y)` adds something of a view's own.
 */
export class Chart {
  /** @param {function(number): [string, Array]} tell title and pairs of the tooltip at an x, or undefined */
  constructor(app, tell) {
    [this.app, this.tell] = [app, tell];
    this.root = h("div", { className: "plot", role: "img" });
    this.root.addEventListener("pointermove", (event) => this.hover(event));
    this.root.addEventListener("pointerleave", () => app.tooltip.hide());
    this.root.addEventListener("click", (event) => !this.what?.labels && app.time.go(this.at(event)));
    this.root.addEventListener("dblclick", () => (this.isZoomed = false));
  }

  get canvas() {
    return this.plot?.ctx.canvas;
  }

  remove() {
    this.plot?.destroy();
    this.plot = this.shape = undefined;
  }

  set(what) {
    this.what = what;
    const { lines, isLog, width, height, bands } = what;
    if (what.text) this.root.setAttribute("aria-label", what.text);
    if (lines.every(({ points }) => points.length === 0)) return this.remove();
    this.root.style.height = `${height}px`; // it draws later, and others ask at once how much room is left
    const { unit } = what.span ?? (isLog ? spanOf(lines, isLog) : { unit: 1 });
    const shape = JSON.stringify([isLog, unit, bands, lines.map(({ dash, bars, points }) => [dash, bars, points.length > MANY])]);
    const data = uPlot.join(lines.map(({ points }) => [
      points.map(([x]) => x),
      points.map(([, y]) => (Number.isFinite(y) ? y : null)),
    ]));
    if (shape !== this.shape) {
      this.remove();
      [this.shape, this.isZoomed] = [shape, false];
      this.plot = new uPlot(this.options(unit), data, this.root);
      return;
    }
    if (this.plot.width !== width || this.plot.height !== height) this.plot.setSize({ width, height });
    this.plot.setData(data, !this.isZoomed);
    if (this.isZoomed) this.plot.redraw();
  }

  options(unit) {
    const { width, height, isLog, lines, bands = [], right = 10 } = this.what;
    const kept = isLog ? powers : (_, places) => places;
    const axis = { font: FONT, stroke: () => ink("muted"), gap: 6, ticks: { show: false } };
    const label = (_, splits) => splits.map((x) => (x === null ? null : this.what.labels?.(x) ?? String(x)));
    return {
      width,
      height,
      padding: [8, right, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, dist: DRAG_PX } },
      scales: {
        x: { time: false, range: (plot, low, high) => this.across(plot.data[0], low, high) },
        y: { distr: isLog ? 4 : 1, asinh: unit, range: (_, low, high) => this.upwards(low, high) },
      },
      axes: [
        { ...axis, size: 22, space: 40, incrs: ROUND.filter((size) => size >= 1), grid: { show: false }, values: label },
        {
          ...axis,
          size: 52,
          space: 24,
          incrs: ROUND,
          filter: kept,
          grid: { stroke: () => ink("line"), width: 1, filter: kept },
          values: (_, splits) => splits.map((y) => (y === null ? null : tick(Math.abs(y) < 1e-15 ? 0 : y))),
        },
      ],
      series: [{}, ...lines.map((_, i) => this.series(i))],
      bands: bands.map(([upper, lower, alpha]) => ({
        series: [upper + 1, lower + 1],
        fill: () => this.what.lines[upper].colour + alpha,
      })),
      hooks: { draw: [() => this.drawn()], setSelect: [({ select }) => (this.isZoomed ||= select.width > 0)] },
    };
  }

  series(i) {
    const { dash, bars, points, width = 1.5 } = this.what.lines[i];
    const colour = () => this.what.lines[i].colour;
    if (bars) {
      const [share, align] = bars;
      return { width: 0, fill: colour, paths: uPlot.paths.bars({ size: [share, Infinity], align, gap: 1 }), points: { show: false } };
    }
    // Of many steps a thick line would be a surface, and is drawn once per pixel; steps without neighbours are dots.
    const isMany = points.length > MANY;
    return {
      stroke: colour,
      pxAlign: isMany ? 1 : 0,
      dash,
      width: isMany ? Math.min(width, 0.8) : width,
      points: { show: () => false, filter: (plot, of) => alone(plot.data[of]), size: 4, fill: colour },
    };
  }

  across(xs, low, high) {
    if (xs.length === 1) [low, high] = [xs[0], xs[0]]; // uPlot gives some range around it
    const align = this.what.lines.find(({ bars }) => bars)?.bars[1];
    if (align === 1) return [low, high + 1];
    return align === 0 || low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  upwards(low, high) {
    if (this.what.span) ({ low, high } = this.what.span);
    if (!Number.isFinite(low)) return [0, 1];
    const isFromZero = this.what.lines.some(({ bars }) => bars);
    const pad = this.what.isLog ? 0 : (high - low || Math.abs(high) || 1) * 0.06;
    if (isFromZero) return [0, Math.max(1, high + pad)];
    return low === high && this.what.isLog ? [low - 1, high + 1] : [low - pad, high + pad];
  }

  /** Where the step is that is shown, marks that somebody has set, and what is not finite. */
  drawn() {
    const { plot, app, what } = this;
    const { ctx: context, bbox } = plot;
    const ratio = uPlot.pxRatio;
    const [left, top, width, height] = [bbox.left, bbox.top, bbox.width, bbox.height].map((size) => size / ratio);
    const box = { left, top, right: left + width, bottom: top + height };
    const { min, max } = plot.scales.x;
    const isInSight = (step) => step >= min && step <= max;
    const x = (step) => left + plot.valToPos(step, "x");
    context.save();
    context.scale(ratio, ratio);
    context.font = FONT;
    for (const { points } of what.labels ? [] : what.lines) {
      for (const [step, value] of points) {
        if (value === null || Number.isFinite(value) || !isInSight(step)) continue;
        context.fillStyle = NOT_FINITE;
        context.beginPath();
        context.arc(x(step), value === Infinity ? top + 4 : box.bottom - 4, 3, 0, 2 * Math.PI);
        context.fill();
      }
    }
    const line = (step, colour, dash) => {
      const at = Math.round(x(step)) + 0.5;
      context.strokeStyle = ink(colour);
      context.lineWidth = 1;
      context.setLineDash(dash);
      stroke(context, [[at, top], [at, box.bottom]]);
      return at;
    };
    for (const { step, label } of what.labels ? [] : app.marks.filter((mark) => isInSight(mark.step))) {
      const at = line(step, "muted", [2, 3]);
      const isRight = at > left + width / 2;
      write(context, clip(label, 24), at + (isRight ? -4 : 4), top, { align: isRight ? "right" : "left", base: "top" });
    }
    if (!what.labels && isInSight(app.step)) line(app.step, "accent", []);
    what.paint?.(context, box, (value) => top + plot.valToPos(value, "y"));
    context.restore();
  }

  /** The x of the data nearest to the pointer; of labelled ones the one it is in. */
  at(event) {
    if (this.plot === undefined) return undefined;
    const x = this.plot.posToVal(event.clientX - this.plot.over.getBoundingClientRect().left, "x");
    return this.what.labels ? Math.floor(x) : this.plot.data[0][this.plot.valToIdx(x)];
  }

  hover(event) {
    const told = this.plot && this.tell(this.at(event));
    if (told) this.app.tooltip.show(...told, event);
  }
}

/** Small charts side by side, one per name; those whose names stay are kept. */
export class ChartGrid {
  /** @param {function(string, number): [string, Array]} tell as of `Chart`, of a name */
  constructor(app, tell) {
    [this.app, this.tell, this.charts] = [app, tell, new Map()];
    this.root = h("div", { className: "grid" });
  }

  make(name) {
    const chart = new Chart(this.app, (step) => this.tell(name, step));
    const now = h("output", { className: "now" });
    const head = h("div", { className: "chart-head" }, h("h3", { textContent: name }), now);
    return { chart, now, figure: h("figure", { className: "chart" }, head, chart.root) };
  }

  /** Shows these, and gives their charts and the width that each has. */
  show(names) {
    for (const [name, { chart }] of this.charts) {
      if (names.includes(name)) continue;
      chart.remove();
      this.charts.delete(name);
    }
    for (const name of names) if (!this.charts.has(name)) this.charts.set(name, this.make(name));
    const all = names.map((name) => this.charts.get(name));
    keepChildren(this.root, all.map(({ figure }) => figure));
    return { all, width: Math.max(MIN_WIDTH, (all[0]?.figure.clientWidth ?? 0) - 26) };
  }

  canvases() {
    return [...this.charts].map(([title, { chart }]) => ({ title, canvas: chart.canvas }));
  }
}

/** Indices of numbers that have no neighbours, or null. */
function alone(numbers) {
  const known = [...numbers.entries()].filter(([, y]) => y !== undefined);
  const isGap = (place) => (known[place]?.[1] ?? null) === null;
  const found = known.filter((_, place) => !isGap(place) && isGap(place - 1) && isGap(place + 1)).map(([i]) => i);
  return found.length ? found : null;
}

/** Of the places of a logarithmic axis powers of ten, or all where it has fewer than two of them; null for the rest. */
function powers(plot, places) {
  const { min, max } = plot.scales.y;
  const isPower = (y) => y >= min && y <= max && (y === 0 || /^-?1\.000e/.test(y.toExponential(3)));
  const isFew = places.filter(isPower).length < 2;
  let last = Infinity;
  return places.map((y) => {
    const at = plot.valToPos(y, "y");
    if (!(isFew || isPower(y)) || last - at < LABEL_PX) return null;
    last = at;
    return y;
  });
}

/** Ends of the y axis for these lines, and the size around zero within which a logarithmic one is straight; `isInner` lines have no part. */
export function spanOf(lines, isLog) {
  const numbers = lines.filter(({ isInner }) => !isInner).flatMap(({ points }) => points.map(([, y]) => y)).filter(Number.isFinite);
  const [low, high] = extremes(numbers);
  const sizes = Float64Array.from(isLog ? numbers : [], Math.abs).filter((x) => x > 0).sort();
  if (sizes.length === 0) return { low, high, unit: 1 };
  const typical = Math.max(sizes[Math.floor(sizes.length / 10)], sizes.at(-1) * 1e-8);
  return { low, high, unit: 10 ** Math.floor(Math.log10(typical)) };
}
