//! What the two text routes have in common in how they answer: envelope, detail, whole and streamed choices. Owner: the
//! route's handler. Invariant: whole and streamed answers are made from the same events, so their texts are equal.

use super::choices::Outcome;
use super::types::response::{DroppedDetail, Ending, Envelope, TokenDetail};
use serde::Serialize;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::{Dropped, TokenReport};
use tokenrouter_core::text::TextCodec;

/// How one route writes its choices.
pub trait Dialect {
    /// A whole choice.
    type Whole: Serialize;
    /// A choice in a chunk.
    type Part: Serialize;
    /// `object` of a whole answer.
    const WHOLE: &'static str;
    /// `object` of a chunk.
    const CHUNK: &'static str;
    /// What ids start with.
    const ID_PREFIX: &'static str;
    /// `gen_ai.operation.name` in traces.
    const OPERATION: &'static str;

    /// A whole choice.
    fn whole(&mut self, index: usize, outcome: Outcome) -> Self::Whole;

    /// What a choice's stream starts with, before anything was generated.
    fn opening(&mut self, index: usize) -> Option<Self::Part>;

    /// The prompt of a choice with its log-probabilities; none where they are not told.
    fn prompt(&mut self, _index: usize, _tokens: &[TokenReport]) -> Option<Self::Part> {
        None
    }

    /// New text and tokens, or the end of a choice; none if there is nothing to tell yet.
    fn part(&mut self, piece: Piece) -> Option<Self::Part>;

    /// Whether tokens without text are worth a chunk of their own.
    fn carries_tokens(&self) -> bool;
}

/// What one chunk says of one choice.
pub struct Piece {
    /// Which choice.
    pub index: usize,
    /// Text to append; may be empty.
    pub text: String,
    /// Tokens committed since the last chunk.
    pub tokens: Vec<TokenReport>,
    /// How long each of them took.
    pub took: Duration,
    /// Filled in the last chunk of the choice.
    pub ending: Ending,
}

/// What is reported beside the text.
#[derive(Clone)]
pub struct Detail {
    /// For bytes and names of tokens.
    pub codec: Arc<dyn TextCodec>,
    /// Names of the models by index.
    pub model_names: Arc<[String]>,
    /// Report log-probabilities.
    pub logprobs: bool,
    /// Report which model made each token.
    pub token_models: bool,
    /// Report what is known of each token.
    pub token_details: bool,
}

impl Detail {
    /// The `token_models` member.
    pub fn makers(&self, tokens: &[TokenReport]) -> Option<Vec<String>> {
        self.token_models.then(|| tokens.iter().map(|report| self.name(report.model)).collect())
    }

    /// The `token_details` member; `took` has one entry a token.
    pub fn details(
        &self,
        tokens: &[TokenReport],
        took: impl IntoIterator<Item = Duration>,
    ) -> Option<Vec<TokenDetail>> {
        let detail = |(report, took): (&TokenReport, Duration)| TokenDetail {
            text: String::from_utf8_lossy(self.codec.token_bytes(report.id).unwrap_or_default()).into_owned(),
            model: self.name(report.model),
            entropy: report.entropy,
            dropped: report.dropped.map(|Dropped { model, entropy, score }| DroppedDetail {
                model: self.name(model),
                entropy,
                score,
            }),
            ms: took.as_micros() as f64 / 1e3,
        };
        self.token_details.then(|| tokens.iter().zip(took).map(detail).collect())
    }

    fn name(&self, model: ModelIdx) -> String {
        match self.model_names.get(model.index()) {
            Some(name) => name.clone(),
            None => model.to_string(),
        }
    }

    /// Whether tokens without text are worth a chunk of their own.
    pub fn carries_tokens(&self) -> bool {
        self.logprobs || self.token_models || self.token_details
    }
}

/// The members all chunks of an answer share.
#[derive(Clone, Debug)]
pub struct Head {
    /// Id of the answer.
    pub id: String,
    created: u64,
    model: String,
}

impl Head {
    /// A new answer by the served model of this name.
    pub fn new(id_prefix: &str, model: &str) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Head { id: format!("{id_prefix}-{}", uuid::Uuid::new_v4().simple()), created, model: model.to_owned() }
    }

    /// An envelope around these choices.
    pub fn envelope<C>(&self, object: &'static str, choices: Vec<C>) -> Envelope<C> {
        let (id, model) = (self.id.clone(), self.model.clone());
        Envelope { id, object, created: self.created, model, choices, usage: None }
    }
}
