//! The runtime as a whole: what it is made of, how it starts, and the handle everybody else holds. Owner: the arbiters
//! the subservers live on. Invariant: after `start`, addresses of subservers never change.

mod check;
mod snapshot;
mod submit;

use crate::admission::{Pace, Refused};
use crate::board::{Board, Role};
use crate::bounds::Bounds;
use crate::clock::Clock;
use crate::conductor::Conductor;
use crate::gpu_executor::Executors;
use crate::instruments::Instruments;
use crate::link::Address;
use crate::link::gate::{Gate, Plan};
use crate::link::local::Directory;
use crate::link::net::Bound;
use crate::link::process::{self, Numbers, Process, Site};
use crate::mailbox::{Mailbox, Meter, Outlet};
use crate::messages::{Said, Stop};
use crate::place::FIRST_LIFE;
use crate::planner::{InForce, Planner, Planning};
use crate::subserver::{Shared, Subserver};
use actix::prelude::*;
pub use snapshot::{ModelSnapshot, RuntimeSnapshot};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokenrouter_core::batching::{Batching, Policy, PolicySpec, clamp};
use tokenrouter_core::constraint::Constraint;
use tokenrouter_core::execution::Turns;
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_core::faults::LinkFaults;
use tokenrouter_core::ids::{ModelIdx, RequestId, TokenId};
use tokenrouter_core::job::{Event, Target};
use tokenrouter_core::kv::KvPool;
use tokenrouter_core::request::RequestSpec;
use tokenrouter_core::routing::stay::Stay;
use tokenrouter_core::routing::{Algorithm, Route};
use tokenrouter_core::text::{TextCodec, TextError};
use tokenrouter_core::theory::table::Table;
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
    /// Where it is: its executor here, or the process that has it.
    pub site: Site,
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
    /// Other bounds on requests.
    pub bounds: Bounds,
    /// Where the control actors live.
    pub placement: Placement,
    /// This process among those of the server. All have the same models, algorithm and batching.
    pub process: Process,
}

