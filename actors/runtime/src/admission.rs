//! Who is let in. Owner: the server; a place is given back when its [`Permit`] is dropped. Invariant: no more is live than the
//! bounds of the server allow, and the choices of one request get all their places or none.

use crate::clock::Clock;
use crate::runtime::Server;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokenrouter_core::ids::{ModelIdx, Time};
use tokenrouter_core::job::{Job, Load, Prompt, Refusal};

/// What an overloaded server tells its clients to wait, at least and at most.
pub const RETRY_AFTER: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A request that has ended counts so much in the mean: one in so many.
const MEMORY: u64 = 16;

/// How long requests live, of late: a running mean in microseconds.
#[derive(Debug, Default)]
pub struct Pace(AtomicU64);

impl Pace {
    fn ended(&self, took: Duration) {
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX / MEMORY);
        let next = |mean: u64| match mean {
            0 => Some(took),
            mean => Some(mean - mean / MEMORY + took / MEMORY),
        };
        // Whoever comes between is in the next mean.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    /// Time until so much of what is live has ended, should it end as requests did of late.
    pub fn until_ended(&self, (excess, live): (u64, u64)) -> Duration {
        let share = excess as f64 / live.max(1) as f64;
        let mean = Duration::from_micros(self.0.load(Ordering::Relaxed));
        mean.mul_f64(share.min(1.0)).clamp(RETRY_AFTER.0, RETRY_AFTER.1)
    }
}

/// Jobs that were not admitted, by entry model: because too many requests, or tokens of prompts, were live.
#[derive(Debug)]
pub struct Refused(Vec<[AtomicU64; 2]>);

impl Refused {
    /// None yet, at so many models.
    pub fn new(models: usize) -> Self {
        Refused((0..models).map(|_| Default::default()).collect())
    }

    /// One more.
    pub fn count(&self, entry: ModelIdx, refusal: &Refusal) {
        let Refusal::Overloaded { load, .. } = refusal else { return };
        if let Some(of_model) = self.0.get(entry.index()) {
            of_model[usize::from(*load == Load::PromptTokens)].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// So far.
    pub fn of(&self, entry: ModelIdx) -> [u64; 2] {
        self.0.get(entry.index()).map_or([0; 2], |counts| counts.each_ref().map(|count| count.load(Ordering::Relaxed)))
    }
}

/// A place among the live requests, and for the tokens of its prompt.
#[derive(Debug)]
pub struct Permit {
    server: Arc<Server>,
    clock: Clock,
    tokens: u64,
    /// When it was used; none for a request that was refused after all.
    since: Option<Time>,
}

impl Permit {
    /// Places for the jobs of one request.
    ///
    /// # Errors
    /// [`Refusal::Overloaded`] when there are not as many; nothing is held then.
    pub fn all(server: &Arc<Server>, clock: Clock, jobs: &[Job]) -> Result<Vec<Permit>, Refusal> {
        let (more, limit) = (jobs.len() as u64, u64::from(server.live_max));
        let room = |live: u32| u32::try_from(u64::from(live) + more).ok().filter(|&sum| u64::from(sum) <= limit);
        if let Err(now) = server.live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room) {
            let (load, now) = (Load::Requests, u64::from(now));
            let retry_after = server.pace.until_ended(((now + more).saturating_sub(limit), now));
            return Err(Refusal::Overloaded { load, now, limit, retry_after });
        }
        let permit = |_| Permit { server: Arc::clone(server), clock, tokens: 0, since: None };
        let mut permits: Vec<Permit> = jobs.iter().map(permit).collect();
        let tokens = |job: &Job| match &job.prompt {
            Prompt::Ids(ids) => ids.len() as u64,
            // Known to the Client, which has its tokens counted one by one.
            Prompt::Text { .. } => 0,
        };
        server.hold_prompts(jobs.iter().map(tokens).sum())?;
        for (permit, job) in permits.iter_mut().zip(jobs) {
            permit.tokens = tokens(job);
        }
        Ok(permits)
    }

    /// The request is accepted, with a prompt of so many tokens.
    ///
    /// # Errors
    /// [`Refusal::Overloaded`] when its tokens were not counted before and are too many.
    pub fn begin(&mut self, prompt_tokens: u32) -> Result<(), Refusal> {
        if self.tokens == 0 {
            self.server.hold_prompts(prompt_tokens.into())?;
            self.tokens = prompt_tokens.into();
        }
        self.since = Some(self.clock.now());
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.server.live.fetch_sub(1, Ordering::Relaxed);
        self.server.prompt_tokens.fetch_sub(self.tokens, Ordering::Relaxed);
        if let Some(since) = self.since {
            self.server.pace.ended(self.clock.now().since(since));
        }
    }
}

impl Server {
    fn hold_prompts(&self, tokens: u64) -> Result<(), Refusal> {
        self.bounds.hold_prompts(&self.prompt_tokens, tokens).map_err(|now| {
            let limit = self.bounds.prompt_tokens_max.unwrap_or(u64::MAX);
            let retry_after = self.pace.until_ended(((now + tokens).saturating_sub(limit), now));
            Refusal::Overloaded { load: Load::PromptTokens, now, limit, retry_after }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_refused_waits_for_as_much_as_is_too_much() {
        let (pace, second) = (Pace::default(), Duration::from_secs(1));
        assert_eq!(pace.until_ended((1, 4)), second, "nothing is known");
        pace.ended(40 * second);
        assert_eq!(pace.until_ended((1, 4)), 10 * second);
        assert_eq!(pace.until_ended((2, 4)), 20 * second);
        assert_eq!(pace.until_ended((9, 4)), 40 * second, "not longer than all take");
        assert_eq!(pace.until_ended((1, 1000)), second, "at least");
        pace.ended(second * 1000);
        assert_eq!(pace.until_ended((4, 4)), 60 * second, "at most");
        (0..200).for_each(|_| pace.ended(second * 2));
        let now = pace.until_ended((4, 4));
        assert!(now < second * 3, "what was is forgotten: {now:?}");
    }
}
