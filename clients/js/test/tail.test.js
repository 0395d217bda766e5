import assert from "node:assert/strict";
import {test} from "node:test";
import {tail} from "../src/index.js";
import {World} from "./world.js";

async function follow(options = {}) {
  const world = new World(), seen = [], controls = [];
  const stream = tail("http://server:1", "main", "a/b c", {
    onChange: change => seen.push(change.offset), onControl: (word, data) => controls.push([word, data]),
    surroundings: world.surroundings, ...options,
  });
  await world.pass(0);
  world.source.open();
  return {world, stream, seen, controls};
}

test("changes come once, over a cut, from the last id", async () => {
  const {world, seen} = await follow({params: {where: "total > 1", format: "plain_json"}});
  assert.equal(world.source.url.pathname, "/api/v1/changes/main/a%2Fb%20c");
  assert.equal(world.source.url.searchParams.get("where"), "total > 1");
  world.source.say("insert", {offset: 2}, 2);
  world.source.say("update", {offset: 3}, 3);
  world.source.fail();
  await world.pass(500);
  assert.equal(world.source.url.searchParams.get("from_offset"), "3");
  world.source.open();
  world.source.say("update", {offset: 3}, 3);
  world.source.say("delete", {offset: 4}, 4);
  assert.deepEqual(seen, [2, 3, 4]);
});

test("cut off before the first frame, the EventSource itself comes back: only it knows the place", async () => {
  const {world} = await follow();
  world.source.fail(0);
  await world.pass(60_000);
  assert.equal(world.sources.length, 1);
  world.source.fail(2); // refused for good: then it is up to us
  await world.pass(500);
  assert.equal(world.sources.length, 2);
});

test("rows of a snapshot share an offset and all come; cut off within, it says so and begins anew", async () => {
  const {world, seen, controls} = await follow({params: {start: "snapshot"}});
  world.source.say("insert", {offset: 9, snapshot: true}, "s:a");
  world.source.say("insert", {offset: 9, snapshot: true}, "s:b");
  world.source.fail();
  await world.pass(500);
  assert.equal(world.source.url.searchParams.get("from_offset"), null);
  assert.deepEqual(controls, [["snapshot_restart", {reason: "reconnected"}]]);
  assert.deepEqual(seen, [9, 9]);
});

test("a lost place is told and is the end", async () => {
  const {world, controls} = await follow();
  world.source.say("resnapshot", {earliest_offset: 7}, 6);
  await world.pass(60_000);
  assert.deepEqual(controls, [["resnapshot", {earliest_offset: 7}]]);
  assert.equal(world.sources.length, 1);
  assert.equal(world.source.readyState, 2);
});

test("closed, it stays closed", async () => {
  const {world, stream} = await follow();
  world.source.fail(2);
  stream.close();
  await world.pass(60_000);
  assert.equal(world.sources.length, 1);
});
