//! `bernoulli`: reads no signal. After a step of model i control goes to j with probability `P[i][j]`; whether the
//! candidate is kept is given per edge. For benches and scheduling tests, and as the null router of comparisons.
//! Draws come from (request seed, position, model): the same request walks the same way at any load.

use super::{Algorithm, Decision, Entry, Kind, Param, Prior, Route, RoutingError, StepView, params};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use crate::rng::{self, Stream};
use serde::Deserialize;
use std::sync::Arc;

const NAME: &str = "bernoulli";

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "routes at random with given probabilities, without looking at any signal",
    source: "baseline",
    params: &[
        Param {
            name: "p",
            kind: Kind::Any,
            per_request: false,
            default: "0.1",
            doc: "a number: share of small steps routed to the large model for one token (two models); \
                  or the matrix P, rows summing to 1",
        },
        Param {
            name: "keep",
            kind: Kind::Array { items: "array" },
            per_request: false,
            default: "candidates of model 0 are dropped on leaving, all others kept",
            doc: "matrix of booleans: whether the candidate is kept when control goes from i to j; staying keeps always",
        },
    ],
    models: (2, 8),
    build: |table, models| Ok(Arc::new(Bernoulli::new(params(NAME, table)?, models)?)),
};

#[derive(Deserialize)]
#[serde(untagged)]
enum Chances {
    Share(f64),
    Matrix(Vec<Vec<f64>>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    p: Option<Chances>,
    keep: Option<Vec<Vec<bool>>>,
}

/// Configured probabilities; shared by all requests.
#[derive(Clone, Debug)]
struct Bernoulli(Arc<Matrices>);

#[derive(Debug)]
struct Matrices {
    p: Vec<Vec<f64>>,
    keep: Vec<Vec<bool>>,
}

impl Bernoulli {
    fn new(params: Params, models: usize) -> Result<Self, RoutingError> {
        let p = match params.p.unwrap_or(Chances::Share(0.1)) {
            Chances::Matrix(p) => p,
            Chances::Share(share) if models == 2 && (0.0..=1.0).contains(&share) => {
                vec![vec![1.0 - share, share], vec![1.0, 0.0]]
            }
            Chances::Share(share) => {
                return Err(wrong(format!("p = {share}: a single share must be within 0 and 1 and needs two models")));
            }
        };
        let keep = params
            .keep
            .unwrap_or_else(|| (0..models).map(|i| (0..models).map(|j| i == j || i != 0).collect()).collect());
        check_shape("p", models, &p)?;
        check_shape("keep", models, &keep)?;
        for (i, row) in p.iter().enumerate() {
            let sum: f64 = row.iter().sum();
            if row.iter().any(|&chance| !(0.0..=1.0).contains(&chance)) || (sum - 1.0).abs() > 1e-9 {
                return Err(wrong(format!("p: row {i} must hold probabilities that sum to 1, not {sum}")));
            }
            if !keep[i][i] {
                return Err(wrong(format!("keep[{i}][{i}] must be true: staying without a token never ends")));
            }
        }
        let drops = |i: usize| (0..models).any(|j| j != i && p[i][j] > 0.0 && !keep[i][j]);
        for i in 0..models {
            if let Some(j) = (0..models).find(|&j| j != i && p[i][j] > 0.0 && !keep[i][j] && drops(j)) {
                return Err(wrong(format!(
                    "keep: models {i} and {j} both drop their candidates; nothing would be committed"
                )));
            }
        }
        Ok(Bernoulli(Arc::new(Matrices { p, keep })))
    }
}

fn wrong(message: String) -> RoutingError {
    RoutingError::Param { name: NAME, message }
}

fn check_shape<T>(field: &str, models: usize, matrix: &[Vec<T>]) -> Result<(), RoutingError> {
    if matrix.len() == models && matrix.iter().all(|row| row.len() == models) {
        return Ok(());
    }
    Err(wrong(format!("{field} must be a {models} x {models} matrix")))
}

impl Algorithm for Bernoulli {
    fn needs(&self, _model: ModelIdx) -> Needs {
        Needs::default()
    }

    fn prior(&self) -> Prior {
        let c = self.0.keep.iter().map(|row| row.iter().map(|&kept| f64::from(u8::from(kept))).collect()).collect();
        Prior { p: self.0.p.clone(), c }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }
}

impl Route for Bernoulli {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        let own = step.model.index();
        let seed = rng::mix(step.seed ^ (own as u64 + 1));
        let draw = rng::unit(seed, step.position(), Stream::Owner);
        let row = &self.0.p[own];
        let mut below = 0.0;
        let hit = row.iter().position(|&chance| {
            below += chance;
            draw < below
        });
        // Rounding may leave the sum a hair below 1: the draw then falls to the last model with a chance.
        let to = hit.or_else(|| row.iter().rposition(|&chance| chance > 0.0)).unwrap_or(own);
        Ok(Decision { to: ModelIdx(to as u8), keep: self.0.keep[own][to] })
    }
}
