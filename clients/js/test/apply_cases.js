/**
 * Applies patches that the server's own code made. In, by line: {"columns", "base": {"etag","rows"}, "patch", "rows"},
 * the rows and the patch as texts. Out: how many were right; the first that was not ends it.
 */

import {readFileSync} from "node:fs";
import {Answer} from "../src/index.js";

let count = 0;
for (const line of readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  const {columns, etag, base, patch, wanted} = JSON.parse(line);
  const body = rows => `{"etag":"x","data":{"columns":${columns},"rows":${rows}}}`;
  const made = await Answer.read(body(base), etag).patched(patch);
  if (!made.isSame(Answer.read(body(wanted), null))) throw new Error(`wrong rows after ${line}`);
  count++;
}
console.log(count);
