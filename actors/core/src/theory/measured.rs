//! What a measured system does: thresholds and tokens per second for it. Owner: planners. Invariant: whatever is said to be
//! best was compared with starting eagerly by the same simulation.
//!
//! Models that share cores slow each other down, so a step has two latencies: alone, and beside the others at work. What
//! that means for a throughput is simulated step by step ([`crate::theory::shared`]). The chain, which finds the
//! thresholds, knows one latency per batch: with x the mean share of the other models that run while model i does,
//! `L_i = alone / ((1 - x) + x alone / beside)`: work goes on at full speed for 1 - x of the time and at `alone / beside`
//! of it for x. x depends on the latencies in turn, so [`Measured::settle`] iterates both to a fixed point. The best few
//! thresholds of the chain are then compared by simulation.
//!
//! A request that comes back to a model brings tokens to catch up on, now one and now forty, and a step gets slower only
//! where many come together. So the simulation follows what each row consumes, and the chain's latency of a batch is the
//! mean over what rows of one request consume on its way.

use crate::batching::clamp;
use crate::theory::chain::{Reach, overlap};
use crate::theory::latency::Surface;
use crate::theory::observe::{Behaviour, Total};
use crate::theory::search::{Budget, Plan, plan};
use crate::theory::shared::Shared;
use crate::theory::simulate::{Length, Simulated};
use crate::theory::system::System;
use crate::theory::table::{Table, discretise, grid};
use serde::Serialize;

/// Rounds of the fixed point at most, and the change of x that ends it.
const ROUNDS: usize = 40;
const SETTLED: f64 = 1e-3;
/// x is found for this many requests at most: with more, every model runs nearly always and x changes little.
const OVERLAP_REQUESTS: u32 = 16;
/// Looks at B* with the x of B* before.
const REPLANS: usize = 3;
/// Thresholds of the chain that are compared by simulation.
const CANDIDATES: usize = 6;
/// Simulations of a prediction.
const LENGTH: Length = Length { ways: 200_000, seed: 1 };
/// Rounds of scaling: company changes a little with the latencies.
const RESCALES: usize = 3;
/// 97.5 % point of the normal distribution.
const NORMAL: f64 = 1.96;

/// A system with what was measured of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    shared: Shared,
    /// Rows behind the ways of each model.
    observations: Vec<u64>,
    /// `[i][b - 1]`: mean seconds of a step with b requests, alone and beside others.
    alone: Vec<Vec<f64>>,
    beside: Vec<Vec<f64>>,
}

/// The fixed point between latencies and overlap.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    /// The models.
    pub behaviours: Vec<Behaviour>,
    /// x of every model.
    pub overlap: Vec<f64>,
    /// The same as a system.
    pub system: System,
    /// Seconds of a tick of that system.
    pub tick: f64,
}

/// Tokens per second under some thresholds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// Thresholds.
    #[serde(rename = "B")]
    pub thresholds: Vec<u32>,
    /// By simulation.
    pub tokens_per_second: f64,
    /// Half of its 95 % confidence interval.
    pub error: f64,
}

/// The answer for one N.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outlook {
    /// Live requests.
    #[serde(rename = "N")]
    pub requests: u32,
    /// The best of `rows`.
    pub best: Predicted,
    /// Starting whenever anybody waits.
    pub eager: Predicted,
    /// All that were simulated, the best first.
    pub rows: Vec<Predicted>,
    /// Mean share of the other models that run while a model does, under `best`.
    pub overlap: Vec<f64>,
    /// 95 % bound of what `best` is off by, as a part of it, because the ways were counted over so few rows.
    pub ways_error: f64,
    /// What the chain says with latencies at that overlap.
    pub chain: Plan,
}

impl Measured {
    /// A system whose ways were counted over so many rows of each model.
    pub fn new(shared: Shared, observations: Vec<u64>) -> Measured {
        let lengths = shared.lengths();
        let means = |surfaces: &[Surface]| surfaces.iter().zip(&lengths).map(|(one, walk)| mean(one, walk)).collect();
        Measured { alone: means(&shared.alone), beside: means(&shared.beside), shared, observations }
    }

    /// What each model does when it overlaps with others for this share of its time (0 to 1 per model).
    pub fn behaviours(&self, overlap: &[f64]) -> Vec<Behaviour> {
        let one = |(i, x): (usize, &f64)| {
            let each = self.alone[i].iter().zip(&self.beside[i]);
            Behaviour {
                steps: self.observations[i] as f64,
                seconds: each.map(|(alone, beside)| alone / ((1.0 - x) + x * alone / beside)).collect(),
                moves: self.shared.moves[i].clone(),
                tokens: self.shared.tokens[i].clone(),
            }
        };
        overlap.iter().enumerate().map(one).collect()
    }

