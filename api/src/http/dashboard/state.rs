//! The document of `GET /actors`: every actor, what waits, runs and hops, and what the thresholds come to. Owner: the HTTP
//! layer. Invariant: all counts are totals since the server started, so whoever reads it twice knows the rates between.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use tokenrouter_actors::histogram::Counts;

/// The server, actor by actor.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct State {
    /// Milliseconds since the server started.
    pub(super) now_ms: f64,
    /// Whether new requests are taken.
    pub(super) open: bool,
    /// Requests accepted and not ended.
    pub(super) live: u32,
    /// Tokens of their prompts.
    pub(super) live_prompt_tokens: u64,
    /// Requests accepted at once, at most.
    pub(super) live_max: u32,
    /// How requests are routed and batched.
    pub(super) router: RouterState,
    /// Each model, in the router's order.
    pub(super) models: Vec<ModelState>,
    /// The mailbox of the actor that gives turns; null where models do not take turns.
    pub(super) conductor: Option<MailboxState>,
    /// How the planning of thresholds goes; null when they do not follow the models.
    pub(super) planner: Option<PlannerState>,
    /// What the throughput model says of now; null while too little was learnt, and where models take turns.
    pub(super) prediction: Option<Prediction>,
    /// How long clients wait, by served name; only names that were asked for.
    pub(super) latency: Vec<ServedState>,
    /// What the supervisors did, oldest first.
    pub(super) log: Vec<LogState>,
}

/// How requests are routed and batched.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RouterState {
    /// Served name of the routed model.
    pub(super) name: String,
    /// The routing algorithm.
    pub(super) algorithm: String,
    /// How thresholds are chosen: `eager`, `fixed`, `optimal` or `adaptive`.
    pub(super) policy: &'static str,
    /// Which models may step at the same time: `async`, `model_sync`, `step_sync` or `std_serving`.
    pub(super) execution: Value,
}

/// One model's subserver.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ModelState {
    /// The model.
    pub(super) name: String,
    /// Where it is, when it is in another process; all counts are 0 then.
    pub(super) elsewhere: Option<String>,
    /// Requests by state.
    pub(super) requests: RequestCounts,
    /// Tokens so far.
    pub(super) tokens: TokenCounts,
    /// Forward passes.
    pub(super) steps: StepState,
    /// Waiting for a batch.
    pub(super) batching: BatchingState,
    /// Where requests go after a step here: an entry for each model, itself included.
    pub(super) hops: Vec<HopState>,
    /// KV memory.
    pub(super) kv: KvState,
    /// The subserver and its children.
    pub(super) actors: Vec<ActorState>,
}

/// Requests by state.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct RequestCounts {
    /// Entered here and not ended.
    pub(super) open_streams: u32,
    /// Wait for a batch.
    pub(super) waiting: u32,
    /// Wait for memory.
    pub(super) stalled: u32,
    /// In the step in flight.
    pub(super) running: u32,
    /// KV kept here while a peer has control.
    pub(super) pending: u32,
}

/// Tokens so far.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TokenCounts {
    /// Written by this model.
    pub(super) committed: u64,
    /// Candidates that the routing dropped.
    pub(super) dropped: u64,
    /// Consumed by rows of one token.
    pub(super) decode: u64,
    /// Consumed by rows of several tokens: prompts, and what was written elsewhere.
    pub(super) extend: u64,
}

/// Forward passes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct StepState {
    /// So far.
    pub(super) count: u64,
    /// Of them failed.
    pub(super) failed: u64,
    /// Time of all.
    pub(super) busy_seconds: f64,
    /// `[b - 1]`: batches of b requests.
    pub(super) sizes: Vec<u64>,
    /// Time of each.
    pub(super) time: Durations,
}

/// Waiting for a batch.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct BatchingState {
    /// Requests a batch waits for.
    pub(super) threshold: u32,
    /// Live routed requests as known here.
    pub(super) live: u32,
    /// Why the threshold is what it is.
    pub(super) why: String,
    /// Batches by what released them.
    pub(super) released: BTreeMap<&'static str, u64>,
    /// Requests released.
    pub(super) rows: u64,
    /// Time they waited.
    pub(super) waited_seconds: f64,
    /// For how long the one that waits longest has waited.
    pub(super) oldest_ms: Option<f64>,
    /// How long each waited.
    pub(super) wait: Durations,
}

