//! What is measured of one model's actors, beside what they say on the board. Owner: the subserver; its actors write and
//! anybody reads. Invariant: it outlives the actors' lives, and writing takes no lock that a reader holds for long.

use crate::board::Role;
use crate::histogram::{Counts, Histogram};
use crate::journal::Journal;
use crate::mailbox::{MailboxSnapshot, Meter};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokenrouter_core::ids::{ModelIdx, Time};

/// Supervision events that are kept.
const LOG_KEPT: usize = 64;

/// Bounds by which steps are counted by the tokens they consume (vLLM's).
pub const STEP_TOKENS: [usize; 13] = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384];

/// What the rows of a step consume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepKind {
    /// Some of them tokens of a prompt.
    Prefill,
    /// Some of them several tokens that were made elsewhere.
    Extend,
    /// All of them one token.
    Decode,
}

impl StepKind {
    /// All, in the order of [`InstrumentsSnapshot::step_time`].
    pub const ALL: [StepKind; 3] = [StepKind::Prefill, StepKind::Extend, StepKind::Decode];

    /// As in metrics.
    pub fn name(self) -> &'static str {
        ["prefill", "extend", "decode"][self as usize]
    }
}

/// Something the supervisor did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogEntry {
    /// When.
    pub at: Time,
    /// About whom.
    pub role: Role,
    /// What, as a sentence.
    pub what: String,
}

/// Everything that is measured of one model's actors.
#[derive(Debug)]
pub struct Instruments {
    mailboxes: [Meter; Role::OF_A_MODEL.len()],
    /// `[b - 1]`: batches of b requests.
    batch_sizes: Vec<AtomicU64>,
    /// By [`STEP_TOKENS`], and more; then their sum.
    step_tokens: [AtomicU64; STEP_TOKENS.len() + 2],
    /// Waits for a batch, by request.
    pub batch_wait: Histogram,
    step_time: [Histogram; StepKind::ALL.len()],
    /// Settling a drawn token: its routing decision and what follows from it, by token.
    pub decision_time: Histogram,
    /// By model: how long control took to come from there, until it waits here for a batch; not known where clocks differ.
    hop_latency: Vec<Histogram>,
    /// What happened to requests.
    pub journal: Journal,
    log: Mutex<VecDeque<LogEntry>>,
}

/// All of it as it is now.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct InstrumentsSnapshot {
    /// By role, as in [`Role::OF_A_MODEL`].
    pub mailboxes: Vec<MailboxSnapshot>,
    /// `[b - 1]`: batches of b requests.
    pub batch_sizes: Vec<u64>,
    /// Steps that consume at most so many tokens as [`STEP_TOKENS`] says and more than the one before, and steps that consume
    /// more than the last; then the tokens of all.
    pub step_tokens: [u64; STEP_TOKENS.len() + 2],
    /// Waits for a batch, by request.
    pub batch_wait: Counts,
    /// Forward passes by [`StepKind`], as the executor took for them.
    pub step_time: [Counts; 3],
    /// Routing decisions with what follows from them, by token.
    pub decision_time: Counts,
    /// By model: hops from there.
    pub hop_latency: Vec<Counts>,
    /// What the supervisor did, oldest first.
    pub log: Vec<LogEntry>,
}

impl Instruments {
    /// Nothing measured yet, for one of so many models whose steps have at most so many rows.
    pub fn new(models: usize, rows_max: u32) -> Instruments {
        Instruments {
            mailboxes: Default::default(),
            batch_sizes: (0..rows_max).map(|_| AtomicU64::new(0)).collect(),
            step_tokens: Default::default(),
            batch_wait: Histogram::default(),
            step_time: Default::default(),
            decision_time: Histogram::default(),
            hop_latency: (0..models).map(|_| Histogram::default()).collect(),
            journal: Journal::default(),
            log: Mutex::default(),
        }
    }

    /// Of the mailbox of an actor; of nobody's for a role that no model has.
    pub fn meter(&self, role: Role) -> Meter {
        let index = Role::OF_A_MODEL.iter().position(|other| *other == role);
        index.map(|index| self.mailboxes[index].clone()).unwrap_or_default()
    }

    /// A batch of so many requests was released.
    pub fn batch(&self, rows: usize) {
        if let Some(count) = rows.checked_sub(1).and_then(|index| self.batch_sizes.get(index)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A forward pass consumes so many tokens.
    pub fn step_tokens(&self, tokens: usize) {
        let bucket = STEP_TOKENS.iter().position(|bound| tokens <= *bound).unwrap_or(STEP_TOKENS.len());
        self.step_tokens[bucket].fetch_add(1, Ordering::Relaxed);
        self.step_tokens[STEP_TOKENS.len() + 1].fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// A forward pass took so long.
    pub fn step(&self, kind: StepKind, took: Duration) {
        self.step_time[kind as usize].observe(took);
    }

    /// Control came from a model.
    pub fn hop(&self, from: ModelIdx, took: Duration) {
        if let Some(histogram) = self.hop_latency.get(from.index()) {
            histogram.observe(took);
        }
    }

    /// The supervisor did something.
    pub fn log(&self, entry: LogEntry) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.len() == LOG_KEPT {
            log.pop_front();
        }
        log.push_back(entry);
    }

    /// All of it as it is now.
    pub fn read(&self) -> InstrumentsSnapshot {
        InstrumentsSnapshot {
            mailboxes: self.mailboxes.iter().map(Meter::read).collect(),
            batch_sizes: self.batch_sizes.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            step_tokens: self.step_tokens.each_ref().map(|count| count.load(Ordering::Relaxed)),
            batch_wait: self.batch_wait.read(),
            step_time: self.step_time.each_ref().map(Histogram::read),
            decision_time: self.decision_time.read(),
            hop_latency: self.hop_latency.iter().map(Histogram::read).collect(),
            log: self.log.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_place_is_kept_for_changes_nothing() {
        let instruments = Instruments::new(2, 4);
        instruments.batch(0);
        instruments.batch(5);
        instruments.hop(ModelIdx(2), Duration::from_secs(1));
        let fresh = Instruments::new(2, 4).read();
        assert_eq!(instruments.read(), fresh);
        instruments.batch(4);
        instruments.hop(ModelIdx(1), Duration::from_secs(1));
        let read = instruments.read();
        assert_eq!((read.batch_sizes, read.hop_latency[1].count), (vec![0, 0, 0, 1], 1));
    }

    #[test]
    fn steps_are_counted_up_to_the_bound_of_their_tokens() {
        let instruments = Instruments::new(1, 1);
        [1, 2, 8, 9, 16384, 16385].into_iter().for_each(|tokens| instruments.step_tokens(tokens));
        let read = instruments.read().step_tokens;
        assert_eq!(read, [1, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 32789]);
    }

    #[test]
    fn the_log_forgets_the_oldest() {
        let instruments = Instruments::new(1, 1);
        let entry = |n: u64| LogEntry { at: Time(n), role: Role::Executor, what: format!("lost {n}") };
        (0..LOG_KEPT as u64 + 3).for_each(|n| instruments.log(entry(n)));
        let log = instruments.read().log;
        assert_eq!((log.len(), log.first(), log.last()), (LOG_KEPT, Some(&entry(3)), Some(&entry(66))));
    }
}
