//! `co_llm`: Co-LLM ("Learning to Decode Collaboratively with Multiple Language Models", arXiv 2403.03870). The small
//! model was fine-tuned with one more token, whose logit says whether it should defer; it is never drawn.
//! Rule: sigmoid(logit of the token) > threshold, strictly (equality stays): the candidate is dropped, the large model
//! makes this one token, and the small model goes on. Default threshold 0.15, the setting of the TokenRouter evaluation
//! (the authors choose it per pair on validation data and fall back to 0.5). A missing score or one that is not a
//! number goes to the large model.

use super::{
    Algorithm, Decision, Entry, HeadSpec, Kind, Param, Prior, Route, RoutingError, SMALL, StepView, Threshold, detour,
    detour_prior, params,
};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

const NAME: &str = "co_llm";
const THRESHOLD: Threshold = Threshold::of_score(NAME);

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "the small model, trained with a token that means \"defer\", hands over the tokens it would rather not make",
    source: "Co-LLM: Learning to Decode Collaboratively with Multiple Language Models (arXiv 2403.03870)",
    params: &[
        Param {
            name: "threshold",
            kind: THRESHOLD.kind(),
            per_request: true,
            default: "0.15",
            doc: "deferral probability above which (strictly) the large model makes the token, within -1 and 2: \
                  below 0 = large alone, 1 or more = small alone; also per request",
        },
        Param {
            name: "token",
            kind: Kind::String,
            per_request: false,
            default: "<|defer|>",
            doc: "text of the deferral token in the vocabulary of model 0",
        },
    ],
    models: (2, 2),
    build: |table, _| {
        let Params { threshold, token } = params(NAME, table)?;
        if token.is_empty() {
            let message = "token is empty; name the deferral token of model 0, e.g. <|defer|>".into();
            return Err(RoutingError::Param { name: NAME, message });
        }
        Ok(Arc::new(CoLlm { token: token.into(), threshold: THRESHOLD.configured(threshold)? }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Params {
    threshold: f32,
    token: String,
}

impl Default for Params {
    fn default() -> Self {
        Params { threshold: 0.15, token: "<|defer|>".into() }
    }
}

#[derive(Clone, Debug)]
struct CoLlm {
    token: Arc<str>,
    threshold: f32,
}

impl Algorithm for CoLlm {
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
        (model == SMALL).then(|| HeadSpec::Row { token: self.token.to_string() })
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        let threshold = THRESHOLD.overridden(overrides, self.threshold)?;
        Ok(Box::new(CoLlm { threshold, ..self.clone() }))
    }
}

impl Route for CoLlm {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        Ok(detour(step.model, step.signals.score.is_some_and(|score| score <= self.threshold)))
    }
}
