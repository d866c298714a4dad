/** The numbers of the heat map: layers times the tokens of one row. */

import { tokenText } from "./format.js";
import { parseReducer } from "./reducer.js";
import { tokensOf } from "./store.js";

/**
 * @typedef {Object} Picture
 * @property {Array<{text: string, label: string, layer: ?number}>} places rows of the map
 * @property {Array<{text: string, id: number, position: number}>} tokens columns
 * @property {Float64Array} values `[places * tokens]`
 * @property {Uint8Array} present `[places * tokens]`: 0 where nothing has come
 * @property {string[]} keys of all rows of the sample
 * @property {string} key the one that is shown
 * @property {number} width numbers per token before they became one
 * @property {Object[]} headers of the frames
 */

/** Numbers per token of a frame. */
const widthOf = (frame) => frame.shape.slice(1).reduce((product, size) => product * size, 1);

/**
 * One number for a token.
 * @param {number} place of the token in its table
 * @param {string} show `mean`, `absmax`, or which of its numbers
 */
function cellOf(frame, place, show) {
  const width = widthOf(frame);
  const start = place * width;
  if (width === 1) return Number(frame.values[start]);
  if (show !== "mean" && show !== "absmax") return Number(frame.values[start + Math.min(Number(show), width - 1)]);
  let [sum, most, number] = [0, -Infinity, 0];
  for (let i = 0; i < width; i++) {
    if (isEmpty(frame, i, width)) continue;
    const value = Number(frame.values[start + i]);
    sum += value;
    number += 1;
    most = Math.abs(value) > most || Number.isNaN(value) ? Math.abs(value) : most;
  }
  if (number === 0) return NaN;
  return show === "mean" ? sum / number : most;
}

/** Whether a stretch has no features: there are more stretches than features. */
function isEmpty(frame, stretch, width) {
  const features = frame.header.num_features;
  if (width <= features || parseReducer(frame.header.reducer).name !== "tiles") return false;
  return Math.floor((stretch * features) / width) === Math.floor(((stretch + 1) * features) / width);
}

/**
 * Puts the frames of a picture together.
 * @param {{run: string, step: number, chosen: Object, places: Object[], key: ?string, show: string}} of
 * @returns {?Picture} null where no frame with tokens is there
 */
export function pictureOf(store, of) {
  const frames = of.places.map((place) => store.frame(of.run, of.step, of.chosen, place.text));
  const tables = frames.map((frame) => (frame ? store.table(of.run, frame.header.table) : undefined));
  const known = [...new Set(tables.filter((table) => table !== undefined))];
  if (known.length === 0) return null;
  const keys = [...new Set(known.flatMap((table) => table.keys.filter((key) => tokensOf(table, key).length > 0)))];
  const key = keys.includes(of.key) ? of.key : keys[0];
  const tokens = tokensAt(known, key);
  const columnOf = new Map(tokens.map((token, column) => [token.position, column]));
  const values = new Float64Array(frames.length * tokens.length).fill(NaN);
  const present = new Uint8Array(values.length);
  frames.forEach((frame, row) => {
    if (tables[row] === undefined) return;
    for (const place of tokensOf(tables[row], key)) {
      const at = row * tokens.length + columnOf.get(tables[row].positions[place]);
      values[at] = cellOf(frame, place, of.show);
      present[at] = 1;
    }
  });
  const first = frames.find((frame, row) => tables[row] !== undefined);
  const headers = frames.filter((frame) => frame !== undefined).map((frame) => frame.header);
  return { places: of.places, tokens, values, present, keys, key, width: widthOf(first), headers, frames, tables };
}

function tokensAt(tables, key) {
  const found = new Map();
  for (const table of tables) {
    for (const place of tokensOf(table, key)) {
      const [position, id] = [table.positions[place], table.ids[place]];
      found.set(position, { position, id, text: tokenText(table.texts[id], id) });
    }
  }
  return [...found.values()].sort((a, b) => a.position - b.position);
}

/** All numbers of one cell, as they came. */
export function numbersOf(picture, row, column) {
  const [frame, table] = [picture.frames[row], picture.tables[row]];
  if (frame === undefined || table === undefined) return null;
  const wanted = picture.tokens[column]?.position;
  const place = tokensOf(table, picture.key).find((at) => table.positions[at] === wanted);
  return place === undefined ? null : frame.values.subarray(place * picture.width, (place + 1) * picture.width);
}

/** What differs: `a - b` where both have the same token at the same position of the same layer. */
export function difference(a, b) {
  const rowOf = new Map(b.places.map((place, row) => [place.text, row]));
  const columnOf = new Map(b.tokens.map((token, column) => [token.position, column]));
  const values = new Float64Array(a.values.length).fill(NaN);
  const present = new Uint8Array(a.values.length);
  a.places.forEach((place, row) => {
    a.tokens.forEach((token, column) => {
      const [at, other] = [row * a.tokens.length + column, columnOf.get(token.position)];
      const from = rowOf.get(place.text);
      if (other === undefined || from === undefined || b.tokens[other].id !== token.id) return;
      const there = from * b.tokens.length + other;
      present[at] = a.present[at] & b.present[there];
      values[at] = a.values[at] - b.values[there];
    });
  });
  return { ...a, values, present, width: 1 };
}
