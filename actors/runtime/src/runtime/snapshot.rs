//! How the runtime is now, put together from what its actors last said. Owner: whoever asks. Invariant: asking waits for
//! no actor.

use super::Runtime;
use crate::board::{
    BatcherSnapshot, ClientSnapshot, DecodeSnapshot, InterModelSnapshot, PlannerSnapshot, Role, Snapshot,
    SubserverSnapshot,
};
use crate::instruments::InstrumentsSnapshot;
use crate::journal::Entry;
use crate::link::Address;
use crate::mailbox::{MailboxSnapshot, Meter};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use tokenrouter_core::batching::PolicySpec;
use tokenrouter_core::execution::Execution;
use tokenrouter_core::ids::{ModelIdx, Time};
use tokenrouter_core::kv::{KvPool, KvStats};

/// How a server is now.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RuntimeSnapshot {
    /// Time since the start.
    pub now: Time,
    /// Live requests.
    pub live: u32,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Accepts new requests.
    pub open: bool,
    /// What was set at the launch.
    pub settings: Settings,
    /// The mailbox of the actor that gives turns; none where models do not take turns.
    pub conductor: Option<MailboxSnapshot>,
    /// How the planning of thresholds goes; none when they do not follow the models.
    pub planner: Option<PlannerSnapshot>,
    /// Per model.
    pub models: Vec<ModelSnapshot>,
}

/// What was set at the launch and bears on how the numbers are read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Settings {
    /// How thresholds are chosen: `eager`, `fixed`, `optimal` or `adaptive`.
    pub policy: &'static str,
    /// Which models may step at the same time.
    pub execution: Execution,
    /// Requests accepted at once.
    pub live_max: u32,
}

/// How one subserver is now.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ModelSnapshot {
    /// Name of the model.
    pub name: String,
    /// Where it is, when it is in another process; everything below is empty then.
    pub elsewhere: Option<String>,
    /// KV memory.
    pub kv: KvStats,
    /// Executors that hold memory: more than one while the step of one that was given up has not ended.
    pub executors: u32,
    /// Jobs for this entry model that found no room: as requests, or for their prompt tokens.
    pub overloaded: [u64; 2],
    /// Supervision.
    pub subserver: SubserverSnapshot,
    /// Streams.
    pub client: ClientSnapshot,
    /// Waiting.
    pub batcher: BatcherSnapshot,
    /// Running.
    pub decode: DecodeSnapshot,
    /// Away.
    pub inter_model: InterModelSnapshot,
    /// What is measured of these actors.
    pub instruments: InstrumentsSnapshot,
}

impl Runtime {
    /// How the server is now.
    pub fn snapshot(&self) -> RuntimeSnapshot {
        let inner = &self.0;
        RuntimeSnapshot {
            now: inner.clock.now(),
            live: inner.server.live.load(Ordering::Relaxed),
            prompt_tokens: inner.server.prompt_tokens.load(Ordering::Relaxed),
            open: self.is_open(),
            settings: self.settings(),
            conductor: inner.conductor.as_ref().map(Meter::read),
            planner: self.planner(),
            models: (0..inner.pools.len()).map(|index| self.model_snapshot(index)).collect(),
        }
    }

    fn model_snapshot(&self, index: usize) -> ModelSnapshot {
        let inner = &self.0;
        let me = ModelIdx(index as u8);
        let name = inner.server.name(me).to_owned();
        let kv = inner.pools[index].as_ref().map(KvPool::stats).unwrap_or_default();
        let elsewhere = inner.server.models[index].site.peer().map(Address::to_string);
        let executors = inner.executors[index].count();
        let overloaded = inner.server.refused.of(me);
        let instruments = inner.instruments[index].read();
        let mut out =
            ModelSnapshot { name, elsewhere, kv, executors, overloaded, instruments, ..ModelSnapshot::default() };
        for role in [Role::Subserver, Role::Client, Role::Batcher, Role::Decode, Role::InterModel] {
            match inner.board.read(me, role) {
                Some(Snapshot::Subserver(said)) => out.subserver = said,
                Some(Snapshot::Client(said)) => out.client = said,
                Some(Snapshot::Batcher(said)) => out.batcher = said,
                Some(Snapshot::Decode(said)) => out.decode = said,
                Some(Snapshot::InterModel(said)) => out.inter_model = said,
                Some(Snapshot::Planner(_)) | None => {}
            }
        }
        out
    }

    /// Whether new requests are accepted.
    pub fn is_open(&self) -> bool {
        self.0.open.load(Ordering::Acquire)
    }

    fn settings(&self) -> Settings {
        let server = &self.0.server;
        let policy = match &server.batching.policy {
            _ if server.batching.adaptive => "adaptive",
            PolicySpec::Eager => "eager",
            PolicySpec::Fixed(_) => "fixed",
            PolicySpec::Planned(_) => "optimal",
        };
        Settings { policy, execution: server.batching.execution, live_max: server.live_max }
    }

    /// What happened to requests since this was asked last, by model; whoever asks first gets it.
    pub fn take_journals(&self) -> Vec<VecDeque<Entry>> {
        self.0.instruments.iter().map(|instruments| instruments.journal.take()).collect()
    }

    /// How the planning of thresholds goes; none when they do not follow the models.
    pub fn planner(&self) -> Option<PlannerSnapshot> {
        match self.0.board.read(ModelIdx(0), Role::Planner) {
            Some(Snapshot::Planner(said)) => Some(said),
            _ => None,
        }
    }
}
