//! Planner: thresholds that follow what the models do. Owner: the thresholds in force, and when they are planned again.
//! Invariant: serving never waits for a plan. Batchers go by the table they were told last; plans are made in a thread
//! of their own (beside the actors on a virtual clock), and one that fails or panics changes nothing.

use crate::board::{Board, PlannerSnapshot, Role, Snapshot};
use crate::mailbox::Outlet;
use crate::messages::{Stop, Thresholds};
use crate::runtime::{Placement, Server};
use actix::prelude::*;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokenrouter_core::batching::PolicySpec;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::theory::adapt::{Adaptation, Outcome, Work, tabled};
use tokenrouter_core::theory::observe::Behaviour;
use tokenrouter_core::theory::table::Table;
use tokio::sync::oneshot;
use tracing::{info, warn};

/// Looks that are left out at most after plans that failed.
const REST_MAX: u32 = 64;

/// The thresholds that were planned last, and the Batchers of this process that follow them.
#[derive(Debug, Default)]
pub struct InForce(Mutex<Following>);

#[derive(Debug, Default)]
struct Following {
    table: Option<Arc<Table>>,
    batchers: BTreeMap<ModelIdx, Outlet<Thresholds>>,
}

impl InForce {
    /// A Batcher in a new life: it gets every table from now on, and here the one in force; none when the launch
    /// settings still hold.
    pub fn follow(&self, model: ModelIdx, batcher: Outlet<Thresholds>) -> Option<Arc<Table>> {
        let mut following = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        following.batchers.insert(model, batcher);
        following.table.clone()
    }

    /// All Batchers of this process go by this table from now on.
    pub fn adopt(&self, table: Arc<Table>) {
        let mut following = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        following.table = Some(Arc::clone(&table));
        for (model, batcher) in &following.batchers {
            // A Batcher that is gone has a successor that asks when it starts.
            if let Err(error) = batcher.try_send(Thresholds(Arc::clone(&table))) {
                warn!(%model, %error, "a batcher did not get its new thresholds");
            }
        }
    }

    /// The table in force; none when the launch settings still hold.
    pub fn table(&self) -> Option<Arc<Table>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).table.clone()
    }
}

/// Makes a plan or compares one again.
pub type Run = Arc<dyn Fn(Work) -> Result<Outcome, String> + Send + Sync>;

/// When and how thresholds are planned again.
#[derive(Clone)]
pub struct Planning {
    /// Time between two looks at the estimates.
    pub every: Duration,
    /// How a plan is made.
    pub run: Run,
}

impl Default for Planning {
    /// Twice a second, by the throughput model.
    fn default() -> Self {
        Planning { every: Duration::from_millis(500), run: Arc::new(Work::run) }
    }
}

impl fmt::Debug for Planning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Planning").field("every", &self.every).finish_non_exhaustive()
    }
}

/// The actor.
#[derive(Debug)]
pub struct Planner {
    server: Arc<Server>,
    board: Board,
    placement: Placement,
    planning: Planning,
    adaptation: Adaptation,
    is_planning: bool,
    /// Looks to leave out, and how many the next failure costs.
    rest: (u32, u32),
    said: PlannerSnapshot,
}

impl Planner {
    /// The Planner of a server whose thresholds follow the models; none for another. The table it starts from is in
    /// force from now on.
    ///
    /// # Errors
    /// One line when the launch settings make no table.
    pub fn new(
        server: &Arc<Server>,
        board: &Board,
        (placement, planning): (Placement, Planning),
    ) -> Result<Option<Self>, String> {
        if !server.batching.adaptive {
            return Ok(None);
        }
        if let Some(elsewhere) = server.models.iter().find(|model| model.site.peer().is_some()) {
            let model = &elsewhere.name;
            warn!(model, "adaptive batching needs all models in one process; thresholds stay as they are");
            return Ok(None);
        }
        let live_max = u32::try_from(server.live_anywhere_max()).unwrap_or(u32::MAX);
        let table = match &server.batching.policy {
            PolicySpec::Planned(table) => table.clone(),
            _ => tabled(&*server.policy(), live_max)?,
        };
        server.in_force.adopt(Arc::new(table));
        Ok(Some(Planner {
            server: Arc::clone(server),
            board: board.clone(),
            placement,
            planning,
            adaptation: Adaptation::new(live_max),
            is_planning: false,
            rest: (0, 1),
            said: PlannerSnapshot::default(),
        }))
    }

