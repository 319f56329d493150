//! `token_trigger`: a token hands over for a span, in the style of RelayLLM (a call command), SplitReason (tags around
//! hard spans) and Speculative Thinking (arXiv 2504.12329: words of reflection).
//! Rule: when the small model's candidate is one of `tokens` it is kept, the large model makes the next `span` tokens,
//! and the small model goes on. What the large model writes triggers nothing. Tokens are given as ids: the algorithm
//! knows no vocabulary, and a text could be several tokens. No published defaults; span is 32.

use super::{
    Algorithm, Decision, Entry, LARGE, Param, Prior, Route, RoutingError, SMALL, StepView, override_of, params,
};
use crate::executor::Needs;
use crate::ids::{ModelIdx, TokenId};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

const NAME: &str = "token_trigger";
const SPAN: u32 = 32;

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "certain tokens of the small model call the large model for a span of tokens",
    source: "RelayLLM, SplitReason, Speculative Thinking (arXiv 2504.12329)",
    params: &[
        Param { name: "tokens", default: "none; must be given", doc: "list of token ids that call the large model" },
        Param { name: "span", default: "32", doc: "tokens the large model makes then, 1 or more; also per request" },
    ],
    models: (2, 2),
    build: |table, _| {
        let Params { tokens, span } = params(NAME, table)?;
        let wrong = |message: &str| Err(RoutingError::Param { name: NAME, message: message.into() });
        if tokens.is_empty() {
            return wrong("tokens is missing or empty; list the ids of the tokens that call the large model");
        }
        if span == 0 {
            return wrong("span must be 1 or more, not 0");
        }
        Ok(Arc::new(Trigger { tokens: tokens.into(), span, made: 0 }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    #[serde(default)]
    tokens: Vec<TokenId>,
    #[serde(default = "span")]
    span: u32,
}

fn span() -> u32 {
    SPAN
}

/// Triggers and, for one request at the large model, the tokens of the current span so far.
#[derive(Clone, Debug)]
struct Trigger {
    tokens: Arc<[TokenId]>,
    span: u32,
    made: u32,
}

impl Algorithm for Trigger {
    fn needs(&self, _model: ModelIdx) -> Needs {
        Needs::default()
    }

    /// Triggers are rare; the mean length of a span is as configured.
    fn prior(&self) -> Prior {
        let back = 1.0 / f64::from(self.span);
        Prior { p: vec![vec![0.98, 0.02], vec![back, 1.0 - back]], c: vec![vec![1.0; 2]; 2] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        let Some(value) = override_of(NAME, "span", overrides)? else { return Ok(Box::new(self.clone())) };
        let span = value.as_u64().and_then(|span| u32::try_from(span).ok()).filter(|&span| span > 0);
        let span = span.ok_or_else(|| RoutingError::Request {
            message: format!("span must be a whole number of 1 or more, not {value}"),
        })?;
        Ok(Box::new(Trigger { span, ..self.clone() }))
    }
}

impl Route for Trigger {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        if step.model == SMALL {
            let called = self.tokens.contains(&step.candidate);
            return Ok(Decision { to: if called { LARGE } else { SMALL }, keep: true });
        }
        self.made += 1;
        if self.made < self.span {
            return Ok(Decision { to: LARGE, keep: true });
        }
        self.made = 0;
        Ok(Decision { to: SMALL, keep: true })
    }
}
