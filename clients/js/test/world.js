/** A world without a network or a clock: answers are laid out before, time moves when a test says so. */

// WebCrypto works in other threads: nobody could tell when all that is ready has happened.
Object.defineProperty(globalThis, "crypto", {value: {}});

export class World {
  constructor() {
    this.requests = [];
    this.sources = [];
    this.timers = [];
    this.time = 0;
    this.answers = [];
    const world = this;
    this.EventSource = class {
      constructor(url) {
        Object.assign(this, {url: new URL(url), readyState: 0, listeners: new Map()});
        world.sources.push(this);
      }
      addEventListener(word, call) { this.listeners.set(word, call); }
      open() { if (this.readyState === 2) return; this.readyState = 1; this.listeners.get("open")({}); }
      fail(readyState = 0) { this.readyState = readyState; this.listeners.get("error")({}); }
      say(word, data, id = "") { this.listeners.get(word)?.({data: JSON.stringify(data), lastEventId: String(id)}); }
      close() { this.readyState = 2; }
    };
  }

  get surroundings() {
    return {
      fetch: (url, options) => this.#fetch(new URL(url), options),
      EventSource: this.EventSource,
      setTimeout: (call, ms) => { const timer = {call, at: this.time + ms, ms}; this.timers.push(timer); return timer; },
      clearTimeout: timer => { this.timers = this.timers.filter(one => one !== timer); },
      random: () => 1,
      now: () => this.time,
    };
  }

  get source() { return this.sources.at(-1); }

  async #fetch(url, {headers, signal}) {
    this.requests.push({url, headers, signal});
    const answer = this.answers.shift() ?? {status: 304};
    const made = typeof answer === "function" ? await answer() : answer;
    if (made instanceof Error) throw made;
    const {status, headers: sent = {}, body = null} = made;
    return {status, headers: new Headers(sent), text: async () => body, json: async () => JSON.parse(body)};
  }

  /** Let all that is ready happen, and time go on by `ms`. */
  async pass(ms = 0) {
    await settle();
    const until = this.time + ms;
    for (;;) {
      const due = this.timers.filter(timer => timer.at <= until).sort((a, b) => a.at - b.at)[0];
      if (!due) break;
      this.timers = this.timers.filter(timer => timer !== due);
      this.time = Math.max(this.time, due.at);
      due.call();
      await settle();
    }
    this.time = until;
  }
}

async function settle() {
  for (let turn = 0; turn < 5; turn++) await new Promise(resolve => setImmediate(resolve));
}

const COLUMNS = '[{"name":"id"},{"name":"v"}]';
export const row = (id, v) => `[{"t":"i64","v":${id}},{"t":"str","v":${JSON.stringify(v)}}]`;

/** A 200 with these rows. */
export function whole(etag, ...rows) {
  const body = `{"etag":${JSON.stringify(etag)},"data":{"columns":${COLUMNS},"rows":[${rows.join(",")}]}}`;
  return {status: 200, headers: {etag}, body};
}

/** A 226. */
export function patch(base, etag, hash, steps, more = "") {
  const body = `{"reset":false,"base_etag":${JSON.stringify(base)},"columns":${COLUMNS},${steps}"key":[0],"ordered":true,`
    + `"etag":${JSON.stringify(etag)},"result_hash":"${hash}"${more}}`;
  return {status: 226, headers: {etag, im: "headwater-rows"}, body};
}
