//! What was measured of a launch file's models beforehand, and what follows for its system. Owner: `tokenrouter profile`
//! writes it, planners read. Invariant: a [`Profile`] that was read is complete: names are unique, every model has a step
//! with 1 request and 1 token, every number is finite and positive where it must be.
//!
//! Models that share cores slow each other down, so a step has two latencies: alone, and beside the others at work. What
//! that means for a throughput is simulated step by step ([`crate::theory::shared`]). The chain, which finds the
//! thresholds, knows one latency per batch: with x the mean share of the other models that run while model i does,
//! `L_i = alone / ((1 - x) + x alone / beside)`: work goes on at full speed for 1 - x of the time and at `alone / beside`
//! of it for x. x depends on the latencies in turn, so [`Profile::settle`] iterates both to a fixed point. The best few
//! thresholds of the chain are then compared by simulation.
//!
//! A request that comes back to a model brings tokens to catch up on. `L_i(b)` is read at the mean number of tokens that
//! a row consumed in the routed run, between the measured numbers on a straight line.

use crate::theory::chain::{Reach, overlap};
use crate::theory::observe::Behaviour;
use crate::theory::search::{Budget, Plan, plan};
use crate::theory::shared::Shared;
use crate::theory::simulate::{Length, Simulated};
use crate::theory::system::System;
use crate::theory::table::{Table, discretise, grid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The version that is written and read.
pub const VERSION: u32 = 1;
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

/// Measurements of all models of a launch file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`VERSION`].
    pub version: u32,
    /// The models, in the router's order at that time.
    pub models: Vec<ModelProfile>,
}

/// Measurements of one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelProfile {
    /// Its name in the launch file.
    pub name: String,
    /// Largest batch of its executor.
    pub rows_max: u32,
    /// Steps with nothing else at work.
    pub alone: Vec<Point>,
    /// Steps while every other model steps without a pause; empty for a single model.
    pub beside: Vec<Point>,
    /// Its row of P and of C, by model name; names that are missing have no share.
    pub ways: BTreeMap<String, Way>,
    /// Mean tokens that a row consumed, prompts apart: 1 for requests that stay, more for those that come back.
    pub row_tokens: f64,
    /// Rows behind `ways` and `row_tokens`.
    pub observations: u64,
}

/// A step as measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Requests in the step.
    pub rows: u32,
    /// Tokens that each consumes: 1 is a decode, more an extend.
    pub tokens: u32,
    /// Mean of the repetitions.
    pub seconds: f64,
    /// Half the range from the 10th to the 90th percentile, as a part of `seconds`.
    pub spread: f64,
}

/// Where requests go after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Way {
    /// Probability.
    pub share: f64,
    /// Mean tokens committed then.
    pub tokens: f64,
}

/// The fixed point between latencies and overlap.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    /// The models, in the order asked for.
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
    /// What the chain says with latencies at that overlap.
    pub chain: Plan,
}

