//! `citer`: CITER ("Collaborative Inference for Efficient LLM Decoding with Token-Level Routing", arXiv 2502.01976).
//! A trained MLP reads the small model's hidden row and estimates the probability that the small model's token will do.
//! Rule: score < threshold (equality stays): the candidate is dropped, the large model makes this one token, and the
//! small model goes on. Default threshold 0.98, the setting of the TokenRouter evaluation (the authors' code defaults
//! to 0.95). A missing score or one that is not a number goes to the large model.

use super::{
    Algorithm, Decision, Entry, HeadSpec, Kind, Param, Prior, Route, RoutingError, SMALL, StepView, Threshold, detour,
    detour_prior, params,
};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

const NAME: &str = "citer";
const THRESHOLD: Threshold = Threshold::of_score(NAME);

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "a trained MLP sends tokens the small model is not fit for to the large model, one at a time",
    source: "CITER: Collaborative Inference for Efficient LLM Decoding with Token-Level Routing (arXiv 2502.01976)",
    params: &[
        Param {
            name: "head",
            kind: Kind::String,
            per_request: false,
            default: "none; must be given",
            doc: "folder of the converted CITER checkpoint, trained for model 0",
        },
        Param {
            name: "threshold",
            kind: THRESHOLD.kind(),
            per_request: true,
            default: "0.98",
            doc: "probability that the small token will do below which (<) the large model makes it, within -1 and 2: \
                  0 or less = small alone, above 1 = large alone; also per request",
        },
    ],
    models: (2, 2),
    build: |table, _| {
        let Params { head, threshold } = params(NAME, table)?;
        let missing = "head is missing; name the folder of a converted CITER checkpoint";
        let head = head.ok_or_else(|| RoutingError::Param { name: NAME, message: missing.into() })?;
        Ok(Arc::new(Citer { head: head.into(), threshold: THRESHOLD.configured(threshold)? }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    head: Option<String>,
    #[serde(default = "threshold")]
    threshold: f32,
}

fn threshold() -> f32 {
    0.98
}

#[derive(Clone, Debug)]
struct Citer {
    head: Arc<str>,
    threshold: f32,
}

impl Algorithm for Citer {
    fn needs(&self, model: ModelIdx) -> Needs {
        Needs { score: model == SMALL, ..Needs::default() }
    }

    /// A middling share; live counters replace it soon.
    fn prior(&self) -> Prior {
        detour_prior(0.2)
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }

    fn head(&self, model: ModelIdx) -> Option<HeadSpec> {
        (model == SMALL).then(|| HeadSpec::Checkpoint { path: self.head.to_string(), family: NAME })
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        let threshold = THRESHOLD.overridden(overrides, self.threshold)?;
        Ok(Box::new(Citer { threshold, ..self.clone() }))
    }
}

impl Route for Citer {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        Ok(detour(step.model, step.signals.score.is_some_and(|score| score >= self.threshold)))
    }
}
