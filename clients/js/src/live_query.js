/** A query that stays fresh: asked once, then only told and patched. */

import {Answer, PatchMismatch, opaque} from "./answer.js";
import {Stream, backoff, surroundings} from "./stream.js";
import {LAST_EVENTS} from "./stream_events.js";

const PATCHES = "headwater-rows";
const FINAL = new Set([400, 403, 404, 405, 501]); // asking again would not help
const PASSING = 400; // once it was answered: a view that is dropped and made again is missing in between

/** The server refused, by `status`; `code` and `hint` are its own words where it gave some. */
export class RequestFailed extends Error {
  name = "RequestFailed";

  constructor(status, problem, retryAfter) {
    super(problem.detail ?? problem.title ?? `the server answered ${status}`);
    Object.assign(this, {status, code: problem.code, hint: problem.hint, retryAfter});
  }
}

export class LiveQuery {
  #options;
  #world;
  #stream = null;
  #asking = null;
  #again = false;
  #timer = null;
  #due = 0;
  #attempts = 0;
  #closed = false;
  #answer = null;
  #heard = null;
  #abort = new AbortController();

  /** How often: asked, told not modified, patched, sent whole, and patches that did not fit. */
  counts = {asked: 0, notModified: 0, patched: 0, whole: 0, mismatches: 0};

  /**
   * @param {object} options
   * @param {string} options.url of the server
   * @param {string} options.queryId of `query.prepare`
   * @param {any[] | Record<string, any>} [options.args] plain values or tagged ones
   * @param {(answer: Answer) => void} options.onChange called with the first answer and whenever it is another one
   * @param {(error: Error) => void} [options.onError] called on every failure; `closed` tells whether it was the last
   * @param {(state: "connecting" | "live") => void} [options.onState] whether changes are heard of at once
   * @param {Record<string, string> | (() => Record<string, string>)} [options.headers] such as authorization
   * @param {() => Promise<string>} [options.ticket] of `security.ticket.create`, asked for at every connection
   * @param {boolean} [options.patches] false: always whole answers
   * @param {number} [options.coalesceMs] how long to wait for more before asking
   */
  constructor({patches = true, coalesceMs = 20, args = [], ...options}) {
    this.#options = {patches, coalesceMs, args, ...options};
    this.#world = {...surroundings, ...options.surroundings};
    this.#stream = new Stream({
      address: lastId => this.#events(lastId),
      words: ["invalidate", ...LAST_EVENTS],
      onFrame: (word, data) => this.#told(word, data),
      // What happened while nobody listened is found out by asking; with an unchanged tag that costs little.
      onOpen: () => { this.#state("live"); this.#heard = null; this.#refresh(0); },
      onDown: () => { this.#state("connecting"); if (!this.#attempts) this.#refresh(0); },
    }, this.#world);
    this.#refresh(0);
  }

  /** @returns {Answer | null} the newest answer, null before the first */
  get answer() {
    return this.#answer;
  }

  /** Whether it has ended, by `close()` or by an error that asking again would not mend. */
  get closed() {
    return this.#closed;
  }

  /** Ask now. @returns {Promise<void>} when the answer is there, or failed (see onError) */
  async refresh() {
    this.#cancel();
    if (this.#asking) await this.#asking;
    if (!this.#closed) await this.#ask();
  }

  close() {
    this.#closed = true;
    this.#cancel();
    this.#abort.abort();
    this.#stream?.close();
  }

  // --- when to ask ----------------------------------------------------------------------------------------

  #told(word, data) {
    if (word === "invalidate") {
      const {new_etag, etag} = JSON.parse(data);
      this.#heard = opaque(new_etag ?? etag);
      if (this.#isHeard()) return;
    } else {
      this.#stream.restart(); // the place is lost: go on from now; what was missed is asked for
    }
    this.#refresh(this.#options.coalesceMs);
  }

  /** Whether the answer that we have is the one we were told of last. */
  #isHeard() {
    return this.#heard !== null && this.#heard === opaque(this.#answer?.etag);
  }

  /** Ask in `ms`; of two plans the earlier one stands. */
  #refresh(ms) {
    if (this.#closed) return;
    if (this.#asking) {
      this.#again = true;
      return;
    }
    const due = this.#world.now() + ms;
    if (this.#timer !== null && this.#due <= due) return;
    this.#cancel();
    this.#due = due;
    this.#timer = this.#world.setTimeout(() => { this.#timer = null; this.#ask(); }, ms);
  }

  #cancel() {
    if (this.#timer !== null) this.#world.clearTimeout(this.#timer);
    this.#timer = null;
  }

  #ask() {
    this.#asking ??= this.#asked().finally(() => {
      this.#asking = null;
      const wanted = this.#again && !this.#isHeard();
      this.#again = false;
      if (wanted) this.#refresh(this.#options.coalesceMs);
    });
    return this.#asking;
  }

