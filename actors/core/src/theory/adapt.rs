//! Whether a table of thresholds is planned again, and whether it is adopted. Owner: the Planner. Invariant: the table in
//! force gives way only to one that the throughput model, on what the models do now and at the numbers of live requests
//! seen lately, puts ahead by more than `GAIN_MIN`; so a steady workload keeps its table.
//!
//! Looking is cheap and planning is not: [`Adaptation::look`] compares estimates with those that were planned for last,
//! [`Work::run`] plans and may be done anywhere, [`Adaptation::finish`] decides.

use crate::batching::{Policy, clamp};
use crate::theory::chain::{Reach, throughput};
use crate::theory::decision::Effort;
use crate::theory::observe::Behaviour;
use crate::theory::search::Budget;
use crate::theory::simulate::{Length, simulate};
use crate::theory::system::System;
use crate::theory::table::{Table, discretise, tick};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A server plans for so many live requests at most; for more the thresholds grow in proportion.
pub const PLANNED_MAX: u32 = 64;
/// Steps that every model must have made before anything is concluded from them.
const STEPS_MIN: f64 = 16.0;
/// A new table must be better than the one in force by this part.
const GAIN_MIN: f64 = 0.01;
/// Plans made while serving reach to this many times the live requests seen lately (then to a power of two), and to
/// [`HORIZON_MIN`] at least: most of the work is at the largest N, which may never come.
const HORIZON: u32 = 2;
const HORIZON_MIN: u32 = 8;
/// Numbers of live requests count for so many looks.
const LOOKS: usize = 4;
/// Estimates differ when a probability does by more than this and this part of the smaller one ...
const MOVES_MOVED: (f64, f64) = (0.01, 0.1);
/// ... or tokens on a way that is taken ...
const TOKENS_MOVED: f64 = 0.1;
/// ... or a latency by this part.
const SECONDS_MOVED: f64 = 0.08;
/// A way with a smaller probability than this is not looked at for its tokens.
const RARE: f64 = 0.005;
/// Ways of requests that a throughput beyond the chain is simulated on.
const WAYS: u64 = 200_000;

/// How much work a plan may be while a server starts or runs: chains up to 30,000 states, simulation beyond, no bound of
/// other policies. On one core a table up to [`PLANNED_MAX`] takes two models about a second.
pub fn budget() -> Budget {
    Budget {
        reach: Reach { states: 30_000, transitions: 600_000 },
        exhaustive: 500_000,
        effort: Effort { reach: Reach { states: 0, transitions: 0 }, ..Effort::default() },
        length: Length { ways: WAYS, ..Length::default() },
    }
}

/// The thresholds of a policy for N = 1 .. `live_max` (at most [`PLANNED_MAX`]), as a table.
///
/// # Errors
/// As [`Table::new`], for a policy without models.
pub fn tabled(policy: &dyn Policy, live_max: u32) -> Result<Table, String> {
    Table::new((1..=live_max.clamp(1, PLANNED_MAX)).map(|n| (n, clamp(policy.thresholds(n), n))).collect())
}

/// What was planned last, and for what.
#[derive(Clone, Debug)]
struct Planned {
    behaviours: Vec<Behaviour>,
    /// Largest N.
    horizon: u32,
    table: Arc<Table>,
}

/// Follows the estimates of all models.
#[derive(Debug)]
pub struct Adaptation {
    live_max: u32,
    planned: Option<Planned>,
    lately: VecDeque<u32>,
    /// Numbers of live requests at which the table planned last was compared with the one in force.
    compared: Vec<u32>,
}

/// A plan to make, or one to compare again.
#[derive(Clone, Debug)]
pub struct Work {
    behaviours: Vec<Behaviour>,
    in_force: Arc<Table>,
    planned: Option<Arc<Table>>,
    lately: BTreeMap<u32, u32>,
    horizon: u32,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    planned: Planned,
    lately: Vec<u32>,
    /// Whether the table was planned now.
    pub is_new: bool,
    /// By which part its throughput exceeds that of the table in force.
    pub gain: f64,
}

impl Adaptation {
    /// Nothing seen yet; plans are for up to `live_max` live requests, at most [`PLANNED_MAX`].
    pub fn new(live_max: u32) -> Self {
        Adaptation {
            live_max: live_max.clamp(1, PLANNED_MAX),
            planned: None,
            lately: VecDeque::new(),
            compared: Vec::new(),
        }
    }

