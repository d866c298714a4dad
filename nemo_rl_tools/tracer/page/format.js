/** Numbers and texts as people read them. */

/** The exact number, as a program reads it back. */
export const exact = (value) => String(value);

/** A number beside an axis: four digits at most, no zeros behind. */
export function tick(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(1).replace(".0", "").replace("e+", "e").replaceAll("-", "−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

/** A number in about four digits. */
export function short(value) {
  if (typeof value === "bigint") value = Number(value);
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "+∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value).replace("-", "−");
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace(/-/g, "−");
  return value.toPrecision(4).replace("-", "−");
}

/** A whole number with thin spaces between thousands. */
export const whole = (value) => String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");

/** `1 step`, `2 steps`. */
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/**
 * A token's text with white space shown: `·` for a space, `⏎` for a new line, `⇥` for a tab.
 * @param {?string} text undefined where it is not known
 */
export function tokenText(text, id) {
  if (text === undefined || text === null) return `#${id}`;
  if (text === "") return "∅";
  const shown = text.replace(/ /g, "·").replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥");
  // Everything else that would not be seen, or would turn the direction of what follows.
  return shown.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, "\ufffd");
}

/** A text of at most so many characters. */
export const clip = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

/** `14:03:22` of this day. */
export const clock = (milliseconds) => new Date(milliseconds).toTimeString().slice(0, 8);