  async #asked() {
    try {
      const answer = await this.#fetched();
      this.#attempts = 0;
      if (answer && !this.#closed) this.#take(answer);
    } catch (error) {
      if (!this.#closed) this.#failed(error);
    }
  }

  #failed(error) {
    if (FINAL.has(error.status) && !(error.status === PASSING && this.#answer)) {
      this.close();
    } else {
      const ms = Math.max(backoff(this.#attempts++, this.#world.random), (error.retryAfter || 0) * 1000);
      this.#cancel();
      this.#due = this.#world.now() + ms;
      this.#timer = this.#world.setTimeout(() => { this.#timer = null; this.#ask(); }, ms);
    }
    this.#options.onError?.(error);
  }

  #take(answer) {
    const before = this.#answer;
    this.#answer = answer;
    if (!answer.isSame(before)) this.#options.onChange(answer);
  }

  #state(state) {
    if (!this.#closed) this.#options.onState?.(state);
  }

  // --- how to ask -----------------------------------------------------------------------------------------

  /** The newest answer; null if it is the one we have. */
  async #fetched() {
    const {etag} = this.#answer ?? {};
    const patches = this.#options.patches ? {"a-im": PATCHES} : {}; // also at first: so the server keeps the base
    if (!etag) return this.#whole(patches);
    const response = await this.#get({"if-none-match": etag, ...patches});
    if (response.status === 304) {
      this.counts.notModified++;
      return null;
    }
    if (response.status !== 226) return this.#read(response);
    try {
      const kind = response.headers.get("im") ?? PATCHES; // a page of another origin may not see it
      if (kind !== PATCHES) throw new PatchMismatch("a patch of another kind");
      const answer = await this.#answer.patched(await response.text());
      this.counts.patched++;
      return answer;
    } catch (error) {
      if (this.#closed) throw error;
      this.counts.mismatches++;
      return this.#whole({});
    }
  }

  async #whole(headers) {
    return this.#read(await this.#get(headers));
  }

  async #read(response) {
    const answer = Answer.read(await response.text(), response.headers.get("etag"));
    this.counts.whole++;
    return answer;
  }

  async #get(headers) {
    this.counts.asked++;
    const own = this.#options.headers;
    const response = await this.#world.fetch(this.#address(""), {
      headers: {...(typeof own === "function" ? own() : own), accept: "application/json", ...headers},
      cache: "no-store", // we are the cache, and a patch must not become anybody's answer
      signal: this.#abort.signal,
    });
    if ([200, 226, 304].includes(response.status)) return response;
    const problem = await response.json().catch(() => ({}));
    throw new RequestFailed(response.status, problem, Number(response.headers.get("retry-after")));
  }

  async #events(lastId) {
    const address = new URL(this.#address("/events"));
    if (lastId !== null) address.searchParams.set("from_offset", lastId);
    if (this.#options.ticket) address.searchParams.set("ticket", await this.#options.ticket());
    return address.href;
  }

  #address(more) {
    const {url, queryId, args} = this.#options;
    const address = new URL(`${url.replace(/\/+$/, "")}/api/v1/q/${encodeURIComponent(queryId)}${more}`);
    if (!Array.isArray(args) || args.length) address.searchParams.set("args", argsText(args));
    return address.href;
  }
}

/** Arguments as JSON; a BigInt is written digit by digit. */
function argsText(args) {
  const mark = "\u0000big:";
  const text = JSON.stringify(args, (_, value) => (typeof value === "bigint" ? mark + value : value));
  return text.replace(/"\\u0000big:(-?\d+)"/g, "$1");
}
