//! B*: the thresholds with the largest T(B). Owner: the planner. Invariant: a plan says how its numbers were found and
//! what is known about better ones; nothing is called best that was not compared or bounded.
//!
//! Small systems: every feasible B is evaluated. Larger ones: probes along each threshold, then steps that halve, stopped
//! as soon as T(B) reaches the bound of the decision problem ([`crate::theory::decision`]), which no policy exceeds; where it
//! stays below, the plan names the gap. Beyond the reach of the chain the same search runs on simulations.

use crate::theory::chain::{Exact, Reach, evaluate};
use crate::theory::decision::{self, Effort};
use crate::theory::simulate::{Length, simulate};
use crate::theory::space::Space;
use crate::theory::system::System;
use serde::Serialize;
use std::collections::BTreeMap;

/// A throughput this close to the bound of all policies is called equal to it.
const EQUAL: f64 = 1e-6;
/// Simulated throughputs are compared on this many ways of requests.
const PROBE_WAYS: u64 = 600_000;

/// How much work a plan may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Largest chain.
    pub reach: Reach,
    /// Every feasible B is evaluated when (feasible B) x (transitions of the eager chain) is at most this.
    pub exhaustive: u64,
    /// The decision problem.
    pub effort: Effort,
    /// Simulations beyond the chain.
    pub length: Length,
}

impl Default for Budget {
    fn default() -> Self {
        Budget {
            reach: Reach { states: 200_000, transitions: 8_000_000 },
            exhaustive: 25_000_000,
            effort: Effort { reach: Reach { states: 400_000, transitions: 20_000_000 }, ..Effort::default() },
            length: Length { ways: PROBE_WAYS, ..Length::default() },
        }
    }
}

/// Where the throughputs of a plan come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The Markov chain; exact.
    Chain,
    /// Discrete-event simulation; with an error.
    Simulation,
}

/// What is known about better policies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Optimality {
    /// No start-or-wait policy at all is better.
    AllPolicies,
    /// Best of all thresholds (or of those searched, when `searched`); no policy of any kind is better by more than this
    /// part.
    Gap {
        /// (bound - T) / T.
        ratio: f64,
        /// Not every feasible B was evaluated.
        searched: bool,
    },
    /// Best of all thresholds; other policies were beyond reach.
    AllThresholds,
    /// Best of those that a search visited; nothing is known about the others.
    Searched,
}

/// One evaluated B.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Thresholds.
    #[serde(rename = "B")]
    pub thresholds: Vec<u32>,
    /// T(B).
    pub tokens_per_tick: f64,
    /// Reachable states of its chain; none when simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub states: Option<usize>,
    /// Half of its 95 % confidence interval when simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
}

/// The answer for one N.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Live requests.
    #[serde(rename = "N")]
    pub requests: u32,
    /// B*.
    #[serde(rename = "best_B")]
    pub best: Vec<u32>,
    /// T(B*).
    pub tokens_per_tick: f64,
    /// T of starting whenever anybody waits.
    pub eager_tokens_per_tick: f64,
    /// Reachable states of the chain of B*; none when simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub states: Option<usize>,
    /// No policy exceeds this; none when beyond reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
    /// How T was found.
    pub method: Method,
    /// What is known about better policies.
    pub optimality: Optimality,
    /// Everything that was evaluated, by B.
    pub table: Vec<Row>,
}

struct Search<'a> {
    system: &'a System,
    space: Option<Space<'a>>,
    budget: Budget,
    bound: Option<f64>,
    seen: BTreeMap<Vec<u32>, Row>,
}

/// The best thresholds of a system.
pub fn plan(system: &System, budget: Budget) -> Plan {
    let eager = vec![1; system.models()];
    let mut search = Search { system, space: Space::new(system).ok(), budget, bound: None, seen: BTreeMap::new() };
    let transitions = search.transitions(&eager);
    if transitions.is_none() {
        search.space = None;
    }
    if search.space.is_some() {
        search.bound = decision::best(system, budget.effort).ok().map(|best| best.upper);
    }
    let work = transitions.map(|each| each as u64 * count_feasible(system));
    let whole = work.is_some_and(|work| work <= budget.exhaustive);
    if whole {
        for thresholds in system.feasible() {
            search.value(&thresholds);
        }
    } else {
        search.climb(eager.clone());
    }
    search.finish(&eager, whole)
}

/// Number of feasible thresholds without listing them (an upper bound when batches are capped): C(N - 1 + M, M).
fn count_feasible(system: &System) -> u64 {
    let (n, m) = (u64::from(system.requests()), system.models() as u64);
    (1..=m).fold(1u64, |ways, k| ways.saturating_mul(n - 1 + k) / k)
}

