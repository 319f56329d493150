//! Delayed batching: when does a model start? Owner: the Batcher. Invariant: no wait without a bound. A batch is
//! released when enough requests wait (the threshold), when nobody else can come, when one has waited too long, or
//! when one of them gains nothing by waiting. Thresholds keep `sum(B_i - 1) < live` always, so that wherever the live
//! requests wait, some model has enough of them.

use crate::execution::Execution;
use crate::ids::{ModelIdx, Time};
use crate::theory::table::Table;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// How thresholds are chosen, as a launch file says it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicySpec {
    /// Start as soon as anybody waits.
    #[default]
    Eager,
    /// Thresholds as given, one per model.
    Fixed(Vec<u32>),
    /// Thresholds planned ahead for every number of live requests.
    Planned(Table),
}

/// Settings of delayed batching.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batching {
    /// Thresholds.
    pub policy: PolicySpec,
    /// No request waits longer than this for others.
    pub max_wait: Duration,
    /// Which models may step at the same time, and what a hop keeps.
    pub execution: Execution,
    /// Whether idle models prefill the prompts of requests that entered elsewhere.
    pub prefill_ahead: bool,
    /// Whether a planned table follows what the models do.
    pub adaptive: bool,
}

impl Default for Batching {
    /// Eager and asynchronous, no wait longer than 50 ms.
    fn default() -> Self {
        Batching {
            policy: PolicySpec::Eager,
            max_wait: Duration::from_millis(50),
            execution: Execution::Async,
            prefill_ahead: false,
            adaptive: false,
        }
    }
}

/// Chooses thresholds from the number of live requests.
pub trait Policy: Send + Debug {
    /// B_i for every model; not yet clamped.
    fn thresholds(&self, live: u32) -> Vec<u32>;
}

/// Every threshold is 1, for so many models.
#[derive(Clone, Copy, Debug)]
pub struct Eager(pub usize);

impl Policy for Eager {
    fn thresholds(&self, _live: u32) -> Vec<u32> {
        vec![1; self.0]
    }
}

#[derive(Debug)]
struct Fixed(Vec<u32>);

impl Policy for Fixed {
    fn thresholds(&self, _live: u32) -> Vec<u32> {
        self.0.clone()
    }
}

impl Policy for Arc<Table> {
    fn thresholds(&self, live: u32) -> Vec<u32> {
        Table::thresholds(self, live)
    }
}

impl PolicySpec {
    /// The policy for so many models.
    ///
    /// # Errors
    /// One line naming the setting when thresholds and models do not match.
    pub fn build(&self, models: usize) -> Result<Box<dyn Policy>, String> {
        match self {
            PolicySpec::Eager => Ok(Box::new(Eager(models))),
            PolicySpec::Fixed(thresholds) if thresholds.len() != models => {
                Err(format!("batching.thresholds has {} entries but the router has {models} models", thresholds.len()))
            }
            PolicySpec::Fixed(thresholds) if thresholds.contains(&0) => {
                Err("batching.thresholds must be at least 1".into())
            }
            PolicySpec::Fixed(thresholds) => Ok(Box::new(Fixed(thresholds.clone()))),
            PolicySpec::Planned(table) if table.models() != models => {
                Err(format!("the table of thresholds is for {} models but the router has {models}", table.models()))
            }
            PolicySpec::Planned(table) => Ok(Box::new(Arc::new(table.clone()))),
        }
    }
}

/// Lowers the largest thresholds until `sum(B_i - 1) < live`; never below 1. Among equals the later model gives way,
/// so every subserver computes the same.
pub fn clamp(mut thresholds: Vec<u32>, live: u32) -> Vec<u32> {
    for threshold in &mut thresholds {
        *threshold = (*threshold).clamp(1, live.max(1));
    }
    let mut excess: u32 = thresholds.iter().map(|b| b - 1).sum();
    while excess > 0 && excess >= live {
        if let Some(largest) = thresholds.iter_mut().max() {
            *largest -= 1;
        }
        excess -= 1;
    }
    thresholds
}

