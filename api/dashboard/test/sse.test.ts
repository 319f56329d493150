import assert from "node:assert/strict";
import { test } from "node:test";
import { Cutter, events } from "../src/sse.ts";

const TEXT = 'event: state\ndata: {"a":1}\n\n: still here\n\ndata: one\ndata: two\r\n\r\nevent:x\ndata:ü\n\ndata: cut';
const EVENTS = [
  { name: "state", data: '{"a":1}' },
  { name: "message", data: "one\ntwo" },
  { name: "x", data: "ü" },
];

test("events are the same whatever the pieces", () => {
  for (let size = 1; size <= TEXT.length; size++) {
    const cutter = new Cutter();
    const found = [];
    for (let at = 0; at < TEXT.length; at += size) found.push(...cutter.push(TEXT.slice(at, at + size)));
    assert.deepEqual(found, EVENTS, `pieces of ${size}`);
  }
});

test("letters of several bytes may be cut", async () => {
  const bytes = new TextEncoder().encode(TEXT);
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
      controller.close();
    },
  });
  const found = [];
  for await (const event of events(body)) found.push(event);
  assert.deepEqual(found, EVENTS);
});
