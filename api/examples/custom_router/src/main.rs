//! The server with a routing algorithm of its own: `alternate` changes the model after every `span` tokens.
//!
//! A routing algorithm is three things:
//! 1. an [`Entry`]: its name in `[router] algorithm`, its parameters and how it is built from them;
//! 2. an [`Algorithm`]: what all requests share, without state;
//! 3. a [`Route`]: follows one request at one model and decides after each of its steps.
//!
//! The entry goes into a [`Catalog`], and the catalog to the command line; every command then knows the algorithm.

use serde::Deserialize;
use std::process::ExitCode;
use std::sync::Arc;
use tokenrouter_core::executor::Needs;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::routing::catalog::Catalog;
use tokenrouter_core::routing::{
    Algorithm, Decision, Entry, Kind, Param, Prior, Route, RoutingError, StepView, params,
};

const NAME: &str = "alternate";

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "the models take turns of a fixed number of tokens",
    source: "an example",
    params: &[Param {
        name: "span",
        kind: Kind::Integer { minimum: 1 },
        per_request: false,
        default: "8",
        doc: "tokens of a turn, 1 or more",
    }],
    models: (2, 8),
    build: |table, models| {
        let Params { span } = params(NAME, table)?;
        if span == 0 {
            return Err(RoutingError::Param { name: NAME, message: "span must be 1 or more".to_owned() });
        }
        Ok(Arc::new(Alternate { span, models }))
    },
};

/// `[router.params]`; a key that is not here is refused.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Params {
    span: u32,
}

impl Default for Params {
    fn default() -> Self {
        Params { span: 8 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Alternate {
    span: u32,
    models: usize,
}

impl Algorithm for Alternate {
    /// It looks at no signal, so none is computed. Another algorithm asks for entropy, logits or hidden rows here.
    fn needs(&self, _model: ModelIdx) -> Needs {
        Needs::default()
    }

    /// Every token is kept; one of `span` hands over to the next model.
    fn prior(&self) -> Prior {
        let leave = 1.0 / f64::from(self.span);
        let chance = |from: usize, to: usize| match (to + self.models - from) % self.models {
            0 => 1.0 - leave,
            1 => leave,
            _ => 0.0,
        };
        let p = (0..self.models).map(|from| (0..self.models).map(|to| chance(from, to)).collect()).collect();
        Prior { p, c: vec![vec![1.0; self.models]; self.models] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(*self)
    }
}

impl Route for Alternate {
    /// Whose turn it is follows from the position alone, so the value needs no state and no note to its peer.
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        let written = step.position().checked_sub(step.prompt_len).ok_or("a candidate within the prompt")?;
        let turn = ((written + 1) / self.span) as usize % self.models;
        Ok(Decision { to: ModelIdx(turn as u8), keep: true })
    }
}

fn main() -> ExitCode {
    static EXTRA: [&Entry; 1] = [&ENTRY];
    tokenrouter::cli::run_with(std::env::args_os(), Catalog::with(&EXTRA))
}
