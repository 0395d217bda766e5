/** Changes of a table as they are committed. */

import {parse} from "./json_text.js";
import {Stream, surroundings} from "./stream.js";
import {CONTROL_EVENTS, LAST_EVENTS, OPS} from "./stream_events.js";


/**
 * Follow a table, over cuts of the connection without gap or repeat; until `close()`, or until its place is lost.
 * @param {string} url of the server
 * @param {string} db
 * @param {string} table
 * @param {object} options
 * @param {(change: any, id: string) => void} options.onChange
 * @param {(word: string, data: any) => void} [options.onControl] `caught_up`, `snapshot_end` …; the last one is
 *   `resnapshot` or `failed`, if there is a last one
 * @param {() => void} [options.onOpen] called whenever a connection has come to be
 * @param {Record<string, string | number>} [options.params] as in docs/streams.md: start, where, columns, format …
 * @param {() => Promise<string>} [options.ticket]
 * @returns {{close: () => void, lastId: string | null}}
 */
export function tail(url, db, table, options) {
  const {onChange, onControl, onOpen, params = {}, ticket, surroundings: own} = options;
  let reached = -1;
  const hear = (word, data, id) => {
    const said = parse(data);
    if (!OPS.includes(word)) {
      if (LAST_EVENTS.includes(word)) stream.close();
      return onControl?.(word, said);
    }
    if (!said.snapshot) {
      if (said.offset <= reached) return;
      reached = said.offset;
    }
    onChange(said, id);
  };
  const address = async lastId => {
    const found = new URL(`${url.replace(/\/+$/, "")}/api/v1/changes/${[db, table].map(encodeURIComponent).join("/")}`);
    for (const [name, value] of Object.entries(params)) found.searchParams.set(name, String(value));
    if (lastId?.startsWith("s:")) onControl?.("snapshot_restart", {reason: "reconnected"});
    else if (lastId !== null) found.searchParams.set("from_offset", lastId);
    if (ticket) found.searchParams.set("ticket", await ticket());
    return found.href;
  };
  const words = [...OPS, ...CONTROL_EVENTS];
  const stream = new Stream({address, words, onFrame: hear, onOpen, mustResume: true}, {...surroundings, ...own});
  return stream;
}
