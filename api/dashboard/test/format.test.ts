import assert from "node:assert/strict";
import { test } from "node:test";
import { chance, counted, percent, plain, rate, ratio, short, time, whole } from "../src/format.ts";

test("times have the unit that fits and three digits", () => {
  const shown: [number | null, string][] = [
    [0, "0 s"], [1.25e-6, "1.25 µs"], [47.7e-6, "47.7 µs"], [0.00099949, "999 µs"], [0.0009996, "1.00 ms"], [0.0123, "12.3 ms"],
    [0.5, "500 ms"], [0.9996, "1.00 s"], [42, "42 s"], [42.125, "42.1 s"], [100, "1 min 40 s"], [7260, "2 h 1 min"], [null, "–"], [NaN, "–"],
  ];
  for (const [seconds, text] of shown) assert.equal(time(seconds), text);
});

test("counts, rates and shares", () => {
  assert.equal(whole(1234567), "1,234,567");
  assert.equal(whole(undefined), "–");
  assert.equal(short(9999), "9,999");
  assert.deepEqual([0, 1, 2].map((count) => counted(count, "request")), ["0 requests", "1 request", "2 requests"]);
  assert.equal(short(12345), "12.3k");
  assert.equal(short(2.5), "2.50");
  assert.equal(short(3_400_000), "3.40M");
  assert.equal(rate(1234.6), "1,235/s");
  assert.equal(rate(12.34, "hops"), "12.3 hops/s");
  assert.equal(rate(0), "0/s");
  assert.equal(percent(0.1234), "12.3 %");
  assert.equal(percent(1), "100 %");
  assert.equal(percent(0.00001), "< 0.01 %");
  assert.equal(percent(0), "0 %");
  assert.equal(chance(0.2), "0.200");
  assert.equal(ratio(1, 0), null);
});

test("values of snapshots", () => {
  assert.deepEqual([1234, 0.123456, true, null, "a", [1, 0.25], []].map(plain), ["1,234", "0.1235", "yes", "–", "a", "1, 0.25", "none"]);
  assert.equal(plain({ secs: 1, nanos: 500_000_000 }), "1.50 s");
  assert.equal(plain(Array.from({ length: 64 }, () => 0)), "0, 0, 0, 0, 0, 0 … 64 in all");
  assert.equal(plain([{ steps: 1 }]), "1 entry");
});
