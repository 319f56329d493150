// Where the spans of a request lie in its picture.

import type { Request, Span } from "./data.ts";

/** A bar; x and width are shares of the picture. */
export interface Bar {
  lane: number;
  kind: Span["kind"];
  x: number;
  width: number;
  from_ms: number;
  to_ms: number;
  steps: number;
  /** How many are drawn as one. */
  spans: number;
}

/** Spans of one kind that are less than this share of the picture apart are drawn as one. */
const NARROW = 0.002;

/** How long it took, or takes so far. */
export const took = (request: Request, now_ms: number): number =>
  Math.max(0, (request.ended_ms ?? now_ms) - request.arrived_ms);

/** The lanes: each model that had the request, in the server's order; before that, the one where it entered. */
export function lanes(request: Request, models: string[]): string[] {
  const had = models.filter((model) => request.spans.some((span) => span.model === model));
  return had.length > 0 ? had : [request.entry];
}

/** The bars of all lanes in a picture of `scale_ms`. */
export function bars(request: Request, names: string[], now_ms: number, scale_ms: number): Bar[] {
  const scale = Math.max(scale_ms, 1);
  const last = new Map<number, Bar>();
  const all: Bar[] = [];
  for (const span of request.spans) {
    const lane = names.indexOf(span.model);
    const to = span.to_ms ?? request.ended_ms ?? now_ms;
    if (lane < 0 || to < span.from_ms) continue;
    const x = (span.from_ms - request.arrived_ms) / scale;
    const width = (to - span.from_ms) / scale;
    const before = last.get(lane);
    if (before !== undefined && before.kind === span.kind && x - (before.x + before.width) < NARROW) {
      before.width = x + width - before.x;
      before.to_ms = to;
      before.steps += span.steps;
      before.spans += 1;
      continue;
    }
    const bar = { lane, kind: span.kind, x, width, from_ms: span.from_ms, to_ms: to, steps: span.steps, spans: 1 };
    last.set(lane, bar);
    all.push(bar);
  }
  return all;
}

/** Round values for an axis of that length: about four. */
export function ticks(length: number): number[] {
  if (!(length > 0)) return [0];
  const raw = length / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw * 0.999) ?? raw;
  return Array.from({ length: Math.floor(length / step + 1e-9) + 1 }, (_, index) => index * step);
}