    /// Latencies and overlap that agree with each other for `requests` live requests under these thresholds.
    ///
    /// # Errors
    /// Thresholds that do not fit, ways that make no system.
    pub fn settle(&self, requests: u32, thresholds: &[u32]) -> Result<Settled, String> {
        let reach: Reach = Budget::default().reach;
        let few = requests.min(OVERLAP_REQUESTS);
        let thresholds = clamp(thresholds.to_vec(), few);
        let mut x = vec![0.5; self.alone.len()];
        for _ in 0..ROUNDS {
            let system = discretise(&self.behaviours(&x), few)?;
            let next = overlap(&system, &thresholds, reach)?;
            let moved = x.iter().zip(&next).map(|(x, next)| (x - next).abs()).fold(0.0, f64::max);
            x.iter_mut().zip(next).for_each(|(x, next)| *x = 0.5 * (*x + next));
            if moved < SETTLED {
                break;
            }
        }
        let behaviours = self.behaviours(&x);
        let system = discretise(&behaviours, requests)?;
        let tick = tick(&behaviours, &system);
        Ok(Settled { behaviours, overlap: x, system, tick })
    }

    /// The best thresholds for `requests` live requests: the chain's best few, with the latencies that hold under them,
    /// compared with starting eagerly by simulation.
    ///
    /// # Errors
    /// As [`Measured::settle`].
    pub fn plan(&self, requests: u32, budget: Budget) -> Result<Outlook, String> {
        let mut outlook = self.compare(requests, budget)?;
        outlook.ways_error = self.ways_error(requests, &outlook.best)?;
        Ok(outlook)
    }

    /// As [`Measured::plan`], without the error of the ways.
    fn compare(&self, requests: u32, budget: Budget) -> Result<Outlook, String> {
        let eager = vec![1; self.alone.len()];
        let mut settled = self.settle(requests, &eager)?;
        let mut chain = plan(&settled.system, budget);
        for _ in 0..REPLANS {
            let again = self.settle(requests, &chain.best)?;
            let same = again.system == settled.system;
            settled = again;
            if same {
                break;
            }
            let before = std::mem::replace(&mut chain, plan(&settled.system, budget));
            if chain.best == before.best {
                break;
            }
        }
        let mut rows: Vec<_> = chain.table.iter().collect();
        rows.sort_by(|a, b| b.tokens_per_tick.total_cmp(&a.tokens_per_tick));
        let mut candidates: Vec<Vec<u32>> = rows.iter().take(CANDIDATES).map(|row| row.thresholds.clone()).collect();
        if !candidates.contains(&eager) {
            candidates.push(eager.clone());
        }
        let mut rows = Vec::new();
        for thresholds in candidates {
            let Simulated { throughput, error } = self.predict(requests, &thresholds)?;
            rows.push(Predicted { thresholds, tokens_per_second: throughput, error });
        }
        let of_eager = rows.iter().position(|row| row.thresholds == eager).map(|at| rows[at].clone());
        rows.sort_by(|a, b| b.tokens_per_second.total_cmp(&a.tokens_per_second));
        let best = rows[0].clone();
        let eager = of_eager.unwrap_or_else(|| best.clone());
        Ok(Outlook { requests, best, eager, rows, overlap: settled.overlap, ways_error: 0.0, chain })
    }

    /// Thresholds for every number of live requests up to `live_max`, each N with its own overlap.
    ///
    /// # Errors
    /// As [`Measured::settle`].
    pub fn table(&self, live_max: u32, budget: Budget) -> Result<Table, String> {
        let rows = grid(live_max).into_iter().map(|n| Ok((n, self.compare(n, budget)?.best.thresholds)));
        Table::new(rows.collect::<Result<_, String>>()?)
    }

    /// Tokens per second under these thresholds, by simulation.
    ///
    /// # Errors
    /// Thresholds that do not fit.
    pub fn predict(&self, requests: u32, thresholds: &[u32]) -> Result<Simulated, String> {
        self.shared.throughput(requests, thresholds, LENGTH)
    }

    /// The same models with requests that go these ways: P and C.
    pub fn with_ways(&self, moves: Vec<Vec<f64>>, tokens: Vec<Vec<f64>>) -> Measured {
        let shared = Shared { moves, tokens, ..self.shared.clone() };
        Measured::new(shared, self.observations.clone())
    }

