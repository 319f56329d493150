//! `r2r`: R2R ("Efficiently Navigating Divergent Reasoning Paths with Small-Large Model Token Routing", arXiv
//! 2505.21600). A trained network reads the small model's hidden row, its candidate and its 100 highest logits, and
//! estimates the probability that the candidate diverges from what the large model means.
//! Rule: score >= threshold (equality leaves): the candidate is dropped, the large model makes this one token, and the
//! small model goes on. Default threshold: the one the checkpoint was trained with (published: about 0.4 for
//! mathematics, 0.14 for code, on the R1-distilled 1.5B/32B pair). A missing score or one that is not a number goes to
//! the large model.

use super::{Detour, Entry, HeadSpec, Kind, Param, RoutingError, Rule, Threshold, params};
use serde::Deserialize;
use std::sync::Arc;

const NAME: &str = "r2r";
const RULE: Rule = Rule {
    threshold: Threshold::of_score(NAME),
    signal: |signals| signals.score,
    trusts: |score, threshold| score < threshold,
    // Measured by TokenRouter on Qwen3-0.6B/32B.
    share: 0.35,
};

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
            kind: RULE.threshold.kind(),
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
        let threshold = RULE.threshold.configured(threshold)?;
        let head = Some(HeadSpec::Checkpoint { path: head, family: NAME });
        Ok(Arc::new(Detour { rule: &RULE, threshold, head }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    head: Option<String>,
    threshold: Option<f32>,
}
