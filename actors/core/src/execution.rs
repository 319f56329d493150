//! Execution modes: which models may step at the same time, and what a hop keeps. Owner: the launch file. Invariant: the
//! text of a request is the same in every mode.

use crate::ids::ModelIdx;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// How the models of a process run beside each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Execution {
    /// Every model steps when it may; a hop keeps the KV of its request.
    #[default]
    Async,
    /// One model steps at a time.
    ModelSync,
    /// All models that may step do so together, and wait for the slowest.
    StepSync,
    /// Every model steps when it may, but each hop is a fresh request: KV is released at the hop and found again, as far
    /// as it is, in the prefix cache.
    StdServing,
}

impl Execution {
    /// Whether models wait for turns.
    pub fn takes_turns(self) -> bool {
        matches!(self, Execution::ModelSync | Execution::StepSync)
    }
}

/// A turn is offered to a model: it answers when its step is over, or at once if it has nothing to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// To whom.
    pub model: ModelIdx,
    /// To which life of its actors.
    pub life: u64,
    /// Number of the turn.
    pub turn: u64,
}

/// What a model says about turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// It has a batch of so many requests to start, at least one; said again when the number changes.
    Wish(u32),
    /// The turn of this number is over. A wish said before is over too.
    Back(u64),
    /// Its actors were replaced: what was offered to the earlier ones is over.
    Reborn,
}

/// Turns for which a model that wishes one can be passed over by models with larger batches.
const PASSED_MAX: u32 = 4;

/// Who may step when models take turns. Invariant: `model_sync` has at most one turn out; `step_sync` offers a turn to
/// all models at once, and none while one is out. A wish is forgotten only when a turn is offered, and no model is
/// passed over more than `PASSED_MAX` times in a row for each other one.
///
/// With one turn at a time the largest batch goes first: requests gather at the other models meanwhile, which makes
/// their steps worth more, as a threshold of half the live requests would.
#[derive(Debug)]
pub struct Turns {
    together: bool,
    /// By model index; `None` = in another process.
    seats: Vec<Option<Chair>>,
    last: usize,
    turns: u64,
}

/// What is known of one model.
#[derive(Clone, Copy, Debug, Default)]
struct Chair {
    life: u64,
    /// Requests it wishes to start with; 0 = none.
    wish: u32,
    /// Turns that others got since it wished for one.
    passed: u32,
    turn: Option<u64>,
}

impl Turns {
    /// Turns of a mode that has them, for the models that are here; their first life is `life`.
    pub fn new(execution: Execution, here: &[bool], life: u64) -> Option<Self> {
        let chair = |&here: &bool| here.then_some(Chair { life, ..Chair::default() });
        let seats = here.iter().map(chair).collect();
        let together = execution == Execution::StepSync;
        execution.takes_turns().then_some(Turns { together, seats, last: here.len().saturating_sub(1), turns: 0 })
    }

    /// A model said something, in this life of its actors; returns the turns to offer now. Words of earlier lives and
    /// about turns that are over change nothing.
    pub fn hear(&mut self, model: ModelIdx, life: u64, word: Word) -> Vec<Offer> {
        let Some(Some(chair)) = self.seats.get_mut(model.index()) else { return Vec::new() };
        match word {
            Word::Reborn if life > chair.life => *chair = Chair { life, ..Chair::default() },
            Word::Wish(batch) if life == chair.life => chair.wish = batch.max(1),
            Word::Back(turn) if life == chair.life && chair.turn == Some(turn) => (chair.turn, chair.wish) = (None, 0),
            _ => return Vec::new(),
        }
        self.offer()
    }

    /// Models with a turn now.
    pub fn out(&self) -> usize {
        self.seats.iter().flatten().filter(|chair| chair.turn.is_some()).count()
    }

