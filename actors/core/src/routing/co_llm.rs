//! `co_llm`: Co-LLM ("Learning to Decode Collaboratively with Multiple Language Models", arXiv 2403.03870). The small
//! model was fine-tuned with one more token, whose logit says whether it should defer; it is never drawn.
//! Rule: sigmoid(logit of the token) > threshold, strictly (equality stays): the candidate is dropped, the large model
//! makes this one token, and the small model goes on. Default threshold 0.15, the setting of the TokenRouter evaluation
//! (the authors choose it per pair on validation data and fall back to 0.5). A missing score or one that is not a
//! number goes to the large model.

use super::{Detour, Entry, HeadSpec, Kind, Param, RoutingError, Rule, Threshold, params};
use serde::Deserialize;
use std::sync::Arc;

const NAME: &str = "co_llm";
const RULE: Rule = Rule {
    threshold: Threshold::of_score(NAME),
    signal: |signals| signals.score,
    trusts: |score, threshold| score <= threshold,
    // A middling share.
    share: 0.2,
};

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "the small model, trained with a token that means \"defer\", hands over the tokens it would rather not make",
    source: "Co-LLM: Learning to Decode Collaboratively with Multiple Language Models (arXiv 2403.03870)",
    params: &[
        Param {
            name: "threshold",
            kind: RULE.threshold.kind(),
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
        let threshold = RULE.threshold.configured(threshold)?;
        Ok(Arc::new(Detour { rule: &RULE, threshold, head: Some(HeadSpec::Row { token }) }))
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
