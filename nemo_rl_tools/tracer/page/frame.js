/** Binary frames of the hub: `NRT1`, length of the header, JSON header, payload of little-endian numbers. */

const MAGIC = "NRT1";
const ARRAYS = { float32: Float32Array, float64: Float64Array, int32: Int32Array, int64: BigInt64Array };
const OVERHEAD_BYTES = 600; // of a frame's header and its place in maps, roughly

/**
 * What a frame or a table is: header fields, numbers and shape.
 * @typedef {Object} Message
 * @property {string} what "frame" or "table"
 * @property {Object} header
 * @property {Float32Array|Float64Array|Int32Array|BigInt64Array} values
 * @property {number[]} shape
 * @property {number} bytes
 */

/** Reads one binary message; numbers are looked at in place, not copied. */
export function decode(buffer) {
  const bytes = new Uint8Array(buffer);
  if (bytes.length < 8 || String.fromCharCode(...bytes.subarray(0, 4)) !== MAGIC) {
    throw new Error("a message that is no frame");
  }
  const length = new DataView(buffer).getUint32(4, true);
  if (length > bytes.length - 8) throw new Error("a frame whose header is longer than the message");
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const Numbers = ARRAYS[header.dtype];
  if (Numbers === undefined) throw new Error(`a frame of the unknown type ${header.dtype}`);
  const count = header.shape.reduce((product, size) => product * size, 1);
  if (8 + length + count * Numbers.BYTES_PER_ELEMENT > bytes.length) throw new Error("a frame that is cut off");
  const values = new Numbers(buffer, 8 + length, count);
  return { what: header.what, header, values, shape: header.shape, bytes: buffer.byteLength + OVERHEAD_BYTES };
}

/**
 * A site for people, such as `mlp.out[3] backward`: the same text as the hub's.
 * @param {{kind: string, layer: ?number, name?: string, direction: string, recomputed?: boolean}} site
 */
export function siteText(site) {
  const at = site.layer ?? site.name;
  return (at === undefined || at === null ? site.kind : `${site.kind}[${at}]`) + wayText(site);
}

/**
 * Direction of a site, written after its kind; empty for the first forward pass.
 * @param {{direction: string, recomputed?: boolean}} site
 */
export function wayText(site) {
  return (site.direction === "forward" ? "" : ` ${site.direction}`) + (site.recomputed ? " recomputed" : "");
}

/** Which picture of its step a frame is. */
export function frameKey(phase, update, site, reducer) {
  return `${phase}|${update}|${site}|${reducer}`;
}
