//! Batcher: delayed batching. Owner: everything that waits for a step of this model. Invariant: it releases a batch
//! only while it holds the credit (`Ready`), and never waits without a timer.

use crate::board::{BatcherSnapshot, Role, Snapshot};
use crate::messages::{Enqueue, LiveNow, Ready, Release, RunBatch, Stop, Thresholds};
use crate::subserver::Place;
use actix::prelude::*;
use std::time::Duration;
use tokenrouter_core::batching::{Gate, Policy, Verdict};
use tokenrouter_core::ids::Time;
use tokenrouter_core::request::Queued;

/// When requests that found no memory are offered again, should nothing happen before.
const STALL_RETRY: Duration = Duration::from_millis(5);

/// The actor.
#[derive(Debug)]
pub struct Batcher {
    place: Place,
    gate: Gate<Queued>,
    stalled: Vec<Queued>,
    credit: bool,
    timer: Option<(Time, SpawnHandle)>,
    said: BatcherSnapshot,
}

impl Batcher {
    /// A Batcher with nobody waiting. The credit is there from the start: the executor is idle.
    pub fn new(place: Place, policy: Box<dyn Policy>) -> Self {
        let gate = Gate::new(place.me, policy, place.server.batching.max_wait);
        Batcher { place, gate, stalled: Vec::new(), credit: true, timer: None, said: BatcherSnapshot::default() }
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
        let now = self.place.clock.now();
        match self.gate.poll(now, self.place.limits().rows_max as usize) {
            Verdict::Go(batch, reason) => {
                self.credit = false;
                self.said.release(reason, batch.len());
                self.said.waited += batch.iter().map(|queued| now.since(queued.since())).sum::<Duration>();
                self.place.post(&self.place.children.decode, RunBatch(batch));
            }
            Verdict::WaitUntil(moment) => self.wake_at(moment, ctx),
            Verdict::Idle => {}
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
        self.said.threshold = self.gate.threshold();
        self.said.live = self.gate.live();
        self.place.board.post(self.place.me, Role::Batcher, Snapshot::Batcher(self.said.clone()));
    }
}

impl Actor for Batcher {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.place.mailbox());
        if let Some(table) = self.place.server.in_force.follow(self.place.me, ctx.address().recipient()) {
            self.gate.set_policy(Box::new(table));
        }
        self.say();
    }
}

impl Drop for Batcher {
    fn drop(&mut self) {
        self.place.down(Role::Batcher);
    }
}

impl Handler<Enqueue> for Batcher {
    type Result = ();

    fn handle(&mut self, Enqueue(queued): Enqueue, ctx: &mut Self::Context) {
        for queued in queued {
            self.gate.push(queued);
        }
        self.pump(ctx);
    }
}

impl Handler<Ready> for Batcher {
    type Result = ();

    fn handle(&mut self, Ready { deferred }: Ready, ctx: &mut Self::Context) {
        self.credit = true;
        if deferred.is_empty() {
            return self.pump(ctx);
        }
        self.release(ctx);
        self.stalled.extend(deferred);
        self.wake_at(self.place.clock.now().after(STALL_RETRY), ctx);
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
        self.pump(ctx);
    }
}

impl Handler<Stop> for Batcher {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        ctx.stop();
    }
}
