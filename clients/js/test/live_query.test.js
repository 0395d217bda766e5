import assert from "node:assert/strict";
import {test} from "node:test";
import {Answer, LiveQuery} from "../src/index.js";
import {World, patch, row, whole} from "./world.js";

const A = row(1, "a"), B = row(2, "b"), C = row(3, "c");
const hashOf = (...rows) => Answer.read(whole('"x"', ...rows).body, null).hash();
const told = (etag, offset) => ["invalidate", {query_id: "q", etag, new_etag: etag, table: "main.t", offset}, offset];

/** A live query in a world of its own, past its first answer and with an open stream. */
async function live(first = whole('"p.1"', A, B), options = {}) {
  const world = new World(), seen = [], errors = [], states = [];
  world.answers.push(first);
  const query = new LiveQuery({
    url: "http://server:1/", queryId: "q", onChange: answer => seen.push(answer), onError: error => errors.push(error),
    onState: state => states.push(state), surroundings: world.surroundings, ...options,
  });
  await world.pass(0);
  world.source.open();
  await world.pass(0);
  return {world, query, seen, errors, states};
}

test("it asks, listens, and asks once more when it listens: nothing falls between", async () => {
  const {world, seen, states} = await live();
  assert.deepEqual(seen.map(answer => answer.objects()), [[{id: 1, v: "a"}, {id: 2, v: "b"}]]);
  assert.equal(world.requests.length, 2);
  assert.equal(world.requests[0].headers["if-none-match"], undefined);
  assert.equal(world.requests[1].headers["if-none-match"], '"p.1"');
  assert.equal(world.requests[1].headers["a-im"], "headwater-rows");
  assert.equal(world.source.url.href, "http://server:1/api/v1/q/q/events");
  assert.deepEqual(states, ["live"]);
});

test("arguments travel as JSON, large integers digit by digit", async () => {
  const {world} = await live(undefined, {args: ["a&b", 1, null, 9223372036854775807n]});
  assert.equal(world.requests[0].url.searchParams.get("args"), '["a&b",1,null,9223372036854775807]');
  assert.equal(world.source.url.searchParams.get("args"), '["a&b",1,null,9223372036854775807]');
});

test("an invalidation is followed by a patch, and rows that stay are the same objects", async () => {
  const {world, query, seen} = await live();
  const steps = `"added":[{"pk":[{"t":"i64","v":3}],"at":2,"row":${C}}],"updated":[],`
    + `"removed":[{"pk":[{"t":"i64","v":1}]}],"moved":[{"pk":[{"t":"i64","v":3}],"from":1,"to":0}],`;
  world.answers.push(patch('"p.1"', '"p.5"', await hashOf(C, B), steps));
  world.source.say(...told('"p.5"', 5));
  await world.pass(20);
  assert.deepEqual(seen.at(-1).rows, [[3, "c"], [2, "b"]]);
  assert.equal(seen.at(-1).rows[1], seen[0].rows[1]);
  assert.equal(query.answer.etag, '"p.5"');
  assert.deepEqual(query.counts, {asked: 3, notModified: 1, patched: 1, whole: 1, mismatches: 0});
});

for (const [what, broken] of Object.entries({
  "a hash that differs": async () => patch('"p.1"', '"p.5"', await hashOf(A), ""),
  "another base": async () => patch('"p.0"', '"p.5"', await hashOf(A, B), ""),
  "an unknown row": async () => patch('"p.1"', '"p.5"', await hashOf(A, B), '"removed":[{"pk":[{"t":"i64","v":9}]}],'),
  "a row that is elsewhere": async () =>
    patch('"p.1"', '"p.5"', await hashOf(B, A), '"moved":[{"pk":[{"t":"i64","v":1}],"from":1,"to":0}],'),
  "no JSON": async () => ({status: 226, headers: {im: "headwater-rows"}, body: "<html>"}),
  "another kind of patch": async () => ({...patch('"p.1"', '"p.5"', await hashOf(A, B), ""), headers: {im: "feed"}}),
  "a reset without rows": async () => ({
    status: 226, headers: {im: "headwater-rows"},
    body: '{"reset":true,"columns":[],"etag":"x","result_hash":"y"}',
  }),
})) {
  test(`a patch with ${what} is thrown away, and the whole answer asked for`, async () => {
    const {world, query, seen} = await live();
    world.answers.push(await broken(), whole('"p.5"', C));
    world.source.say(...told('"p.5"', 5));
    await world.pass(20);
    assert.equal(world.requests.length, 4);
    assert.equal(world.requests[3].headers["if-none-match"], undefined);
    assert.equal(world.requests[3].headers["a-im"], undefined);
    assert.deepEqual(seen.at(-1).rows, [[3, "c"]]);
    assert.equal(query.counts.mismatches, 1);
  });
}

