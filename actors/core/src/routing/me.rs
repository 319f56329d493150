//! `me`: Mixture-model-like Ensemble. The target is the mixture sum_i w_i p_i(next token | text): instead of running all
//! models and averaging, each token's model is drawn by the weights and its token is kept. Exact when tokens are truly
//! sampled; greedy decoding gives a mixture of the models' best tokens, which is not the ensemble's best token.
//! Rule: the owner of every position, the first included, is drawn from Cat(w); no signal is read, nothing is dropped.
//! Draws come from (request seed, absolute position) in a stream of their own, so company and timing change nothing.
//! Default weights: 0.5, 0.3, 0.2 for three models (the TokenRouter evaluation), equal ones otherwise.

use super::{Algorithm, Decision, Entry, Kind, Param, Prior, Route, RoutingError, StepView, params};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use crate::rng::{self, Stream};
use serde::Deserialize;
use std::sync::Arc;

const NAME: &str = "me";

/// Where the first owner is drawn. `route` draws for the position after its candidate, and a prompt has at least one
/// token, so positions 0 and 1 are never drawn there.
const ENTRY_POSITION: u32 = 0;

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "an ensemble: each token's model is drawn by weight",
    source: "Mixture-model-like Ensemble (ME), as in the TokenRouter evaluation",
    params: &[Param {
        name: "weights",
        kind: Kind::Array { items: "number" },
        per_request: false,
        default: "0.5, 0.3, 0.2 for three models, equal otherwise",
        doc: "list of one weight per model, each within 0 and 1, summing to 1; needs a temperature above 0",
    }],
    models: (2, 8),
    build: |table, models| {
        let Params { weights } = params(NAME, table)?;
        Ok(Arc::new(Ensemble(checked(weights.unwrap_or_else(|| default_weights(models)), models)?)))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    weights: Option<Vec<f64>>,
}

fn default_weights(models: usize) -> Vec<f64> {
    if models == 3 { vec![0.5, 0.3, 0.2] } else { vec![1.0 / models as f64; models] }
}

fn checked(weights: Vec<f64>, models: usize) -> Result<Arc<[f64]>, RoutingError> {
    let wrong = |message: String| Err(RoutingError::Param { name: NAME, message });
    if weights.len() != models {
        return wrong(format!("weights: {} are given for {models} models", weights.len()));
    }
    if let Some(weight) = weights.iter().find(|weight| !(0.0..=1.0).contains(*weight)) {
        return wrong(format!("weights: each must be within 0 and 1, not {weight}"));
    }
    let sum: f64 = weights.iter().sum();
    if (sum - 1.0).abs() > 1e-6 {
        return wrong(format!("weights must sum to 1, not {sum}"));
    }
    Ok(weights.into())
}

/// The weights; shared by all requests.
#[derive(Clone, Debug)]
struct Ensemble(Arc<[f64]>);

impl Ensemble {
    fn owner(&self, seed: u64, position: u32) -> ModelIdx {
        let draw = rng::unit(seed, position, Stream::Owner);
        let mut below = 0.0;
        let hit = self.0.iter().position(|&weight| {
            below += weight;
            draw < below
        });
        // Rounding may leave the sum a hair below 1: the draw then falls to the last model with a weight.
        let owner = hit.or_else(|| self.0.iter().rposition(|&weight| weight > 0.0)).unwrap_or(0);
        ModelIdx(owner as u8)
    }
}

impl Algorithm for Ensemble {
    fn needs(&self, _model: ModelIdx) -> Needs {
        Needs::default()
    }

    fn entry(&self, seed: u64) -> ModelIdx {
        self.owner(seed, ENTRY_POSITION)
    }

    fn prior(&self) -> Prior {
        let models = self.0.len();
        Prior { p: vec![self.0.to_vec(); models], c: vec![vec![1.0; models]; models] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }

    fn greedy_warning(&self) -> Option<&'static str> {
        Some("algorithm `me` is an ensemble only where tokens are sampled; ask for a temperature above 0")
    }
}

impl Route for Ensemble {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        Ok(Decision { to: self.owner(step.seed, step.position() + 1), keep: true })
    }
}
