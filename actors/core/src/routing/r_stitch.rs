//! `r_stitch`: entropy of the active model's next-token distribution, divided by ln of the vocabulary width, against
//! one threshold (R-Stitch, Algorithm 1). Small model: above the threshold the candidate is dropped and the large
//! model takes over at the same position. Large model: its token is kept on both edges, and at or below the threshold
//! control goes back. Default threshold 0.03, the setting of the TokenRouter evaluation for Qwen3-0.6B/32B (the paper's
//! best is 0.02). A missing entropy or one that is not a number counts as above.

use super::{Algorithm, Decision, Entry, LARGE, Param, Prior, Route, RoutingError, SMALL, StepView, Threshold, params};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

const NAME: &str = "r_stitch";
const THRESHOLD: Threshold = Threshold::of_score(NAME);

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "the large model takes over while next-token entropy is high",
    source: "R-Stitch: Dynamic Trajectory Stitching for Efficient Reasoning (arXiv 2507.17307)",
    params: &[Param {
        name: "threshold",
        kind: THRESHOLD.kind(),
        per_request: true,
        default: "0.03",
        doc: "normalised entropy (0 certain, 1 uniform), within -1 and 2: small leaves if above, large returns if at or \
              below; below 0 = large alone, 1 or more = small alone; also per request",
    }],
    models: (2, 2),
    build: |table, _| {
        let Params { threshold } = params(NAME, table)?;
        Ok(Arc::new(RStitch { threshold: THRESHOLD.configured(threshold)? }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Params {
    threshold: f32,
}

impl Default for Params {
    fn default() -> Self {
        Params { threshold: 0.03 }
    }
}

#[derive(Clone, Copy, Debug)]
struct RStitch {
    threshold: f32,
}

impl Algorithm for RStitch {
    fn needs(&self, _model: ModelIdx) -> Needs {
        Needs { entropy: true, ..Needs::default() }
    }

    /// Middling values; live counters replace them soon.
    fn prior(&self) -> Prior {
        Prior { p: vec![vec![0.85, 0.15], vec![0.6, 0.4]], c: vec![vec![1.0, 0.0], vec![1.0, 1.0]] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(*self)
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        Ok(Box::new(RStitch { threshold: THRESHOLD.overridden(overrides, self.threshold)? }))
    }
}

impl Route for RStitch {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        // An executor never reports a row without its entropy or with one that is not a number; should one do so, the
        // large model is the safe side.
        let sure = step.signals.entropy.is_some_and(|entropy| entropy.normalised() <= self.threshold);
        Ok(match (step.model, sure) {
            (SMALL, false) => Decision { to: LARGE, keep: false },
            (_, false) => Decision { to: LARGE, keep: true },
            (_, true) => Decision { to: SMALL, keep: true },
        })
    }
}
