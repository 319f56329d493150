//! Decode: the steps of one model. Owner: the requests of the step in flight, and what is learnt from steps. Invariant:
//! at most one step is with the executor; every request of a batch leaves as exactly one of stay, hop, finish, failure
//! or deferral.

mod rows;
mod watch;

use crate::board::{DecodeSnapshot, Role, Snapshot};
use crate::instruments::StepKind;
use crate::journal::{Entry, What};
use crate::mailbox::{Outlet, takes_metered};
use crate::messages::{
    Began, Depart, Departing, Emit, Enqueue, Epoch, ExecutorLost, ExecutorReplaced, Forward, Lap, PromptRead, Ready,
    Release, RunBatch, RunStep, Stepped, Stop,
};
use crate::place::Place;
use actix::prelude::*;
use rows::{kind, prefills, way};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_core::executor::{Drawn, ExecutorError, RowOutput, Step, StepOutput};
use tokenrouter_core::ids::{ModelIdx, RequestId, Time};
use tokenrouter_core::job::{Failure, Target};
use tokenrouter_core::peer::PeerFrame;
use tokenrouter_core::plan::plan;
use tokenrouter_core::request::{Committed, Queued, Running, Settled};
use tokenrouter_core::theory::observe::Observer;
use tokenrouter_core::tombstones::Tombstones;
use tracing::{debug, error, warn};

/// Failed steps in a row after which a request is failed rather than tried again.
const ATTEMPTS_MAX: u8 = 2;

/// How often the board is told what was learnt.
const LEARNT_EVERY: Duration = Duration::from_millis(100);

/// The actor.
#[derive(Debug)]
pub struct Decode {
    place: Place,
    executor: Outlet<RunStep>,
    epoch: Epoch,
    running: Vec<Running>,
    ended: Tombstones,
    observer: Observer,
    /// When the step in flight began, if no prompt is in it: prefill says nothing of the latency of decoding.
    timed: Option<Time>,
    /// Of the step in flight.
    kind: StepKind,
    /// What is to be known later of the step that is being settled.
    entries: Vec<Entry>,
    learnt_at: Time,
    /// Why the executor is lost, until there is another.
    lost: Option<String>,
    /// Somebody is going to look at the step in flight.
    is_watched: bool,
    said: DecodeSnapshot,
}

/// Where the requests of a finished step go.
#[derive(Default)]
struct Outcome {
    stay: Vec<Queued>,
    leave: Vec<Departing>,
    /// Of requests that entered here.
    prompts: Vec<PromptRead>,
    /// Per home of the stream.
    emits: BTreeMap<ModelIdx, Vec<Committed>>,
    lost: Vec<(ModelIdx, RequestId, Failure)>,
}

impl Decode {
    /// A Decode with nothing running.
    pub fn new(place: Place, executor: Outlet<RunStep>, epoch: Epoch) -> Self {
        let prior = place.server.algorithm.prior();
        let row = |matrix: Vec<Vec<f64>>| matrix.into_iter().nth(place.me.index()).unwrap_or_default();
        let observer = Observer::new(row(prior.p), row(prior.c), place.limits().rows_max);
        let earlier = match place.board.read(place.me, Role::Decode) {
            Some(Snapshot::Decode(earlier)) => earlier,
            _ => DecodeSnapshot::default(),
        };
        let said = DecodeSnapshot { behaviour: Arc::new(observer.behaviour()), totals: Arc::default(), ..earlier };
        Decode {
            executor,
            epoch,
            running: Vec::new(),
            ended: Tombstones::default(),
            observer,
            timed: None,
            kind: StepKind::Decode,
            entries: Vec::new(),
            learnt_at: Time::default(),
            lost: None,
            is_watched: false,
            said,
            place,
        }
    }

    fn begin(&mut self, batch: Vec<Queued>, ctx: &mut Context<Self>) {
        let (gone, batch): (Vec<_>, Vec<_>) = batch.into_iter().partition(|queued| self.ended.holds(queued.id()));
        for queued in gone {
            queued.abort();
        }
        let needs = self.place.server.algorithm.needs(self.place.me);
        let plan = plan(batch, self.place.limits(), &self.place.pool, needs);
        if plan.running.is_empty() {
            return self.place.post(&self.place.children.batcher, Ready { deferred: plan.deferred });
        }
        if !plan.deferred.is_empty() {
            self.place.post(&self.place.children.batcher, Enqueue(plan.deferred));
        }
        self.count(&plan.step);
        self.said.began = self.place.clock.now();
        self.tell_began(&plan.step, &plan.running);
        self.kind = kind(&plan.step, &plan.running);
        self.timed = (self.kind != StepKind::Prefill).then_some(self.said.began);
        self.running = plan.running;
        let run = RunStep { epoch: self.epoch, step: plan.step, reply: self.place.children.decode.outlet() };
        if let Err(error) = self.executor.try_send(run) {
            self.lose_executor(format!("not reachable: {error}"));
        }
        self.watch(ctx);
        self.say();
    }

