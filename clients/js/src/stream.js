/** A stream of server-sent events that comes back by itself: from where it was, and not all at once with the others. */

const FIRST_MS = 500, MOST_MS = 30_000, STEADY_MS = 5_000;
const LATER = 4; // attempts: where the server itself ended the stream
const CLOSED = 2;

/** What the client needs of its surroundings; tests bring their own. */
export const surroundings = {
  fetch: (...args) => globalThis.fetch(...args),
  EventSource: globalThis.EventSource,
  setTimeout: (call, ms) => globalThis.setTimeout(call, ms),
  clearTimeout: timer => globalThis.clearTimeout(timer),
  random: Math.random,
  now: () => Date.now(),
};

/** How long to wait before attempt `number`, from 0: doubling, and between half and all of it by chance. */
export function backoff(number, random) {
  const most = Math.min(MOST_MS, FIRST_MS * 2 ** Math.min(number, 20));
  return most / 2 + random() * most / 2;
}

export class Stream {
  #options;
  #world;
  #source = null;
  #timer = null;
  #attempts = 0;
  #openedAt = null;
  #closed = false;

  /** The id of the last frame, or null. */
  lastId = null;

  /**
   * @param {object} options
   * @param {(lastId: string | null) => string | Promise<string>} options.address where to connect, given the last id
   * @param {string[]} options.words the events to hear
   * @param {(word: string, data: any, id: string) => void} options.onFrame data is the text
   * @param {() => void} [options.onOpen]
   * @param {() => void} [options.onDown] it was cut off, or never came to be; it will be tried again
   * @param {boolean} [options.mustResume] before the first frame only the EventSource knows the id it stands at: let
   *   it come back by itself
   * @param {object} world
   */
  constructor(options, world) {
    this.#options = options;
    this.#world = world;
    if (!world.EventSource) throw new TypeError("there is no EventSource here: pass one as `EventSource`");
    this.#connect();
  }

  async #connect() {
    this.#timer = null;
    try {
      const address = await this.#options.address(this.lastId);
      if (!this.#closed) this.#listen(new this.#world.EventSource(address));
    } catch {
      this.#down(); // no ticket: as if there were no server
    }
  }

  #listen(source) {
    this.#source = source;
    source.addEventListener("open", () => {
      if (source !== this.#source) return;
      this.#openedAt = this.#world.now();
      this.#options.onOpen?.();
    });
    source.addEventListener("error", () => { if (source === this.#source) this.#failed(source); });
    for (const word of this.#options.words) {
      source.addEventListener(word, frame => { if (source === this.#source) this.#heard(word, frame); });
    }
  }

  #heard(word, frame) {
    this.#attempts = 0;
    if (frame.lastEventId) this.lastId = frame.lastEventId;
    this.#options.onFrame(word, frame.data, frame.lastEventId);
  }

  #failed(source) {
    const comesBack = this.#openedAt !== null && source.readyState !== CLOSED;
    if (this.#options.mustResume && this.lastId === null && comesBack) return this.#options.onDown?.();
    source.close();
    this.#source = null;
    this.#down();
  }

  /** Begin anew, from now, but not at once. */
  restart() {
    this.lastId = null;
    this.#openedAt = null;
    this.#attempts = Math.max(this.#attempts, LATER);
    this.#source?.close();
    this.#source = null;
    this.#down();
  }

  #down() {
    if (this.#closed) return;
    if (this.#openedAt !== null && this.#world.now() - this.#openedAt > STEADY_MS) this.#attempts = 0;
    this.#openedAt = null;
    this.#timer = this.#world.setTimeout(() => this.#connect(), backoff(this.#attempts++, this.#world.random));
    this.#options.onDown?.();
  }

  close() {
    this.#closed = true;
    this.#source?.close();
    this.#source = null;
    if (this.#timer !== null) this.#world.clearTimeout(this.#timer);
  }
}
