//! The best start-or-wait policy of all, not only of thresholds: the semi-Markov decision problem over the same states.
//! Owner: the planner, to certify thresholds. Invariant: its bounds hold whenever it stops, early or late.
//!
//! At a completion every idle model with a queue may start it or wait, as long as something runs. With v a value per
//! state, `q(s) = (tokens(s) + sum_a p_a max over choices of v - v(s)) / ticks(s)`; for **any** v the best long-run
//! throughput lies between the smallest and the largest q (Puterman 1994, theorem 8.5.5, on the transformed problem of
//! section 11.4). Each sweep moves v by a fraction of q (relative value iteration).

use crate::theory::chain::Reach;
use crate::theory::space::{Key, KeyHasher, Space};
use crate::theory::system::System;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;

/// Sweeps between two looks at the bounds.
const LOOK: usize = 10;

/// Bounds on the throughput of the best policy, in tokens per tick.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// Some policy reaches this.
    pub lower: f64,
    /// No policy exceeds this.
    pub upper: f64,
    /// States of the decision problem.
    pub states: usize,
}

/// When to stop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// Largest decision problem.
    pub reach: Reach,
    /// Stop when `upper - lower` is below this part of `upper`.
    pub gap: f64,
    /// Sweeps at most.
    pub sweeps: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Effort { reach: Reach::default(), gap: 1e-7, sweeps: 20_000 }
    }
}

/// The decision problem in three levels of rows: state -> arrivals with probabilities -> possible next states.
#[derive(Default)]
struct Problem {
    tokens: Vec<f64>,
    ticks: Vec<f64>,
    arrivals: Vec<u32>,
    probabilities: Vec<f64>,
    /// Which moment of decision each arrival leads to.
    moments: Vec<u32>,
    /// Choices of moment m are `choices[bounds[m]..bounds[m + 1]]`.
    bounds: Vec<u32>,
    choices: Vec<u32>,
}

/// Bounds on the best throughput of any policy that starts whole queues.
///
/// # Errors
/// One line when the problem is beyond the reach.
pub fn best(system: &System, effort: Effort) -> Result<Best, String> {
    let problem = Problem::explore(&mut Space::new(system)?, effort.reach)?;
    Ok(problem.iterate(effort))
}

impl Problem {
    fn explore(space: &mut Space<'_>, reach: Reach) -> Result<Problem, String> {
        let mut index: HashMap<Key, u32, BuildHasherDefault<KeyHasher>> = HashMap::default();
        let mut moments: HashMap<Key, u32, BuildHasherDefault<KeyHasher>> = HashMap::default();
        let mut states: Vec<Key> = Vec::new();
        let mut problem = Problem { arrivals: vec![0], bounds: vec![0], ..Problem::default() };
        let mut options = Vec::new();
        let mut decide = |problem: &mut Problem, states: &mut Vec<Key>, space: &Space<'_>, moment: Key| -> u32 {
            if let Some(&known) = moments.get(&moment) {
                return known;
            }
            choose(space, moment, &mut options);
            for &option in &options {
                problem.choices.push(*index.entry(option).or_insert_with(|| {
                    states.push(option);
                    states.len() as u32 - 1
                }));
            }
            problem.bounds.push(problem.choices.len() as u32);
            let number = problem.bounds.len() as u32 - 2;
            moments.insert(moment, number);
            number
        };
        decide(&mut problem, &mut states, space, space.first());
        let mut at = 0;
        while let Some(&state) = states.get(at) {
            let completion = space.complete(state)?;
            problem.tokens.push(completion.tokens);
            problem.ticks.push(f64::from(completion.ticks));
            for &(arrived, probability) in space.split(&completion) {
                let moment = decide(&mut problem, &mut states, space, completion.rest + arrived);
                problem.moments.push(moment);
                problem.probabilities.push(probability);
            }
            problem.arrivals.push(problem.moments.len() as u32);
            at += 1;
            if states.len() > reach.states || problem.moments.len() > reach.transitions {
                return Err(format!(
                    "the decision problem has more than {} states or {} transitions",
                    reach.states, reach.transitions
                ));
            }
        }
        Ok(problem)
    }

    fn iterate(&self, effort: Effort) -> Best {
        let states = self.tokens.len();
        let shortest = self.ticks.iter().copied().fold(f64::INFINITY, f64::min);
        let pace = 0.9 * shortest;
        let mut value = vec![0.0; states];
        let mut best = vec![0.0; self.bounds.len() - 1];
        let mut bounds = Best { lower: 0.0, upper: f64::INFINITY, states };
        for sweep in 0..effort.sweeps {
            for (m, best) in best.iter_mut().enumerate() {
                let range = self.bounds[m] as usize..self.bounds[m + 1] as usize;
                *best = self.choices[range].iter().map(|&s| value[s as usize]).fold(f64::NEG_INFINITY, f64::max);
            }
            let (mut lower, mut upper) = (f64::INFINITY, f64::NEG_INFINITY);
            let mut anchor = 0.0;
            for s in 0..states {
                let range = self.arrivals[s] as usize..self.arrivals[s + 1] as usize;
                let next: f64 = self.moments[range.clone()]
                    .iter()
                    .zip(&self.probabilities[range])
                    .map(|(&m, p)| p * best[m as usize])
                    .sum();
                let q = (self.tokens[s] + next - value[s]) / self.ticks[s];
                lower = lower.min(q);
                upper = upper.max(q);
                value[s] += pace * q;
                if s == 0 {
                    anchor = value[0];
                }
            }
            value.iter_mut().for_each(|v| *v -= anchor);
            bounds.lower = bounds.lower.max(lower);
            bounds.upper = bounds.upper.min(upper);
            if sweep % LOOK == 0 && bounds.upper - bounds.lower <= effort.gap * bounds.upper {
                break;
            }
        }
        bounds
    }
}

/// Every state that the decisions at this moment can lead to.
fn choose(space: &Space<'_>, moment: Key, options: &mut Vec<Key>) {
    let models = space.system().models();
    options.clear();
    options.push(moment);
    let mut runs = false;
    for i in 0..models {
        let place = space.place(moment, i);
        runs |= place.running > 0;
        if place.running == 0 && place.waiting > 0 {
            for at in 0..options.len() {
                options.push(space.started(options[at], i));
            }
        }
    }
    if !runs {
        options.remove(0);
    }
}
