//! `citer`: CITER ("Collaborative Inference for Efficient LLM Decoding with Token-Level Routing", arXiv 2502.01976).
//! A trained MLP reads the small model's hidden row and estimates the probability that the small model's token will do.
//! Rule: score < threshold (equality stays): the candidate is dropped, the large model makes this one token, and the
//! small model goes on. Default threshold 0.98, the setting of the TokenRouter evaluation (the authors' code defaults
//! to 0.95). A missing score or one that is not a number goes to the large model.

use super::{Detour, Entry, HeadSpec, Kind, Param, RoutingError, Rule, Threshold, params};
use serde::Deserialize;
use std::sync::Arc;

const NAME: &str = "citer";
const RULE: Rule = Rule {
    threshold: Threshold::of_score(NAME),
    signal: |signals| signals.score,
    trusts: |score, threshold| score >= threshold,
    // A middling share.
    share: 0.2,
};

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
            kind: RULE.threshold.kind(),
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
        let threshold = RULE.threshold.configured(threshold)?;
        let head = Some(HeadSpec::Checkpoint { path: head, family: NAME });
        Ok(Arc::new(Detour { rule: &RULE, threshold, head }))
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