/// A runtime could not be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// A setting is wrong.
    #[error("{0}")]
    Setting(String),
    /// The address for peers cannot be taken.
    #[error("cannot listen at {address}: {reason}; is another process there, and may this one write there?")]
    Listen {
        /// The address.
        address: Address,
        /// What the operating system says.
        reason: String,
    },
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
    /// Requests live now that entered in this process: permits that were given.
    pub live: AtomicU32,
    /// Tokens of their prompts.
    pub prompt_tokens: AtomicU64,
    /// How long requests live.
    pub pace: Pace,
    /// Jobs that found no room.
    pub refused: Refused,
    /// Other bounds on requests.
    pub bounds: Bounds,
    /// Which life of this process.
    pub life: u64,
    /// What goes wrong, on order, with messages between models.
    pub faults: Vec<LinkFaults>,
    /// Processes the server is made of.
    pub processes: usize,
    /// The thresholds that were planned last.
    pub in_force: InForce,
    /// Who gives turns to the models of this process, in the modes that have them.
    pub conductor: Option<Outlet<Said>>,
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
        // Overrides were checked when the request was accepted; one that does not parse here changes nothing.
        let overrides = spec.routing.as_ref().and_then(|text| serde_json::from_str(text).ok());
        let pinned = self.algorithm.at(spec.algorithm);
        let algorithm = pinned.as_deref().unwrap_or(&*self.algorithm);
        let own = overrides.and_then(|overrides| algorithm.with(&overrides).ok());
        match spec.target {
            Target::Routed => own.map_or_else(|| algorithm.start(), |own| own.start()),
            Target::Only(_) => Box::new(Stay { models: self.models.len() }),
        }
    }

    /// What keeps the answer of a request in form, at its start.
    ///
    /// # Errors
    /// What is wrong with the form.
    pub fn constraint_for(&self, spec: &RequestSpec) -> Result<Option<Box<dyn Constraint>>, TextError> {
        spec.constraint.as_deref().map(|form| self.codec.constraint(form, &spec.eos)).transpose()
    }

    /// A batching policy value for one Batcher. The settings were checked at the start.
    pub fn policy(&self) -> Box<dyn Policy> {
        let models = self.models.len();
        self.batching.policy.build(models).unwrap_or_else(|_| Box::new(tokenrouter_core::batching::Eager(models)))
    }

    /// Requests live at once in all processes, at most.
    pub fn live_anywhere_max(&self) -> usize {
        self.live_max as usize * self.processes
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
    /// Of the models that are here.
    pools: Vec<Option<KvPool>>,
    /// Of every model: how many hold memory.
    executors: Vec<Executors>,
    /// Of every model.
    instruments: Vec<Arc<Instruments>>,
    /// Of the actor that gives turns, in the modes that have them.
    conductor: Option<Meter>,
    board: Board,
    clock: Clock,
    numbers: Numbers,
    /// Jobs that were not admitted.
    gate: Option<Addr<Gate>>,
    planner: Option<Addr<Planner>>,
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

/// Starts all subservers. Must be called within an actix system.
///
/// # Errors
/// [`StartError`] naming the setting.
pub fn start(spec: RuntimeSpec) -> Result<Runtime, StartError> {
    start_with(spec, Planning::default())
}

/// As [`start`], with another way to plan thresholds; it matters to adaptive batching only.
///
/// # Errors
/// As [`start`].
pub fn start_with(spec: RuntimeSpec, planning: Planning) -> Result<Runtime, StartError> {
    check::check(&spec)?;
    let bound = spec.process.listen.clone().map(|address| Ok((bind(&address)?, address))).transpose()?;
    let numbers = Numbers::new(&spec.process, &spec.models);
    let (directory, board, clock) = (Directory::default(), Board::default(), Clock::start());
    let mut arbiters = Vec::new();
    let here: Vec<bool> = spec.models.iter().map(|model| model.site.peer().is_none()).collect();
    let conductor = Turns::new(spec.batching.execution, &here, FIRST_LIFE).map(|turns| {
        let directory = Arc::clone(&directory);
        Mailbox::new(place(spec.placement, &mut arbiters, move || Conductor::new(turns, directory)), Meter::default())
    });
    let server = Arc::new(Server {
        life: spec.process.life,
        faults: spec.process.faults.clone(),
        processes: process::count(&spec.models),
        eos: eos(&spec.models),
        models: spec.models,
        codec: spec.codec,
        algorithm: spec.algorithm,
        batching: spec.batching,
        live_max: spec.live_max,
        live: AtomicU32::new(0),
        refused: Refused::new(here.len()),
        prompt_tokens: AtomicU64::new(0),
        pace: Pace::default(),
        bounds: spec.bounds,
        in_force: InForce::default(),
        conductor: conductor.as_ref().map(Mailbox::outlet),
    });
    let planner = Planner::new(&server, &board, (spec.placement, planning)).map_err(StartError::Setting)?;
    let planner = planner.map(|planner| place(spec.placement, &mut arbiters, move || planner));
    let executors: Vec<Executors> = here.iter().map(|_| Executors::default()).collect();
    let measured = |model: &ModelSpec| Arc::new(Instruments::new(here.len(), model.limits.rows_max));
    let instruments: Vec<_> = server.models.iter().map(measured).collect();
    let mut start = |index: usize, model: &ModelSpec| {
        let Site::Here(seat) = &model.site else { return (None, None) };
        let pool = KvPool::new(model.limits.pages);
        let shared = Shared {
            server: Arc::clone(&server),
            seat: seat.clone(),
            directory: Arc::clone(&directory),
            clock,
            board: board.clone(),
            pool: pool.clone(),
            executors: executors[index].clone(),
            instruments: Arc::clone(&instruments[index]),
        };
        let subserver = Subserver::new(ModelIdx(index as u8), shared);
        let address = place(spec.placement, &mut arbiters, move || subserver);
        (Some(Mailbox::new(address, instruments[index].meter(Role::Subserver))), Some(pool))
    };
    let (subservers, pools) = server.models.iter().enumerate().map(|(index, model)| start(index, model)).unzip();
    directory.get_or_init(|| subservers);
    let gate = bound.map(|(bound, address)| {
        let (server, directory) = (Arc::clone(&server), Arc::clone(&directory));
        let plan = Plan { bound, address, server, directory };
        place(spec.placement, &mut arbiters, move || Gate::new(plan))
    });
    let (open, arbiters) = (AtomicBool::new(true), Mutex::new(arbiters));
    Ok(Runtime(Arc::new(Inner {
        server,
        directory,
        pools,
        executors,
        instruments,
        conductor: conductor.map(|conductor| conductor.meter().clone()),
        board,
        clock,
        numbers,
        gate,
        planner,
        open,
        arbiters,
    })))
}

/// End-of-text tokens of all models together.
fn eos(models: &[ModelSpec]) -> Vec<TokenId> {
    let mut eos: Vec<TokenId> = models.iter().flat_map(|model| model.eos.iter().copied()).collect();
    eos.sort_unstable();
    eos.dedup();
    eos
}

fn bind(address: &Address) -> Result<Bound, StartError> {
    Bound::new(address).map_err(|error| StartError::Listen { address: address.clone(), reason: error.to_string() })
}

fn place<A: Actor<Context = Context<A>>>(
    placement: Placement,
    arbiters: &mut Vec<Arbiter>,
    build: impl FnOnce() -> A + Send + 'static,
) -> Addr<A> {
    match placement {
        Placement::Here => build().start(),
        Placement::OwnArbiter => {
            let arbiter = Arbiter::new();
            let address = A::start_in_arbiter(&arbiter.handle(), move |_| build());
            arbiters.push(arbiter);
            address
        }
    }
}

impl Runtime {
    /// All models of this process go by these thresholds from now on; adaptive batching may replace them again.
    ///
    /// # Errors
    /// One line when the table is for another number of models.
    pub fn adopt(&self, table: Table) -> Result<(), StartError> {
        let server = &self.0.server;
        PolicySpec::Planned(table.clone()).build(server.models.len()).map_err(StartError::Setting)?;
        server.in_force.adopt(Arc::new(table));
        Ok(())
    }

    /// How many requests each model waits for when so many are live.
    pub fn thresholds(&self, live: u32) -> Vec<u32> {
        clamp(self.0.server.policy().thresholds(live), live)
    }

    /// Whether requests have anything here, those that entered in other processes included.
    fn is_busy(&self) -> bool {
        let held = |pool: &KvPool| pool.stats().leases > 0;
        self.0.server.live.load(Ordering::Relaxed) > 0 || self.0.pools.iter().flatten().any(held)
    }

    /// Refuses new work, lets open requests end for at most `limit`, fails the rest and stops all actors.
    pub async fn drain(&self, limit: Duration) {
        let inner = &self.0;
        inner.open.store(false, Ordering::Release);
        let deadline = tokio::time::Instant::now() + limit;
        while self.is_busy() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(DRAIN_POLL).await;
        }
        if let Some(planner) = &inner.planner {
            planner.send(Stop::Shutdown).await.ok();
        }
        for subserver in inner.directory.get().into_iter().flatten().flatten() {
            // Closed means stopped already.
            subserver.send(Stop::Shutdown).await.ok();
        }
        if let Some(gate) = &inner.gate {
            gate.send(Stop::Shutdown).await.ok();
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
