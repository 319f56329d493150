//! `entropy`: the entropy strategy of R2R's code, without a trained network. Entropy of the small model's next-token
//! distribution in nats, not divided by anything (`r_stitch` divides by ln of the vocabulary width: the two thresholds
//! must not be confused).
//! Rule: entropy >= threshold (equality leaves): the candidate is dropped, the large model makes this one token, and the
//! small model goes on. Default threshold 0.45, as there. A missing entropy or one that is not a number goes to the
//! large model.

use super::{
    Algorithm, Decision, Entry, Param, Prior, Route, RoutingError, SMALL, StepView, Threshold, detour, detour_prior,
    params,
};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

const NAME: &str = "entropy";
/// The uniform distribution over all token ids of 32 bits has 22.2 nats.
const THRESHOLD: Threshold = Threshold { algorithm: NAME, range: -1.0..=23.0 };

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "the large model makes each token of which the small model is unsure, one at a time",
    source: "entropy strategy of R2R's code (arXiv 2505.21600)",
    params: &[Param {
        name: "threshold",
        kind: THRESHOLD.kind(),
        per_request: true,
        default: "0.45",
        doc: "entropy in nats from which (>=) the large model makes the token, within -1 and 23: \
              0 or less = large alone, above ln of the vocabulary width = small alone; also per request",
    }],
    models: (2, 2),
    build: |table, _| {
        let Params { threshold } = params(NAME, table)?;
        Ok(Arc::new(Nats { threshold: THRESHOLD.configured(threshold)? }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Params {
    threshold: f32,
}

impl Default for Params {
    fn default() -> Self {
        Params { threshold: 0.45 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Nats {
    threshold: f32,
}

impl Algorithm for Nats {
    fn needs(&self, model: ModelIdx) -> Needs {
        Needs { entropy: model == SMALL, ..Needs::default() }
    }

    /// A middling share; live counters replace it soon.
    fn prior(&self) -> Prior {
        detour_prior(0.2)
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(*self)
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        Ok(Box::new(Nats { threshold: THRESHOLD.overridden(overrides, self.threshold)? }))
    }
}

impl Route for Nats {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        Ok(detour(step.model, step.signals.entropy.is_some_and(|entropy| entropy.nats < self.threshold)))
    }
}