/// Something that waits for a batch.
pub trait Waiting {
    /// Waiting since.
    fn since(&self) -> Time;
    /// Gains nothing by waiting for others.
    fn is_pinned(&self) -> bool;
}

impl Waiting for crate::request::Queued {
    fn since(&self) -> Time {
        crate::request::Queued::since(self)
    }

    fn is_pinned(&self) -> bool {
        crate::request::Queued::is_pinned(self)
    }
}

/// Why a batch was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Release {
    /// The threshold was reached.
    Threshold,
    /// All live requests wait here already.
    NoMoreWork,
    /// The oldest waited as long as is allowed.
    Timeout,
    /// One of them belongs to this model alone.
    Pinned,
}

/// What the gate says now.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict<B> {
    /// Start with these.
    Go(B, Release),
    /// Ask again at this moment, or when something comes.
    WaitUntil(Time),
    /// Nobody waits.
    Idle,
}

/// Collects waiting requests of one model until they may start.
#[derive(Debug)]
pub struct Gate<T> {
    me: ModelIdx,
    policy: Box<dyn Policy>,
    max_wait: Duration,
    live: u32,
    threshold: u32,
    waiting: VecDeque<T>,
}

impl<T: Waiting> Gate<T> {
    /// The gate of model `me`.
    pub fn new(me: ModelIdx, policy: Box<dyn Policy>, max_wait: Duration) -> Self {
        let mut gate = Gate { me, policy, max_wait, live: 0, threshold: 1, waiting: VecDeque::new() };
        gate.set_live(0);
        gate
    }

    /// So many routed requests are live now.
    pub fn set_live(&mut self, live: u32) {
        self.live = live;
        self.threshold = clamp(self.policy.thresholds(live), live).get(self.me.index()).copied().unwrap_or(1);
    }

    /// Thresholds come from this policy from now on, for the requests that wait already too.
    pub fn set_policy(&mut self, policy: Box<dyn Policy>) {
        self.policy = policy;
        self.set_live(self.live);
    }

    /// One more waits.
    pub fn push(&mut self, item: T) {
        self.waiting.push_back(item);
    }

