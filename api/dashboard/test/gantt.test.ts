import assert from "node:assert/strict";
import { test } from "node:test";
import type { Request, Span } from "../src/data.ts";
import { bars, lanes, ticks, took } from "../src/gantt.ts";

const span = (model: string, kind: Span["kind"], from_ms: number, to_ms: number | null, steps = 0): Span => ({ model, kind, from_ms, to_ms, steps });

const request = (spans: Span[], ended_ms: number | null): Request => ({
  id: "a", routed: true, entry: "small", arrived_ms: 1000, ended_ms, outcome: null, prompt_tokens: 1, tokens: 1, by_model: {}, spans,
});

test("a bar lies where its span is, in the lane of its model", () => {
  const one = request([span("small", "waiting", 1000, 1010), span("small", "running", 1010, 1060, 5), span("large", "running", 1060, null, 2)], null);
  const names = lanes(one, ["small", "middle", "large"]);
  assert.deepEqual(names, ["small", "large"]);
  assert.equal(took(one, 1100), 100);
  const found = bars(one, names, 1100, 100).map((bar) => [bar.lane, bar.kind, bar.x, Number(bar.width.toFixed(6)), bar.steps]);
  assert.deepEqual(found, [[0, "waiting", 0, 0.1, 0], [0, "running", 0.1, 0.5, 5], [1, "running", 0.6, 0.4, 2]]);
});

test("what is open ends with its request", () => {
  const [bar] = bars(request([span("small", "pending", 1000, null)], 1050), ["small"], 9999, 100);
  assert.equal(bar?.width, 0.5);
});

test("who has no span yet has a lane where it entered", () => {
  assert.deepEqual(lanes(request([], null), ["small", "large"]), ["small"]);
});

test("steps that follow each other are one bar, others are not", () => {
  const spans = [span("small", "running", 1000, 1040, 1), span("small", "running", 1040.01, 1060, 1), span("small", "running", 1070, 1100, 1)];
  const found = bars(request(spans, 1100), ["small"], 1100, 100).map((bar) => [bar.steps, bar.to_ms - bar.from_ms]);
  assert.deepEqual(found, [[2, 60], [1, 30]]);
});

test("thousands of short spans are a few bars that lose no time and no step", () => {
  const spans = Array.from({ length: 5000 }, (_, index) => span("small", "running", 1000 + index, 1001 + index, 1));
  const found = bars(request(spans, 6000), ["small"], 6000, 5000);
  assert.ok(found.length < 10, `${found.length} bars`);
  assert.equal(found.reduce((sum, bar) => sum + bar.steps, 0), 5000);
  assert.ok(Math.abs(found.reduce((sum, bar) => sum + bar.width, 0) - 1) < 1e-6);
});

test("kinds and lanes are never drawn as one", () => {
  const spans = Array.from({ length: 100 }, (_, index) => span(index % 2 ? "small" : "large", index % 4 < 2 ? "waiting" : "running", 1000 + index / 100, 1000 + (index + 1) / 100));
  const found = bars(request(spans, 2000), ["small", "large"], 2000, 1000);
  for (const bar of found) assert.ok(bar.width < 0.001);
  assert.ok(found.length >= 50);
});

test("axes have round marks that do not go beyond", () => {
  assert.deepEqual(ticks(100), [0, 50, 100]);
  assert.deepEqual(ticks(80), [0, 20, 40, 60, 80]);
  assert.deepEqual(ticks(0), [0]);
  for (let round = 0; round < 200; round++) {
    const length = Math.exp(Math.random() * 20 - 5);
    const marks = ticks(length);
    assert.ok(marks.length >= 2 && marks.length <= 6, `${marks.length} for ${length}`);
    assert.ok(marks.at(-1)! <= length * 1.000001);
  }
});
