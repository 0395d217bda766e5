/** Values as the wire tags them, and as a program wants them. */

/**
 * The bare value of a tagged one: `{"t": "i64", "v": 1}` is 1. Bytes become a Uint8Array, dates and decimals stay texts.
 * @param {any} value
 * @returns {any}
 */
export function plain(value) {
  if (value === null || typeof value !== "object" || typeof value.t !== "string") return value;
  if (value.t === "null") return null;
  if (value.t === "unavailable") return undefined;
  if (value.t === "bytes") return Uint8Array.from(atob(value.b64), char => char.charCodeAt(0));
  if (value.t === "f64" && typeof value.v === "string") return Number(value.v); // NaN, Infinity
  return "iso" in value ? value.iso : value.v;
}
