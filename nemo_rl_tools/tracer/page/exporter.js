/** What somebody takes along: the picture as PNG, the numbers as CSV. */

import { FONT, MONO, ink } from "./chart.js";
import { h } from "./dom.js";

const MARGIN = 20;
const HEAD = 52;
const TITLE = 24;
const MOST_LINES = 60;

/**
 * CSV with a header; texts that a spreadsheet would run as a formula are quoted with an apostrophe.
 * @param {{columns: string[], rows: Array<Array<string|number>>}} numbers
 */
export function csvOf({ columns, rows }) {
  return [columns, ...rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

function field(value) {
  if (typeof value === "number") return String(value);
  const isNumber = value === "NaN" || (value.trim() !== "" && !Number.isNaN(Number(value)));
  const safe = !isNumber && /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

/** Hands a file to the browser. */
export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** A name for files out of what is shown. */
export function fileName(parts, suffix) {
  const safe = parts.map((part) => String(part).replace(/[^A-Za-z0-9._-]+/g, "_").slice(0, 60)).filter(Boolean);
  return `${safe.join("-")}.${suffix}`;
}

/**
 * One picture of all canvases of a view, with a heading; of a table where it has none.
 * @param {{canvases: function(): Array<{title: string, canvas: HTMLCanvasElement}>, numbers: function(): Object}} view
 */
export function pictureOf(view, heading) {
  const pieces = view.canvases().filter(({ canvas }) => canvas?.width > 1 && canvas.offsetParent !== null);
  const ratio = window.devicePixelRatio || 1;
  const whole = document.createElement("canvas");
  const context = whole.getContext("2d");
  if (pieces.length > 0) paste(whole, context, pieces, heading, ratio);
  else list(whole, context, view.numbers(), heading, ratio);
  return new Promise((resolve) => whole.toBlob(resolve, "image/png"));
}

function begin(whole, context, [width, height], heading, ratio) {
  [whole.width, whole.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = ink("card");
  context.fillRect(0, 0, width, height);
  context.fillStyle = ink("text");
  context.font = `600 15px ${FONT.slice(5)}`;
  context.textBaseline = "middle";
  context.fillText(heading, MARGIN, HEAD / 2 + 4, width - 2 * MARGIN);
}

/** Canvases as they stand on the page, from left to right and down. */
function paste(whole, context, pieces, heading, ratio) {
  const boxes = pieces.map(({ canvas }) => canvas.getBoundingClientRect());
  const left = Math.min(...boxes.map((box) => box.left));
  const top = Math.min(...boxes.map((box) => box.top));
  const size = [
    Math.max(...boxes.map((box) => box.right)) - left + 2 * MARGIN,
    Math.max(...boxes.map((box) => box.bottom)) - top + HEAD + TITLE + MARGIN,
  ];
  begin(whole, context, size, heading, ratio);
  pieces.forEach(({ title, canvas }, i) => {
    const [x, y] = [boxes[i].left - left + MARGIN, boxes[i].top - top + HEAD + TITLE];
    context.fillStyle = ink("muted");
    context.font = FONT;
    context.fillText(title, x, y - TITLE / 2, boxes[i].width);
    context.drawImage(canvas, x, y, boxes[i].width, boxes[i].height);
  });
}

function list(whole, context, { columns, rows }, heading, ratio) {
  const lines = [columns, ...rows.slice(0, MOST_LINES)].map((row) => row.map(String));
  const widths = columns.map((_, i) => Math.min(24, Math.max(...lines.map((line) => line[i].length))) * 7.4 + 14);
  const size = [widths.reduce((sum, width) => sum + width, 2 * MARGIN), HEAD + lines.length * 18 + MARGIN];
  begin(whole, context, size, heading, ratio);
  context.font = MONO;
  lines.forEach((line, row) => {
    let x = MARGIN;
    context.fillStyle = ink(row === 0 ? "muted" : "text");
    line.forEach((text, i) => {
      context.fillText(text.slice(0, 24), x, HEAD + row * 18 + 9);
      x += widths[i];
    });
  });
}