    /// With so many live requests, this table in force and these estimates (none for a model that was not heard of):
    /// whether there is something to plan or to compare.
    pub fn look(&mut self, live: u32, in_force: &Arc<Table>, estimates: &[Option<Arc<Behaviour>>]) -> Option<Work> {
        if live == 0 {
            return None;
        }
        self.lately.push_back(live.min(self.live_max));
        if self.lately.len() > LOOKS {
            self.lately.pop_front();
        }
        let ready = |estimate: &Arc<Behaviour>| estimate.steps >= STEPS_MIN && !estimate.seconds.is_empty();
        let behaviours: Vec<Behaviour> = estimates
            .iter()
            .map(|estimate| estimate.as_ref().filter(|estimate| ready(estimate)).map(|estimate| (**estimate).clone()))
            .collect::<Option<_>>()?;
        let mut lately: BTreeMap<u32, u32> = BTreeMap::new();
        self.lately.iter().for_each(|&n| *lately.entry(n).or_default() += 1);
        let most = lately.keys().copied().max().unwrap_or(1);
        let holds = |planned: &&Planned| most <= planned.horizon && !has_moved(&planned.behaviours, &behaviours, most);
        let same = self.planned.as_ref().filter(holds);
        let planned = same.map(|planned| Arc::clone(&planned.table));
        if let Some(table) = &planned {
            let seen = lately.keys().all(|n| self.compared.contains(n));
            if seen || **table == **in_force {
                return None;
            }
        }
        let wide = (HORIZON * most).next_power_of_two().max(HORIZON_MIN).min(self.live_max);
        let (behaviours, horizon) =
            same.map_or((behaviours, wide), |planned| (planned.behaviours.clone(), planned.horizon));
        Some(Work { behaviours, in_force: Arc::clone(in_force), planned, lately, horizon })
    }

    /// Takes what came of a [`Work`]: the table to adopt, if it is better by enough.
    pub fn finish(&mut self, outcome: Outcome) -> Option<Arc<Table>> {
        let table = Arc::clone(&outcome.planned.table);
        self.compared = outcome.lately;
        self.planned = Some(outcome.planned);
        (outcome.gain > GAIN_MIN).then_some(table)
    }
}

impl Work {
    /// Plans and compares. Pure, and long: not for a thread that serves.
    ///
    /// # Errors
    /// One line when the estimates make no system.
    pub fn run(self) -> Result<Outcome, String> {
        let Work { behaviours, in_force, planned, lately, horizon } = self;
        let is_new = planned.is_none();
        let table = match planned {
            Some(table) => table,
            None => Arc::new(Table::plan(&behaviours, horizon, budget())?),
        };
        let total = |table: &Table| -> Result<f64, String> {
            lately.iter().map(|(&n, &times)| Ok(f64::from(times) * rate(table, &discretise(&behaviours, n)?))).sum()
        };
        let (new, old) = (total(&table)?, total(&in_force)?);
        let gain = if old > 0.0 { new / old - 1.0 } else { 0.0 };
        let planned = Planned { behaviours, horizon, table };
        Ok(Outcome { planned, lately: lately.into_keys().collect(), is_new, gain })
    }
}

/// T(B) in tokens per second: what models that behave so make of `live` requests under these thresholds, as batchers follow
/// them; within 2 % where it is simulated. It may take hundredths of a second: not for a thread that serves.
///
/// # Errors
/// One line when the estimates make no system.
pub fn predict(behaviours: &[Behaviour], live: u32, thresholds: &[u32]) -> Result<f64, String> {
    let system = discretise(behaviours, live)?;
    let (reach, length) =
        (Reach { states: 2_000, transitions: 40_000 }, Length { ways: WAYS / 10, ..Length::default() });
    Ok(rate_under(thresholds.to_vec(), &system, (reach, length)) / tick(behaviours, live)?)
}

/// T of a table for a system, as batchers follow it: clamped, and never waiting for more than a batch takes.
fn rate(table: &Table, system: &System) -> f64 {
    let Budget { reach, length, .. } = budget();
    rate_under(table.thresholds(system.requests()), system, (reach, length))
}

fn rate_under(thresholds: Vec<u32>, system: &System, (reach, length): (Reach, Length)) -> f64 {
    let mut thresholds = clamp(thresholds, system.requests());
    thresholds.iter_mut().enumerate().for_each(|(i, b)| *b = (*b).min(system.cap(i)));
    let exact = throughput(system, &thresholds, reach).map(|exact| exact.throughput);
    let simulated = || simulate(system, &thresholds, length).map(|simulated| simulated.throughput);
    exact.or_else(|_| simulated()).unwrap_or(0.0)
}

/// Whether estimates differ by more than chance makes them, for batches up to `rows`.
fn has_moved(before: &[Behaviour], now: &[Behaviour], rows: u32) -> bool {
    before.len() != now.len() || before.iter().zip(now).any(|(before, now)| one_has_moved(before, now, rows))
}

