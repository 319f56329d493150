import assert from "node:assert/strict";
import { test } from "node:test";
import type { Hist, Model, State } from "../src/data.ts";
import { EMPTY } from "../src/hist.ts";
import { WINDOW_MS, Store } from "../src/store.ts";

function model(name: string, committed: number): Model {
  const mailbox = { depth: 0, depth_max: 0, messages: committed * 3, wait: EMPTY };
  return {
    name,
    elsewhere: null,
    requests: { open_streams: 0, waiting: 1, stalled: 0, running: 0, pending: 0 },
    tokens: { committed, dropped: 0, decode: 0, extend: 0 },
    steps: { count: committed, failed: 0, busy_seconds: 0, sizes: [], time: EMPTY },
    batching: { threshold: 1, live: 0, why: "", released: { threshold: 0, no_more_work: 0, timeout: 0, pinned: 0 }, rows: committed * 2, waited_seconds: 0, oldest_ms: null, wait: EMPTY },
    hops: [],
    kv: { pages_total: 100, pages_used: 25, pages_cached: 0, page_tokens: 16, prefix_query_tokens: 0, prefix_hit_tokens: 0, preemptions: 0 },
    actors: [{ role: "decode", state: "idle", lives: 1, last_error: null, mailbox, snapshot: {} }],
  };
}

function state(now_ms: number, small: number, large: number, ttft: Hist = EMPTY): State {
  return {
    now_ms, open: true, live: 2, live_prompt_tokens: 0, live_max: 8,
    router: { name: "demo", algorithm: "a", policy: "eager", execution: "async" },
    models: [model("small", small), model("large", large)],
    planner: null, prediction: null, log: [],
    latency: [{ model_name: "demo", ttft, itl: EMPTY, e2e: EMPTY, finished: {}, generation_tokens: 0 }],
  };
}

test("rates come from the counters of the last seconds", () => {
  const store = new Store();
  for (let tick = 0; tick <= 10; tick++) store.push(state(tick * 500, tick * 50, tick * 25));
  assert.equal(store.last("tokens/small"), 100);
  assert.equal(store.last("measured"), 150);
  assert.equal(store.last("large"), 1 / 3);
  assert.equal(store.last("batch/small"), 2);
  assert.equal(store.last("kv/large"), 0.25);
  assert.equal(store.last("actor/small/decode/messages"), 300);
  assert.equal(store.last("no such series"), null);
});

test("percentiles forget what is older than the window", () => {
  const store = new Store();
  const slow: Hist = { count: 10, sum_seconds: 10, buckets: [[1, 10]] };
  const both: Hist = { count: 20, sum_seconds: 10.1, buckets: [[0.01, 10], [1, 10]] };
  for (let at = 0; at <= WINDOW_MS + 5_000; at += 500) store.push(state(at, 0, 0, slow));
  store.push(state(WINDOW_MS + 5_500, 0, 0, both));
  const found = store.last("ttft/0.99");
  assert.ok(found !== null && found <= 0.01, `${found}`);
});

test("an hour takes no more room than ten minutes", () => {
  const store = new Store();
  for (let at = 0; at <= 3_600_000; at += 500) store.push(state(at, at, at));
  assert.ok(store.times.length <= 1_201, `${store.times.length} samples`);
  assert.equal(store.series("tokens/small").length, store.times.length);
  assert.equal(store.length_ms, 600_000);
  assert.equal(store.ago(WINDOW_MS).now_ms, 3_600_000 - WINDOW_MS);
  assert.equal(store.ago(9_999_999).now_ms, 3_600_000 - WINDOW_MS, "older states are gone");
});

test("states that come too fast are not kept either", () => {
  const store = new Store();
  for (let at = 0; at < 20_000; at++) store.push(state(at, at, at));
  assert.ok(store.times.length <= 1_500);
});

test("a server that started again has a new history", () => {
  const store = new Store();
  store.push(state(50_000, 900, 900));
  store.push(state(100, 3, 3));
  assert.equal(store.times.length, 1);
  assert.equal(store.last("tokens/small"), null);
  store.push(state(1_100, 13, 3));
  assert.equal(store.last("tokens/small"), 10);
});
