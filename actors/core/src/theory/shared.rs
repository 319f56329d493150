//! Throughput by simulation where models slow each other down: they share cores, so the pace of a step changes whenever
//! another step starts or ends. Owner: the planner, for measured profiles. Invariant: with equal latencies alone and
//! beside others it is the simulation of [`crate::theory::simulate`] without ticks; luck is common to all thresholds.
//!
//! A step with b requests is `alone[b]` seconds of work. While k of the M - 1 other models run it goes on at
//! `1 / (1 + (beside[b] / alone[b] - 1) k / (M - 1))` of full speed.

use crate::rng::{Stream, unit};
use crate::theory::simulate::{Length, PARTS, Simulated};

/// Work that is left of a step after rounding, in seconds.
const NOTHING: f64 = 1e-12;

/// A system whose models have two latencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// `alone[i][b - 1]`: seconds of a step of model i with b requests; its length is the largest batch.
    pub alone: Vec<Vec<f64>>,
    /// The same while all others run.
    pub beside: Vec<Vec<f64>>,
    /// P.
    pub moves: Vec<Vec<f64>>,
    /// C.
    pub tokens: Vec<Vec<f64>>,
}

struct Run<'a> {
    shared: &'a Shared,
    thresholds: &'a [u32],
    seed: u64,
    waiting: Vec<Vec<u32>>,
    running: Vec<Vec<u32>>,
    /// Seconds of work left of the step of each model.
    left: Vec<f64>,
    taken: Vec<u32>,
    now: f64,
    ways: u64,
    tokens: f64,
}

impl Shared {
    /// Tokens per second of `requests` requests, after a tenth of the ways for warming up.
    ///
    /// # Errors
    /// One line for thresholds that do not fit.
    pub fn throughput(&self, requests: u32, thresholds: &[u32], length: Length) -> Result<Simulated, String> {
        let models = self.alone.len();
        let cap = |i: usize| requests.min(self.alone[i].len() as u32);
        let fits = thresholds.len() == models
            && thresholds.iter().enumerate().all(|(i, &b)| (1..=cap(i)).contains(&b))
            && thresholds.iter().map(|b| b - 1).sum::<u32>() < requests;
        if !fits {
            return Err(format!("thresholds {thresholds:?} do not fit {requests} requests"));
        }
        let mut run = Run {
            shared: self,
            thresholds,
            seed: length.seed,
            waiting: vec![Vec::new(); models],
            running: vec![Vec::new(); models],
            left: vec![0.0; models],
            taken: vec![0; requests as usize],
            now: 0.0,
            ways: 0,
            tokens: 0.0,
        };
        run.waiting[0] = (0..requests).collect();
        run.go(length.ways / 10);
        let each = (length.ways / PARTS).max(1);
        let parts: Vec<(f64, f64)> = (0..PARTS).map(|_| run.go(each)).collect();
        Ok(Simulated::of_parts(&parts))
    }
}

