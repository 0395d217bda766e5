import assert from "node:assert/strict";
import {createHash} from "node:crypto";
import {test} from "node:test";
import {sha256, sha256Slowly} from "../src/sha256.js";

test("both ways agree with node's own, at every length around the edge of a block", async () => {
  for (const length of [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000]) {
    const text = "aé😀".repeat(length).slice(0, length);
    const wanted = createHash("sha256").update(Buffer.from(new TextEncoder().encode(text))).digest("hex");
    assert.equal(await sha256(text), wanted);
    assert.equal(sha256Slowly(new TextEncoder().encode(text)), wanted);
  }
});
