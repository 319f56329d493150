//! States of the closed system at the moments when batches complete, and what follows from each. Owner: whoever
//! explores them. Invariant: the requests of a state, waiting and running, always sum to N.
//!
//! A state is (k waiting, b running, r ticks remaining) per model, right after launches. All models whose r is the
//! smallest complete together and their batches split multinomially by P; then idle models may start. What a model takes
//! is its whole queue, or as much as fits into one batch.

use crate::theory::system::System;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Most ways in which the batches of one completion may split.
const SPLITS_MAX: f64 = 1e6;

/// A packed state: for every model the bits of k, b and r.
pub type Key = u128;

/// One model of a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Requests waiting.
    pub waiting: u32,
    /// Requests in the running batch; 0 when idle.
    pub running: u32,
    /// Ticks until it completes; 0 when idle.
    pub remaining: u32,
}

/// The system with a way to write its states down.
#[derive(Clone, Debug)]
pub struct Space<'a> {
    system: &'a System,
    count_bits: u32,
    time_bits: u32,
    /// Where a completed batch goes, by the batches that complete: (what is added to the queues, probability).
    splits: HashMap<Key, Vec<(Key, f64)>, BuildHasherDefault<KeyHasher>>,
}

/// What follows from a state before anybody decides what starts.
#[derive(Clone, Debug)]
pub struct Completion {
    /// Ticks until the next completion.
    pub ticks: u32,
    /// Expected tokens committed by it.
    pub tokens: f64,
    /// The state without the completed batches.
    pub rest: Key,
    /// Which batches completed: the key of their split.
    pub split: Key,
}

impl<'a> Space<'a> {
    /// A space of all states of a system.
    ///
    /// # Errors
    /// One line when states do not fit into a key, far beyond what can be enumerated.
    pub fn new(system: &'a System) -> Result<Space<'a>, String> {
        let bits = |largest: u32| u32::BITS - largest.leading_zeros();
        let (count_bits, time_bits) = (bits(system.requests()), bits(system.longest()));
        let needed = (2 * count_bits + time_bits) * system.models() as u32;
        if needed > Key::BITS {
            return Err(format!("a state needs {needed} bits and has {}", Key::BITS));
        }
        Ok(Space { system, count_bits, time_bits, splits: HashMap::default() })
    }

    /// The system.
    pub fn system(&self) -> &'a System {
        self.system
    }

    fn width(&self) -> u32 {
        2 * self.count_bits + self.time_bits
    }

    /// The place of model i in a state.
    pub fn place(&self, key: Key, i: usize) -> Place {
        let part = key >> (self.width() * i as u32);
        let field = |shift: u32, bits: u32| ((part >> shift) as u32) & ((1u32 << bits) - 1);
        Place {
            waiting: field(0, self.count_bits),
            running: field(self.count_bits, self.count_bits),
            remaining: field(2 * self.count_bits, self.time_bits),
        }
    }

    /// The state that has this place at model i and nothing elsewhere; places of different models are added.
    pub fn key(&self, i: usize, place: Place) -> Key {
        let part = Key::from(place.waiting)
            | Key::from(place.running) << self.count_bits
            | Key::from(place.remaining) << (2 * self.count_bits);
        part << (self.width() * i as u32)
    }

    /// All requests wait at model 0, nothing runs.
    pub fn first(&self) -> Key {
        self.key(0, Place { waiting: self.system.requests(), ..Place::default() })
    }

    /// Model i, idle, starts.
    pub fn started(&self, key: Key, i: usize) -> Key {
        let waiting = self.place(key, i).waiting;
        let batch = waiting.min(self.system.cap(i));
        let before = Place { waiting, ..Place::default() };
        let after = Place { waiting: waiting - batch, running: batch, remaining: self.system.ticks(i, batch) };
        key - self.key(i, before) + self.key(i, after)
    }

    /// Every idle model that may start does, by thresholds.
    pub fn launched(&self, mut key: Key, thresholds: &[u32]) -> Key {
        for (i, &threshold) in thresholds.iter().enumerate() {
            let place = self.place(key, i);
            if place.running == 0 && place.waiting >= threshold.max(1) {
                key = self.started(key, i);
            }
        }
        key
    }

