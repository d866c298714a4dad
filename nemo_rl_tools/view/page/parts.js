/** Parts that all of the page is made of: elements, files, lines and plots. */
"use strict";

/** Colours that people with any colour vision tell apart (Okabe and Ito), and dashes; 28 lines have another look each. */
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
const COLORS = isDark
  ? ["#56b4e9", "#f0803c", "#1fc79a", "#e79bc6", "#f2b84b", "#8f9bff", "#c7b04a"]
  : ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d00"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const few = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const tiny = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, notation: "scientific" });
const digits = (value) => (Number.isFinite(value) ? (value && Math.abs(value) < 1e-3 ? tiny : few).format(value) : "");
const byId = (id) => document.getElementById(id);
const look = (i) => ({ color: COLORS[i % COLORS.length], dash: DASHES[i % DASHES.length] });
/** Distances between ticks of an axis of steps. */
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [power, 2 * power, 5 * power]);
const seconds = (value) => {
  if (value < 60) return `${few.format(Math.round(value * 10) / 10)} s`;
  const [minutes, hours] = [Math.floor(value / 60), Math.floor(value / 3600)];
  if (minutes < 60) return `${minutes} min ${Math.round(value % 60)} s`.replace(" 0 s", "");
  return `${hours} h ${minutes % 60} min`.replace(" 0 min", "");
};
const date = (at) => {
  const [day, time] = [new Date(1000 * at).toLocaleDateString("sv"), new Date(1000 * at).toLocaleTimeString("sv")];
  return `${day} ${time.slice(0, 5)}`;
};
const total = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0);
const mean = (values) => total(values) / (values.length || 1);

function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** A table; a cell that is a number stands to the right. */
function table(head, rows) {
  const isNumber = (value) => typeof value === "number" || value === undefined;
  const numbers = head.map((_, i) => rows.length > 0 && rows.every((row) => isNumber(row[i])));
  const cell = (value) => (isNumber(value)
    ? h("td", { className: "number" }, digits(value)) : h("td", {}, ...[value].flat()));
  const names = head.map((text, i) => h("th", { scope: "col", className: numbers[i] ? "number" : "" }, text));
  return h("div", { className: "wide" }, h("table", {},
    h("thead", {}, h("tr", {}, ...names)), h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map(cell))))));
}

const p = (...children) => h("p", {}, ...children);
const command = (text) => h("pre", { className: "command", tabIndex: 0 }, text);

/** A short line as a curve has it. */
function swatch({ color, dash }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [name, value] of Object.entries({ width: 34, height: 8, "aria-hidden": true })) svg.setAttribute(name, value);
  const drawn = { x1: 0, x2: 34, y1: 4, y2: 4, stroke: color, "stroke-width": 3, "stroke-dasharray": dash.join(" ") };
  for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

/** Data of a file of this page: a script, since a page of a file can read nothing else. */
function load(path) {
  return new Promise((resolve) => {
    const failed = () => resolve({ problem: `${path} cannot be read; does nemo-rl view still run?` });
    const script = h("script", { src: path, onerror: failed, onload: () => resolve(window.nemoRlFiles[path.split("?")[0]]) });
    document.head.append(script);
    script.remove();
  });
}

let plots = [];

function clearPlots() {
  for (const plot of plots) plot.destroy();
  plots = [];
}

function plot(figure, data, series, more = {}) {
  const style = getComputedStyle(document.documentElement);
  const axis = { stroke: style.getPropertyValue("--soft"), grid: { stroke: style.getPropertyValue("--line"), width: 1 } };
  const across = more.isWall ? { values: (_, ticks) => ticks.map(seconds) } : { incrs: WHOLE };
  const made = new uPlot({
    width: Math.max(figure.clientWidth - 18, 120), height: 190, series: [{ label: "step" }, ...series],
    axes: [{ ...axis, ...across, size: 32 }, { ...axis, size: 60, values: (_, ticks) => ticks.map(digits) }],
    legend: { show: false }, cursor: { sync: { key: "step" } }, ...more, scales: { x: { time: false }, ...more.scales },
  }, data, figure);
  plots.push(made);
  return made;
}

/** A curve of fewer points is never smoothed. */
const LEAST_SMOOTHED = 10;

/** Exponential running mean, of which the first values weigh no more than the later ones. */
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    [sum, norm] = [weight * sum + (1 - weight) * value, weight * norm + 1 - weight];
    return sum / norm;
  });
}

/** Lines, each with `label`, `color`, `dash`, `at` (steps, or seconds) and `values`; `.at` says what is under the pointer. */
function plotLines(figure, lines, { smooth = 0, isWall = false } = {}) {
  const data = [], series = [], shown = [];
  for (const { label, color, dash, at, values } of lines) {
    const isSmoothed = smooth > 0 && values.length >= LEAST_SMOOTHED;
    const drawn = { label, stroke: color, width: 2, dash, spanGaps: true, points: { show: at.length < 2 } };
    if (isSmoothed) {
      data.push([at, values]);
      series.push({ ...drawn, alpha: 0.25, width: 1, dash: [] });
    }
    data.push([at, isSmoothed ? smoothed(values, smooth) : values]);
    series.push(drawn);
    shown.push([series.length, isSmoothed ? series.length - 1 : series.length, color]);
  }
  const told = figure.querySelector(".at");
  const setCursor = (made) => {
    const i = made.cursor.idx ?? -1, x = made.data[0][i];
    const texts = i < 0 ? [] : shown.map(([, raw, color]) => [made.data[raw][i], color]).filter(([value]) => Number.isFinite(value));
    told?.replaceChildren(...(texts.length ? [isWall ? seconds(x) : `step ${x}`] : []),
      ...texts.map(([value, color]) => { const each = h("b", {}, ` ${digits(value)}`); each.style.color = color; return each; }));
  };
  return plot(figure, uPlot.join(data), series, { isWall, hooks: { setCursor: [setCursor] } });
}

const MOST_BARS = 60;

/** Parts on top of each other, the first at the foot, each with `color`, `dash` of its edge and `values`; and a line. */
function plotStack(figure, steps, parts, line) {
  const style = getComputedStyle(document.documentElement), text = style.getPropertyValue("--text");
  const tops = [];
  for (const { values } of parts) tops.push(values.map((value, i) => (value ?? 0) + (tops.at(-1)?.[i] ?? 0)));
  const paths = steps.length > MOST_BARS ? undefined : uPlot.paths.bars({ size: [0.8, 60] });
  const areas = parts.map(({ label, color, dash }) => (
    { label, fill: color, stroke: text, width: 1, dash, paths, points: { show: false } }));
  const over = { label: "step", stroke: text, width: 2, dash: [6, 4], points: { show: steps.length < 2 } };
  const edge = paths && steps.length ? 0.6 : 0;
  // The highest is drawn first: each covers what the one above it has below its own foot.
  return plot(figure, [steps, ...tops.toReversed(), line], [...areas.toReversed(), over], {
    height: 260, cursor: {},
    scales: {
      x: { time: false, range: (_, low, high) => [low - edge, high + edge] },
      y: { range: (_, low, high) => [0, high * 1.05 || 1] },
    },
  });
}
