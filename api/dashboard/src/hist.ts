// Histograms of the server: differences, sums and quantiles.

import type { Hist } from "./data.ts";

export const EMPTY: Hist = { count: 0, sum_seconds: 0, buckets: [] };

/** A bucket is at most a quarter wider than its lower bound. */
const WIDTH = 1.25;

const key = (upper: number | null) => upper ?? Infinity;

function combine(a: Hist, b: Hist, sign: 1 | -1): Hist {
  const counts = new Map(a.buckets.map(([upper, count]) => [key(upper), count]));
  for (const [upper, count] of b.buckets) counts.set(key(upper), (counts.get(key(upper)) ?? 0) + sign * count);
  const buckets = [...counts].filter(([, count]) => count > 0).sort(([a], [b]) => a - b);
  return {
    count: buckets.reduce((sum, [, count]) => sum + count, 0),
    sum_seconds: Math.max(0, a.sum_seconds + sign * b.sum_seconds),
    buckets,
  };
}

/** What was added between two looks. */
export const since = (now: Hist, before: Hist): Hist => combine(now, before, -1);

/** All together. */
export const sum = (hists: Hist[]): Hist => hists.reduce((a, b) => combine(a, b, 1), EMPTY);

/** In seconds, by interpolating in its bucket; null of nothing. The unbounded bucket counts as its lower bound. */
export function quantile(hist: Hist, q: number): number | null {
  let below = 0;
  let last = 0;
  for (const [bound, count] of hist.buckets) {
    const upper = key(bound);
    const lower = upper === Infinity ? last : Math.max(last, upper / WIDTH);
    if (below + count >= q * hist.count && count > 0) {
      return upper === Infinity ? lower : lower + ((upper - lower) * (q * hist.count - below)) / count;
    }
    below += count;
    last = upper;
  }
  return null;
}

export const mean = (hist: Hist): number | null => (hist.count > 0 ? hist.sum_seconds / hist.count : null);
