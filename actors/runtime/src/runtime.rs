//! The runtime as a whole: what it is made of, how it starts, and the handle everybody else holds. Owner: the arbiters
//! the subservers live on. Invariant: after `start`, addresses of subservers never change.

use crate::board::{
    BatcherSnapshot, Board, ClientSnapshot, DecodeSnapshot, InterModelSnapshot, Role, Snapshot, SubserverSnapshot,
};
use crate::clock::Clock;
use crate::gpu_executor::Seat;
use crate::link::local::Directory;
use crate::messages::{Stop, Submit, Ticket};
use crate::subserver::{Shared, Subserver};
use actix::prelude::*;
use serde::Serialize;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokenrouter_core::batching::{Batching, Policy};
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_core::ids::{ModelIdx, RequestId, Time, TokenId};
use tokenrouter_core::job::{Event, Job, Refusal, Target};
use tokenrouter_core::kv::{KvPool, KvStats};
use tokenrouter_core::plan::STEP_TOKENS_MIN;
use tokenrouter_core::request::RequestSpec;
use tokenrouter_core::routing::stay::Stay;
use tokenrouter_core::routing::{Algorithm, Route};
use tokenrouter_core::text::TextCodec;
use tokio::sync::mpsc;

/// How often a drain looks whether it is done.
const DRAIN_POLL: Duration = Duration::from_millis(10);

/// Time open streams get to receive their last event when a drain ends.
const FAREWELL: Duration = Duration::from_millis(100);

/// Models a server has at most; indices travel as one byte and live counts are broadcast to all.
pub const MODELS_MAX: usize = 16;

/// One model and the device it runs on.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Name, unique.
    pub name: String,
    /// What the device can do.
    pub limits: ExecutorLimits,
    /// Its end-of-text tokens.
    pub eos: Vec<TokenId>,
    /// Where its executor lives and how it is built.
    pub executor: Seat,
}

/// Where the control actors live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Each subserver on an arbiter (thread) of its own.
    OwnArbiter,
    /// All on the calling arbiter: deterministic, for tests on a virtual clock.
    Here,
}

/// Everything a server is made of.
#[derive(Clone)]
pub struct RuntimeSpec {
    /// Models, in the router's order.
    pub models: Vec<ModelSpec>,
    /// Their common vocabulary.
    pub codec: Arc<dyn TextCodec>,
    /// The routing algorithm.
    pub algorithm: Arc<dyn Algorithm>,
    /// When models start.
    pub batching: Batching,
    /// Requests accepted at once.
    pub live_max: u32,
    /// Where the control actors live.
    pub placement: Placement,
}

/// A runtime could not be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// A setting is wrong.
    #[error("{0}")]
    Setting(String),
}

/// What all actors of a server read.
pub struct Server {
    /// Models, in the router's order.
    pub models: Vec<ModelSpec>,
    /// Their common vocabulary.
    pub codec: Arc<dyn TextCodec>,
    /// The routing algorithm.
    pub algorithm: Arc<dyn Algorithm>,
    /// When models start.
    pub batching: Batching,
    /// End-of-text tokens of all models together.
    pub eos: Vec<TokenId>,
    /// Requests accepted at once.
    pub live_max: u32,
    /// Requests live now; written by the Clients.
    pub live: AtomicU32,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("models", &self.models)
            .field("algorithm", &self.algorithm)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// What follows a request: the algorithm, or nothing for a request that names one model.
    pub fn route_for(&self, spec: &RequestSpec) -> Box<dyn Route> {
        match spec.target {
            Target::Routed => self.algorithm.start(),
            Target::Only(_) => Box::new(Stay { models: self.models.len() }),
        }
    }

    /// A batching policy value for one Batcher. The settings were checked at the start.
    pub fn policy(&self) -> Box<dyn Policy> {
        let models = self.models.len();
        self.batching.policy.build(models).unwrap_or_else(|_| Box::new(tokenrouter_core::batching::Eager(models)))
    }

    /// Name of a model.
    pub fn name(&self, model: ModelIdx) -> &str {
        self.models.get(model.index()).map_or("?", |model| &model.name)
    }
}

/// The handle of a running server; cloning is cheap.
#[derive(Clone, Debug)]
pub struct Runtime(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    server: Arc<Server>,
    directory: Directory,
    pools: Vec<KvPool>,
    board: Board,
    clock: Clock,
    next_id: AtomicU64,
    open: AtomicBool,
    arbiters: Mutex<Vec<Arbiter>>,
}

/// An accepted job.
#[derive(Debug)]
pub struct Reply {
    /// Its id in logs and snapshots.
    pub id: RequestId,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// What happens, ending in `Finished` or `Failed`; a channel that closes without either means the same as
    /// `Failed(Internal)`. Dropping it aborts the job at every model.
    pub events: mpsc::Receiver<Event>,
}

/// How a server is now.
#[derive(Clone, Debug, Serialize)]
pub struct RuntimeSnapshot {
    /// Time since the start.
    pub now: Time,
    /// Live requests.
    pub live: u32,
    /// Accepts new requests.
    pub open: bool,
    /// Per model.
    pub models: Vec<ModelSnapshot>,
}

/// How one subserver is now.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ModelSnapshot {
    /// Name of the model.
    pub name: String,
    /// KV memory.
    pub kv: KvStats,
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
}

