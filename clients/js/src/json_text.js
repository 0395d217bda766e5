/**
 * JSON as text: cut into its parts without reading them, so that a part can be compared and hashed as it was sent.
 * JSON.parse would lose the digits of large integers and the way a number was written.
 */

const QUOTE = 34, BACKSLASH = 92, COMMA = 44, COLON = 58;
const OPENING = new Set([91, 123]), CLOSING = new Set([93, 125]);

/**
 * The elements of an array, each as its text.
 * @param {string} text
 * @returns {string[]}
 */
export function items(text) {
  return parts(text, "[", "]").map(([start, end]) => text.slice(start, end).trim());
}

/**
 * The fields of an object, each value as its text.
 * @param {string} text
 * @returns {Map<string, string>}
 */
export function fields(text) {
  const found = new Map();
  for (const [start, end, colon] of parts(text, "{", "}")) {
    if (colon < 0) throw new SyntaxError("an object has a part without a name");
    found.set(JSON.parse(text.slice(start, colon)), text.slice(colon + 1, end).trim());
  }
  return found;
}

/** Where each part begins and ends, and where its first colon stands. */
function parts(text, open, close) {
  const begin = text.indexOf(open), end = text.lastIndexOf(close);
  if (begin < 0 || end < begin || text.slice(0, begin).trim() || text.slice(end + 1).trim()) {
    throw new SyntaxError(`this is not ${open}…${close}: ${text.slice(0, 40)}`);
  }
  const found = [];
  let depth = 0, start = begin + 1, colon = -1;
  for (let at = start; at < end; at++) {
    const code = text.charCodeAt(at);
    if (code === QUOTE) at = endOfString(text, at);
    else if (OPENING.has(code)) depth++;
    else if (CLOSING.has(code)) depth--;
    else if (depth === 0 && code === COLON && colon < 0) colon = at;
    else if (depth === 0 && code === COMMA) {
      found.push([start, at, colon]);
      start = at + 1;
      colon = -1;
    }
  }
  if (depth !== 0) throw new SyntaxError(`brackets do not match in ${text.slice(0, 40)}`);
  if (found.length || text.slice(start, end).trim()) found.push([start, end, colon]);
  return found;
}

function endOfString(text, at) {
  for (let next = at + 1; next < text.length; next++) {
    const code = text.charCodeAt(next);
    if (code === BACKSLASH) next++;
    else if (code === QUOTE) return next;
  }
  throw new SyntaxError("a string does not end");
}

/**
 * As JSON.parse, but an integer that a number cannot hold exactly becomes a BigInt.
 * @param {string} text
 * @returns {any}
 */
export function parse(text) {
  return /\d{16}/.test(text) ? parseSlowly(text.trim()) : JSON.parse(text);
}

function parseSlowly(text) {
  if (text[0] === "[") return items(text).map(parse);
  if (text[0] === "{") return Object.fromEntries([...fields(text)].map(([name, value]) => [name, parse(value)]));
  const value = JSON.parse(text);
  return /^-?\d+$/.test(text) && !Number.isSafeInteger(value) ? BigInt(text) : value;
}