impl Profile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// One line that names the file and what is wrong.
    pub fn read(path: &Path) -> Result<Profile, String> {
        let wrong = |problem: &dyn std::fmt::Display| format!("profile {}: {problem}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
        let profile: Profile = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
        profile.check().map_err(|problem| wrong(&problem))?;
        Ok(profile)
    }

    /// Whether it is complete.
    ///
    /// # Errors
    /// One line that names the model and what is wrong.
    pub fn check(&self) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!("version is {}; this program reads {VERSION}; measure again", self.version));
        }
        if self.models.is_empty() {
            return Err("it has no models".into());
        }
        for (index, model) in self.models.iter().enumerate() {
            if self.models[..index].iter().any(|other| other.name == model.name) {
                return Err(format!("model {} occurs twice", model.name));
            }
        }
        for model in &self.models {
            model.check().map_err(|problem| format!("model {}: {problem}", model.name))?;
            if let Some(other) = model.ways.keys().find(|name| self.models.iter().all(|known| known.name != **name)) {
                return Err(format!("model {}: ways lead to {other}, which is none of its models", model.name));
            }
        }
        Ok(())
    }

    /// The models of these names, in this order.
    ///
    /// # Errors
    /// One line with both lists when they are not the same models.
    pub fn models(&self, names: &[String]) -> Result<Vec<&ModelProfile>, String> {
        let found = names.iter().map(|name| self.models.iter().find(|model| model.name == *name));
        match found.collect::<Option<Vec<_>>>() {
            Some(found) if found.len() == self.models.len() => Ok(found),
            _ => {
                let measured: Vec<&str> = self.models.iter().map(|model| model.name.as_str()).collect();
                Err(format!(
                    "the profile is of the models {} but the router has {}; measure again with `tokenrouter profile`",
                    measured.join(", "),
                    names.join(", ")
                ))
            }
        }
    }

    /// What each of these models does when it overlaps with others for this share of its time (0 to 1 per model).
    ///
    /// # Errors
    /// As [`Profile::models`].
    pub fn behaviours(&self, names: &[String], overlap: &[f64]) -> Result<Vec<Behaviour>, String> {
        let models = self.models(names)?;
        let one = |(index, model): (usize, &&ModelProfile)| {
            let x = overlap.get(index).copied().unwrap_or(0.0);
            let way = |name: &String| model.ways.get(name).copied().unwrap_or_default();
            Behaviour {
                steps: model.observations as f64,
                seconds: (1..=model.rows_max).map(|rows| model.seconds(rows, x)).collect(),
                moves: names.iter().map(|name| way(name).share).collect(),
                tokens: names.iter().map(|name| way(name).tokens).collect(),
            }
        };
        Ok(models.iter().enumerate().map(one).collect())
    }

    /// Latencies and overlap that agree with each other for `requests` live requests under these thresholds.
    ///
    /// # Errors
    /// As [`Profile::models`]; thresholds that do not fit.
    pub fn settle(&self, names: &[String], requests: u32, thresholds: &[u32]) -> Result<Settled, String> {
        let reach: Reach = Budget::default().reach;
        let few = requests.min(OVERLAP_REQUESTS);
        let thresholds = crate::batching::clamp(thresholds.to_vec(), few);
        let mut x = vec![0.5; names.len()];
        for _ in 0..ROUNDS {
            let system = discretise(&self.behaviours(names, &x)?, few)?;
            let next = overlap(&system, &thresholds, reach)?;
            let moved = x.iter().zip(&next).map(|(x, next)| (x - next).abs()).fold(0.0, f64::max);
            x.iter_mut().zip(next).for_each(|(x, next)| *x = 0.5 * (*x + next));
            if moved < SETTLED {
                break;
            }
        }
        let behaviours = self.behaviours(names, &x)?;
        let system = discretise(&behaviours, requests)?;
        let tick = tick(&behaviours, &system);
        Ok(Settled { behaviours, overlap: x, system, tick })
    }

    /// The best thresholds for `requests` live requests: the chain's best few, with the latencies that hold under them,
    /// compared with starting eagerly by simulation.
    ///
    /// # Errors
    /// As [`Profile::settle`].
    pub fn plan(&self, names: &[String], requests: u32, budget: Budget) -> Result<Outlook, String> {
        let eager = vec![1; names.len()];
        let mut settled = self.settle(names, requests, &eager)?;
        let mut chain = plan(&settled.system, budget);
        for _ in 0..REPLANS {
            let again = self.settle(names, requests, &chain.best)?;
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
        let shared = self.shared(names)?;
        let mut rows = Vec::new();
        for thresholds in candidates {
            let Simulated { throughput, error } = shared.throughput(requests, &thresholds, LENGTH)?;
            rows.push(Predicted { thresholds, tokens_per_second: throughput, error });
        }
        let of_eager = rows.iter().position(|row| row.thresholds == eager).map(|at| rows[at].clone());
        rows.sort_by(|a, b| b.tokens_per_second.total_cmp(&a.tokens_per_second));
        let best = rows[0].clone();
        let eager = of_eager.unwrap_or_else(|| best.clone());
        Ok(Outlook { requests, best, eager, rows, overlap: settled.overlap, chain })
    }

    /// Thresholds for every number of live requests up to `live_max`, each N with its own overlap.
    ///
    /// # Errors
    /// As [`Profile::settle`].
    pub fn table(&self, names: &[String], live_max: u32, budget: Budget) -> Result<Table, String> {
        let rows = grid(live_max).into_iter().map(|n| Ok((n, self.plan(names, n, budget)?.best.thresholds)));
        Table::new(rows.collect::<Result<_, String>>()?)
    }

    /// Tokens per second under these thresholds, by simulation.
    ///
    /// # Errors
    /// As [`Profile::models`]; thresholds that do not fit.
    pub fn predict(&self, names: &[String], requests: u32, thresholds: &[u32]) -> Result<Simulated, String> {
        self.shared(names)?.throughput(requests, thresholds, LENGTH)
    }

    /// The models with both of their latencies.
    fn shared(&self, names: &[String]) -> Result<Shared, String> {
        let [alone, beside] = [0.0, 1.0].map(|x| self.behaviours(names, &vec![x; names.len()]));
        let (alone, beside) = (alone?, beside?);
        Ok(Shared {
            moves: alone.iter().map(|one| one.moves.clone()).collect(),
            tokens: alone.iter().map(|one| one.tokens.clone()).collect(),
            alone: alone.into_iter().map(|one| one.seconds).collect(),
            beside: beside.into_iter().map(|one| one.seconds).collect(),
        })
    }
}