    /// The same system with steps scaled, model by model, until their mean is that of steps that were seen under these
    /// thresholds (`[i][b - 1]`); a model without such is left as it is.
    ///
    /// # Errors
    /// Thresholds that do not fit.
    pub fn with_steps(&self, (requests, thresholds): (u32, &[u32]), seen: &[Vec<Total>]) -> Result<Measured, String> {
        let mut shared = self.shared.clone();
        for _ in 0..RESCALES {
            let simulated = shared.simulate(requests, thresholds, LENGTH)?.steps;
            let factors: Vec<f64> =
                simulated.iter().zip(seen).map(|(simulated, seen)| factor(simulated, seen)).collect();
            shared = shared.scaled(&factors);
        }
        Ok(Measured::new(shared, self.observations.clone()))
    }

    /// Mean seconds of the longest step with up to so many requests.
    pub fn longest(&self, requests: u32) -> f64 {
        let few = |row: &Vec<f64>| row.iter().take(requests as usize).copied().fold(0.0, f64::max);
        self.alone.iter().chain(&self.beside).map(few).fold(0.0, f64::max)
    }

    /// By how much a prediction changes, as a part of it, when every share is off by its 95 % bound (the square root of the
    /// sum of squares).
    fn ways_error(&self, requests: u32, predicted: &Predicted) -> Result<f64, String> {
        let mut sum = 0.0;
        for (i, row) in self.shared.moves.iter().enumerate() {
            // Where nothing was counted the share is what the algorithm says of itself.
            for (j, &p) in row.iter().enumerate().filter(|&(j, p)| j != i && *p > 0.0 && *p < 1.0) {
                let Some(n) = self.observations.get(i).filter(|n| **n > 0) else { continue };
                let bound = NORMAL * (p * (1.0 - p) / *n as f64).sqrt();
                let q = (p + bound).min(0.5 * (1.0 + p));
                let mut shared = self.shared.clone();
                let rest = (1.0 - q) / (1.0 - p);
                shared.moves[i]
                    .iter_mut()
                    .enumerate()
                    .for_each(|(k, share)| *share = if k == j { q } else { *share * rest });
                let moved = shared.throughput(requests, &predicted.thresholds, LENGTH)?.throughput;
                sum += (moved / predicted.tokens_per_second - 1.0).powi(2);
            }
        }
        Ok(sum.sqrt())
    }
}

/// How many times as long steps took as simulated ones, each batch size in the share that was seen.
fn factor(simulated: &[(u32, f64)], seen: &[Total]) -> f64 {
    let both = simulated.iter().zip(seen).filter(|((count, _), seen)| *count > 0 && seen.steps > 0);
    let (said, took) = both.fold((0.0, 0.0), |(said, took), ((count, seconds), seen)| {
        (said + seen.steps as f64 * seconds / f64::from(*count), took + seen.seconds)
    });
    if said > 0.0 { took / said } else { 1.0 }
}

/// `[b - 1]`: mean seconds of a step with b rows that consume what these did, one after another.
fn mean(surface: &Surface, walk: &[u32]) -> Vec<f64> {
    let of = |rows: u32| {
        let parts = walk.chunks_exact(rows as usize);
        // A model that is hardly ever visited: its rows are all alike then.
        let (sum, count) = match parts.len() {
            0 => (surface.seconds(rows, average(walk)), 1),
            count => (parts.map(|part| surface.seconds(rows, average(part))).sum(), count),
        };
        sum / count as f64
    };
    (1..=surface.rows_max()).map(of).collect()
}

fn average(lengths: &[u32]) -> f64 {
    f64::from(lengths.iter().sum::<u32>()) / lengths.len() as f64
}