/// Starts all subservers. Must be called within an actix system.
///
/// # Errors
/// [`StartError`] naming the setting.
pub fn start(spec: RuntimeSpec) -> Result<Runtime, StartError> {
    check(&spec)?;
    let mut eos: Vec<TokenId> = spec.models.iter().flat_map(|model| model.eos.iter().copied()).collect();
    eos.sort_unstable();
    eos.dedup();
    let pools: Vec<KvPool> = spec.models.iter().map(|model| KvPool::new(model.limits.pages)).collect();
    let server = Arc::new(Server {
        models: spec.models,
        codec: spec.codec,
        algorithm: spec.algorithm,
        batching: spec.batching,
        eos,
        live_max: spec.live_max,
        live: AtomicU32::new(0),
    });
    let (directory, board, clock) = (Directory::default(), Board::default(), Clock::start());
    let mut arbiters = Vec::new();
    let mut subservers = Vec::new();
    for (index, pool) in pools.iter().enumerate() {
        let shared = Shared {
            server: Arc::clone(&server),
            directory: Arc::clone(&directory),
            clock,
            board: board.clone(),
            pool: pool.clone(),
        };
        let subserver = Subserver::new(ModelIdx(index as u8), shared);
        subservers.push(match spec.placement {
            Placement::Here => subserver.start(),
            Placement::OwnArbiter => {
                let arbiter = Arbiter::new();
                let address = Subserver::start_in_arbiter(&arbiter.handle(), move |_| subserver);
                arbiters.push(arbiter);
                address
            }
        });
    }
    directory.get_or_init(|| subservers);
    let (next_id, open, arbiters) = (AtomicU64::new(1), AtomicBool::new(true), Mutex::new(arbiters));
    Ok(Runtime(Arc::new(Inner { server, directory, pools, board, clock, next_id, open, arbiters })))
}

fn check(spec: &RuntimeSpec) -> Result<(), StartError> {
    let setting = |message: String| Err(StartError::Setting(message));
    if spec.models.is_empty() || spec.models.len() > MODELS_MAX {
        return setting(format!("a server has 1 to {MODELS_MAX} models, not {}", spec.models.len()));
    }
    if spec.live_max == 0 {
        return setting("live_max must be at least 1".into());
    }
    for model in &spec.models {
        let limits = &model.limits;
        if limits.pages == 0 || limits.rows_max == 0 || limits.context_len < 2 {
            return setting(format!("model {}: every limit of its executor must be positive: {limits:?}", model.name));
        }
        if limits.step_tokens_max < STEP_TOKENS_MIN {
            let name = &model.name;
            return setting(format!("model {name}: step_tokens_max must be at least {STEP_TOKENS_MIN}"));
        }
    }
    spec.batching.policy.build(spec.models.len()).map(drop).map_err(StartError::Setting)
}

impl Runtime {
    /// Hands a job in.
    ///
    /// # Errors
    /// [`Refusal`] when it is not accepted; nothing of it remains then.
    pub async fn submit(&self, job: Job) -> Result<Reply, Refusal> {
        if !self.0.open.load(Ordering::Acquire) {
            return Err(Refusal::Unavailable("shutting down".into()));
        }
        let entry = match job.target {
            Target::Routed => self.0.server.algorithm.entry(job.sampling.seed),
            Target::Only(model) => model,
        };
        let subserver = self.0.directory.get().and_then(|all| all.get(entry.index()));
        let unavailable = || Refusal::Unavailable(format!("no subserver for model {entry}"));
        let subserver = subserver.ok_or_else(unavailable)?;
        let id = RequestId(self.0.next_id.fetch_add(1, Ordering::Relaxed));
        let Ticket { prompt_tokens, events } =
            subserver.send(Submit { id, job }).await.unwrap_or_else(|_| Err(unavailable()))?;
        Ok(Reply { id, prompt_tokens, events })
    }

    /// How the server is now.
    pub fn snapshot(&self) -> RuntimeSnapshot {
        let inner = &self.0;
        RuntimeSnapshot {
            now: inner.clock.now(),
            live: inner.server.live.load(Ordering::Relaxed),
            open: inner.open.load(Ordering::Acquire),
            models: (0..inner.pools.len()).map(|index| self.model_snapshot(index)).collect(),
        }
    }

    fn model_snapshot(&self, index: usize) -> ModelSnapshot {
        let inner = &self.0;
        let me = ModelIdx(index as u8);
        let name = inner.server.name(me).to_owned();
        let mut out = ModelSnapshot { name, kv: inner.pools[index].stats(), ..ModelSnapshot::default() };
        for role in [Role::Subserver, Role::Client, Role::Batcher, Role::Decode, Role::InterModel] {
            match inner.board.read(me, role) {
                Some(Snapshot::Subserver(said)) => out.subserver = said,
                Some(Snapshot::Client(said)) => out.client = said,
                Some(Snapshot::Batcher(said)) => out.batcher = said,
                Some(Snapshot::Decode(said)) => out.decode = said,
                Some(Snapshot::InterModel(said)) => out.inter_model = said,
                None => {}
            }
        }
        out
    }

    /// Refuses new work, lets open requests end for at most `limit`, fails the rest and stops all actors.
    pub async fn drain(&self, limit: Duration) {
        let inner = &self.0;
        inner.open.store(false, Ordering::Release);
        let deadline = tokio::time::Instant::now() + limit;
        while inner.server.live.load(Ordering::Relaxed) > 0 && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(DRAIN_POLL).await;
        }
        for subserver in inner.directory.get().into_iter().flatten() {
            // Closed means stopped already.
            subserver.send(Stop::Shutdown).await.ok();
        }
        tokio::time::sleep(FAREWELL).await;
        let arbiters = std::mem::take(&mut *inner.arbiters.lock().unwrap_or_else(PoisonError::into_inner));
        for arbiter in &arbiters {
            arbiter.stop();
        }
        let joined =
            tokio::task::spawn_blocking(move || arbiters.into_iter().map(Arbiter::join).all(|end| end.is_ok()));
        if !joined.await.unwrap_or(false) {
            tracing::warn!("a control thread ended by a panic");
        }
    }
}
