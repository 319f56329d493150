//! What the algorithms have in common that lend the large model one token at a time: the small model's candidate is
//! trusted, or it is dropped and the large model makes this position; then the small model goes on. Owner: the algorithm,
//! which brings the rule. Invariant: a signal that is missing or no number is never trusted.

use super::{Algorithm, Decision, HeadSpec, Kind, LARGE, Prior, Route, RoutingError, SMALL, StepView, override_of};
use crate::executor::{Needs, Signals};
use crate::ids::ModelIdx;
use serde_json::Value;
use std::fmt;
use std::ops::RangeInclusive;

/// A threshold of an algorithm: its name and the values it may take.
pub(crate) struct Threshold {
    /// The algorithm.
    pub algorithm: &'static str,
    /// What is allowed; wide enough for both ends at which one model is alone.
    pub range: RangeInclusive<f32>,
}

impl Threshold {
    /// Of an algorithm that compares a number within 0 and 1. Values a little outside are allowed: below 0 and above 1
    /// one model is alone, whatever the number.
    pub const fn of_score(algorithm: &'static str) -> Self {
        Threshold { algorithm, range: -1.0..=2.0 }
    }

    /// What is allowed, for the list of parameters.
    pub const fn kind(&self) -> Kind {
        Kind::Number { minimum: *self.range.start(), maximum: *self.range.end() }
    }

    fn allowed(&self, value: impl std::fmt::Display) -> String {
        format!("threshold must be a number within {} and {}, not {value}", self.range.start(), self.range.end())
    }

    /// Checks the value of a launch file.
    pub fn configured(&self, value: f32) -> Result<f32, RoutingError> {
        if self.range.contains(&value) {
            return Ok(value);
        }
        Err(RoutingError::Param { name: self.algorithm, message: self.allowed(value) })
    }

    /// The value of a request, or `own` where it is silent.
    pub fn overridden(&self, overrides: &Value, own: f32) -> Result<f32, RoutingError> {
        let Some(value) = override_of(self.algorithm, "threshold", overrides)? else { return Ok(own) };
        let number = value.as_f64().map(|number| number as f32).filter(|number| self.range.contains(number));
        number.ok_or_else(|| RoutingError::Request { message: self.allowed(value) })
    }
}

/// When a candidate of the small model is trusted.
pub(crate) struct Rule {
    /// What is compared with.
    pub threshold: Threshold,
    /// The signal it is compared with; `None` = missing. Without a head it is the entropy, with one its score.
    pub signal: fn(&Signals) -> Option<f32>,
    /// Whether a signal means trust at a threshold.
    pub trusts: fn(f32, f32) -> bool,
    /// Share of the small model's steps that are expected not to be trusted; live counters replace it soon.
    pub share: f64,
}

/// An algorithm of such a rule.
#[derive(Clone)]
pub(crate) struct Detour {
    /// The rule.
    pub rule: &'static Rule,
    /// The threshold.
    pub threshold: f32,
    /// The learned head of the small model, if the rule reads its score.
    pub head: Option<HeadSpec>,
}

impl fmt::Debug for Detour {
    /// The same in every process of a server, which compare it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Detour { rule, threshold, head } = self;
        f.debug_struct(rule.threshold.algorithm).field("threshold", threshold).field("head", head).finish()
    }
}

impl Algorithm for Detour {
    fn needs(&self, model: ModelIdx) -> Needs {
        let (small, scored) = (model == SMALL, self.head.is_some());
        Needs { score: small && scored, entropy: small && !scored, ..Needs::default() }
    }

    fn prior(&self) -> Prior {
        let share = self.rule.share;
        Prior { p: vec![vec![1.0 - share, share], vec![1.0, 0.0]], c: vec![vec![1.0, 0.0], vec![1.0, 0.0]] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }

    fn head(&self, model: ModelIdx) -> Option<HeadSpec> {
        self.head.clone().filter(|_| model == SMALL)
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        let threshold = self.rule.threshold.overridden(overrides, self.threshold)?;
        Ok(Box::new(Detour { threshold, ..self.clone() }))
    }
}

impl Route for Detour {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        let Rule { signal, trusts, .. } = self.rule;
        let trusted = signal(step.signals).is_some_and(|signal| trusts(signal, self.threshold));
        Ok(match (step.model, trusted) {
            (SMALL, false) => Decision { to: LARGE, keep: false },
            _ => Decision { to: SMALL, keep: true },
        })
    }
}