    fn look(&mut self, ctx: &mut Context<Self>) {
        if self.is_planning {
            return;
        }
        if self.rest.0 > 0 {
            self.rest.0 -= 1;
            return;
        }
        self.said.looks += 1;
        let work = self.server.in_force.table().and_then(|table| {
            let estimates: Vec<_> = self.models().map(|model| self.behaviour(model)).collect();
            self.adaptation.look(self.live(), &table, &estimates)
        });
        match work {
            Some(work) if self.placement == Placement::Here => {
                let result = guarded(&self.planning.run, work);
                self.finish(result);
            }
            Some(work) => self.run_aside(work, ctx),
            None => {}
        }
        self.say();
    }

    fn run_aside(&mut self, work: Work, ctx: &mut Context<Self>) {
        let (run, (told, answer)) = (Arc::clone(&self.planning.run), oneshot::channel());
        let plan = move || {
            // Nobody listens any more when the server has stopped meanwhile.
            told.send(guarded(&run, work)).ok();
        };
        if let Err(error) = std::thread::Builder::new().name("planner".into()).spawn(plan) {
            return self.finish(Err(format!("no thread: {error}")));
        }
        self.is_planning = true;
        ctx.spawn(answer.into_actor(self).map(|result, planner, _| {
            planner.is_planning = false;
            planner.finish(result.unwrap_or_else(|_| Err("the thread ended".into())));
            planner.say();
        }));
    }

    fn finish(&mut self, result: Result<Outcome, String>) {
        match result {
            Ok(outcome) => {
                self.rest = (0, 1);
                self.said.planned += u64::from(outcome.is_new);
                self.said.gain = outcome.gain;
                if let Some(table) = self.adaptation.finish(outcome) {
                    self.said.adopted += 1;
                    let live = self.live();
                    info!(live, thresholds = ?table.thresholds(live), gain = self.said.gain, "new thresholds");
                    self.server.in_force.adopt(table);
                }
            }
            Err(problem) => {
                warn!(problem, "thresholds could not be planned; those in force stay");
                self.rest = (self.rest.1, (2 * self.rest.1).min(REST_MAX));
                self.said.failed += 1;
                self.said.last_error = Some(problem);
            }
        }
    }

    fn models(&self) -> impl Iterator<Item = ModelIdx> + use<> {
        (0..self.server.models.len()).map(|index| ModelIdx(index as u8))
    }

    /// Live routed requests, as the best informed Batcher knows.
    fn live(&self) -> u32 {
        let live = |model| match self.board.read(model, Role::Batcher) {
            Some(Snapshot::Batcher(said)) => said.live,
            _ => 0,
        };
        self.models().map(live).max().unwrap_or(0)
    }

    fn behaviour(&self, model: ModelIdx) -> Option<Arc<Behaviour>> {
        match self.board.read(model, Role::Decode) {
            Some(Snapshot::Decode(said)) => Some(said.behaviour),
            _ => None,
        }
    }

    fn say(&self) {
        self.board.post(ModelIdx(0), Role::Planner, Snapshot::Planner(self.said.clone()));
    }
}

fn guarded(run: &Run, work: Work) -> Result<Outcome, String> {
    catch_unwind(AssertUnwindSafe(|| run(work))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(format!("panicked: {}", text.unwrap_or("no message")))
    })
}

impl Actor for Planner {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(self.planning.every, Planner::look);
        self.say();
    }
}

impl Handler<Stop> for Planner {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        ctx.stop();
    }
}
