//! `entropy`: the entropy strategy of R2R's code, without a trained network. Entropy of the small model's next-token
//! distribution in nats, not divided by anything (`r_stitch` divides by ln of the vocabulary width: the two thresholds
//! must not be confused).
//! Rule: entropy >= threshold (equality leaves): the candidate is dropped, the large model makes this one token, and the
//! small model goes on. Default threshold 0.45, as there. A missing entropy or one that is not a number goes to the
//! large model.

use super::{Detour, Entry, Param, Rule, Threshold, params};
use serde::Deserialize;
use std::sync::Arc;

const NAME: &str = "entropy";
const RULE: Rule = Rule {
    threshold: Threshold { algorithm: NAME, range: -1.0..=23.0 },
    signal: |signals| signals.entropy.map(|entropy| entropy.nats),
    trusts: |nats, threshold| nats < threshold,
    // A middling share.
    share: 0.2,
};

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "the large model makes each token of which the small model is unsure, one at a time",
    source: "entropy strategy of R2R's code (arXiv 2505.21600)",
    params: &[Param {
        name: "threshold",
        kind: RULE.threshold.kind(),
        per_request: true,
        default: "0.45",
        doc: "entropy in nats from which (>=) the large model makes the token, within -1 and 23: \
              0 or less = large alone, above ln of the vocabulary width = small alone; also per request",
    }],
    models: (2, 2),
    build: |table, _| {
        let Params { threshold } = params(NAME, table)?;
        let threshold = RULE.threshold.configured(threshold)?;
        Ok(Arc::new(Detour { rule: &RULE, threshold, head: None }))
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