impl Run<'_> {
    /// So many more ways: (tokens, seconds) of them.
    fn go(&mut self, ways: u64) -> (f64, f64) {
        let (goal, tokens, start) = (self.ways + ways, self.tokens, self.now);
        while self.ways < goal {
            self.launch();
            self.advance();
        }
        (self.tokens - tokens, self.now - start)
    }

    fn launch(&mut self) {
        for i in 0..self.left.len() {
            let waiting = self.waiting[i].len();
            if self.running[i].is_empty() && waiting >= self.thresholds[i] as usize {
                let batch = waiting.min(self.shared.alone[i].len());
                self.running[i].extend(self.waiting[i].drain(..batch));
                self.left[i] = self.shared.alone[i][batch - 1];
            }
        }
    }

    /// On to the end of the next step, every step at its pace.
    fn advance(&mut self) {
        let models = self.left.len();
        let busy: Vec<usize> = (0..models).filter(|&i| !self.running[i].is_empty()).collect();
        let crowd = (busy.len().saturating_sub(1)) as f64 / (models - 1).max(1) as f64;
        let pace = |i: usize| {
            let b = self.running[i].len() - 1;
            1.0 / (1.0 + (self.shared.beside[i][b] / self.shared.alone[i][b] - 1.0) * crowd)
        };
        let paces: Vec<f64> = busy.iter().map(|&i| pace(i)).collect();
        let next = busy.iter().zip(&paces).map(|(&i, pace)| self.left[i] / pace).fold(f64::INFINITY, f64::min);
        if !next.is_finite() {
            // Feasible thresholds always let some model start; without one there is nothing to wait for.
            self.ways = u64::MAX;
            return;
        }
        self.now += next;
        for (&i, pace) in busy.iter().zip(paces) {
            self.left[i] -= next * pace;
            if self.left[i] <= NOTHING {
                self.complete(i);
            }
        }
    }

    fn complete(&mut self, i: usize) {
        let batch = std::mem::take(&mut self.running[i]);
        self.ways += batch.len() as u64;
        for request in batch {
            let n = self.taken[request as usize];
            self.taken[request as usize] = n.wrapping_add(1);
            let to = self.way(i, unit(self.seed ^ u64::from(request) << 32, n, Stream::Owner));
            self.tokens += self.shared.tokens[i][to];
            self.waiting[to].push(request);
        }
    }

    fn way(&self, i: usize, mut number: f64) -> usize {
        let row = &self.shared.moves[i];
        for (j, p) in row.iter().enumerate() {
            if number < *p {
                return j;
            }
            number -= p;
        }
        row.iter().rposition(|p| *p > 0.0).unwrap_or(i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::theory::chain::{Reach, throughput};
    use crate::theory::system::System;

    /// Models that do not slow each other down have the throughput of the exact chain; two that halve each other's pace
    /// and never wait have half of it.
    #[test]
    fn it_agrees_with_the_chain_and_with_plain_arithmetic() {
        for (n, p, thresholds) in [(1, 0.35, [1, 1]), (4, 0.35, [1, 3]), (8, 0.1, [1, 2]), (6, 0.3, [2, 2])] {
            let (moves, tokens) = (vec![vec![1.0 - p, p], vec![1.0, 0.0]], vec![vec![1.0, 0.0], vec![1.0, 1.0]]);
            let ticks = |base: u32, each: u32| (1..=n).map(|b| base + each * b).collect::<Vec<u32>>();
            let latency = vec![ticks(3, 1), ticks(11, 2)];
            let alone: Vec<Vec<f64>> =
                latency.iter().map(|row| row.iter().map(|&ticks| f64::from(ticks) * 1e-3).collect()).collect();
            let system = System::new(n, latency, moves.clone(), tokens.clone()).expect("a system");
            let exact = throughput(&system, &thresholds, Reach::default()).expect("T(B)").throughput * 1e3;
            let shared = Shared { beside: alone.clone(), alone, moves, tokens };
            let found = shared.throughput(n, &thresholds, Length { ways: 400_000, seed: 3 }).expect("simulated");
            assert!((found.throughput - exact).abs() < 2.0 * found.error, "{n} {p} {thresholds:?}: {found:?} {exact}");
        }
        let stay = vec![vec![0.0, 1.0], vec![1.0, 0.0]];
        let mut shared = Shared {
            alone: vec![vec![0.01]; 2],
            beside: vec![vec![0.02]; 2],
            moves: stay,
            tokens: vec![vec![1.0, 1.0]; 2],
        };
        let at =
            |shared: &Shared, n| shared.throughput(n, &[1, 1], Length { ways: 4000, seed: 1 }).map(|s| s.throughput);
        assert!((at(&shared, 1).expect("one") - 100.0).abs() < 0.1, "{:?}", at(&shared, 1));
        assert!((at(&shared, 4).expect("four") - 100.0).abs() < 0.5, "{:?}", at(&shared, 4));
        shared.beside = shared.alone.clone();
        assert!((at(&shared, 4).expect("four") - 200.0).abs() < 0.5, "{:?}", at(&shared, 4));
        assert!(at(&shared, 1).is_ok() && shared.throughput(1, &[1, 2], Length::default()).is_err());
    }
}
