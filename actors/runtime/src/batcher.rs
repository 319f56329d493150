//! Batcher: delayed batching. Owner: everything that waits for a step of this model. Invariant: it releases a batch
//! only while it holds the credit (`Ready`) and, where models take turns, a turn; and never waits without a timer.

use crate::board::{BatcherSnapshot, Role, Snapshot};
use crate::mailbox::takes_metered;
use crate::messages::{Enqueue, Lap, LiveNow, Offered, Ready, Release, RunBatch, Say, Stop, Thresholds};
use crate::place::Place;
use actix::prelude::*;
use std::collections::VecDeque;
use std::time::Duration;
use tokenrouter_core::batching::{Gate, Policy, Verdict};
use tokenrouter_core::execution::Word;
use tokenrouter_core::ids::{RequestId, Time};
use tokenrouter_core::request::Queued;

/// When requests that found no memory are offered again, should nothing happen before.
const STALL_RETRY: Duration = Duration::from_millis(5);

/// Prompts that wait to be prefilled ahead, at most; those of later requests are not.
const AHEAD_MAX: usize = 64;

/// Batcher -> itself: a batch may be due. Requests of one step arrive one by one, in messages that are on their way
/// already; whoever is released after this one is released with them.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Due;

/// Whether a step may start, whatever waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// This model steps when it may.
    Always,
    /// Models take turns and this one has none, nor has it asked for one.
    None,
    /// It has asked, for a batch of so many.
    Asked(u32),
    /// It has the turn of this number, until its step is over.
    Mine(u64),
}

/// The actor.
#[derive(Debug)]
pub struct Batcher {
    place: Place,
    gate: Gate<Queued>,
    stalled: Vec<Queued>,
    /// Prompts to prefill for the prefix cache while nobody waits.
    ahead: VecDeque<Queued>,
    credit: bool,
    /// Whether [`Due`] is on its way.
    is_due: bool,
    turn: Turn,
    timer: Option<(Time, SpawnHandle)>,
    said: BatcherSnapshot,
}

impl Batcher {
    /// A Batcher with nobody waiting. The credit is there from the start: the executor is idle.
    pub fn new(place: Place, policy: Box<dyn Policy>) -> Self {
        let gate = Gate::new(place.me, policy, place.server.batching.max_wait);
        let turn = if place.server.conductor.is_some() { Turn::None } else { Turn::Always };
        let (stalled, ahead) = (Vec::new(), VecDeque::new());
        let said = match place.board.read(place.me, Role::Batcher) {
            Some(Snapshot::Batcher(earlier)) => earlier,
            _ => BatcherSnapshot::default(),
        };
        Batcher { place, gate, stalled, ahead, credit: true, is_due: false, turn, timer: None, said }
    }

    /// Something changed: who found no memory may try again, and a batch may be due.
    fn pump(&mut self, ctx: &mut Context<Self>) {
        for queued in self.stalled.drain(..) {
            self.gate.push(queued);
        }
        self.release(ctx);
        self.say();
    }

    fn release(&mut self, ctx: &mut Context<Self>) {
        if !self.credit {
            return;
        }
        let (now, rows_max) = (self.place.clock.now(), self.place.limits().rows_max as usize);
        if matches!(self.turn, Turn::None | Turn::Asked(_)) {
            return match self.gate.outlook(now, rows_max) {
                Verdict::Go(..) => self.ask(rows_max),
                Verdict::WaitUntil(moment) => self.wake_at(moment, ctx),
                Verdict::Idle => {}
            };
        }
        match self.gate.poll(now, rows_max) {
            Verdict::Go(batch, reason) => {
                self.credit = false;
                self.said.release(reason, batch.len());
                self.place.instruments.batch(batch.len());
                for queued in &batch {
                    let waited = now.since(queued.since());
                    self.place.instruments.batch_wait.observe(waited);
                    self.said.waited += waited;
                }
                self.place.post(&self.place.children.decode, RunBatch(batch));
            }
            Verdict::WaitUntil(moment) => self.wake_at(moment, ctx),
            Verdict::Idle => self.prefill_ahead(),
        }
    }

    /// Nobody waits: a bounded piece of a prompt that may come.
    fn prefill_ahead(&mut self) {
        if self.stalled.is_empty()
            && let Some(queued) = self.ahead.pop_front()
        {
            self.credit = false;
            self.place.post(&self.place.children.decode, RunBatch(vec![queued]));
        }
    }

    fn keep_ahead(&mut self, queued: Queued) {
        let id = queued.id();
        let has_come = self.gate.holds(|other| other.id() == id) || self.stalled.iter().any(|other| other.id() == id);
        if queued.behind() == 0 || has_come || self.ahead.len() >= AHEAD_MAX {
            // What is prefilled goes to the prefix cache.
            queued.abort();
        } else {
            self.ahead.push_back(queued);
        }
    }

    fn drop_ahead(&mut self, id: RequestId) {
        if let Some(index) = self.ahead.iter().position(|queued| queued.id() == id)
            && let Some(queued) = self.ahead.remove(index)
        {
            queued.abort();
        }
    }