/// Where requests go after a step.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct HopState {
    /// The model that goes on.
    pub(super) to: String,
    /// How often so far; 0 for itself.
    pub(super) count: u64,
    /// Probability as learnt lately.
    pub(super) p: f64,
    /// Tokens committed on such a way, on average.
    pub(super) tokens: f64,
    /// From the end of the step here until it waits there; empty for itself and for models in other processes.
    pub(super) latency: Durations,
}

/// KV memory.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct KvState {
    /// Pages in all.
    pub(super) pages_total: u32,
    /// Held by requests.
    pub(super) pages_used: u32,
    /// Kept only for future prefix hits.
    pub(super) pages_cached: u32,
    /// Tokens of a page.
    pub(super) page_tokens: usize,
    /// Prompt tokens looked up in the prefix cache.
    pub(super) prefix_query_tokens: u64,
    /// Found there.
    pub(super) prefix_hit_tokens: u64,
    /// Times a request lost its KV to an older one.
    pub(super) preemptions: u64,
}

/// One actor.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ActorState {
    /// Its part: `subserver`, `client`, `batcher`, `decode`, `inter_model` or `executor`.
    pub(super) role: &'static str,
    /// `idle`, `busy`, `lost` (an executor that is being replaced) or `elsewhere` (in another process).
    pub(super) state: &'static str,
    /// Which life it is in: 1 if it was never restarted.
    pub(super) lives: u64,
    /// Why it was restarted last.
    pub(super) last_error: Option<String>,
    /// Its mailbox, over all its lives.
    pub(super) mailbox: MailboxState,
    /// What it says of itself.
    pub(super) snapshot: Value,
}

/// A mailbox.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MailboxState {
    /// Messages that wait.
    pub(super) depth: u64,
    /// Messages that ever waited at once.
    pub(super) depth_max: u64,
    /// Messages handled.
    pub(super) messages: u64,
    /// How long each waited.
    pub(super) wait: Durations,
}

/// The planning of thresholds.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PlannerState {
    /// Looks at the estimates.
    pub(super) looks: u64,
    /// Tables planned.
    pub(super) planned: u64,
    /// Tables adopted.
    pub(super) adopted: u64,
    /// Plans that failed.
    pub(super) failed: u64,
    /// By which part the table compared last exceeded the one in force then.
    pub(super) gain: f64,
    /// Why the last plan failed.
    pub(super) last_error: Option<String>,
}

/// What the throughput model says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Prediction {
    /// For so many live routed requests, under the thresholds in force.
    pub live: u32,
    /// T(B).
    pub tokens_per_second: f64,
}

/// What clients of a served name see.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ServedState {
    /// The served name.
    pub(super) model_name: String,
    /// From the request to its first token.
    pub(super) ttft: Durations,
    /// Between tokens.
    pub(super) itl: Durations,
    /// From the request to its end.
    pub(super) e2e: Durations,
    /// Requests that ended, by reason: `stop`, `length`, `abort`, `error`.
    pub(super) finished: BTreeMap<String, u64>,
    /// Tokens generated.
    pub(super) generation_tokens: u64,
}

/// Something a supervisor did.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LogState {
    /// Milliseconds since the server started.
    pub(super) at_ms: f64,
    /// Of which model.
    pub(super) model: String,
    /// About which actor.
    pub(super) actor: &'static str,
    /// What.
    pub(super) what: String,
}

/// How long something took, all of it since the start.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Durations {
    /// How many.
    pub(super) count: u64,
    /// Of all together.
    pub(super) sum_seconds: f64,
    /// `[upper bound in seconds, count]` of each bucket that is not empty, in order; not cumulative. A bucket is at most a
    /// quarter wider than its lower bound.
    pub(super) buckets: Vec<(f64, u64)>,
}

impl From<&Counts> for Durations {
    fn from(counts: &Counts) -> Self {
        // JSON has no infinity: what is beyond all bounds is below twice the last.
        let last = 2.0 * Counts::doublings().last().unwrap_or(1.0);
        let buckets = counts.buckets.iter().map(|(upper, count)| (upper.min(last), *count)).collect();
        Durations { count: counts.count, sum_seconds: counts.sum_seconds, buckets }
    }
}