/// Seconds of a tick: those of all steps together over their ticks, so that rounding up and down cancels.
fn tick(behaviours: &[Behaviour], system: &System) -> f64 {
    let steps = (0..system.models()).flat_map(|i| (1..=system.cap(i)).map(move |b| (i, b)));
    let (seconds, ticks) = steps.fold((0.0, 0.0), |(seconds, ticks), (i, b)| {
        (seconds + behaviours[i].seconds[b as usize - 1], ticks + f64::from(system.ticks(i, b)))
    });
    seconds / ticks
}

impl ModelProfile {
    fn check(&self) -> Result<(), String> {
        if self.rows_max == 0 {
            return Err("rows_max is 0; a step has at least 1 row".into());
        }
        for (what, points) in [("alone", &self.alone), ("beside", &self.beside)] {
            let usable = |point: &&Point| {
                point.rows > 0
                    && point.tokens > 0
                    && point.seconds > 0.0
                    && point.seconds.is_finite()
                    && point.spread >= 0.0
            };
            if let Some(point) = points.iter().find(|point| !usable(point)) {
                return Err(format!("{what} holds {point:?}; rows, tokens and seconds must be above 0"));
            }
            let left_out = what == "beside" && points.is_empty();
            if !left_out && points.iter().all(|point| (point.rows, point.tokens) != (1, 1)) {
                return Err(format!("{what} has no step with 1 row and 1 token; measure at least that"));
            }
        }
        let sum: f64 = self.ways.values().map(|way| way.share).sum();
        let usable = |way: &Way| way.share >= 0.0 && way.tokens >= 0.0 && way.tokens.is_finite();
        if !self.ways.values().all(usable) || (sum - 1.0).abs() > 1e-6 {
            return Err(format!("the shares of its ways sum to {sum}; they must sum to 1 and be 0 or more"));
        }
        if !(self.row_tokens.is_finite() && self.row_tokens >= 1.0) {
            return Err(format!("row_tokens is {}; a row consumes at least 1", self.row_tokens));
        }
        Ok(())
    }

    /// Seconds of a step with so many rows, overlapping for a share x of its time.
    pub fn seconds(&self, rows: u32, x: f64) -> f64 {
        let alone = at(&self.alone, rows, self.row_tokens);
        if self.beside.is_empty() {
            return alone;
        }
        let beside = at(&self.beside, rows, self.row_tokens);
        alone / ((1.0 - x) + x * alone / beside)
    }
}

/// Seconds at (rows, tokens per row): along rows first, then along tokens.
fn at(points: &[Point], rows: u32, tokens: f64) -> f64 {
    let mut levels: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
    for point in points {
        levels.entry(point.tokens).or_default().push((f64::from(point.rows), point.seconds));
    }
    let line = levels.into_iter().map(|(level, mut along)| {
        along.sort_by(|a, b| a.0.total_cmp(&b.0));
        (f64::from(level), between(&along, f64::from(rows)))
    });
    between(&line.collect::<Vec<_>>(), tokens)
}