test("a reset with rows is taken, once its hash is right", async () => {
  const {world, query, seen} = await live();
  const body = `{"reset":true,"columns":[{"name":"w"}],"full":{"columns":[{"name":"w"}],"rows":[${C}]},`
    + `"key":null,"ordered":true,"etag":"\\"p.5\\"","result_hash":"${await hashOf(C)}"}`;
  world.answers.push({status: 226, headers: {im: "headwater-rows"}, body});
  world.source.say(...told('"p.5"', 5));
  await world.pass(20);
  assert.deepEqual(seen.at(-1).rows, [[3, "c"]]);
  assert.equal(query.counts.patched, 1);
});

test("a burst of invalidations is one request", async () => {
  const {world} = await live();
  for (let offset = 5; offset < 50; offset++) world.source.say(...told(`"p.${offset}"`, offset));
  world.answers.push(whole('"p.49"', C));
  await world.pass(1000);
  assert.equal(world.requests.length, 3);
});

test("what is told while a request runs is asked for after it, unless the answer is that one", async () => {
  for (const [answered, requests] of [['"p.5"', 4], ['"p.6"', 3]]) {
    const {world} = await live();
    let answer;
    world.answers.push(() => new Promise(resolve => { answer = resolve; }));
    world.source.say(...told('"p.5"', 5));
    await world.pass(20);
    world.source.say(...told('"p.6"', 6));
    answer(whole(answered, C));
    await world.pass(1000);
    assert.equal(world.requests.length, requests);
  }
});

test("an invalidation for the answer that is there costs nothing, weak or strong", async () => {
  const {world} = await live(whole('W/"p.1"', A));
  world.source.say(...told('"p.1"', 1));
  await world.pass(1000);
  assert.equal(world.requests.length, 2);
});

test("an answer that came out the same is not a change", async () => {
  const {world, query, seen} = await live();
  world.answers.push(whole('"p.5"', A, B));
  world.source.say(...told('"p.5"', 5));
  await world.pass(20);
  assert.equal(seen.length, 1);
  assert.equal(query.answer.etag, '"p.5"');
});

test("cut off, it comes back from the last id, later each time, and asks what it missed", async () => {
  const {world, seen, states} = await live();
  world.source.say(...told('"p.1"', 7));
  world.source.fail();
  assert.equal(world.sources[0].readyState, 2);
  const waits = [];
  for (let attempt = 0; attempt < 9; attempt++) {
    const count = world.sources.length;
    waits.push(world.timers.map(timer => timer.ms).sort((a, b) => b - a)[0]);
    await world.pass(waits.at(-1));
    assert.equal(world.sources.length, count + 1);
    assert.equal(world.source.url.searchParams.get("from_offset"), "7");
    if (attempt < 8) world.source.fail(2);
  }
  assert.deepEqual(waits, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]);
  world.answers.push(whole('"p.9"', C));
  world.source.open();
  await world.pass(0);
  assert.deepEqual(seen.at(-1).rows, [[3, "c"]]);
  assert.deepEqual([...new Set(states)], ["live", "connecting"]);
});

test("what happened between an answer and the stream that came back is asked for", async () => {
  const {world, seen} = await live();
  world.answers.push(whole('"p.5"', B));
  world.source.say(...told('"p.5"', 5));
  await world.pass(20);
  let answer;
  world.answers.push(() => new Promise(resolve => { answer = resolve; }));
  world.source.fail();
  await world.pass(500); // it asks, and the stream connects meanwhile
  world.source.open();
  answer({status: 304}); // said before the stream was there
  world.answers.push(whole('"p.8"', C));
  await world.pass(1000);
  assert.deepEqual(seen.at(-1).rows, [[3, "c"]]);
});