    /// Time goes on to the next completion. At least one model must be running.
    ///
    /// # Errors
    /// One line when the batches can split in too many ways.
    pub fn complete(&mut self, key: Key) -> Result<Completion, String> {
        let models = self.system.models();
        let places: Vec<Place> = (0..models).map(|i| self.place(key, i)).collect();
        let ticks = places.iter().filter(|place| place.running > 0).map(|place| place.remaining).min().unwrap_or(0);
        let (mut rest, mut split, mut tokens) = (0, 0, 0.0);
        for (i, place) in places.iter().enumerate() {
            if place.running == 0 {
                rest += self.key(i, *place);
            } else if place.remaining > ticks {
                rest += self.key(i, Place { remaining: place.remaining - ticks, ..*place });
            } else {
                rest += self.key(i, Place { waiting: place.waiting, ..Place::default() });
                split += self.key(i, Place { running: place.running, ..Place::default() });
                tokens += f64::from(place.running) * self.system.reward(i);
            }
        }
        if !self.splits.contains_key(&split) {
            let outcomes = self.outcomes(split)?;
            self.splits.insert(split, outcomes);
        }
        Ok(Completion { ticks, tokens, rest, split })
    }

    /// What a completion adds to the queues, each with its probability; add it to `rest`.
    pub fn split(&self, completion: &Completion) -> &[(Key, f64)] {
        self.splits.get(&completion.split).map_or(&[], Vec::as_slice)
    }

    /// Distribution of the arrivals when these batches complete.
    fn outcomes(&self, split: Key) -> Result<Vec<(Key, f64)>, String> {
        let ways: f64 = (0..self.system.models()).map(|i| self.ways(i, self.place(split, i).running)).product();
        if ways > SPLITS_MAX {
            return Err(format!("the batches of a completion can split in {ways:.0} ways"));
        }
        let mut all: HashMap<Key, f64, BuildHasherDefault<KeyHasher>> = HashMap::from_iter([(0, 1.0)]);
        for i in 0..self.system.models() {
            let own = self.multinomial(i, self.place(split, i).running);
            let mut joined = HashMap::default();
            for (&there, p) in &all {
                for &(here, q) in &own {
                    *joined.entry(there + here).or_insert(0.0) += p * q;
                }
            }
            all = joined;
        }
        let mut all: Vec<(Key, f64)> = all.into_iter().collect();
        all.sort_unstable_by_key(|&(key, _)| key);
        Ok(all)
    }

    /// In how many ways `count` requests can leave model i: `C(count + targets - 1, targets - 1)`.
    fn ways(&self, i: usize, count: u32) -> f64 {
        let targets = self.system.moves(i).iter().filter(|p| **p > 0.0).count() as u32;
        (1..targets).map(|k| f64::from(count + k) / f64::from(k)).product()
    }

    /// Where `count` requests go from model i, independently: (arrivals, probability).
    fn multinomial(&self, i: usize, count: u32) -> Vec<(Key, f64)> {
        let mut all = vec![(0, 1.0, count, 1.0)];
        for (j, &p) in self.system.moves(i).iter().enumerate() {
            let mut next = Vec::new();
            for &(key, probability, left, mass) in &all {
                let here: f64 = if p >= mass { 1.0 } else { p / mass };
                for (taken, q) in binomial(left, here) {
                    let arrivals = self.key(j, Place { waiting: taken, ..Place::default() });
                    next.push((key + arrivals, probability * q, left - taken, mass - p));
                }
            }
            all = next;
        }
        all.into_iter().filter(|&(_, p, left, _)| p > 0.0 && left == 0).map(|(key, p, _, _)| (key, p)).collect()
    }
}

/// The binomial distribution, without what has no probability.
fn binomial(count: u32, p: f64) -> Vec<(u32, f64)> {
    if p <= 0.0 {
        return vec![(0, 1.0)];
    }
    if p >= 1.0 {
        return vec![(count, 1.0)];
    }
    let (n, mut ways) = (f64::from(count), 0.0_f64);
    let term = |k: u32| {
        let k = f64::from(k);
        let log = ways + k * p.ln() + (n - k) * (1.0 - p).ln();
        ways += ((n - k) / (k + 1.0)).ln();
        log.exp()
    };
    (0..=count).zip((0..=count).map(term)).filter(|&(_, q)| q > 0.0).collect()
}

/// Keys are spread by one multiplication of their folded halves.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u128(u128::from(byte) ^ u128::from(self.0) << 8);
        }
    }

    fn write_u128(&mut self, key: u128) {
        let folded = (key as u64) ^ ((key >> 64) as u64).wrapping_mul(0xd1b5_4a32_d192_ed03);
        let product = u128::from(folded) * 0x9e37_79b9_7f4a_7c15_u128;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}
