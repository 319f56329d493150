//! `token_trigger`: a token hands over for a span, in the style of RelayLLM (a call command), SplitReason (tags around
//! hard spans) and Speculative Thinking (arXiv 2504.12329: words of reflection).
//! Rule: when the small model's candidate is one of the triggers it is kept, the large model makes the next `span`
//! tokens, and the small model goes on. What the large model writes triggers nothing. Triggers are given as ids
//! (`tokens`), as texts that are one token each (`texts`), or both; the launcher brings the vocabulary that knows the
//! texts. A text is a trigger in that very form: in most vocabularies "Wait" and " Wait" are two tokens, and so are
//! "\n\n" and ".\n\n". No published defaults; span is 32.

use super::{
    Algorithm, Decision, Entry, Kind, LARGE, Param, Prior, Route, RoutingError, SMALL, StepView, override_of, params,
};
use crate::executor::Needs;
use crate::ids::{ModelIdx, TokenId};
use crate::text::{SpecialTokens, TextCodec};
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
        Param {
            name: "tokens",
            kind: Kind::Array { items: "integer" },
            per_request: false,
            default: "none; tokens or texts must be given",
            doc: "list of token ids that call the large model",
        },
        Param {
            name: "texts",
            kind: Kind::Array { items: "string" },
            per_request: false,
            default: "none; tokens or texts must be given",
            doc: "list of texts that call the large model, each exactly one token of the vocabulary, such as \"Wait\", \
                  \" Wait\" or a control token; turned into ids when the server starts",
        },
        Param {
            name: "span",
            kind: Kind::Integer { minimum: 1 },
            per_request: true,
            default: "32",
            doc: "tokens the large model makes then, 1 or more; also per request",
        },
    ],
    models: (2, 2),
    build: |table, _| {
        let Params { tokens, texts, span } = params(NAME, table)?;
        if tokens.is_empty() && texts.is_empty() {
            return Err(wrong(
                "tokens and texts are missing or empty; list the ids or the texts of the tokens that call the large model",
            ));
        }
        if span == 0 {
            return Err(wrong("span must be 1 or more, not 0"));
        }
        Ok(Arc::new(Trigger { tokens: tokens.into(), texts: texts.into(), span, made: 0 }))
    },
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    #[serde(default)]
    tokens: Vec<TokenId>,
    #[serde(default)]
    texts: Vec<String>,
    #[serde(default = "span")]
    span: u32,
}

fn span() -> u32 {
    SPAN
}

fn wrong(message: impl Into<String>) -> RoutingError {
    RoutingError::Param { name: NAME, message: message.into() }
}

/// Triggers and, for one request at the large model, the tokens of the current span so far.
#[derive(Clone, Debug)]
struct Trigger {
    tokens: Arc<[TokenId]>,
    /// Triggers whose ids are not known yet; none is left once there was a vocabulary.
    texts: Arc<[String]>,
    span: u32,
    made: u32,
}

/// The one token that a text is.
fn token_of(text: &str, codec: &dyn TextCodec) -> Result<TokenId, RoutingError> {
    let ids = codec.encode(text, SpecialTokens::Parse).map_err(|error| wrong(format!("texts: {text:?}: {error}")))?;
    match ids[..] {
        [id] => Ok(id),
        _ => Err(wrong(format!(
            "texts: {text:?} is not one token but {} ({ids:?}); give a text that is one token (a space or line break in \
             front makes another one), or list ids as tokens",
            ids.len()
        ))),
    }
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

    fn in_vocabulary(&self, codec: &dyn TextCodec) -> Result<Option<Arc<dyn Algorithm>>, RoutingError> {
        if self.texts.is_empty() {
            return Ok(None);
        }
        let mut tokens = self.tokens.to_vec();
        for text in &*self.texts {
            tokens.push(token_of(text, codec)?);
        }
        Ok(Some(Arc::new(Trigger { tokens: tokens.into(), texts: [].into(), ..self.clone() })))
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
        if let Some(text) = self.texts.first() {
            return Err(format!("the token of {text:?} is not known: the algorithm was started without a vocabulary"));
        }
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
