//! Throughput by simulation where models slow each other down: they share cores, so the pace of a step changes whenever
//! another step starts or ends. Owner: the planner, for measured profiles. Invariant: with equal latencies alone and
//! beside others that do not depend on tokens it is the simulation of [`crate::theory::simulate`] without ticks; luck is
//! common to all thresholds.
//!
//! A row consumes what has been committed since the last row of its request at that model, by whomever, and one token at
//! least. A step of b rows with t tokens each on average is `alone(b, t)` seconds of work. While k of the M - 1 other
//! models run it goes on at `1 / (1 + (beside(b, t) / alone(b, t) - 1) k / (M - 1))` of full speed.

use crate::rng::{Stream, unit};
use crate::theory::latency::Surface;
use crate::theory::simulate::{Length, PARTS, Simulated};

/// Work that is left of a step after rounding, in seconds.
const NOTHING: f64 = 1e-12;

/// Steps that the walk of one request is followed for to find what rows consume.
const WALK: u32 = 20_000;

/// A system whose models have two latencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// Steps of every model with nothing else at work.
    pub alone: Vec<Surface>,
    /// The same while all others run; for the same largest batches.
    pub beside: Vec<Surface>,
    /// P.
    pub moves: Vec<Vec<f64>>,
    /// C.
    pub tokens: Vec<Vec<f64>>,
}

/// What a simulation saw.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Tokens per second.
    pub rate: Simulated,
    /// `[i][b - 1]`: steps of model i with b requests, and the seconds that they took, others beside them or not.
    pub steps: Vec<Vec<(u32, f64)>>,
}

/// A request on its way.
#[derive(Clone, Debug)]
struct Walker {
    seed: u64,
    /// Ways behind it.
    taken: u32,
    /// Tokens committed since its last row at each model.
    behind: Vec<u32>,
}

struct Run<'a> {
    shared: &'a Shared,
    thresholds: &'a [u32],
    walkers: Vec<Walker>,
    waiting: Vec<Vec<u32>>,
    running: Vec<Vec<u32>>,
    /// Seconds of work left of the step of each model.
    left: Vec<f64>,
    /// How many times as long that step takes while all others run.
    slower: Vec<f64>,
    /// When it began.
    began: Vec<f64>,
    steps: Vec<Vec<(u32, f64)>>,
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
        self.simulate(requests, thresholds, length).map(|outcome| outcome.rate)
    }

    /// As [`Shared::throughput`], with the steps that were made.
    ///
    /// # Errors
    /// As [`Shared::throughput`].
    pub fn simulate(&self, requests: u32, thresholds: &[u32], length: Length) -> Result<Outcome, String> {
        let models = self.alone.len();
        let cap = |i: usize| requests.min(self.alone[i].rows_max());
        let fits = thresholds.len() == models
            && thresholds.iter().enumerate().all(|(i, &b)| (1..=cap(i)).contains(&b))
            && thresholds.iter().map(|b| b - 1).sum::<u32>() < requests;
        if !fits {
            return Err(format!("thresholds {thresholds:?} do not fit {requests} requests"));
        }
        let mut run = Run {
            shared: self,
            thresholds,
            walkers: (0..requests).map(|request| Walker::new(length.seed ^ u64::from(request) << 32, models)).collect(),
            waiting: vec![Vec::new(); models],
            running: vec![Vec::new(); models],
            left: vec![0.0; models],
            slower: vec![1.0; models],
            began: vec![0.0; models],
            steps: self.alone.iter().map(|one| vec![(0, 0.0); one.rows_max() as usize]).collect(),
            now: 0.0,
            ways: 0,
            tokens: 0.0,
        };
        run.waiting[0] = (0..requests).collect();
        run.go(length.ways / 10);
        let each = (length.ways / PARTS).max(1);
        let parts: Vec<(f64, f64)> = (0..PARTS).map(|_| run.go(each)).collect();
        Ok(Outcome { rate: Simulated::of_parts(&parts), steps: run.steps })
    }

    /// The same models, their steps so many times as long.
    pub fn scaled(&self, factors: &[f64]) -> Shared {
        let scaled =
            |surfaces: &[Surface]| surfaces.iter().zip(factors).map(|(one, factor)| one.scaled(*factor)).collect();
        Shared { alone: scaled(&self.alone), beside: scaled(&self.beside), ..self.clone() }
    }

    /// What the rows of one request consume at each model, in their order; of a model it never comes to, a decode.
    pub fn lengths(&self) -> Vec<Vec<u32>> {
        let mut lengths = vec![Vec::new(); self.alone.len()];
        let (mut walker, mut at) = (Walker::new(1, lengths.len()), 0);
        for _ in 0..WALK {
            lengths[at].push(walker.consume(at));
            at = walker.go(self, at);
        }
        lengths.iter_mut().filter(|lengths| lengths.is_empty()).for_each(|lengths| lengths.push(1));
        lengths
    }

    fn way(&self, i: usize, mut number: f64) -> usize {
        let row = &self.moves[i];
        for (j, p) in row.iter().enumerate() {
            if number < *p {
                return j;
            }
            number -= p;
        }
        row.iter().rposition(|p| *p > 0.0).unwrap_or(i)
    }
}

impl Walker {
    fn new(seed: u64, models: usize) -> Walker {
        Walker { seed, taken: 0, behind: vec![1; models] }
    }

    /// Tokens of its next row at this model, which is made now.
    fn consume(&mut self, i: usize) -> u32 {
        std::mem::take(&mut self.behind[i]).max(1)
    }