    /// Takes out everything that matches (a request that was aborted).
    pub fn remove(&mut self, mut gone: impl FnMut(&T) -> bool) -> Vec<T> {
        let (out, kept): (VecDeque<T>, VecDeque<T>) = self.waiting.drain(..).partition(|item| gone(item));
        self.waiting = kept;
        out.into()
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Since when the one that waits longest waits.
    pub fn oldest(&self) -> Option<Time> {
        self.waiting.iter().map(Waiting::since).min()
    }

    /// The threshold in force.
    pub fn threshold(&self) -> u32 {
        self.threshold
    }

    /// Live routed requests as known here.
    pub fn live(&self) -> u32 {
        self.live
    }

    /// The model is idle: may a batch of at most `rows_max` start at `now`? Larger queues go at once and the rest stays.
    pub fn poll(&mut self, now: Time, rows_max: usize) -> Verdict<Vec<T>> {
        match self.outlook(now, rows_max) {
            Verdict::Go((), reason) => {
                Verdict::Go(self.waiting.drain(..self.waiting.len().min(rows_max.max(1))).collect(), reason)
            }
            Verdict::WaitUntil(moment) => Verdict::WaitUntil(moment),
            Verdict::Idle => Verdict::Idle,
        }
    }

    /// What [`Gate::poll`] would say; nobody starts.
    pub fn outlook(&self, now: Time, rows_max: usize) -> Verdict<()> {
        let Some(oldest) = self.oldest() else { return Verdict::Idle };
        let deadline = oldest.after(self.max_wait);
        let waiting = self.waiting.len() as u64;
        let reason = if waiting >= u64::from(self.threshold) || waiting >= rows_max as u64 {
            Release::Threshold
        } else if self.waiting.iter().any(Waiting::is_pinned) {
            Release::Pinned
        } else if waiting >= u64::from(self.live) {
            Release::NoMoreWork
        } else if now >= deadline {
            Release::Timeout
        } else {
            return Verdict::WaitUntil(deadline);
        };
        Verdict::Go((), reason)
    }

    /// Whether something that matches waits.
    pub fn holds(&self, matches: impl FnMut(&T) -> bool) -> bool {
        self.waiting.iter().any(matches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Guest {
        since: Time,
        pinned: bool,
    }

    impl Waiting for Guest {
        fn since(&self) -> Time {
            self.since
        }

        fn is_pinned(&self) -> bool {
            self.pinned
        }
    }

    const MS: u64 = 1_000_000;

    /// A gate with these thresholds for model 0, `live` requests, and guests that came at these milliseconds.
    fn gate(thresholds: &[u32], live: u32, guests: &[u64]) -> Gate<Guest> {
        let policy = PolicySpec::Fixed(thresholds.to_vec()).build(thresholds.len()).unwrap();
        let mut gate = Gate::new(ModelIdx(0), policy, Duration::from_millis(50));
        gate.set_live(live);
        for &ms in guests {
            gate.push(Guest { since: Time(ms * MS), pinned: false });
        }
        gate
    }

    #[track_caller]
    fn check(mut gate: Gate<Guest>, now_ms: u64, expected: Result<(usize, Release), Option<u64>>) {
        let verdict = match gate.poll(Time(now_ms * MS), 8) {
            Verdict::Go(batch, reason) => Ok((batch.len(), reason)),
            Verdict::WaitUntil(moment) => Err(Some(moment.0 / MS)),
            Verdict::Idle => Err(None),
        };
        assert_eq!(verdict, expected);
    }

    #[test]
    fn a_batch_is_released_for_a_reason() {
        check(gate(&[3], 5, &[]), 0, Err(None));
        check(gate(&[3], 5, &[1, 2]), 10, Err(Some(51)));
        check(gate(&[3], 5, &[1, 2, 3]), 10, Ok((3, Release::Threshold)));
        check(gate(&[3], 5, &[1, 2, 3, 4]), 10, Ok((4, Release::Threshold)));
        check(gate(&[3], 2, &[1, 2]), 10, Ok((2, Release::Threshold)));
        check(gate(&[3, 3], 5, &[1, 2]), 51, Ok((2, Release::Timeout)));
        check(gate(&[3], 0, &[1]), 10, Ok((1, Release::Threshold)));
    }

    #[test]
    fn who_belongs_to_one_model_takes_the_others_along() {
        let mut gate = gate(&[4], 9, &[1, 2]);
        gate.push(Guest { since: Time(0), pinned: true });
        check(gate, 10, Ok((3, Release::Pinned)));
    }

    #[test]
    fn a_full_batch_goes_and_the_rest_stays() {
        let mut gate = gate(&[9], 20, &[1; 8]);
        gate.push(Guest { since: Time(2 * MS), pinned: false });
        assert!(matches!(gate.poll(Time(3 * MS), 8), Verdict::Go(batch, Release::Threshold) if batch.len() == 8));
        assert_eq!(gate.poll(Time(3 * MS), 8), Verdict::WaitUntil(Time(52 * MS)));
    }

    #[test]
    fn thresholds_must_match_the_models() {
        let wrong = PolicySpec::Fixed(vec![1, 2, 3]).build(2).map(drop).unwrap_err();
        assert_eq!(wrong, "batching.thresholds has 3 entries but the router has 2 models");
        assert!(PolicySpec::Fixed(vec![1, 0]).build(2).is_err());
    }

    proptest! {
        /// Wherever the live requests wait, some model has enough of them; and no threshold falls further than it must.
        #[test]
        fn clamped_thresholds_cannot_starve(thresholds in prop::collection::vec(0u32..20, 1..5), live in 0u32..30) {
            let clamped = clamp(thresholds.clone(), live);
            let excess: u32 = clamped.iter().map(|b| b - 1).sum();
            prop_assert!(excess < live.max(1));
            prop_assert!(clamped.iter().zip(&thresholds).all(|(&now, &was)| now >= 1 && now <= was.max(1)));
            let wanted: u32 = thresholds.iter().map(|&b| b.max(1).min(live.max(1)) - 1).sum();
            prop_assert_eq!(excess, wanted.min(live.max(1) - 1));
        }
    }
}