test("a lost place means: from now on, and ask", async () => {
  const {world, seen} = await live();
  world.source.say(...told('"p.1"', 7));
  world.answers.push(whole('"p.9"', C));
  world.source.say("resnapshot", {earliest_offset: 100}, 99);
  await world.pass(10_000);
  assert.deepEqual(seen.at(-1).rows, [[3, "c"]]);
  assert.equal(world.sources.length, 2);
  assert.equal(world.source.url.searchParams.get("from_offset"), null);
});

test("a failure is told and tried again; Retry-After is honoured; a stream that opens ends the wait", async () => {
  const {world, seen, errors} = await live();
  world.answers.push(new TypeError("no network"), {status: 503, headers: {"retry-after": "60"}, body: '{"code":"busy"}'});
  world.source.say(...told('"p.5"', 5));
  await world.pass(20);
  await world.pass(500);
  assert.deepEqual(errors.map(error => error.code ?? error.name), ["TypeError", "busy"]);
  await world.pass(59_000);
  assert.equal(world.requests.length, 4);
  world.answers.push(whole('"p.9"', C));
  world.source.fail();
  await world.pass(500);
  world.source.open();
  await world.pass(0);
  assert.deepEqual(seen.at(-1).rows, [[3, "c"]]);
});

test("an error that asking again would not mend is the end", async () => {
  const {world, query, errors} = await live({status: 404, body: '{"code":"not_found","title":"no such query"}'});
  assert.equal(errors[0].message, "no such query");
  assert.ok(query.closed);
  await world.pass(100_000);
  assert.equal(world.requests.length, 1);
  assert.ok(world.sources.every(source => source.readyState === 2));
});

test("a query that was answered once may be wrong for a while: a view is made anew", async () => {
  const {world, query, seen, errors} = await live();
  const missing = {status: 400, body: '{"code":"invalid_request","title":"no such table: v"}'};
  world.answers.push(missing, missing, whole('"p.9"', C));
  world.source.say(...told('"p.5"', 5));
  await world.pass(20);
  assert.ok(!query.closed && errors.length === 1);
  await world.pass(10_000);
  assert.deepEqual(seen.at(-1).rows, [[3, "c"]]);
  assert.equal(errors.length, 2);
  world.answers.push({status: 403, body: '{"code":"forbidden"}'});
  world.source.say(...told('"p.12"', 12));
  await world.pass(20);
  assert.ok(query.closed);
});

test("a query that is wrong from the start stays so", async () => {
  const {world, query} = await live({status: 400, body: '{"code":"invalid_request"}'});
  assert.ok(query.closed);
  await world.pass(100_000);
  assert.equal(world.requests.length, 1);
});

test("closed, it is silent: no request, no stream, no call", async () => {
  const {world, query, seen} = await live();
  let answer;
  world.answers.push(() => new Promise(resolve => { answer = resolve; }));
  world.source.say(...told('"p.5"', 5));
  await world.pass(20);
  query.close();
  assert.ok(world.requests.at(-1).signal.aborted);
  answer(whole('"p.5"', C));
  world.source.say(...told('"p.6"', 6));
  await world.pass(100_000);
  assert.equal(seen.length, 1);
  assert.equal(world.requests.length, 3);
  assert.equal(world.timers.length, 0);
  assert.ok(world.sources.every(source => source.readyState === 2));
});

test("a ticket is asked for at every connection, headers at every request", async () => {
  let made = 0;
  const {world} = await live(undefined, {ticket: async () => `t${++made}`, headers: () => ({authorization: "Bearer s"})});
  assert.equal(world.source.url.searchParams.get("ticket"), "t1");
  world.source.fail(2);
  await world.pass(500);
  assert.equal(world.source.url.searchParams.get("ticket"), "t2");
  assert.equal(world.requests[0].headers.authorization, "Bearer s");
});

test("without an EventSource it says so", () => {
  const world = new World();
  const surroundings = {...world.surroundings, EventSource: undefined};
  assert.throws(() => new LiveQuery({url: "http://s", queryId: "q", onChange() {}, surroundings}), /EventSource/);
  assert.equal(world.timers.length, 0);
});
