/** Colour maps that the colour-blind can read, and scales that map numbers to them. */

const VIRIDIS = "440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725".split(" ");
const DIVERGING = {
  light: ["0b4a8f", "2f74b5", "6fa5d3", "b3cfe6", "f3f2ef", "f3cfa6", "e39b55", "bf6415", "8a3d06"],
  dark: ["a8d1ff", "6ea9ea", "3d76bd", "254a7c", "20232b", "74401c", "b8631f", "eb9850", "ffd3a3"],
};
/** Colour of NaN and infinities, in no map. */
export const NOT_FINITE = "#e5008a";
/** Colours of the two runs; told apart by lightness, too. */
const SERIES = { light: ["#2b6cb0", "#d97706"], dark: ["#5ea0ef", "#f2a65a"] };

const tables = new Map();

/** Whether the page is dark. */
export const isDark = () => document.documentElement.dataset.theme === "dark";

/** Colour of run A (0) or run B (1). */
export const seriesColour = (side) => SERIES[isDark() ? "dark" : "light"][side];

/** 256 colours as `rgb(...)`. */
export function colours(isDiverging) {
  const anchors = isDiverging ? DIVERGING[isDark() ? "dark" : "light"] : VIRIDIS;
  if (!tables.has(anchors)) tables.set(anchors, Array.from({ length: 256 }, (_, i) => between(anchors, i / 255)));
  return tables.get(anchors);
}

function between(anchors, share) {
  const place = share * (anchors.length - 1);
  const at = Math.min(Math.floor(place), anchors.length - 2);
  const [from, to] = [anchors[at], anchors[at + 1]].map((text) => [0, 2, 4].map((i) => parseInt(text.slice(i, i + 2), 16)));
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * (place - at))).join(",")})`;
}

/** Black or white, whichever is read on a colour of `colours`. */
export function inkOn(colour) {
  const [r, g, b] = colour.match(/\d+/g).map(Number);
  return 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#111" : "#fff";
}

/** Colour of one of several lines, from dark to light as they go. */
export function lineColour(index, total) {
  const table = colours(false);
  const share = total > 1 ? index / (total - 1) : 0.35;
  return table[Math.round(isDark() ? 60 + 195 * share : 10 + 195 * share)];
}

/**
 * How numbers become places in a colour map.
 * @param {number[]} numbers those shown; what is not finite is left out
 * @param {{kind: string, isSigned: boolean}} how `linear`, `middle` (98 %), `log`
 * @returns {{low: number, high: number, isDiverging: boolean, place: function(number): number, value: function(number): number}}
 */
export function scaleOf(numbers, how) {
  const sorted = Float64Array.from(numbers.filter(Number.isFinite)).sort();
  const at = (share) => (sorted.length ? sorted[Math.round(share * (sorted.length - 1))] : 0);
  const cut = how.kind === "middle" ? 0.01 : 0;
  let [low, high] = [at(cut), at(1 - cut)];
  const isDiverging = how.isSigned && low < 0;
  if (isDiverging) [low, high] = [-Math.max(-low, high), Math.max(-low, high)];
  if (low === high) [low, high] = isDiverging ? [low - 1, high + 1] : [low, low + Math.max(Math.abs(low), 1e-30)];
  const [to, from] = how.kind === "log" ? logarithm(sorted) : [(x) => x, (x) => x];
  const [first, last] = [to(low), to(high)];
  const place = (value) => Math.min(1, Math.max(0, (to(value) - first) / (last - first)));
  return { low, high, isDiverging, place, value: (share) => from(first + share * (last - first)) };
}

/** Logarithmic away from zero, straight near it, so that zero and both signs have a place. */
function logarithm(sorted) {
  const sizes = Array.from(sorted, Math.abs).filter((value) => value > 0).sort((a, b) => a - b);
  const unit = sizes.length ? Math.max(sizes[Math.floor(sizes.length / 20)], sizes.at(-1) * 1e-6) : 1;
  return [(x) => Math.asinh(x / unit), (y) => Math.sinh(y) * unit];
}
