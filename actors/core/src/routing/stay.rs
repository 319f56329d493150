//! `stay`: the entry model makes every token. The null case, and what a request for a single model runs under.

use super::{Algorithm, Decision, Entry, Prior, Route, StepView, params};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use serde::Deserialize;
use std::sync::Arc;

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: "stay",
    summary: "one model makes every token; nothing is routed",
    source: "baseline",
    params: &[],
    models: (1, 8),
    build: |table, models| {
        let Params {} = params("stay", table)?;
        Ok(Arc::new(Stay { models }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {}

/// Never leaves.
#[derive(Clone, Copy, Debug)]
pub struct Stay {
    /// Models of the router.
    pub models: usize,
}

impl Algorithm for Stay {
    fn needs(&self, _model: ModelIdx) -> Needs {
        Needs::default()
    }

    fn prior(&self) -> Prior {
        let identity = |on: f64| -> Vec<Vec<f64>> {
            (0..self.models).map(|i| (0..self.models).map(|j| if i == j { on } else { 0.0 }).collect()).collect()
        };
        Prior { p: identity(1.0), c: identity(1.0) }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(*self)
    }
}

impl Route for Stay {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        Ok(Decision { to: step.model, keep: true })
    }
}
