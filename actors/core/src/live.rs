//! How many requests are live, kept equal at all subservers. Owner: each InterModel has one table; the count of an
//! origin is written only by the Client there. Invariant: a note replaces another of the same origin only if its stamp
//! is higher, so late or repeated messages change nothing.

use crate::ids::ModelIdx;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Orders what one sender says. A later life of the sender outranks all that an earlier one said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp {
    /// Which life of the sender.
    pub life: u64,
    /// Grows within a life.
    pub seq: u64,
}

impl Stamp {
    /// Before the first word of a life.
    pub fn start(life: u64) -> Self {
        Stamp { life, seq: 0 }
    }

    /// Whether nothing can have been said between `before`, which was heard last, and this: before the first word of a
    /// life nothing was.
    pub fn follows(self, before: Stamp) -> bool {
        self == before.next() || (self.life > before.life && self.seq == 1)
    }

    /// The one after this.
    pub fn next(self) -> Self {
        Stamp { seq: self.seq + 1, ..self }
    }
}

/// Live routed requests that entered at one subserver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveNote {
    /// Where they entered.
    pub origin: ModelIdx,
    /// Grows with every change at the origin.
    pub stamp: Stamp,
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
    /// A table for the subserver of model `own` among `models`, in this life of that subserver.
    pub fn new(own: ModelIdx, models: usize, life: u64) -> Self {
        let stamp = |m: usize| if m == own.index() { Stamp::start(life) } else { Stamp::default() };
        let notes = (0..models).map(|m| LiveNote { origin: ModelIdx(m as u8), stamp: stamp(m), count: 0 }).collect();
        LiveTable { own, notes }
    }

    /// The Client here says how many of its requests are live now.
    pub fn set_own(&mut self, count: u32) {
        let note = &mut self.notes[self.own.index()];
        note.stamp = note.stamp.next();
        note.count = count;
    }

    /// Takes from what `sender` knows whatever is newer; returns whether anything was. The sender's last word about
    /// itself counts again after [`LiveTable::forget`].
    pub fn absorb(&mut self, sender: ModelIdx, notes: &[LiveNote]) -> bool {
        let mut changed = false;
        for note in notes.iter().filter(|note| note.origin != self.own) {
            let Some(mine) = self.notes.get_mut(note.origin.index()) else { continue };
            let again = note.origin == sender && mine.stamp == note.stamp && mine.count != note.count;
            if mine.stamp < note.stamp || again {
                *mine = *note;
                changed = true;
            }
        }
        changed
    }

    /// The origin is gone and its requests with it; returns whether there were any.
    pub fn forget(&mut self, origin: ModelIdx) -> bool {
        let note = self.notes.get_mut(origin.index()).filter(|note| note.origin != self.own);
        note.is_some_and(|note| std::mem::take(&mut note.count) > 0)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn note(life: u64, seq: u64, count: u32) -> LiveNote {
        LiveNote { origin: ModelIdx(1), stamp: Stamp { life, seq }, count }
    }

    #[test]
    fn newer_notes_win_and_a_later_life_outranks_all() {
        let mut table = LiveTable::new(ModelIdx(0), 3, 1);
        assert!(table.absorb(ModelIdx(1), &[note(1, 7, 5)]));
        assert!(!table.absorb(ModelIdx(1), &[note(1, 6, 9)]), "late");
        assert!(table.absorb(ModelIdx(2), &[note(2, 0, 1)]), "a later life");
        assert!(!table.absorb(ModelIdx(1), &[note(1, 99, 9)]), "an earlier life");
        assert_eq!(table.total(), 1);
    }

    #[test]
    fn a_lost_origin_counts_nothing_until_it_speaks_itself() {
        let mut table = LiveTable::new(ModelIdx(0), 3, 1);
        table.set_own(2);
        table.absorb(ModelIdx(1), &[note(1, 7, 5)]);
        assert!(table.forget(ModelIdx(1)));
        assert!(!table.forget(ModelIdx(1)), "nothing left to forget");
        assert_eq!(table.total(), 2);
        assert!(!table.absorb(ModelIdx(2), &[note(1, 7, 5)]), "hearsay that was forgotten");
        assert!(table.absorb(ModelIdx(1), &[note(1, 7, 5)]), "its own last word");
        assert_eq!(table.total(), 7);
        assert!(!table.forget(ModelIdx(0)), "the own count is not forgotten");
    }

    #[test]
    fn notes_about_nobody_and_about_oneself_are_ignored() {
        let mut table = LiveTable::new(ModelIdx(1), 2, 1);
        let stranger = LiveNote { origin: ModelIdx(9), stamp: Stamp::start(u64::MAX), count: 3 };
        assert!(!table.absorb(ModelIdx(0), &[stranger, note(u64::MAX, 0, 8)]));
        assert_eq!(table.total(), 0);
    }
}