    fn offer(&mut self) -> Vec<Offer> {
        if self.out() > 0 {
            return Vec::new();
        }
        let models = self.seats.len();
        // Who comes after the last is the first among equals.
        let order = |index: usize| (index + models - self.last - 1) % models;
        let rank = |chair: &Chair| if chair.passed >= PASSED_MAX { (true, 0) } else { (false, chair.wish) };
        let wishes = self.seats.iter().enumerate().filter_map(|(index, chair)| Some((index, chair.as_ref()?)));
        let wishes = wishes.filter(|(_, chair)| chair.wish > 0);
        let first = wishes.min_by_key(|(index, chair)| (Reverse(rank(chair)), order(*index)));
        let Some((next, _)) = first else { return Vec::new() };
        self.last = next;
        self.turns += 1;
        let (turn, together) = (self.turns, self.together);
        for chair in self.seats.iter_mut().flatten() {
            chair.passed = if chair.wish > 0 { chair.passed + 1 } else { 0 };
        }
        let chosen = self.seats.iter_mut().enumerate().filter(|(index, _)| together || *index == next);
        let take = |(index, chair): (usize, &mut Option<Chair>)| {
            let chair = chair.as_mut()?;
            (chair.wish, chair.passed, chair.turn) = (0, 0, Some(turn));
            Some(Offer { model: ModelIdx(index as u8), life: chair.life, turn })
        };
        chosen.filter_map(take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn turns(execution: Execution) -> Turns {
        Turns::new(execution, &[true, false, true, true], 1).expect("a mode with turns")
    }

    fn hear(turns: &mut Turns, model: u8, life: u64, word: Word) -> Vec<(u8, u64)> {
        turns.hear(ModelIdx(model), life, word).iter().map(|offer| (offer.model.0, offer.turn)).collect()
    }

    #[test]
    fn only_two_modes_have_turns() {
        assert!(Turns::new(Execution::Async, &[true], 1).is_none());
        assert!(Turns::new(Execution::StdServing, &[true], 1).is_none());
    }

    #[test]
    fn one_after_the_other() {
        let mut turns = turns(Execution::ModelSync);
        assert_eq!(hear(&mut turns, 1, 1, Word::Wish(1)), [], "not here");
        assert_eq!(hear(&mut turns, 2, 1, Word::Wish(1)), [(2, 1)]);
        for model in [0, 2, 3] {
            assert_eq!(hear(&mut turns, model, 1, Word::Wish(1)), []);
        }
        assert_eq!(hear(&mut turns, 2, 1, Word::Back(7)), [], "another turn");
        assert_eq!(hear(&mut turns, 2, 1, Word::Back(1)), [(3, 2)]);
        assert_eq!(hear(&mut turns, 3, 2, Word::Reborn), [(0, 3)], "a lost turn is over");
        assert_eq!(hear(&mut turns, 3, 1, Word::Wish(1)), [], "an earlier life");
        assert_eq!(hear(&mut turns, 2, 1, Word::Wish(1)), []);
        assert_eq!(hear(&mut turns, 0, 1, Word::Back(3)), [(2, 4)]);
        assert_eq!(hear(&mut turns, 2, 1, Word::Back(4)), [], "nobody wishes");
    }

    #[test]
    fn the_largest_batch_goes_first_and_nobody_is_forgotten() {
        let mut turns = turns(Execution::ModelSync);
        assert_eq!(hear(&mut turns, 0, 1, Word::Wish(2)), [(0, 1)]);
        assert_eq!(hear(&mut turns, 2, 1, Word::Wish(1)), []);
        assert_eq!(hear(&mut turns, 3, 1, Word::Wish(2)), []);
        assert_eq!(hear(&mut turns, 3, 1, Word::Wish(3)), [], "its batch has grown");
        assert_eq!(hear(&mut turns, 0, 1, Word::Back(1)), [(3, 2)]);
        // Model 2 wishes for a small batch, and the others for larger ones again and again.
        let mut given = Vec::new();
        for turn in 2..10 {
            let (mine, other) = if turn % 2 == 0 { (3, 0) } else { (0, 3) };
            let last = given.last().copied().unwrap_or(3);
            hear(&mut turns, if last == mine { other } else { mine }, 1, Word::Wish(5));
            let offers = hear(&mut turns, last, 1, Word::Back(turn));
            assert_eq!(offers.len(), 1);
            given.push(offers[0].0);
        }
        let first = given.iter().position(|&model| model == 2);
        assert_eq!(first, Some(PASSED_MAX as usize - 1), "passed over once before: {given:?}");
    }

    #[test]
    fn all_together() {
        let mut turns = turns(Execution::StepSync);
        assert_eq!(hear(&mut turns, 3, 1, Word::Wish(1)), [(0, 1), (2, 1), (3, 1)]);
        assert_eq!(hear(&mut turns, 0, 1, Word::Back(1)), []);
        assert_eq!(hear(&mut turns, 0, 1, Word::Wish(1)), []);
        assert_eq!(hear(&mut turns, 2, 2, Word::Reborn), []);
        assert_eq!(hear(&mut turns, 3, 1, Word::Back(1)), [(0, 2), (2, 2), (3, 2)]);
    }

    /// A model as the conductor sees it: what it has sent, what is on its way to it, and the turn it has.
    #[derive(Default)]
    struct Model {
        life: u64,
        said: VecDeque<(u64, Word)>,
        offers: VecDeque<Offer>,
        asked: bool,
        has: Option<u64>,
        work: u32,
    }

    impl Model {
        fn say(&mut self, word: Word) {
            self.said.push_back((self.life, word));
        }

        fn ask(&mut self) {
            if self.work > 0 && self.has.is_none() && !self.asked {
                self.asked = true;
                self.say(Word::Wish(self.work));
            }
        }

        /// One thing happens to it: 0 = work comes, 1 = an offer arrives, 2 = its step ends, 3 = it is replaced.
        fn act(&mut self, what: u8) {
            match what {
                0 => {
                    self.work += 1;
                    self.ask();
                }
                1 => {
                    let Some(offer) = self.offers.pop_front().filter(|offer| offer.life == self.life) else { return };
                    self.asked = false;
                    match self.work {
                        0 => self.say(Word::Back(offer.turn)),
                        _ => self.has = Some(offer.turn),
                    }
                }
                2 => {
                    let Some(turn) = self.has.take() else { return };
                    self.work -= 1;
                    self.say(Word::Back(turn));
                    self.ask();
                }
                _ => {
                    self.life += 1;
                    (self.asked, self.has, self.work) = (false, None, 0);
                    self.say(Word::Reborn);
                }
            }
        }
    }

    proptest! {
        /// Whatever is delayed and whoever is replaced: turns exclude each other, and all work gets done.
        #[test]
        fn turns_exclude_each_other_and_reach_all(
            together in prop::bool::ANY,
            acts in prop::collection::vec((0usize..3, 0u8..14), 0..120),
        ) {
            let execution = if together { Execution::StepSync } else { Execution::ModelSync };
            let mut turns = Turns::new(execution, &[true; 3], 1).unwrap();
            let mut models: Vec<Model> = (0..3).map(|_| Model { life: 1, ..Model::default() }).collect();
            let end = (0..400).flat_map(|_| (0..3).flat_map(|who| [(who, 1), (who, 2), (who, 13)]));
            for (who, act) in acts.into_iter().chain(end) {
                match act {
                    0..=3 => models[who].act(act),
                    4..=6 => models[who].act(1),
                    7..=8 => models[who].act(2),
                    _ => if let Some((life, word)) = models[who].said.pop_front() {
                        for offer in turns.hear(ModelIdx(who as u8), life, word) {
                            models[offer.model.index()].offers.push_back(offer);
                        }
                    },
                }
                let running: Vec<u64> = models.iter().filter_map(|model| model.has).collect();
                let same = running.windows(2).all(|pair| pair[0] == pair[1]);
                // A step of actors that were replaced is cut off; the one that took its turn runs alone.
                prop_assert!(if together { same } else { running.len() <= 1 }, "{running:?}");
            }
            prop_assert!(models.iter().all(|model| model.work == 0 && model.has.is_none()));
            prop_assert_eq!(turns.out(), 0);
        }
    }
}