    /// Of requests that entered here, the first step is one with tokens of the prompt.
    fn tell_began(&self, step: &Step, running: &[Running]) {
        let rows = step.rows.iter().zip(running).filter(|row| prefills(*row)).map(|(_, running)| running);
        let entered = rows.filter(|running| running.spec().home == self.place.me && !running.is_ahead());
        let ids: Vec<RequestId> = entered.map(Running::id).collect();
        if !ids.is_empty() {
            self.place.post(&self.place.children.client, Began(ids, self.said.began));
        }
    }

    fn count(&mut self, step: &Step) {
        let tokens = step.rows.iter().map(|row| row.tokens.len()).sum();
        self.place.instruments.step_tokens(tokens);
        for row in &step.rows {
            match row.tokens.len() {
                1 => self.said.decode_tokens += 1,
                n => self.said.extend_tokens += n as u64,
            }
        }
    }

    /// A step is over: its latency counts, and the board is told now and then.
    fn learn(&mut self, is_whole: bool) {
        let now = self.place.clock.now();
        if let Some(begin) = self.timed.take().filter(|_| is_whole) {
            self.observer.step(self.running.len() as u32, now.since(begin).as_secs_f64());
        }
        if now.since(self.learnt_at) >= LEARNT_EVERY {
            self.learnt_at = now;
            self.said.behaviour = Arc::new(self.observer.behaviour());
            self.said.totals = Arc::new(self.observer.totals().to_vec());
        }
    }

    fn finish(&mut self, result: Result<StepOutput, ExecutorError>) {
        self.learn(result.is_ok());
        let running = std::mem::take(&mut self.running);
        let result = result.and_then(|output| match output.rows.len() == running.len() {
            true => Ok(output),
            false => Err(ExecutorError::Step(format!("{} rows in, {} out", running.len(), output.rows.len()))),
        });
        self.said.steps += 1;
        self.said.last_step = self.place.clock.now();
        let outcome = match result {
            Ok(output) => self.settle(running, output),
            Err(fault) => {
                self.said.steps_failed += 1;
                let outcome = self.retry(running, &fault);
                if let ExecutorError::Lost(reason) = fault {
                    self.send_on(outcome);
                    return self.lose_executor(reason);
                }
                warn!(model = self.place.name(), %fault, "step failed");
                outcome
            }
        };
        self.send_on(outcome);
        self.place.post(&self.place.children.batcher, Ready { deferred: Vec::new() });
    }

    fn settle(&mut self, running: Vec<Running>, output: StepOutput) -> Outcome {
        let (now, rows) = (self.place.clock.now(), running.len());
        let mut outcome = Outcome::default();
        for (running, row) in running.into_iter().zip(output.rows) {
            let (id, home) = (running.id(), running.spec().home);
            if self.ended.holds(id) {
                self.note(&running, (false, None));
                running.abort();
                continue;
            }
            match row {
                RowOutput::Fed(targets) => {
                    self.note(&running, (false, Some(self.place.me)));
                    outcome.stay.push(running.fed(targets, now));
                }
                RowOutput::Failed(_) if running.is_ahead() => drop(running),
                RowOutput::Failed(reason) => {
                    self.note(&running, (false, None));
                    drop(running);
                    outcome.lost.push((home, id, self.failure(reason)));
                }
                RowOutput::Drawn(drawn) => self.drawn((running, drawn), now, &mut outcome),
            }
        }
        let took = self.place.clock.now().since(now);
        self.place.instruments.decision_time.observe_times(took / rows.max(1) as u32, rows as u64);
        outcome
    }

    fn drawn(&mut self, (mut running, mut drawn): (Running, Drawn), now: Time, outcome: &mut Outcome) {
        let (id, home) = (running.id(), running.spec().home);
        match running.prompt_logprobs(&mut drawn) {
            Ok(prompt) => outcome.prompts.extend(prompt.map(|prompt| PromptRead(id, prompt))),
            Err(reason) => return outcome.lost.push((home, id, self.failure(reason))),
        }
        let is_routed = running.spec().target == Target::Routed;
        let waited_since = running.since();
        let (token, next) = running.settle(drawn, now);
        let to = way(self.place.me, &next);
        self.keep((id, waited_since), (token.is_some(), to));
        if is_routed && let Some(to) = to {
            self.observer.went(to.index(), token.is_some().into());
        }
        match &token {
            Some(_) => self.said.committed += 1,
            None => self.said.dropped += 1,
        }
        if let Some(token) = token {
            outcome.emits.entry(home).or_default().push(token);
        }
        match next {
            Settled::Stay(queued) => outcome.stay.push(queued),
            Settled::Leave(pending, request) => outcome.leave.push(Departing { pending, request }),
            Settled::Done(_) => {}
            Settled::Failed(_, failure) => outcome.lost.push((home, id, failure)),
        }
    }