impl Search<'_> {
    /// Entries of a chain's matrix; none beyond reach.
    fn transitions(&mut self, thresholds: &[u32]) -> Option<usize> {
        let space = self.space.as_mut()?;
        let chain = crate::theory::chain::Chain::explore(space, thresholds, self.budget.reach).ok()?;
        Some(chain.targets.len())
    }

    /// T(B), evaluated once.
    fn value(&mut self, thresholds: &[u32]) -> f64 {
        if let Some(row) = self.seen.get(thresholds) {
            return row.tokens_per_tick;
        }
        let exact = self.space.as_mut().and_then(|space| evaluate(space, thresholds, self.budget.reach).ok());
        let row = match exact {
            Some(Exact { throughput, states }) => {
                Row { thresholds: thresholds.to_vec(), tokens_per_tick: throughput, states: Some(states), error: None }
            }
            None => {
                let (tokens_per_tick, error) = simulate(self.system, thresholds, self.budget.length)
                    .map_or((0.0, f64::INFINITY), |simulated| (simulated.throughput, simulated.error));
                Row { thresholds: thresholds.to_vec(), tokens_per_tick, states: None, error: Some(error) }
            }
        };
        let value = row.tokens_per_tick;
        self.seen.insert(thresholds.to_vec(), row);
        value
    }

    fn best(&self) -> Option<&Row> {
        // Among equals the smaller thresholds, which come first.
        self.seen.values().reduce(|best, row| {
            let better = row.tokens_per_tick > best.tokens_per_tick * (1.0 + 1e-12);
            if better { row } else { best }
        })
    }

    fn is_certified(&self) -> bool {
        self.bound.is_some_and(|bound| self.best().is_some_and(|best| best.tokens_per_tick >= bound * (1.0 - EQUAL)))
    }

    /// Probes along every threshold (..., 12, 8, 6, 4, 3, 2, 1; large ones have the smaller chains), then steps to
    /// neighbours that halve. Probes stop at the second in a row that is no better.
    fn climb(&mut self, mut at: Vec<u32>) {
        let mut value = self.value(&at);
        for i in 0..at.len() {
            let probes: Vec<u32> = (0..).map(probe).take_while(|&probe| probe <= self.system.cap(i)).collect();
            let mut idle = 0;
            for probe in probes.into_iter().rev() {
                let mut other = at.clone();
                other[i] = probe;
                let better = self.step(&other, (&mut at, &mut value));
                idle = if better { 0 } else { idle + 1 };
                if idle == 2 && at[i] > probe {
                    break;
                }
            }
        }
        let mut stride = (self.system.requests() / 4).next_power_of_two();
        while stride > 0 && !self.is_certified() {
            let before = value;
            for other in neighbours(&at, stride) {
                if self.step(&other, (&mut at, &mut value)) {
                    break;
                }
            }
            if value <= before {
                stride /= 2;
            }
        }
    }

    /// Goes to `other` when it is better.
    fn step(&mut self, other: &[u32], (at, value): (&mut Vec<u32>, &mut f64)) -> bool {
        if !self.system.is_feasible(other) {
            return false;
        }
        let found = self.value(other);
        let better = found > *value;
        if better {
            *at = other.to_vec();
            *value = found;
        }
        better
    }

    fn finish(mut self, eager: &[u32], whole: bool) -> Plan {
        let eager_tokens_per_tick = self.value(eager);
        let simulated = self.seen.values().any(|row| row.states.is_none());
        let best = self.best();
        let states = best.and_then(|row| row.states);
        let (best, tokens_per_tick) =
            best.map_or((eager.to_vec(), 0.0), |row| (row.thresholds.clone(), row.tokens_per_tick));
        let optimality = match self.bound {
            Some(_) if self.is_certified() => Optimality::AllPolicies,
            Some(bound) => Optimality::Gap { ratio: bound / tokens_per_tick - 1.0, searched: !whole },
            None if whole => Optimality::AllThresholds,
            None => Optimality::Searched,
        };
        Plan {
            requests: self.system.requests(),
            best,
            tokens_per_tick,
            eager_tokens_per_tick,
            states,
            bound: self.bound,
            method: if simulated { Method::Simulation } else { Method::Chain },
            optimality,
            table: self.seen.into_values().collect(),
        }
    }
}

/// 1, 2, 3, 4, 6, 8, 12, 16, 24, ...
fn probe(index: u32) -> u32 {
    match index {
        0 => 1,
        _ if index % 2 == 1 => 2 << (index / 2),
        _ => 3 << (index / 2 - 1),
    }
}

/// One threshold up or down by a stride, or one up and another down.
fn neighbours(at: &[u32], stride: u32) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    let up = |mut b: Vec<u32>, i: usize| {
        b[i] += stride;
        b
    };
    let down = |mut b: Vec<u32>, i: usize| {
        b[i] = b[i].saturating_sub(stride);
        b
    };
    for i in (0..at.len()).rev() {
        all.push(up(at.to_vec(), i));
        all.push(down(at.to_vec(), i));
        all.extend((0..at.len()).filter(|&j| j != i).map(|j| up(down(at.to_vec(), i), j)));
    }
    all
}
