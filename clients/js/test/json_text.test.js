import assert from "node:assert/strict";
import {test} from "node:test";
import {fields, items, parse} from "../src/json_text.js";
import {plain} from "../src/literal.js";

test("an array is cut into its elements as they were written", () => {
  assert.deepEqual(items('[1.0, 1e2 ,"a,]\\"[",{"a":[1,2]},[],-0]'),
    ["1.0", "1e2", '"a,]\\"["', '{"a":[1,2]}', "[]", "-0"]);
  assert.deepEqual(items(" [ ] "), []);
});

test("an object is cut into its fields", () => {
  assert.deepEqual([...fields('{"a:b":{"c":":,"},"d":[1,{"e":2}], "\\u0041" : null}')],
    [["a:b", '{"c":":,"}'], ["d", '[1,{"e":2}]'], ["A", "null"]]);
  assert.equal(fields("{}").size, 0);
});

test("what is not JSON is refused", () => {
  for (const text of ["", "1", "[", "x[]", "[]x", "[[]", '["]']) assert.throws(() => items(text), SyntaxError, text);
  assert.throws(() => fields("{1}"), SyntaxError);
});

test("large integers keep their digits, others stay numbers", () => {
  assert.deepEqual(parse('{"a":9223372036854775807,"b":[-9007199254740993,9007199254740991],"c":"12345678901234567890"}'),
    {a: 9223372036854775807n, b: [-9007199254740993n, 9007199254740991], c: "12345678901234567890"});
  assert.equal(parse("0.1234567890123456789"), 0.1234567890123456789);
});

test("tagged values become bare ones", () => {
  const lits = '[{"t":"null"},{"t":"bool","v":true},{"t":"u64","v":18446744073709551615},{"t":"f64","v":"-Infinity"},'
    + '{"t":"bytes","b64":"AP8="},{"t":"date","iso":"2026-01-18"},{"t":"json","v":{"t":"x"}},{"t":"dec","v":"1.50"}]';
  assert.deepEqual(parse(lits).map(plain),
    [null, true, 18446744073709551615n, -Infinity, new Uint8Array([0, 255]), "2026-01-18", {t: "x"}, "1.50"]);
});
