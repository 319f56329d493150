//! What a server takes on at once and how long a request or a step may take. Owner: the settings of the server, read by its
//! Clients. Invariant: pure; whoever waits asks here until when.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokenrouter_core::ids::Time;
use tokenrouter_core::job::{Failure, Overdue};

/// Bounds of a server beyond the number of its requests; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Tokens of the prompts of all live requests together. A request that is alone may have more.
    pub prompt_tokens_max: Option<u64>,
    /// Time from arrival to the first token.
    pub first_token: Option<Duration>,
    /// Time from arrival to the end.
    pub whole: Option<Duration>,
    /// Time of one step; an executor that takes longer is given up for a new one.
    pub step: Option<Duration>,
}

impl Bounds {
    /// Counts the prompts of a new request to the prompt tokens `held` by live ones; whoever holds them takes them off again.
    ///
    /// # Errors
    /// What is held, when there would be too many; nothing is counted then.
    pub fn hold_prompts(&self, held: &AtomicU64, tokens: u64) -> Result<(), u64> {
        let limit = self.prompt_tokens_max.unwrap_or(u64::MAX);
        let room = |now: u64| now.checked_add(tokens).filter(|&sum| now == 0 || sum <= limit);
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).map(drop)
    }

    /// When a request that arrived at `since` will have taken too long, and what it fails with then.
    pub fn due(&self, since: Time, has_token: bool) -> Option<(Time, Failure)> {
        let due = |limit: Duration, overdue| (since.after(limit), Failure::TimedOut { overdue, limit });
        let first = self.first_token.filter(|_| !has_token).map(|limit| due(limit, Overdue::FirstToken));
        let whole = self.whole.map(|limit| due(limit, Overdue::End));
        first.into_iter().chain(whole).min_by_key(|(moment, _)| *moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_held_up_to_the_bound_and_one_alone_beyond_it() {
        let (bounds, held) = (Bounds { prompt_tokens_max: Some(10), ..Bounds::default() }, AtomicU64::new(0));
        assert!(bounds.hold_prompts(&held, 7).is_ok() && bounds.hold_prompts(&held, 3).is_ok());
        assert_eq!(bounds.hold_prompts(&held, 1), Err(10), "eleven");
        assert_eq!(held.load(Ordering::Relaxed), 10, "a refused prompt is not counted");
        held.store(0, Ordering::Relaxed);
        assert!(bounds.hold_prompts(&held, 11).is_ok(), "nobody else is there");
        assert!(bounds.hold_prompts(&held, 1).is_err());
        assert!(Bounds::default().hold_prompts(&held, u32::MAX.into()).is_ok());
    }

    #[test]
    fn the_first_bound_that_is_passed_is_the_one_that_counts() {
        let ms = Duration::from_millis;
        let at = |millis: u64| Time(millis * 1_000_000);
        let both = Bounds { first_token: Some(ms(20)), whole: Some(ms(50)), ..Bounds::default() };
        let first = Failure::TimedOut { overdue: Overdue::FirstToken, limit: ms(20) };
        let whole = Failure::TimedOut { overdue: Overdue::End, limit: ms(50) };
        assert_eq!(both.due(at(5), false), Some((at(25), first)));
        assert_eq!(both.due(at(5), true), Some((at(55), whole)));
        assert_eq!(Bounds::default().due(at(5), false), None);
    }
}