/// The value at x on the straight lines between (x, y) that ascend in x: constant before the first, the last slope behind
/// the last unless it falls.
fn between(along: &[(f64, f64)], x: f64) -> f64 {
    let after = along.partition_point(|&(known, _)| known < x);
    match (after.checked_sub(1).map(|before| along[before]), along.get(after)) {
        (_, Some(&(known, y))) if known == x => y,
        (Some((a, low)), Some(&(b, high))) => low + (high - low) * (x - a) / (b - a),
        (None, Some(&(_, y))) => y,
        (Some((last, y)), None) => {
            let slope = match along.len().checked_sub(2).map(|before| along[before]) {
                Some((before, low)) if last > before => ((y - low) / (last - before)).max(0.0),
                _ => 0.0,
            };
            y + slope * (x - last)
        }
        (None, None) => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Stream, unit};

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn model(name: &str, (alone, beside): (f64, f64), ways: [(&str, f64, f64); 2]) -> ModelProfile {
        let point = |seconds: f64| Point { rows: 1, tokens: 1, seconds, spread: 0.0 };
        ModelProfile {
            name: name.into(),
            rows_max: 8,
            alone: vec![point(alone)],
            beside: vec![point(beside)],
            ways: ways.into_iter().map(|(to, share, tokens)| (to.into(), Way { share, tokens })).collect(),
            row_tokens: 1.0,
            observations: 1000,
        }
    }

    /// Steps of 10 and 40 ms; beside the other they take `slower` times as long.
    fn pair(p: f64, slower: f64) -> Profile {
        let small = model("small", (0.010, 0.010 * slower), [("small", 1.0 - p, 1.0), ("large", p, 0.0)]);
        let large = model("large", (0.040, 0.040 * slower), [("small", 1.0, 1.0), ("large", 0.0, 1.0)]);
        Profile { version: VERSION, models: vec![small, large] }
    }

    /// One mean latency per model comes near to what changes of pace within a step do, and lies between the extremes.
    #[test]
    fn the_fixed_point_is_close_to_shared_cores() {
        let names = names(&["small", "large"]);
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
            let settled = profile.settle(&names, n, &thresholds).expect("it settles");
            let (fixed, shared) =
                (exact(&settled.behaviours), profile.predict(&names, n, &thresholds).expect("simulated"));
            let error = fixed / shared.throughput - 1.0;
            assert!(error.abs() < 0.10, "N = {n}, p = {p}, {slower}: {fixed} against {shared:?}, {error:+.3}");
            let at = |x: f64| exact(&profile.behaviours(&names, &[x, x]).expect("behaviours"));
            assert!(at(1.0) * 0.99 <= fixed && fixed <= at(0.0) * 1.01, "{} {fixed} {}", at(1.0), at(0.0));
        }
    }

    #[test]
    fn one_request_never_overlaps_and_many_nearly_always_do() {
        let names = names(&["small", "large"]);
        let at = |n: u32| pair(0.35, 2.0).settle(&names, n, &[1, 1]).expect("it settles");
        let alone = at(1);
        assert!(alone.overlap.iter().all(|x| *x < 0.01), "{:?}", alone.overlap);
        assert!((alone.behaviours[0].seconds[0] - 0.010).abs() < 1e-3);
        let many = at(8);
        assert!(many.overlap.iter().all(|x| *x > 0.8), "{:?}", many.overlap);
        let again = overlap(&many.system, &[1, 1], Reach::default()).expect("shares");
        assert!(many.overlap.iter().zip(&again).all(|(x, y)| (x - y).abs() < 0.02), "{:?} {again:?}", many.overlap);
    }

    /// A plane with a product is reproduced anywhere within what was measured, and carried on behind it.
    #[test]
    fn latencies_between_the_points_lie_on_straight_lines() {
        for case in 0..50u64 {
            let [a, b, c, d] = [0, 1, 2, 3].map(|at| 0.001 + unit(case, at, Stream::Token));
            let seconds = |rows: f64, tokens: f64| a + b * rows + c * tokens + d * rows * tokens;
            let mut points = Vec::new();
            for tokens in [1, 4, 16] {
                points.extend([8, 1, 2].map(|rows| Point {
                    rows,
                    tokens,
                    seconds: seconds(f64::from(rows), f64::from(tokens)),
                    spread: 0.0,
                }));
            }
            for rows in 1..=12 {
                let tokens = 1.0 + 20.0 * unit(case, 100 + rows, Stream::Token);
                let (found, expected) = (super::at(&points, rows, tokens), seconds(f64::from(rows), tokens));
                assert!((found / expected - 1.0).abs() < 1e-9, "{rows} {tokens}: {found} {expected}");
            }
        }
    }

    #[test]
    fn tables_hold_feasible_thresholds_for_every_n() {
        let table = pair(0.35, 1.8).table(&names(&["small", "large"]), 5, Budget::default()).expect("a table");
        for (n, thresholds) in table.rows() {
            assert!(thresholds.iter().map(|b| b - 1).sum::<u32>() < *n, "{n} {thresholds:?}");
        }
        assert_eq!((table.rows().len(), table.models()), (5, 2));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let folder = std::env::temp_dir().join(format!("tokenrouter-profile-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("profile.json");
        let good = serde_json::to_value(pair(0.1, 2.0)).expect("json");
        let read = |value: &serde_json::Value| {
            std::fs::write(&path, value.to_string()).expect("written");
            Profile::read(&path)
        };
        assert_eq!(read(&good), Ok(pair(0.1, 2.0)));
        for (pointer, value, part) in [
            ("/version", 2.into(), "version is 2; this program reads 1"),
            ("/models/1/name", "small".into(), "model small occurs twice"),
            ("/models/0/alone/0/seconds", 0.0.into(), "model small: alone holds"),
            ("/models/0/alone/0/rows", 2.into(), "alone has no step with 1 row"),
            ("/models/1/ways/small/share", 0.5.into(), "model large: the shares of its ways sum to 0.5"),
            ("/models/1/row_tokens", 0.5.into(), "row_tokens is 0.5"),
        ] {
            let mut bad = good.clone();
            *bad.pointer_mut(pointer).expect("the field") = value;
            let error = read(&bad).expect_err(part);
            assert!(error.contains(part) && error.contains("profile.json"), "{error}");
        }
        let mut bad = good.clone();
        bad["more"] = 1.into();
        assert!(read(&bad).expect_err("unknown").contains("unknown field `more`"));
        let error = pair(0.1, 2.0).models(&names(&["small", "huge"])).expect_err("other models");
        assert!(error.contains("small, large") && error.contains("small, huge"), "{error}");
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
