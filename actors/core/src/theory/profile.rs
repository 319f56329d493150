//! What was measured of a launch file's models beforehand. Owner: `tokenrouter profile` writes it, planners read; what
//! follows for throughput is in [`crate::theory::measured`]. Invariant: a [`Profile`] that was read is complete: names are
//! unique, every model has a step with 1 request and 1 token, every number is finite and positive where it must be.

use crate::theory::latency::{Point, Surface};
use crate::theory::measured::Measured;
use crate::theory::shared::Shared;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The version that is written and read.
pub const VERSION: u32 = 2;
/// Largest batch of any executor.
const ROWS_MAX: u32 = 4096;

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
    /// Rows behind `ways`; 0 where they are only what the algorithm expects.
    pub observations: u64,
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

    /// The same as a system to plan for, its models in this order.
    ///
    /// # Errors
    /// As [`Profile::models`].
    pub fn measured(&self, names: &[String]) -> Result<Measured, String> {
        let models = self.models(names)?;
        let each = |of: fn(&Way) -> f64| -> Vec<Vec<f64>> {
            let row = |model: &&ModelProfile| names.iter().map(|name| model.ways.get(name).map_or(0.0, of)).collect();
            models.iter().map(row).collect()
        };
        let alone: Vec<Surface> = models.iter().map(|model| Surface::new(&model.alone, model.rows_max)).collect();
        let beside = |(model, alone): (&&ModelProfile, &Surface)| match model.beside.as_slice() {
            [] => alone.clone(),
            beside => Surface::new(beside, model.rows_max),
        };
        let shared = Shared {
            beside: models.iter().zip(&alone).map(beside).collect(),
            alone,
            moves: each(|way| way.share),
            tokens: each(|way| way.tokens),
        };
        Ok(Measured::new(shared, models.iter().map(|model| model.observations).collect()))
    }
}

impl ModelProfile {
    fn check(&self) -> Result<(), String> {
        if !(1..=ROWS_MAX).contains(&self.rows_max) {
            return Err(format!("rows_max is {}; a step has 1 to {ROWS_MAX} rows", self.rows_max));
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
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            observations: 1000,
        }
    }

    /// Steps of 10 and 40 ms; beside the other they take `slower` times as long.
    fn pair(p: f64, slower: f64) -> Profile {
        let small = model("small", (0.010, 0.010 * slower), [("small", 1.0 - p, 1.0), ("large", p, 0.0)]);
        let large = model("large", (0.040, 0.040 * slower), [("small", 1.0, 1.0), ("large", 0.0, 1.0)]);
        Profile { version: VERSION, models: vec![small, large] }
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
            ("/version", 1.into(), "version is 1; this program reads 2"),
            ("/models/1/name", "small".into(), "model small occurs twice"),
            ("/models/0/rows_max", 0.into(), "model small: rows_max is 0; a step has 1 to 4096 rows"),
            ("/models/1/rows_max", u32::MAX.into(), "model large: rows_max is 4294967295"),
            ("/models/0/alone/0/seconds", 0.0.into(), "model small: alone holds"),
            ("/models/0/alone/0/rows", 2.into(), "alone has no step with 1 row"),
            ("/models/1/ways/small/share", 0.5.into(), "model large: the shares of its ways sum to 0.5"),
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