    /// Where it goes from model i.
    fn go(&mut self, shared: &Shared, i: usize) -> usize {
        let draw = |stream| unit(self.seed, self.taken, stream);
        let to = shared.way(i, draw(Stream::Owner));
        let mean = shared.tokens[i][to];
        let kept = mean.floor() as u32 + u32::from(draw(Stream::Token) < mean.fract());
        self.taken = self.taken.wrapping_add(1);
        self.behind.iter_mut().for_each(|behind| *behind += kept);
        to
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
                let batch = waiting.min(self.shared.alone[i].rows_max() as usize);
                self.running[i].extend(self.waiting[i].drain(..batch));
                let walkers = &mut self.walkers;
                let consumed = self.running[i].iter().map(|&request| walkers[request as usize].consume(i)).sum::<u32>();
                let (rows, tokens) = (batch as u32, f64::from(consumed) / batch as f64);
                self.left[i] = self.shared.alone[i].seconds(rows, tokens);
                self.slower[i] = self.shared.beside[i].seconds(rows, tokens) / self.left[i];
                self.began[i] = self.now;
            }
        }
    }

    /// On to the end of the next step, every step at its pace.
    fn advance(&mut self) {
        let models = self.left.len();
        let busy: Vec<usize> = (0..models).filter(|&i| !self.running[i].is_empty()).collect();
        let crowd = (busy.len().saturating_sub(1)) as f64 / (models - 1).max(1) as f64;
        let pace = |i: usize| 1.0 / (1.0 + (self.slower[i] - 1.0) * crowd);
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
        let (count, seconds) = &mut self.steps[i][batch.len() - 1];
        (*count, *seconds) = (*count + 1, *seconds + self.now - self.began[i]);
        for request in batch {
            let to = self.walkers[request as usize].go(self.shared, i);
            self.tokens += self.shared.tokens[i][to];
            self.waiting[to].push(request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::theory::chain::{Reach, throughput};
    use crate::theory::latency::Point;
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
            let alone: Vec<Surface> = alone.into_iter().map(Surface::flat).collect();
            let shared = Shared { beside: alone.clone(), alone, moves, tokens };
            let found = shared.throughput(n, &thresholds, Length { ways: 400_000, seed: 3 }).expect("simulated");
            assert!((found.throughput - exact).abs() < 2.0 * found.error, "{n} {p} {thresholds:?}: {found:?} {exact}");
        }
        let stay = vec![vec![0.0, 1.0], vec![1.0, 0.0]];
        let mut shared = Shared {
            alone: vec![Surface::flat(vec![0.01]); 2],
            beside: vec![Surface::flat(vec![0.02]); 2],
            moves: stay,
            tokens: vec![vec![1.0, 1.0]; 2],
        };
        let at =
            |shared: &Shared, n| shared.throughput(n, &[1, 1], Length { ways: 4000, seed: 1 }).map(|s| s.throughput);
        assert!((at(&shared, 1).expect("one") - 100.0).abs() < 0.1, "{:?}", at(&shared, 1));
        assert!((at(&shared, 4).expect("four") - 100.0).abs() < 0.5, "{:?}", at(&shared, 4));
        let outcome = shared.simulate(4, &[1, 1], Length { ways: 4000, seed: 1 }).expect("four");
        for steps in &outcome.steps {
            let (count, seconds) = steps[0];
            assert!(
                count > 2000 && (seconds / f64::from(count) - 0.02).abs() < 1e-4,
                "each beside the other: {steps:?}"
            );
        }
        let twice = shared.scaled(&[2.0, 2.0]).throughput(4, &[1, 1], Length { ways: 4000, seed: 1 }).expect("four");
        assert!((twice.throughput - 50.0).abs() < 0.5, "{twice:?}");
        shared.beside = shared.alone.clone();
        assert!((at(&shared, 4).expect("four") - 200.0).abs() < 0.5, "{:?}", at(&shared, 4));
        assert!(at(&shared, 1).is_ok() && shared.throughput(1, &[1, 2], Length::default()).is_err());
    }

    /// Bernoulli routing: the large model catches up on 1 / p tokens on average, geometrically spread, and a step that
    /// costs nothing below four tokens and a second for each above costs what that spread says, not what its mean does.
    #[test]
    fn rows_consume_what_others_committed() {
        let p = 0.2;
        let point = |tokens: u32, seconds: f64| Point { rows: 1, tokens, seconds, spread: 0.0 };
        let hinge = [point(1, 1.0), point(4, 1.0), point(5, 2.0), point(6, 3.0)];
        let shared = Shared {
            alone: vec![Surface::flat(vec![1.0]), Surface::new(&hinge, 1)],
            beside: vec![Surface::flat(vec![1.0]), Surface::new(&hinge, 1)],
            moves: vec![vec![1.0 - p, p], vec![1.0, 0.0]],
            tokens: vec![vec![1.0, 0.0], vec![1.0, 0.0]],
        };
        let lengths = shared.lengths();
        assert!(lengths[0].iter().all(|&tokens| tokens == 1));
        let mean = f64::from(lengths[1].iter().sum::<u32>()) / lengths[1].len() as f64;
        assert!((mean * p - 1.0).abs() < 0.05, "{mean}");
        // A cycle: 1 / p steps of the small model, whose last token is dropped, and one of the large model with
        // k tokens, P(k) = p (1 - p)^(k - 1): E max(k - 4, 0) = (1 - p)^4 / p.
        let seconds = 1.0 / p + 1.0 + (1.0 - p).powi(4) / p;
        let found = shared.throughput(1, &[1, 1], Length { ways: 400_000, seed: 5 }).expect("simulated");
        let expected = (1.0 / p) / seconds;
        assert!((found.throughput - expected).abs() < 2.0 * found.error, "{found:?} {expected}");
        assert!(found.error < 0.02 * expected);
    }
}
