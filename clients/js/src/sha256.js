/** SHA-256: the browser's own where it has one, else this one. A page of plain HTTP has no WebCrypto. */

const ROUNDS = [], INITIAL = [];
for (let number = 2; ROUNDS.length < 64; number++) {
  if (isPrime(number)) {
    if (INITIAL.length < 8) INITIAL.push(fraction(Math.sqrt(number)));
    ROUNDS.push(fraction(Math.cbrt(number)));
  }
}

function isPrime(number) {
  for (let divisor = 2; divisor * divisor <= number; divisor++) if (number % divisor === 0) return false;
  return true;
}

function fraction(root) {
  return ((root - Math.floor(root)) * 2 ** 32) | 0;
}

/**
 * The hex digits of SHA-256 over the UTF-8 of `text`.
 * @param {string} text
 * @returns {Promise<string>}
 */
export async function sha256(text) {
  const bytes = new TextEncoder().encode(text);
  const subtle = globalThis.crypto?.subtle;
  return subtle ? hex(new Uint8Array(await subtle.digest("SHA-256", bytes))) : sha256Slowly(bytes);
}

/**
 * The same, without the browser's help.
 * @param {Uint8Array} bytes
 * @returns {string}
 */
export function sha256Slowly(bytes) {
  const view = padded(bytes), state = Int32Array.from(INITIAL), words = new Int32Array(64);
  for (let block = 0; block < view.byteLength; block += 64) {
    for (let at = 0; at < 16; at++) words[at] = view.getInt32(block + 4 * at);
    mix(state, words);
  }
  const result = new DataView(new ArrayBuffer(32));
  state.forEach((word, at) => result.setInt32(4 * at, word));
  return hex(new Uint8Array(result.buffer));
}

function padded(bytes) {
  const size = Math.ceil((bytes.length + 9) / 64) * 64, data = new Uint8Array(size), view = new DataView(data.buffer);
  data.set(bytes);
  data[bytes.length] = 0x80;
  view.setUint32(size - 8, Math.floor(bytes.length / 2 ** 29));
  view.setUint32(size - 4, (bytes.length << 3) >>> 0);
  return view;
}

const turn = (word, by) => (word >>> by) | (word << (32 - by));

function mix(state, words) {
  for (let at = 16; at < 64; at++) {
    const far = words[at - 15], near = words[at - 2];
    const low = turn(far, 7) ^ turn(far, 18) ^ (far >>> 3), high = turn(near, 17) ^ turn(near, 19) ^ (near >>> 10);
    words[at] = (words[at - 16] + low + words[at - 7] + high) | 0;
  }
  let [a, b, c, d, e, f, g, h] = state;
  for (let at = 0; at < 64; at++) {
    const first = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + ((e & f) ^ (~e & g)) + ROUNDS[at] + words[at]) | 0;
    const second = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [a, b, c, d, e, f, g, h] = [(first + second) | 0, a, b, c, (d + first) | 0, e, f, g];
  }
  [a, b, c, d, e, f, g, h].forEach((word, at) => { state[at] += word; });
}

function hex(bytes) {
  return Array.from(bytes, byte => byte.toString(16).padStart(2, "0")).join("");
}
