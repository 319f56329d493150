//! Throughput T(B) of the closed system under fixed thresholds: reachable states breadth first, transitions, stationary
//! vector. Owner: the planner. Invariant: every row of the transition matrix sums to 1.
//!
//! `T(B) = sum_s pi(s) tokens(s) / sum_s pi(s) ticks(s)` over the chain embedded at completions.

use crate::theory::space::{Key, KeyHasher, Space};
use crate::theory::stationary::stationary;
use crate::theory::system::System;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

/// How large a chain may grow before it is left to the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Most states.
    pub states: usize,
    /// Most entries of the transition matrix.
    pub transitions: usize,
}

impl Default for Reach {
    fn default() -> Self {
        Reach { states: 1_000_000, transitions: 30_000_000 }
    }
}

/// T(B) with the size of its chain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exact {
    /// Tokens per tick, all requests together.
    pub throughput: f64,
    /// Reachable states.
    pub states: usize,
}

/// A sparse transition matrix, row by row, with what a transition from each state yields and takes.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    /// Row s is `targets[starts[s]..starts[s + 1]]`.
    pub starts: Vec<u32>,
    /// Column of every entry.
    pub targets: Vec<u32>,
    /// Probability of every entry.
    pub probabilities: Vec<f64>,
    /// Expected tokens of the transition from every state.
    pub tokens: Vec<f64>,
    /// Its ticks.
    pub ticks: Vec<f64>,
    /// Which models run in every state: bit i for model i.
    pub running: Vec<u32>,
}

impl Chain {
    /// The chain under feasible thresholds, from "all wait at model 0".
    ///
    /// # Errors
    /// One line when it grows beyond `reach`.
    pub fn explore(space: &mut Space<'_>, thresholds: &[u32], reach: Reach) -> Result<Chain, String> {
        debug_assert!(space.system().is_feasible(thresholds), "{thresholds:?}");
        let first = settled(space, thresholds);
        let mut index: HashMap<Key, u32, BuildHasherDefault<KeyHasher>> = HashMap::from_iter([(first, 0)]);
        let mut states = vec![first];
        let mut chain = Chain { starts: vec![0], ..Chain::default() };
        let mut at = 0;
        while let Some(&state) = states.get(at) {
            let completion = space.complete(state)?;
            chain.tokens.push(completion.tokens);
            chain.ticks.push(f64::from(completion.ticks));
            chain.running.push(running(space, state));
            for &(arrivals, probability) in space.split(&completion) {
                let next = space.launched(completion.rest + arrivals, thresholds);
                let target = *index.entry(next).or_insert_with(|| {
                    states.push(next);
                    states.len() as u32 - 1
                });
                chain.targets.push(target);
                chain.probabilities.push(probability);
            }
            chain.starts.push(chain.targets.len() as u32);
            at += 1;
            if states.len() > reach.states || chain.targets.len() > reach.transitions {
                return Err(format!(
                    "the chain has more than {} states or {} transitions",
                    reach.states, reach.transitions
                ));
            }
        }
        Ok(chain)
    }

    /// Number of states.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether it has no state.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Row s: (target, probability).
    pub fn row(&self, s: usize) -> impl Iterator<Item = (usize, f64)> {
        let range = self.starts[s] as usize..self.starts[s + 1] as usize;
        self.targets[range.clone()].iter().map(|&t| t as usize).zip(self.probabilities[range].iter().copied())
    }
}

/// All wait at model 0, and what may start has. Thresholds of model 0 are at most N, so something runs.
fn settled(space: &Space<'_>, thresholds: &[u32]) -> Key {
    space.launched(space.first(), thresholds)
}

/// The models that run in a state, as bits.
fn running(space: &Space<'_>, state: Key) -> u32 {
    (0..space.system().models()).filter(|&i| space.place(state, i).running > 0).fold(0, |bits, i| bits | 1 << i)
}

/// Per model: how many of the other models run while it runs, as a mean share of them (0 when it never runs).
///
/// # Errors
/// As [`throughput`].
pub fn overlap(system: &System, thresholds: &[u32], reach: Reach) -> Result<Vec<f64>, String> {
    feasible(system, thresholds)?;
    let chain = Chain::explore(&mut Space::new(system)?, thresholds, reach)?;
    let pi = stationary(&chain)?;
    let others = (system.models() - 1).max(1) as f64;
    let share = |i: usize| {
        let states = chain.running.iter().zip(chain.ticks.iter().zip(&pi)).filter(|(bits, _)| *bits >> i & 1 == 1);
        let sums = states.fold((0.0, 0.0), |(time, beside), (bits, (ticks, p))| {
            (time + ticks * p, beside + ticks * p * f64::from(bits.count_ones() - 1) / others)
        });
        if sums.0 > 0.0 { sums.1 / sums.0 } else { 0.0 }
    };
    Ok((0..system.models()).map(share).collect())
}

fn feasible(system: &System, thresholds: &[u32]) -> Result<(), String> {
    if system.is_feasible(thresholds) {
        return Ok(());
    }
    Err(format!(
        "thresholds {thresholds:?} do not fit: one per model, each from 1 to its largest batch, sum(B_i - 1) < {}",
        system.requests()
    ))
}

/// T(B).
///
/// # Errors
/// One line for thresholds that do not fit and for chains beyond `reach`.
pub fn throughput(system: &System, thresholds: &[u32], reach: Reach) -> Result<Exact, String> {
    feasible(system, thresholds)?;
    evaluate(&mut Space::new(system)?, thresholds, reach)
}

/// T(B) of feasible thresholds in a space that is shared between many of them.
pub(crate) fn evaluate(space: &mut Space<'_>, thresholds: &[u32], reach: Reach) -> Result<Exact, String> {
    let chain = Chain::explore(space, thresholds, reach)?;
    let pi = stationary(&chain)?;
    let mean = |values: &[f64]| values.iter().zip(&pi).map(|(value, p)| value * p).sum::<f64>();
    Ok(Exact { throughput: mean(&chain.tokens) / mean(&chain.ticks), states: chain.len() })
}