/// Seconds of a tick: those of all steps together over their ticks, so that rounding up and down cancels.
fn tick(behaviours: &[Behaviour], system: &System) -> f64 {
    let steps = (0..system.models()).flat_map(|i| (1..=system.cap(i)).map(move |b| (i, b)));
    let (seconds, ticks) = steps.fold((0.0, 0.0), |(seconds, ticks), (i, b)| {
        (seconds + behaviours[i].seconds[b as usize - 1], ticks + f64::from(system.ticks(i, b)))
    });
    seconds / ticks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::theory::latency::Point;

    /// Steps of 10 and 40 ms; beside the other they take `slower` times as long.
    fn pair(p: f64, slower: f64) -> Measured {
        let surface = |seconds: f64| Surface::flat(vec![seconds; 8]);
        let shared = Shared {
            alone: vec![surface(0.010), surface(0.040)],
            beside: vec![surface(0.010 * slower), surface(0.040 * slower)],
            moves: vec![vec![1.0 - p, p], vec![1.0, 0.0]],
            tokens: vec![vec![1.0, 0.0], vec![1.0, 1.0]],
        };
        Measured::new(shared, vec![1000; 2])
    }

    /// One mean latency per model comes near to what changes of pace within a step do, and lies between the extremes.
    #[test]
    fn the_fixed_point_is_close_to_shared_cores() {
        for (n, p, slower, thresholds) in [
            (1, 0.35, 2.0, [1, 1]),
            (2, 0.1, 2.0, [1, 1]),
            (4, 0.1, 2.0, [1, 2]),
            (4, 0.35, 1.7, [1, 1]),
            (8, 0.35, 2.0, [1, 3]),
            (8, 0.1, 1.3, [1, 1]),
        ] {
            let profile = pair(p, slower);
            let exact = |behaviours: &[Behaviour]| {
                let system = discretise(behaviours, n).expect("a system");
                let exact = crate::theory::chain::throughput(&system, &thresholds, Reach::default()).expect("T(B)");
                exact.throughput / tick(behaviours, &system)
            };
            let settled = profile.settle(n, &thresholds).expect("it settles");
            let (fixed, shared) = (exact(&settled.behaviours), profile.predict(n, &thresholds).expect("simulated"));
            let error = fixed / shared.throughput - 1.0;
            assert!(error.abs() < 0.10, "N = {n}, p = {p}, {slower}: {fixed} against {shared:?}, {error:+.3}");
            let at = |x: f64| exact(&profile.behaviours(&[x, x]));
            assert!(at(1.0) * 0.99 <= fixed && fixed <= at(0.0) * 1.01, "{} {fixed} {}", at(1.0), at(0.0));
        }
    }

    #[test]
    fn one_request_never_overlaps_and_many_nearly_always_do() {
        let at = |n: u32| pair(0.35, 2.0).settle(n, &[1, 1]).expect("it settles");
        let alone = at(1);
        assert!(alone.overlap.iter().all(|x| *x < 0.01), "{:?}", alone.overlap);
        assert!((alone.behaviours[0].seconds[0] - 0.010).abs() < 1e-3);
        let many = at(8);
        assert!(many.overlap.iter().all(|x| *x > 0.8), "{:?}", many.overlap);
        let again = overlap(&many.system, &[1, 1], Reach::default()).expect("shares");
        assert!(many.overlap.iter().zip(&again).all(|(x, y)| (x - y).abs() < 0.02), "{:?} {again:?}", many.overlap);
    }

    #[test]
    fn tables_hold_feasible_thresholds_for_every_n() {
        let table = pair(0.35, 1.8).table(5, Budget::default()).expect("a table");
        for (n, thresholds) in table.rows() {
            assert!(thresholds.iter().map(|b| b - 1).sum::<u32>() < *n, "{n} {thresholds:?}");
        }
        assert_eq!((table.rows().len(), table.models()), (5, 2));
    }

    /// Ten times the rows, a third of the error; a share that was not counted is exact.
    #[test]
    fn few_rows_leave_a_prediction_open() {
        let error = |rows: u64| {
            let measured = Measured { observations: vec![rows; 2], ..pair(0.1, 1.0) };
            measured.plan(2, Budget::default()).expect("a plan").ways_error
        };
        let (few, many) = (error(200), error(2000));
        assert!(few > 0.05 && (2.5..4.5).contains(&(few / many)), "{few} {many}");
        assert_eq!(error(0), 0.0);
    }

    /// Whatever the true latencies are a multiple of, the steps of a run tell it.
    #[test]
    fn steps_that_were_seen_scale_the_system() {
        let (known, truth) = (pair(0.3, 1.8), pair(0.3, 1.8).shared.scaled(&[1.3, 0.8]));
        let seen = truth.simulate(4, &[1, 2], LENGTH).expect("simulated");
        let total = |&(steps, seconds): &(u32, f64)| Total { steps: u64::from(steps), seconds };
        let steps: Vec<Vec<Total>> = seen.steps.iter().map(|steps| steps.iter().map(total).collect()).collect();
        let scaled = known.with_steps((4, &[1, 2]), &steps).and_then(|one| one.predict(4, &[1, 2])).expect("scaled");
        assert!((scaled.throughput / seen.rate.throughput - 1.0).abs() < 0.01, "{scaled:?} {seen:?}");
        let same = known.with_steps((4, &[1, 2]), &[vec![], vec![]]).expect("nothing was seen");
        assert_eq!(same, known);
    }

    /// The chain's latency of a batch is the mean over what rows consume, not the latency of the mean.
    #[test]
    fn a_batch_costs_what_its_rows_cost_on_average() {
        let point = |tokens: u32, seconds: f64| Point { rows: 1, tokens, seconds, spread: 0.0 };
        let hinge = Surface::new(&[point(1, 1.0), point(4, 1.0), point(8, 5.0)], 2);
        assert_eq!(mean(&hinge, &[1, 7, 3, 5]), [(1.0 + 4.0 + 1.0 + 2.0) / 4.0, 1.0]);
        assert_eq!(mean(&hinge, &[5])[1], 2.0, "fewer rows than a batch");
    }
}