fn one_has_moved(before: &Behaviour, now: &Behaviour, rows: u32) -> bool {
    let (floor, part) = MOVES_MOVED;
    let moves = before.moves.iter().zip(&now.moves).any(|(p, q)| (p - q).abs() > floor + part * p.min(*q));
    let tokens = before.tokens.iter().zip(&now.tokens).zip(&now.moves);
    let tokens = tokens.into_iter().any(|((c, d), p)| *p > RARE && (c - d).abs() > TOKENS_MOVED);
    let sizes = std::iter::successors(Some(1usize), |b| Some(b * 2)).take_while(|&b| b <= rows as usize);
    let at = |behaviour: &Behaviour, b: usize| behaviour.seconds.get(b - 1).copied();
    let seconds = |b: usize| match (at(before, b), at(now, b)) {
        (Some(s), Some(t)) => (s - t).abs() > SECONDS_MOVED * s.min(t),
        (None, None) => false,
        _ => true,
    };
    moves || tokens || sizes.into_iter().any(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batching::Eager;

    /// Two models of 6.0 and 27.9 ms, the first handing over with probability p.
    fn pair(p: f64) -> Vec<Option<Arc<Behaviour>>> {
        let one = |seconds: f64, moves: [f64; 2], tokens: [f64; 2]| {
            let (moves, tokens) = (moves.to_vec(), tokens.to_vec());
            Some(Arc::new(Behaviour { steps: 100.0, seconds: vec![seconds; 16], moves, tokens }))
        };
        vec![one(0.006, [1.0 - p, p], [1.0, 0.0]), one(0.0279, [1.0, 0.0], [1.0, 0.0])]
    }

    fn eager() -> Arc<Table> {
        Arc::new(tabled(&Eager(2), 16).unwrap())
    }

    /// One request at a time spends 6.0 ms on each visit of the small model and 27.9 ms on each of the large one.
    #[test]
    fn predictions_are_tokens_per_second() {
        let models: Vec<Behaviour> = pair(0.35).into_iter().map(|one| (*one.unwrap()).clone()).collect();
        let by_hand = (0.65 + 0.35) / (0.006 + 0.35 * 0.0279);
        let predicted = predict(&models, 1, &[1, 1]).unwrap();
        assert!((predicted / by_hand - 1.0).abs() < 0.03, "{predicted} and {by_hand}");
        let four = predict(&models, 4, &[1, 3]).unwrap();
        assert!(four > 1.05 * predict(&models, 4, &[1, 1]).unwrap(), "{four}");
        assert!(predict(&[Behaviour::default()], 4, &[1]).is_err());
    }

    #[test]
    fn a_better_table_is_adopted_once() {
        let mut adaptation = Adaptation::new(16);
        let work = adaptation.look(4, &eager(), &pair(0.35)).unwrap();
        let outcome = work.run().unwrap();
        assert!(outcome.is_new && outcome.gain > 0.05, "{outcome:?}");
        let table = adaptation.finish(outcome).unwrap();
        assert_eq!(table.thresholds(4), [1, 3]);
        assert!(adaptation.look(4, &table, &pair(0.35)).is_none());
        assert!(adaptation.look(4, &table, &pair(0.36)).is_none(), "within chance");
        assert!(adaptation.look(8, &table, &pair(0.35)).is_none(), "planned ahead");
    }

    #[test]
    fn plans_reach_as_far_as_the_load_may_grow_soon() {
        let mut adaptation = Adaptation::new(12);
        let outcome = adaptation.look(3, &eager(), &pair(0.35)).unwrap().run().unwrap();
        let table = adaptation.finish(outcome).unwrap();
        assert_eq!(table.rows().last().unwrap().0, 8);
        let outcome = adaptation.look(9, &table, &pair(0.35)).unwrap().run().unwrap();
        assert!(outcome.is_new);
        assert_eq!(outcome.planned.table.rows().last().unwrap().0, 12);
    }

    #[test]
    fn what_gains_nothing_at_one_load_is_compared_again_at_another() {
        let mut adaptation = Adaptation::new(16);
        let outcome = adaptation.look(1, &eager(), &pair(0.35)).unwrap().run().unwrap();
        assert!(adaptation.finish(outcome).is_none(), "one request waits for nobody");
        assert!(adaptation.look(1, &eager(), &pair(0.35)).is_none());
        let outcome = adaptation.look(8, &eager(), &pair(0.35)).unwrap().run().unwrap();
        assert!(!outcome.is_new);
        assert!(adaptation.finish(outcome).is_some());
    }

    #[test]
    fn a_shift_is_planned_for() {
        let mut adaptation = Adaptation::new(16);
        let outcome = adaptation.look(8, &eager(), &pair(0.1)).unwrap().run().unwrap();
        assert!(adaptation.finish(outcome).is_none(), "at 0.1 the gain at 8 is too small");
        let outcome = adaptation.look(8, &eager(), &pair(0.4)).unwrap().run().unwrap();
        assert!(outcome.is_new && adaptation.finish(outcome).is_some());
    }

    #[test]
    fn nothing_is_concluded_from_little() {
        let mut adaptation = Adaptation::new(16);
        let mut few = pair(0.35);
        few[1] = Some(Arc::new(Behaviour { steps: 3.0, ..(**few[1].as_ref().unwrap()).clone() }));
        assert!(adaptation.look(8, &eager(), &few).is_none());
        few[1] = None;
        assert!(adaptation.look(8, &eager(), &few).is_none());
        assert!(adaptation.look(0, &eager(), &pair(0.35)).is_none(), "nobody is there");
    }
}
