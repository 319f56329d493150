//! `always`: one chosen model makes every token. A baseline: the large model alone behind the routed name.
//! Rule: the entry model is the chosen one and never changes. Default: the last model of the router.

use super::{Algorithm, Decision, Entry, Kind, Param, Prior, Route, RoutingError, StepView, params, stay::Stay};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use serde::Deserialize;
use std::sync::Arc;

const NAME: &str = "always";

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "one chosen model makes every token",
    source: "baseline",
    params: &[Param {
        name: "model",
        kind: Kind::Integer { minimum: 0 },
        per_request: false,
        default: "the last",
        doc: "number of the model in the router's order, from 0",
    }],
    models: (1, 8),
    build: |table, models| {
        let Params { model } = params(NAME, table)?;
        let model = model.unwrap_or(models - 1);
        if model >= models {
            let message = format!("model = {model}: the router's models are 0 to {}", models - 1);
            return Err(RoutingError::Param { name: NAME, message });
        }
        Ok(Arc::new(Always { model: ModelIdx(model as u8), stay: Stay { models } }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    model: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Always {
    model: ModelIdx,
    stay: Stay,
}

impl Algorithm for Always {
    fn needs(&self, _model: ModelIdx) -> Needs {
        Needs::default()
    }

    fn entry(&self, _seed: u64) -> ModelIdx {
        self.model
    }

    fn prior(&self) -> Prior {
        self.stay.prior()
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(*self)
    }
}

impl Route for Always {
    fn route(&mut self, _step: &StepView<'_>) -> Result<Decision, String> {
        Ok(Decision { to: self.model, keep: true })
    }
}