    /// Keeps what is to be known of a request's step later.
    fn keep(&mut self, (request, since): (RequestId, Time), (committed, to): (bool, Option<ModelIdx>)) {
        let what = What::Stepped { since, began: self.said.began, committed, to };
        self.entries.push(Entry { request, at: self.said.last_step, what });
    }

    fn note(&mut self, running: &Running, what: (bool, Option<ModelIdx>)) {
        if !running.is_ahead() {
            self.keep((running.id(), running.since()), what);
        }
    }

    fn retry(&mut self, running: Vec<Running>, fault: &ExecutorError) -> Outcome {
        let now = self.place.clock.now();
        let mut outcome = Outcome::default();
        for running in running {
            let home = running.spec().home;
            if self.ended.holds(running.id()) {
                running.abort();
                continue;
            }
            if running.is_ahead() {
                continue;
            }
            match running.retry(ATTEMPTS_MAX, now) {
                Ok(queued) => outcome.stay.push(queued),
                Err(finished) => outcome.lost.push((home, finished.request, self.failure(fault.to_string()))),
            }
        }
        outcome
    }

    fn failure(&self, reason: String) -> Failure {
        Failure::Executor { model: self.place.name().to_owned(), reason }
    }

    /// Prompts first, then tokens, then control: a peer's next token must find this one delivered.
    fn send_on(&mut self, outcome: Outcome) {
        let children = &self.place.children;
        self.place.instruments.journal.add(self.entries.drain(..));
        for prompt in outcome.prompts {
            self.place.post(&children.client, prompt);
        }
        for (home, tokens) in outcome.emits {
            if home == self.place.me {
                self.place.post(&children.client, Emit(tokens));
            } else {
                self.place.post(&children.inter_model, Forward { to: home, frame: PeerFrame::Emit(tokens) });
            }
        }
        if !outcome.stay.is_empty() {
            self.place.post(&children.batcher, Enqueue(outcome.stay));
        }
        if !outcome.leave.is_empty() {
            self.place.post(&children.inter_model, Depart(outcome.leave));
        }
        for (home, id, failure) in outcome.lost {
            self.place.tell_lost(home, id, failure);
        }
    }

    fn lose_executor(&mut self, reason: String) {
        error!(model = self.place.name(), reason, "executor lost");
        self.lost = Some(reason.clone());
        let lost = ExecutorLost { epoch: self.epoch, reason };
        self.place.post(&self.place.subserver, lost);
    }

    fn say(&mut self) {
        self.said.running = self.running.len() as u32;
        self.said.is_lost = self.lost.is_some();
        self.place.board.post(self.place.me, Role::Decode, Snapshot::Decode(self.said.clone()));
    }
}

impl Actor for Decode {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.place.mailbox());
        self.say();
    }
}

takes_metered!(Decode: RunBatch, Stepped, Lap, Release, ExecutorReplaced, Stop);

impl Drop for Decode {
    fn drop(&mut self) {
        self.place.down(Role::Decode);
    }
}

impl Handler<RunBatch> for Decode {
    type Result = ();

    fn handle(&mut self, RunBatch(batch): RunBatch, ctx: &mut Self::Context) {
        self.begin(batch, ctx);
    }
}

impl Handler<Stepped> for Decode {
    type Result = ();

    fn handle(&mut self, message: Stepped, _: &mut Self::Context) {
        if message.epoch != self.epoch || self.lost.is_some() {
            return debug!(model = self.place.name(), "a late answer of an executor that was given up");
        }
        self.said.busy += message.took;
        self.place.instruments.step(self.kind, message.took);
        self.finish(message.result);
        self.say();
    }
}

impl Handler<Lap> for Decode {
    type Result = ();

    fn handle(&mut self, lap: Lap, _: &mut Self::Context) {
        self.place.post(&self.place.children.client, lap);
    }
}

impl Handler<Release> for Decode {
    type Result = ();

    /// A request in flight is dropped when its step is over; the Batcher is told after whatever is on its way there.
    fn handle(&mut self, release: Release, _: &mut Self::Context) {
        self.ended.bury(release.0);
        self.place.post(&self.place.children.batcher, release);
    }
}

impl Handler<ExecutorReplaced> for Decode {
    type Result = ();

    fn handle(&mut self, message: ExecutorReplaced, _: &mut Self::Context) {
        self.executor = message.executor;
        self.epoch = message.epoch;
        // A step that was never answered belongs to the old life; its requests go on from their tokens.
        let stranded = std::mem::take(&mut self.running);
        self.timed = None;
        let reason = self.lost.take().unwrap_or_else(|| "no answer".into());
        let outcome = self.retry(stranded, &ExecutorError::Lost(reason));
        self.send_on(outcome);
        self.place.post(&self.place.children.batcher, Ready { deferred: Vec::new() });
        self.say();
    }
}

impl Handler<Stop> for Decode {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        ctx.stop();
    }
}
