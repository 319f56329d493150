// What the server tells the page. All counters are totals since the server started.

/** A duration histogram: buckets that are not empty, not cumulative, sorted; null = no upper bound. */
export interface Hist {
  count: number;
  sum_seconds: number;
  buckets: [upper: number | null, count: number][];
}

export type Role = "subserver" | "client" | "batcher" | "decode" | "inter_model" | "executor";

export interface Actor {
  role: Role;
  state: "idle" | "busy" | "lost" | "elsewhere";
  /** 1 = never restarted. */
  lives: number;
  last_error: string | null;
  mailbox: { depth: number; depth_max: number; messages: number; wait: Hist };
  snapshot: Record<string, unknown>;
}

export interface Hop {
  to: string;
  count: number;
  p: number;
  tokens: number;
  latency: Hist;
}

export interface Model {
  name: string;
  /** Address, if it lives in another process. */
  elsewhere: string | null;
  requests: { open_streams: number; waiting: number; stalled: number; running: number; pending: number };
  tokens: { committed: number; dropped: number; decode: number; extend: number };
  steps: { count: number; failed: number; busy_seconds: number; sizes: number[]; time: Hist };
  batching: {
    threshold: number;
    live: number;
    why: string;
    released: Record<Release, number>;
    rows: number;
    waited_seconds: number;
    oldest_ms: number | null;
    wait: Hist;
  };
  hops: Hop[];
  kv: {
    pages_total: number;
    pages_used: number;
    pages_cached: number;
    page_tokens: number;
    prefix_query_tokens: number;
    prefix_hit_tokens: number;
    preemptions: number;
  };
  actors: Actor[];
}

export type Release = "threshold" | "no_more_work" | "timeout" | "pinned";

export interface Latency {
  model_name: string;
  ttft: Hist;
  itl: Hist;
  e2e: Hist;
  finished: Record<string, number>;
  generation_tokens: number;
}

export interface LogEntry {
  at_ms: number;
  model: string;
  actor: string;
  what: string;
}

export interface State {
  now_ms: number;
  open: boolean;
  live: number;
  live_prompt_tokens: number;
  live_max: number;
  router: { name: string; algorithm: string; policy: string; execution: string };
  models: Model[];
  planner: null | {
    looks: number;
    planned: number;
    adopted: number;
    failed: number;
    gain: number;
    last_error: string | null;
  };
  prediction: null | { live: number; tokens_per_second: number };
  latency: Latency[];
  log: LogEntry[];
}

export interface Span {
  model: string;
  kind: "waiting" | "running" | "pending";
  from_ms: number;
  to_ms: number | null;
  steps: number;
}

export interface Request {
  id: string;
  routed: boolean;
  entry: string;
  arrived_ms: number;
  ended_ms: number | null;
  outcome: string | null;
  prompt_tokens: number;
  tokens: number;
  by_model: Record<string, number>;
  spans: Span[];
}

export interface Requests {
  now_ms: number;
  requests: Request[];
}

/** Names of the roles as they are shown. */
export const ROLES: Record<Role, string> = {
  subserver: "Subserver",
  client: "Client",
  batcher: "Batcher",
  decode: "Decode",
  inter_model: "Inter-model",
  executor: "Executor",
};
