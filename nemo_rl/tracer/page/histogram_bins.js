/** Which bins of a histogram are drawn, and what stands beside them. */

import { tick } from "./format.js";

const BESIDE = 2; // empty bins kept beside those with counts
const IN_THE_MIDDLE = 0.002; // of all values may be drawn as one bin around zero

/**
 * Groups of bins, each drawn as one bar: all bins between the ends that have counts; around zero those that hold next
 * to nothing are one bar.
 * @param {number[][]} all counts of every step
 * @param {{edges: number[], isLinear: boolean}} bins
 * @returns {Array<{first: number, last: number}>}
 */
export function groupsOf(all, bins) {
  const size = bins.edges.length - 1;
  const sums = new Float64Array(size);
  for (const counts of all) counts.forEach((count, bin) => (sums[bin] += count));
  const used = sums.findIndex((sum) => sum > 0);
  const last = sums.findLastIndex((sum) => sum > 0);
  const from = Math.max(0, (used < 0 ? 0 : used) - BESIDE);
  const to = Math.min(size - 1, (last < 0 ? size - 1 : last) + BESIDE);
  const middle = bins.isLinear ? -1 : middleWidth(sums);
  const centre = (size - 1) / 2;
  const groups = [];
  for (let bin = from; bin <= to; bin++) {
    if (Math.abs(bin - centre) > middle) groups.push({ first: bin, last: bin });
    else if (groups.at(-1)?.isMiddle) groups.at(-1).last = bin;
    else groups.push({ first: bin, last: bin, isMiddle: true });
  }
  return groups;
}

function middleWidth(sums) {
  const centre = (sums.length - 1) / 2;
  const allowed = IN_THE_MIDDLE * sums.reduce((sum, count) => sum + count, 0);
  let [width, held] = [0, sums[centre]];
  while (width + 1 < centre && held + sums[centre - width - 1] + sums[centre + width + 1] <= allowed) {
    width += 1;
    held += sums[centre - width] + sums[centre + width];
  }
  return held <= allowed ? width : 0;
}

/** Counts of a group. */
export function sumOf(counts, { first, last }) {
  let sum = 0;
  for (let bin = first; bin <= last; bin++) sum += Number(counts[bin]);
  return sum;
}

/** A number at the edge of a bin; powers of two are written as such. */
export function edgeText(value, isLinear) {
  if (!Number.isFinite(value)) return value > 0 ? "+∞" : "−∞";
  if (isLinear || value === 0) return tick(value);
  const power = String(Math.round(Math.log2(Math.abs(value)))).replace(
    /./g,
    (digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)],
  );
  return `${value < 0 ? "−" : ""}2${power}`;
}
