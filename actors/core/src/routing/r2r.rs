//! `r2r`: R2R ("Efficiently Navigating Divergent Reasoning Paths with Small-Large Model Token Routing", arXiv
//! 2505.21600). A trained network reads the small model's hidden row, its candidate and its 100 highest logits, and
//! estimates the probability that the candidate diverges from what the large model means.
//! Rule: score >= threshold (equality leaves): the candidate is dropped, the large model makes this one token, and the
//! small model goes on. Default threshold: the one the checkpoint was trained with (published: about 0.4 for
//! mathematics, 0.14 for code, on the R1-distilled 1.5B/32B pair). A missing score or one that is not a number goes to
//! the large model.

use super::{
    Algorithm, Decision, Entry, HeadSpec, Kind, Param, Prior, Route, RoutingError, SMALL, StepView, Threshold, detour,
    detour_prior, params,
};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

const NAME: &str = "r2r";
const THRESHOLD: Threshold = Threshold::of_score(NAME);

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "a trained network sends likely divergent tokens to the large model, one at a time",
    source: "R2R: Efficiently Navigating Divergent Reasoning Paths (arXiv 2505.21600)",
    params: &[
        Param {
            name: "head",
            kind: Kind::String,
            per_request: false,
            default: "none; must be given",
            doc: "folder of the converted R2R checkpoint, trained for model 0",
        },
        Param {
            name: "threshold",
            kind: THRESHOLD.kind(),
            per_request: true,
            default: "the checkpoint's",
            doc: "probability of divergence from which (>=) the large model makes the token, within -1 and 2: \
                  0 or less = large alone, above 1 = small alone; also per request",
        },
    ],
    models: (2, 2),
    build: |table, _| {
        let Params { head, threshold } = params(NAME, table)?;
        let missing = |message: &str| RoutingError::Param { name: NAME, message: message.into() };
        let head = head.ok_or_else(|| missing("head is missing; name the folder of a converted R2R checkpoint"))?;
        let threshold = threshold
            .ok_or_else(|| missing("threshold is missing and the checkpoint gives none; give one, e.g. 0.4"))?;
        Ok(Arc::new(R2r { head: head.into(), threshold: THRESHOLD.configured(threshold)? }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    head: Option<String>,
    threshold: Option<f32>,
}

#[derive(Clone, Debug)]
struct R2r {
    head: Arc<str>,
    threshold: f32,
}

impl Algorithm for R2r {
    fn needs(&self, model: ModelIdx) -> Needs {
        Needs { score: model == SMALL, ..Needs::default() }
    }

    /// The share TokenRouter measured on Qwen3-0.6B/32B; live counters replace it soon.
    fn prior(&self) -> Prior {
        detour_prior(0.35)
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }

    fn head(&self, model: ModelIdx) -> Option<HeadSpec> {
        (model == SMALL).then(|| HeadSpec::Checkpoint { path: self.head.to_string(), family: NAME })
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        let threshold = THRESHOLD.overridden(overrides, self.threshold)?;
        Ok(Box::new(R2r { threshold, ..self.clone() }))
    }
}

impl Route for R2r {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        Ok(detour(step.model, step.signals.score.is_some_and(|score| score < self.threshold)))
    }
}