    fn ask(&mut self, rows_max: usize) {
        let batch = self.gate.len().min(rows_max) as u32;
        if self.turn != Turn::Asked(batch) {
            self.turn = Turn::Asked(batch);
            self.place.post(&self.place.children.inter_model, Say(Word::Wish(batch)));
        }
    }

    fn give_back(&mut self) {
        if let Turn::Mine(turn) = self.turn {
            self.turn = Turn::None;
            self.place.post(&self.place.children.inter_model, Say(Word::Back(turn)));
        }
    }

    fn wake_at(&mut self, moment: Time, ctx: &mut Context<Self>) {
        if let Some((set, handle)) = self.timer.take() {
            if set <= moment && set > self.place.clock.now() {
                self.timer = Some((set, handle));
                return;
            }
            ctx.cancel_future(handle);
        }
        let handle = ctx.run_later(moment.since(self.place.clock.now()), |batcher, ctx| {
            batcher.timer = None;
            batcher.pump(ctx);
        });
        self.timer = Some((moment, handle));
    }

    fn say(&mut self) {
        self.said.waiting = self.gate.len() as u32;
        self.said.stalled = self.stalled.len() as u32;
        let stalled = self.stalled.iter().map(Queued::since);
        self.said.oldest = self.gate.oldest().into_iter().chain(stalled).min();
        self.said.threshold = self.gate.threshold();
        self.said.live = self.gate.live();
        self.place.board.post(self.place.me, Role::Batcher, Snapshot::Batcher(self.said.clone()));
    }
}

impl Actor for Batcher {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.place.mailbox());
        if let Some(table) = self.place.server.in_force.follow(self.place.me, self.place.children.batcher.outlet()) {
            self.gate.set_policy(Box::new(table));
        }
        self.say();
    }
}

takes_metered!(Batcher: Enqueue, Ready, Lap, Offered, LiveNow, Thresholds, Release, Stop);

impl Drop for Batcher {
    fn drop(&mut self) {
        self.place.down(Role::Batcher);
    }
}

impl Handler<Enqueue> for Batcher {
    type Result = ();

    fn handle(&mut self, Enqueue(queued): Enqueue, ctx: &mut Self::Context) {
        for queued in queued {
            if queued.is_ahead() {
                self.keep_ahead(queued);
                continue;
            }
            self.drop_ahead(queued.id());
            self.gate.push(queued);
        }
        if !std::mem::replace(&mut self.is_due, true) {
            ctx.notify(Due);
        }
    }
}

impl Handler<Due> for Batcher {
    type Result = ();

    fn handle(&mut self, _: Due, ctx: &mut Self::Context) {
        self.is_due = false;
        self.pump(ctx);
    }
}

impl Handler<Ready> for Batcher {
    type Result = ();

    fn handle(&mut self, Ready { deferred }: Ready, ctx: &mut Self::Context) {
        self.credit = true;
        self.give_back();
        let (ahead, deferred): (Vec<_>, Vec<_>) = deferred.into_iter().partition(Queued::is_ahead);
        for queued in ahead {
            queued.abort();
        }
        if deferred.is_empty() {
            return self.pump(ctx);
        }
        self.stalled.extend(deferred);
        self.release(ctx);
        self.wake_at(self.place.clock.now().after(STALL_RETRY), ctx);
        self.say();
    }
}

impl Handler<Lap> for Batcher {
    type Result = ();

    fn handle(&mut self, lap: Lap, _: &mut Self::Context) {
        self.place.post(&self.place.children.decode, lap);
    }
}

impl Handler<Offered> for Batcher {
    type Result = ();

    fn handle(&mut self, Offered(offer): Offered, ctx: &mut Self::Context) {
        self.turn = Turn::Mine(offer.turn);
        self.release(ctx);
        if self.credit {
            self.give_back();
        }
        self.say();
    }
}

impl Handler<LiveNow> for Batcher {
    type Result = ();

    fn handle(&mut self, LiveNow(live): LiveNow, ctx: &mut Self::Context) {
        self.gate.set_live(live);
        self.pump(ctx);
    }
}

impl Handler<Thresholds> for Batcher {
    type Result = ();

    fn handle(&mut self, Thresholds(table): Thresholds, ctx: &mut Self::Context) {
        self.gate.set_policy(Box::new(table));
        self.pump(ctx);
    }
}

impl Handler<Release> for Batcher {
    type Result = ();

    fn handle(&mut self, Release(id): Release, ctx: &mut Self::Context) {
        let stalled = self.stalled.extract_if(.., |queued| queued.id() == id);
        let gone: Vec<Queued> = stalled.chain(self.gate.remove(|queued| queued.id() == id)).collect();
        for queued in gone {
            queued.abort();
        }
        self.drop_ahead(id);
        self.pump(ctx);
    }
}

impl Handler<Stop> for Batcher {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        ctx.stop();
    }
}
