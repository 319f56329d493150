//! Throughput T(B) by discrete-event simulation: beyond the reach of the chain, and as a check of it. Owner: the planner.
//! Invariant: which way a request goes after its n-th step depends on the seed, the request and n alone (common random
//! numbers), so two thresholds are compared on the same luck.

use crate::rng::{Stream, unit};
use crate::theory::system::System;

/// How long to simulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    /// Ways of requests, all together, that are counted; a step of b requests has b.
    pub ways: u64,
    /// What the ways of requests are drawn from.
    pub seed: u64,
}

impl Default for Length {
    fn default() -> Self {
        Length { ways: 2_000_000, seed: 1 }
    }
}

/// Equal parts that a run is divided into for its error.
pub(crate) const PARTS: u64 = 20;
/// 97.5 % point of Student's t with [`PARTS`] - 1 = 19 degrees of freedom.
const STUDENT: f64 = 2.093;

/// A simulated throughput.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Simulated {
    /// Tokens per tick, all requests together.
    pub throughput: f64,
    /// Half the width of its 95 % confidence interval, from the means of 20 parts of the run.
    pub error: f64,
}

struct Run<'a> {
    system: &'a System,
    thresholds: &'a [u32],
    seed: u64,
    waiting: Vec<Vec<u32>>,
    running: Vec<Vec<u32>>,
    done_at: Vec<u64>,
    taken: Vec<u32>,
    now: u64,
    ways: u64,
    tokens: f64,
}

/// T(B) after a tenth of the ways for warming up.
///
/// # Errors
/// One line for thresholds that do not fit.
pub fn simulate(system: &System, thresholds: &[u32], length: Length) -> Result<Simulated, String> {
    if !system.is_feasible(thresholds) {
        return Err(format!("thresholds {thresholds:?} do not fit {} requests", system.requests()));
    }
    let models = system.models();
    let mut run = Run {
        system,
        thresholds,
        seed: length.seed,
        waiting: vec![Vec::new(); models],
        running: vec![Vec::new(); models],
        done_at: vec![0; models],
        taken: vec![0; system.requests() as usize],
        now: 0,
        ways: 0,
        tokens: 0.0,
    };
    run.waiting[0] = (0..system.requests()).collect();
    run.go(length.ways / 10);
    let each = (length.ways / PARTS).max(1);
    let parts: Vec<(f64, f64)> = (0..PARTS).map(|_| run.go(each)).collect();
    Ok(Simulated::of_parts(&parts))
}

impl Simulated {
    /// From (tokens, time) of the [`PARTS`] parts of a run.
    pub(crate) fn of_parts(parts: &[(f64, f64)]) -> Simulated {
        let (tokens, time) = parts.iter().fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
        let (throughput, count) = (tokens / time, PARTS as f64);
        let spread: f64 = parts.iter().map(|(tokens, time)| (tokens - throughput * time).powi(2)).sum();
        Simulated { throughput, error: STUDENT * (spread / (count - 1.0) / count).sqrt() / (time / count) }
    }
}

impl Run<'_> {
    /// So many more ways: (tokens, ticks) of them.
    fn go(&mut self, ways: u64) -> (f64, f64) {
        let (goal, tokens, start) = (self.ways + ways, self.tokens, self.now);
        while self.ways < goal {
            self.launch();
            self.complete();
        }
        (self.tokens - tokens, (self.now - start) as f64)
    }

    fn launch(&mut self) {
        for i in 0..self.system.models() {
            let waiting = self.waiting[i].len() as u32;
            if self.running[i].is_empty() && waiting >= self.thresholds[i] {
                let batch = waiting.min(self.system.cap(i));
                self.running[i].extend(self.waiting[i].drain(..batch as usize));
                self.done_at[i] = self.now + u64::from(self.system.ticks(i, batch));
            }
        }
    }

    fn complete(&mut self) {
        let busy = (0..self.system.models()).filter(|&i| !self.running[i].is_empty());
        let Some(next) = busy.map(|i| self.done_at[i]).min() else {
            // Feasible thresholds always let some model start; without one there is nothing to wait for.
            self.ways = u64::MAX;
            return;
        };
        self.now = next;
        for i in 0..self.system.models() {
            if self.running[i].is_empty() || self.done_at[i] > next {
                continue;
            }
            let batch = std::mem::take(&mut self.running[i]);
            self.ways += batch.len() as u64;
            for request in batch {
                let n = self.taken[request as usize];
                self.taken[request as usize] = n.wrapping_add(1);
                let to = self.way(i, unit(self.seed ^ u64::from(request) << 32, n, Stream::Owner));
                self.tokens += self.system.tokens(i)[to];
                self.waiting[to].push(request);
            }
        }
    }

    /// Where a request goes from i for a number in `[0, 1)`.
    fn way(&self, i: usize, mut number: f64) -> usize {
        let row = self.system.moves(i);
        for (j, p) in row.iter().enumerate() {
            if number < *p {
                return j;
            }
            number -= p;
        }
        row.iter().rposition(|p| *p > 0.0).unwrap_or(i)
    }
}
