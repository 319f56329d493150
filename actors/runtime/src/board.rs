//! What every actor says of itself: small snapshots that the dashboard and /metrics read. Owner: each key has one
//! writer, the actor it names. Invariant: reading never waits for an actor; an actor in a new life counts on from what the
//! earlier one said.

use dashmap::DashMap;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_core::batching::Release;
use tokenrouter_core::ids::{ModelIdx, Time};
use tokenrouter_core::theory::observe::{Behaviour, Total};

/// An actor's part in its subserver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Supervises the others.
    Subserver,
    /// Owns the streams.
    Client,
    /// Owns what waits.
    Batcher,
    /// Owns what runs.
    Decode,
    /// Owns what is away.
    InterModel,
    /// Owns the device.
    Executor,
    /// Plans thresholds; one for all models, under the first.
    Planner,
}

impl Role {
    /// The actors that every model has.
    pub const OF_A_MODEL: [Role; 6] =
        [Role::Subserver, Role::Client, Role::Batcher, Role::Decode, Role::InterModel, Role::Executor];

    /// As in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Role::Subserver => "subserver",
            Role::Client => "client",
            Role::Batcher => "batcher",
            Role::Decode => "decode",
            Role::InterModel => "inter_model",
            Role::Executor => "executor",
            Role::Planner => "planner",
        }
    }
}

/// A snapshot of one actor.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Snapshot {
    /// Of a subserver.
    Subserver(SubserverSnapshot),
    /// Of a Client.
    Client(ClientSnapshot),
    /// Of a Batcher.
    Batcher(BatcherSnapshot),
    /// Of a Decode.
    Decode(DecodeSnapshot),
    /// Of an InterModel.
    InterModel(InterModelSnapshot),
    /// Of the Planner.
    Planner(PlannerSnapshot),
}

/// Supervision.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SubserverSnapshot {
    /// Lives of the executor after the first.
    pub executor_restarts: u64,
    /// Lives of the control actors after the first.
    pub children_restarts: u64,
    /// Why the last restart happened.
    pub last_error: Option<String>,
}

/// Streams and totals.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ClientSnapshot {
    /// Open streams.
    pub live: u32,
    /// Jobs accepted so far.
    pub accepted: u64,
    /// Jobs refused here so far; those that found no room are in the snapshot of the model.
    pub refused: u64,
    /// Ended by end-of-text, a stop token or a stop string.
    pub stopped: u64,
    /// Ended by length.
    pub length: u64,
    /// Given up by the user.
    pub aborted: u64,
    /// Failed.
    pub failed: u64,
    /// Prompt tokens of accepted jobs.
    pub prompt_tokens: u64,
    /// Tokens delivered.
    pub completion_tokens: u64,
}

/// Waiting and releases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BatcherSnapshot {
    /// Requests that wait for a batch.
    pub waiting: u32,
    /// Requests that wait for memory.
    pub stalled: u32,
    /// Threshold in force.
    pub threshold: u32,
    /// Live routed requests as known here.
    pub live: u32,
    /// Batches by release reason: threshold, no_more_work, timeout, pinned.
    pub released: [u64; 4],
    /// Requests released so far.
    pub rows: u64,
    /// Time they waited.
    pub waited: Duration,
    /// Since when the one that waits longest waits.
    pub oldest: Option<Time>,
}

impl BatcherSnapshot {
    /// Names of `released`, in order.
    pub const REASONS: [&str; 4] = ["threshold", "no_more_work", "timeout", "pinned"];

    /// One batch of `rows` requests was released.
    pub fn release(&mut self, reason: Release, rows: usize) {
        let index = match reason {
            Release::Threshold => 0,
            Release::NoMoreWork => 1,
            Release::Timeout => 2,
            Release::Pinned => 3,
        };
        self.released[index] += 1;
        self.rows += rows as u64;
    }
}

/// Steps and tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DecodeSnapshot {
    /// Requests in the step in flight.
    pub running: u32,
    /// Whether the executor is lost and not replaced yet.
    pub is_lost: bool,
    /// Steps so far.
    pub steps: u64,
    /// Steps that failed.
    pub steps_failed: u64,
    /// Time the executor took for them.
    pub busy: Duration,
    /// Tokens consumed as decode (one token for a row).
    pub decode_tokens: u64,
    /// Tokens consumed as extend or prefill.
    pub extend_tokens: u64,
    /// Tokens committed here.
    pub committed: u64,
    /// Candidates dropped here.
    pub dropped: u64,
    /// When the last step began; it is in flight while `running` is not 0.
    pub began: Time,
    /// When the last step ended.
    pub last_step: Time,
    /// Latencies and ways as learnt, renewed now and then.
    pub behaviour: Arc<Behaviour>,
    /// `[b - 1]`: all steps with b requests and without prompts, renewed with it.
    pub totals: Arc<Vec<Total>>,
}

/// Hops.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InterModelSnapshot {
    /// Requests whose KV is kept here while a peer has control.
    pub pending: u32,
    /// Hops sent, by peer.
    pub hops: Vec<u64>,
    /// Requests that came back.
    pub returned: u64,
    /// Tokens they brought.
    pub catchup_tokens: u64,
    /// Time they were away.
    pub away: Duration,
    /// Which peers are connected, both ways, by model index; itself always.
    pub connected: Vec<bool>,
    /// Frames dropped because they were late, repeated or unknown.
    pub dropped_frames: u64,
    /// Times frames of a peer were found missing.
    pub gaps: u64,
}

/// Thresholds that follow what the models do.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PlannerSnapshot {
    /// Looks at the estimates so far.
    pub looks: u64,
    /// Tables planned.
    pub planned: u64,
    /// Tables adopted.
    pub adopted: u64,
    /// Plans that failed.
    pub failed: u64,
    /// By which part the throughput of the table compared last exceeds that of the one in force then.
    pub gain: f64,
    /// Why the last plan failed.
    pub last_error: Option<String>,
}

/// All snapshots of a server.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<DashMap<(ModelIdx, Role), Snapshot>>);

impl Board {
    /// An actor says how it is.
    pub fn post(&self, model: ModelIdx, role: Role, snapshot: Snapshot) {
        self.0.insert((model, role), snapshot);
    }

    /// What an actor said last.
    pub fn read(&self, model: ModelIdx, role: Role) -> Option<Snapshot> {
        self.0.get(&(model, role)).map(|entry| entry.value().clone())
    }
}
