/** What the numbers of each reducer mean. */

/** Names of the ten numbers of `stats`, in their order. */
export const STATS = ["count", "sum", "sumsq", "min", "max", "absmax", "zeros", "nan", "posinf", "neginf"];
const PER_TOKEN = new Set(["tiles", "topk", "full", "sample", "project"]);
const FIRST_EXPONENT = -32; // of the histogram by powers of two
const NUM_EXPONENTS = 64;

/**
 * Name and parameters of a reducer's text, such as `tiles(8, rms)`.
 * @returns {{name: string, args: string[]}}
 */
export function parseReducer(text) {
  const match = /^\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*$/.exec(text);
  if (match === null) return { name: text, args: [] };
  return { name: match[1], args: (match[2] ?? "").split(",").map((arg) => arg.trim()).filter(Boolean) };
}

/** Whether a reducer keeps something of each token. */
const isPerToken = (text) => PER_TOKEN.has(parseReducer(text).name);

/** Whether a reducer gives numbers per token that one colour can stand for. */
export const isColour = (text) => isPerToken(text) && parseReducer(text).name !== "topk";

/** Whether a reducer's numbers are spread around zero. */
export function isSigned(text) {
  const { name, args } = parseReducer(text);
  return name === "tiles" ? args[1] === "mean" || args[1] === "max" : name !== "topk";
}

/** The ten numbers by name, with mean, standard deviation and rms of the finite values (NaN where there are none). */
export function statsOf(values) {
  const found = Object.fromEntries(STATS.map((name, place) => [name, values[place]]));
  const finite = found.count - found.nan - found.posinf - found.neginf;
  const mean = finite > 0 ? found.sum / finite : NaN;
  const square = finite > 0 ? found.sumsq / finite : NaN;
  return {
    ...found,
    finite,
    mean,
    std: Math.sqrt(Math.max(0, square - mean * mean)),
    rms: Math.sqrt(square),
    min: finite > 0 ? found.min : NaN,
    max: finite > 0 ? found.max : NaN,
  };
}

/**
 * Edges of the bins of a histogram, one more than there are bins.
 * @param {string} text of the reducer
 * @returns {{edges: number[], isLinear: boolean}}
 */
export function histogramBins(text) {
  const { args } = parseReducer(text);
  if (args.length === 3 && Number(args[2]) > 0) {
    const [low, high, bins] = args.map(Number);
    const inner = Array.from({ length: bins + 1 }, (_, i) => low + ((high - low) * i) / bins);
    return { edges: [-Infinity, ...inner, Infinity], isLinear: true };
  }
  const positive = Array.from({ length: NUM_EXPONENTS }, (_, i) => 2 ** (FIRST_EXPONENT + i));
  const negative = positive.map((edge) => -edge).reverse();
  return { edges: [-Infinity, ...negative, ...positive, Infinity], isLinear: false };
}

/**
 * Quantiles of a histogram, each by a straight line within its bin; bins that go to infinity give their finite edge.
 * @param {number[]} shares between 0 and 1
 */
export function quantiles(counts, edges, shares) {
  const numbers = Array.from(counts, Number);
  const total = numbers.reduce((sum, count) => sum + count, 0);
  return shares.map((share) => {
    let before = 0;
    for (let bin = 0; bin < numbers.length; bin++) {
      if (numbers[bin] > 0 && before + numbers[bin] >= share * total) {
        const low = Number.isFinite(edges[bin]) ? edges[bin] : edges[bin + 1];
        const high = Number.isFinite(edges[bin + 1]) ? edges[bin + 1] : edges[bin];
        return low + ((high - low) * (share * total - before)) / numbers[bin];
      }
      before += numbers[bin];
    }
    return NaN;
  });
}

/** Entropy of a load as a share of that of an even load: 1 is even, 0 is one expert alone; NaN without load. */
export function evenness(counts, numExperts) {
  const numbers = Array.from(counts, Number);
  const total = numbers.reduce((sum, count) => sum + count, 0);
  if (total <= 0) return NaN;
  if (numExperts < 2) return 1;
  const shares = numbers.filter((count) => count > 0).map((count) => count / total);
  return shares.reduce((entropy, share) => entropy - share * Math.log(share), 0) / Math.log(numExperts);
}
