/** An answer: its columns and rows, each row kept as the text it was sent by; and what a patch makes of it. */

import {fields, items, parse} from "./json_text.js";
import {plain} from "./literal.js";
import {sha256} from "./sha256.js";

/** A patch does not fit the rows that are held: ask for the whole answer. */
export class PatchMismatch extends Error {
  name = "PatchMismatch";
}

/** What stands inside a tag: weak or strong, it names the same answer. */
export function opaque(tag) {
  return tag ? tag.replace(/^W\//, "").replace(/^"(.*)"$/, "$1") : null;
}

/** One row: its text, and its values once somebody asks. A row that stays over a patch stays the same object. */
class Row {
  #values;

  constructor(text) {
    this.text = text;
  }

  get values() {
    return (this.#values ??= Object.freeze(parse(this.text).map(plain)));
  }

  key(places) {
    const cells = items(this.text);
    return `[${places.map(place => cells[place]).join(",")}]`;
  }
}

/** An answer as it was at one tag. It never changes: a patch makes another one. */
export class Answer {
  #columns;
  #rows;

  /** @param {string | null} etag @param {string} columns @param {Row[]} rows @param {boolean} truncated */
  constructor(etag, columns, rows, truncated = false) {
    this.etag = etag;
    this.truncated = truncated; // there were more rows than one answer holds
    this.#columns = columns;
    this.#rows = rows;
  }

  /**
   * The answer in the body of a GET.
   * @param {string} body
   * @param {string | null} etag as the header says
   */
  static read(body, etag) {
    const data = fields(fields(body).get("data"));
    const rows = items(data.get("rows")).map(text => new Row(text));
    return new Answer(etag, data.get("columns"), rows, data.get("truncated") === "true");
  }

  /** @returns {{name: string}[]} */
  get columns() {
    return parse(this.#columns);
  }

  /** @returns {any[][]} rows of bare values (see `plain`); large integers are BigInt */
  get rows() {
    return this.#rows.map(row => row.values);
  }

  /** @returns {Record<string, any>[]} rows by the names of their columns */
  objects() {
    const names = this.columns.map(column => column.name);
    return this.rows.map(row => Object.fromEntries(row.map((value, at) => [names[at], value])));
  }

  /** @param {Answer | null} other */
  isSame(other) {
    return other !== null && this.#columns === other.#columns && this.#rows.length === other.#rows.length
      && this.#rows.every((row, at) => row.text === other.#rows[at].text);
  }

  /** `result_hash` of these rows: SHA-256 over their array as sent; sorted by bytes where order means nothing. */
  async hash(ordered = true) {
    const texts = this.#rows.map(row => row.text);
    return `sha256:${await sha256(`[${(ordered ? texts : texts.sort(byBytes)).join(",")}]`)}`;
  }

  /**
   * The answer after a patch; raises PatchMismatch unless it is the one that the server has.
   * @param {string} text the body of a 226
   * @returns {Promise<Answer>}
   */
  async patched(text) {
    const patch = fields(text);
    const flag = name => patch.get(name) === "true";
    const made = new Answer(parse(patch.get("etag")), patch.get("columns"), this.#patchedRows(patch));
    if (await made.hash(!patch.has("ordered") || flag("ordered")) !== parse(patch.get("result_hash"))) {
      throw new PatchMismatch("the rows after the patch are not those of the server");
    }
    return made;
  }

  #patchedRows(patch) {
    if (patch.get("reset") === "true") {
      demand(patch.has("full"), "a reset without rows");
      return items(fields(patch.get("full")).get("rows")).map(text => new Row(text));
    }
    demand(opaque(parse(patch.get("base_etag"))) === opaque(this.etag), "the patch is for another answer");
    demand(patch.get("columns") === this.#columns, "the columns are others");
    demand(patch.has("key") && patch.get("key") !== "null", "a patch without a key");
    return steps(patch, this.#rows);
  }
}

/** Removed, updated, added, moved: in this order, each seeing the work of those before. */
function steps(patch, rows) {
  const places = parse(patch.get("key"));
  const list = name => patch.has(name) ? items(patch.get(name)).map(fields) : [];
  const held = new Map(rows.map(row => [row.key(places), row]));
  demand(held.size === rows.length, "two rows have one key");
  const removed = new Set(list("removed").map(one => known(held, one.get("pk"))));
  const keys = [...held.keys()].filter(key => !removed.has(key));
  for (const one of list("updated")) held.set(known(held, one.get("pk")), new Row(one.get("row")));
  for (const one of list("added")) {
    held.set(one.get("pk"), new Row(one.get("row")));
    keys.splice(Number(one.get("at")), 0, one.get("pk"));
  }
  for (const one of list("moved")) {
    const from = Number(one.get("from"));
    demand(keys[from] === one.get("pk"), "a row to be moved is not where it should be");
    keys.splice(Number(one.get("to")), 0, ...keys.splice(from, 1));
  }
  return keys.map(key => held.get(key));
}

function known(held, key) {
  demand(held.has(key), "a row of the patch is not there");
  return key;
}

function demand(holds, what) {
  if (!holds) throw new PatchMismatch(what);
}

/** The order of the UTF-8 bytes, which is that of code points; JavaScript's own is that of UTF-16. */
function byBytes(one, other) {
  const left = Array.from(one), right = Array.from(other);
  for (let at = 0; at < left.length && at < right.length; at++) {
    if (left[at] !== right[at]) return left[at].codePointAt(0) - right[at].codePointAt(0);
  }
  return left.length - right.length;
}
