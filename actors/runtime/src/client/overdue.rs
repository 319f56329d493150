//! Requests that take too long. Owner: the Client. Invariant: while a stream has a bound an alarm is set that does not ring
//! after it; a request that is overdue ends like every other, and is released everywhere.

use super::Client;
use actix::prelude::*;
use tokenrouter_core::ids::{RequestId, Time};
use tokenrouter_core::job::Failure;

impl Client {
    /// Somebody looks at this moment, or before.
    pub(super) fn wake_at(&mut self, moment: Time, ctx: &mut Context<Self>) {
        if let Some((set, handle)) = self.alarm {
            if set <= moment {
                return;
            }
            ctx.cancel_future(handle);
        }
        let wait = moment.since(self.place.clock.now());
        let handle = ctx.run_later(wait, |client, ctx| {
            client.alarm = None;
            client.fail_overdue(ctx);
        });
        self.alarm = Some((moment, handle));
    }

    fn fail_overdue(&mut self, ctx: &mut Context<Self>) {
        // Tokens that have come count.
        self.deliver_held(ctx);
        let now = self.place.clock.now();
        let bounds = self.place.server.bounds;
        let dues = self.streams.iter().filter_map(|(id, stream)| {
            let (moment, failure) = bounds.due(stream.since, stream.transcript.usage().completion_tokens > 0)?;
            Some((moment, *id, failure))
        });
        let (mut overdue, later): (Vec<_>, Vec<_>) = dues.partition(|(moment, ..)| *moment <= now);
        overdue.sort_unstable_by_key(|&(moment, id, _): &(Time, RequestId, Failure)| (moment, id));
        for (_, id, failure) in overdue {
            self.fail(id, failure, ctx);
        }
        if let Some(next) = later.iter().map(|(moment, ..)| *moment).min() {
            self.wake_at(next, ctx);
        }
    }
}
