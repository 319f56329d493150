// The numbers whose history is kept, from two or three states of the server.

import type { State } from "./data.ts";
import { quantile, since, sum } from "./hist.ts";

export type Sample = Record<string, number | null>;

/** The shares of requests whose latency is shown. */
export const QUANTILES = [0.5, 0.9, 0.99];

export const LATENCIES = ["ttft", "itl", "e2e"] as const;

/** `before` is a moment ago, for rates; `start` begins the window of the percentiles. */
export function sample(now: State, before: State, start: State): Sample {
  const seconds = (now.now_ms - before.now_ms) / 1000;
  const per = (a: number, b: number) => (seconds > 0 ? Math.max(0, a - b) / seconds : null);
  const out: Sample = { live: now.live, predicted: now.prediction?.tokens_per_second ?? null };
  let total = 0;
  now.models.forEach((model, index) => {
    const was = before.models[index] ?? model;
    const name = model.name;
    const tokens = per(model.tokens.committed, was.tokens.committed);
    total += tokens ?? 0;
    out[`tokens/${name}`] = tokens;
    const hops = (of: typeof model) => of.hops.reduce((sum, hop) => sum + hop.count, 0);
    out[`hops/${name}`] = per(hops(model), hops(was));
    out[`kv/${name}`] = model.kv.pages_total > 0 ? model.kv.pages_used / model.kv.pages_total : null;
    out[`waiting/${name}`] = model.requests.waiting;
    out[`pending/${name}`] = model.requests.pending;
    out[`threshold/${name}`] = model.batching.threshold;
    const rows = model.batching.rows - was.batching.rows;
    const steps = model.steps.count - was.steps.count;
    out[`batch/${name}`] = steps > 0 ? rows / steps : null;
    for (const actor of model.actors) {
      const past = was.actors.find((other) => other.role === actor.role) ?? actor;
      const key = actorKey(name, actor.role);
      out[`${key}/messages`] = per(actor.mailbox.messages, past.mailbox.messages);
      out[`${key}/depth`] = actor.mailbox.depth;
      out[`${key}/wait`] = quantile(since(actor.mailbox.wait, past.mailbox.wait), 0.99);
    }
  });
  out["measured"] = seconds > 0 ? total : null;
  const large = now.models.at(-1);
  out["large"] = large !== undefined && total > 0 ? (out[`tokens/${large.name}`] ?? 0) / total : null;
  for (const what of LATENCIES) {
    const window = since(sum(now.latency.map((one) => one[what])), sum(start.latency.map((one) => one[what])));
    for (const q of QUANTILES) out[`${what}/${q}`] = quantile(window, q);
  }
  return out;
}

/** Where the history of an actor is. */
export const actorKey = (model: string, role: string): string => `actor/${model}/${role}`;
