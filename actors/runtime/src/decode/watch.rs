//! Steps that do not end. Owner: Decode. Invariant: while a step is in flight and has a bound, somebody looks at it no later
//! than that; an executor that does not answer in time is lost like one that panics, and what it says later is not heard.

use super::Decode;
use actix::prelude::*;
use std::time::Duration;

impl Decode {
    /// A step has begun: somebody looks when it should have ended.
    pub(super) fn watch(&mut self, ctx: &mut Context<Self>) {
        if let Some(limit) = self.place.server.bounds.step
            && !self.is_watched
        {
            self.look_in(limit, ctx);
        }
    }

    fn look_in(&mut self, wait: Duration, ctx: &mut Context<Self>) {
        self.is_watched = true;
        ctx.run_later(wait, |decode, ctx| {
            decode.is_watched = false;
            decode.look(ctx);
        });
    }

    fn look(&mut self, ctx: &mut Context<Self>) {
        let Some(limit) = self.place.server.bounds.step else { return };
        if self.running.is_empty() || self.lost.is_some() {
            return;
        }
        let took = self.place.clock.now().since(self.said.began);
        match limit.checked_sub(took).filter(|rest| !rest.is_zero()) {
            Some(rest) => self.look_in(rest, ctx),
            None => {
                self.said.steps_failed += 1;
                self.lose_executor(format!("no answer in {} ms", limit.as_millis()));
                self.say();
            }
        }
    }
}
