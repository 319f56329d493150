import assert from "node:assert/strict";
import { test } from "node:test";
import type { Hist } from "../src/data.ts";
import { EMPTY, mean, quantile, since, sum } from "../src/hist.ts";

/** As the server counts: upper bounds a quarter apart within a doubling. */
function counted(values: number[]): Hist {
  const counts = new Map<number, number>();
  for (const value of values) {
    const octave = 2 ** Math.floor(Math.log2(value));
    const upper = octave * (1 + (Math.floor((value / octave - 1) * 4) + 1) / 4);
    counts.set(upper, (counts.get(upper) ?? 0) + 1);
  }
  const total = values.reduce((a, b) => a + b, 0);
  return { count: values.length, sum_seconds: total, buckets: [...counts].sort(([a], [b]) => a - b) };
}

test("quantiles are within a bucket of the exact ones", () => {
  for (let round = 0; round < 50; round++) {
    const values = Array.from({ length: 1 + Math.floor(Math.random() * 400) }, () => Math.exp(Math.random() * 12 - 10));
    const sorted = values.toSorted((a, b) => a - b);
    for (const q of [0.5, 0.9, 0.99, 1]) {
      const exact = sorted[Math.max(0, Math.ceil(q * sorted.length) - 1)]!;
      const found = quantile(counted(values), q)!;
      assert.ok(found <= exact * 1.2501 && found >= exact / 1.2501, `q ${q}: ${found} for ${exact}`);
    }
  }
});

test("nothing has no quantile and no mean", () => {
  assert.equal(quantile(EMPTY, 0.5), null);
  assert.equal(mean(EMPTY), null);
});

test("a value beyond all bounds counts as the last bound", () => {
  assert.equal(quantile({ count: 2, sum_seconds: 400, buckets: [[2, 1], [null, 1]] }, 0.99), 2);
});

test("differences are what was added, sums all of it", () => {
  const [first, second] = [[0.001, 0.004, 0.1], [0.001, 3, 200]];
  const all = counted([...first, ...second]);
  assert.deepEqual(since(all, counted(first)).buckets, counted(second).buckets);
  assert.equal(since(all, counted(first)).count, 3);
  assert.deepEqual(sum([counted(first), counted(second)]).buckets, all.buckets);
  assert.equal(since(all, all).count, 0);
  assert.ok(Math.abs(mean(all)! - 203.106 / 6) < 1e-9);
});
