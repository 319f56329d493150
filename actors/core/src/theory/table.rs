//! Thresholds for every N, planned ahead. Owner: whoever plans; batchers read. Invariant: a table answers for any N, so
//! a batcher never waits for the planner.

use crate::theory::observe::Behaviour;
use crate::theory::search::{Budget, plan};
use crate::theory::system::System;
use serde::{Deserialize, Serialize};

/// Largest number of ticks of a step that a plan from measured seconds works with; more give no better thresholds and
/// much larger chains.
const TICKS_MAX: f64 = 48.0;
/// Rounding of latencies to ticks that is taken for exact.
const ROUNDING: f64 = 0.03;

/// Thresholds by the number of live requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// (N, B), ascending in N, at least one.
    rows: Vec<(u32, Vec<u32>)>,
}

impl Table {
    /// A table of these rows.
    ///
    /// # Errors
    /// One line when there is none, when N does not ascend from at least 1, or when a B is 0 or of another length.
    pub fn new(rows: Vec<(u32, Vec<u32>)>) -> Result<Table, String> {
        let Some((first, thresholds)) = rows.first() else { return Err("the table of thresholds is empty".into()) };
        if *first == 0 || rows.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
            return Err("the table of thresholds must ascend in N from at least 1".into());
        }
        let models = thresholds.len();
        match rows.iter().find(|(_, b)| b.len() != models || b.contains(&0)) {
            Some((n, b)) => Err(format!("thresholds {b:?} for N = {n}: {models} numbers from 1 are needed")),
            None => Ok(Table { rows }),
        }
    }

    /// Plans for N = 1 .. `live_max`: every N up to 8, then about every fifth more.
    ///
    /// # Errors
    /// As [`discretise`].
    pub fn plan(behaviours: &[Behaviour], live_max: u32, budget: Budget) -> Result<Table, String> {
        let mut rows = Vec::new();
        for n in grid(live_max) {
            rows.push((n, plan(&discretise(behaviours, n)?, budget).best));
        }
        Table::new(rows)
    }

    /// M.
    pub fn models(&self) -> usize {
        self.rows.first().map_or(0, |(_, thresholds)| thresholds.len())
    }

    /// The rows.
    pub fn rows(&self) -> &[(u32, Vec<u32>)] {
        &self.rows
    }

    /// B for so many live requests: on the line between the rows beside it, in proportion beyond the last.
    pub fn thresholds(&self, live: u32) -> Vec<u32> {
        let after = self.rows.partition_point(|(n, _)| *n < live);
        let between = |(n, b): (f64, &[u32]), (m, c): (f64, &[u32])| {
            let t = (f64::from(live) - n) / (m - n);
            b.iter().zip(c).map(|(&b, &c)| (f64::from(b) + t * (f64::from(c) - f64::from(b))).round() as u32).collect()
        };
        match (after.checked_sub(1).map(|at| &self.rows[at]), self.rows.get(after)) {
            (Some((n, b)), Some((m, c))) => between((f64::from(*n), b), (f64::from(*m), c)),
            (None, Some((_, b))) => b.clone(),
            (Some((n, b)), None) => {
                let scale = f64::from(live) / f64::from(*n);
                b.iter().map(|&b| (1.0 + f64::from(b - 1) * scale).round() as u32).collect()
            }
            (None, None) => Vec::new(),
        }
    }
}

/// The N that are planned for.
pub(crate) fn grid(live_max: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (1..=live_max.clamp(1, 8)).collect();
    while let Some(&last) = all.last().filter(|&&last| last < live_max) {
        all.push((last + last.div_ceil(5)).min(live_max));
    }
    all
}

/// The system of `requests` requests between models that behave so, seconds rounded to the longest tick that keeps every
/// latency within 3 % or the longest step within 48 ticks.
///
/// # Errors
/// One line when a model has no latency, or when P or C are malformed.
pub fn discretise(behaviours: &[Behaviour], requests: u32) -> Result<System, String> {
    let tick = tick(behaviours, requests)?;
    let ticks = |behaviour: &Behaviour| behaviour.seconds.iter().map(|s| (s / tick).round().max(1.0) as u32).collect();
    System::new(
        requests,
        behaviours.iter().map(ticks).collect(),
        behaviours.iter().map(|behaviour| behaviour.moves.clone()).collect(),
        behaviours.iter().map(|behaviour| behaviour.tokens.clone()).collect(),
    )
}

/// Seconds of a tick of [`discretise`].
///
/// # Errors
/// One line when a model has no latency.
pub fn tick(behaviours: &[Behaviour], requests: u32) -> Result<f64, String> {
    let seconds = || behaviours.iter().flat_map(|behaviour| behaviour.seconds.iter().take(requests as usize));
    let (least, most) = seconds().fold((f64::INFINITY, 0.0_f64), |(least, most), &s| (least.min(s), most.max(s)));
    if let Some(i) = behaviours.iter().position(|behaviour| behaviour.seconds.is_empty()) {
        return Err(format!("model {i} has no latency; measure at least a step with 1 request"));
    }
    if !(least > 0.0 && most.is_finite()) {
        return Err(format!("latencies go from {least} to {most} seconds; they must be above 0 and finite"));
    }
    let error = |tick: f64| seconds().map(|s| ((s / tick).round().max(1.0) * tick / s - 1.0).abs()).fold(0.0, f64::max);
    let finest = (TICKS_MAX * least / most).floor().max(1.0) as u32;
    let tick = (1..=finest).map(|parts| least / f64::from(parts)).find(|&tick| error(tick) <= ROUNDING);
    Ok(tick.unwrap_or(least / f64::from(finest)).max(most / 60_000.0))
}
