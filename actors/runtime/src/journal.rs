//! What happened to requests, kept for a while: when each came, stepped and ended. Owner: one for each model, written by its
//! Client and its Decode. Invariant: it is bounded whatever nobody reads; what is forgotten is the oldest.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use tokenrouter_core::ids::{ModelIdx, RequestId, Time};

/// Entries that are kept until somebody takes them.
const KEPT: usize = 8192;

/// Something that happened to a request at a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Whose.
    pub request: RequestId,
    /// When.
    pub at: Time,
    /// What.
    pub what: What,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// It entered here.
    Arrived {
        /// Whether it is routed.
        is_routed: bool,
        /// Tokens of its prompt.
        prompt_tokens: u32,
    },
    /// It was part of a step that is over now.
    Stepped {
        /// Since when it waited for it.
        since: Time,
        /// When the step began.
        began: Time,
        /// Whether a token was committed.
        committed: bool,
        /// Where it goes on; `None` when it does not.
        to: Option<ModelIdx>,
    },
    /// It ended; said where it entered.
    Ended(Ending),
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By end-of-text, a stop token or a stop string.
    Stop,
    /// By length.
    Length,
    /// Its user went away.
    Abort,
    /// It failed.
    Error,
}

impl Ending {
    /// As in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Ending::Stop => "stop",
            Ending::Length => "length",
            Ending::Abort => "abort",
            Ending::Error => "error",
        }
    }
}

/// What happened, until it is taken.
#[derive(Debug, Default)]
pub struct Journal(Mutex<VecDeque<Entry>>);

impl Journal {
    /// These happened, in this order.
    pub fn add(&self, entries: impl IntoIterator<Item = Entry>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for entry in entries {
            if kept.len() == KEPT {
                kept.pop_front();
            }
            kept.push_back(entry);
        }
    }

    /// All that is kept, in order; it is forgotten here.
    pub fn take(&self) -> VecDeque<Entry> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten() {
        let journal = Journal::default();
        let entry = |n: u64| Entry { request: RequestId(n), at: Time(n), what: What::Ended(Ending::Stop) };
        journal.add((0..KEPT as u64 + 10).map(entry));
        let taken = journal.take();
        assert_eq!((taken.len(), taken.front(), taken.back()), (KEPT, Some(&entry(10)), Some(&entry(KEPT as u64 + 9))));
        assert_eq!(journal.take().len(), 0);
    }
}
