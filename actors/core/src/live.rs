//! How many requests are live, kept equal at all subservers. Owner: each InterModel has one table; the count of an
//! origin is written only by the Client there. Invariant: a note replaces another of the same origin only if its
//! sequence number is higher, so late or repeated messages change nothing.

use crate::ids::ModelIdx;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Live routed requests that entered at one subserver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveNote {
    /// Where they entered.
    pub origin: ModelIdx,
    /// Grows with every change at the origin.
    pub seq: u64,
    /// How many there are.
    pub count: u32,
}

/// One note per origin.
pub type LiveNotes = SmallVec<[LiveNote; 4]>;

/// The newest note of every origin.
#[derive(Clone, Debug)]
pub struct LiveTable {
    own: ModelIdx,
    notes: LiveNotes,
}

impl LiveTable {
    /// A table for the subserver of model `own` among `models`. `life` counts the lives of that subserver: notes of a
    /// later life replace those of an earlier one.
    pub fn new(own: ModelIdx, models: usize, life: u64) -> Self {
        let seq = |m: usize| if m == own.index() { life << 32 } else { 0 };
        let notes = (0..models).map(|m| LiveNote { origin: ModelIdx(m as u8), seq: seq(m), count: 0 }).collect();
        LiveTable { own, notes }
    }

    /// The Client here says how many of its requests are live now.
    pub fn set_own(&mut self, count: u32) {
        let note = &mut self.notes[self.own.index()];
        note.seq += 1;
        note.count = count;
    }

    /// Takes what is newer; returns whether anything was.
    pub fn absorb(&mut self, notes: &[LiveNote]) -> bool {
        let mut changed = false;
        for note in notes.iter().filter(|note| note.origin != self.own) {
            if let Some(mine) = self.notes.get_mut(note.origin.index()).filter(|mine| mine.seq < note.seq) {
                *mine = *note;
                changed = true;
            }
        }
        changed
    }

    /// Live routed requests everywhere.
    pub fn total(&self) -> u32 {
        self.notes.iter().map(|note| note.count).sum()
    }

    /// Everything known, for a message to a peer.
    pub fn notes(&self) -> LiveNotes {
        self.notes.clone()
    }
}
