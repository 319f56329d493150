//! What a user asks for (`Job`) and what comes back (`Event`), in the words of the runtime rather than of HTTP.
//! Owner: the Client actor of the entry model. Invariant: every accepted job ends in exactly one `Finished` or `Failed`.

use crate::constraint::ConstraintSpec;
use crate::executor::TokenLogprobs;
use crate::ids::{ModelIdx, TokenId};
use crate::sampling::SamplingParams;
use crate::text::SpecialTokens;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// The text or tokens to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Token ids, used as they are.
    Ids(Vec<TokenId>),
    /// Text to tokenise.
    Text {
        /// The text.
        text: String,
        /// Whether control tokens in it are recognised.
        special: SpecialTokens,
        /// Whether the vocabulary's begin-of-text token is put in front (if it has one).
        add_bos: bool,
    },
}

/// Who generates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// All models, under the server's routing algorithm.
    Routed,
    /// One model, routing bypassed.
    Only(ModelIdx),
}

/// When generation ends.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StopRules {
    /// Tokens to generate at most; `None` = up to the context length.
    pub max_tokens: Option<u32>,
    /// End-of-text and stop tokens are not drawn before this many tokens.
    pub min_tokens: u32,
    /// End-of-text does not end the request.
    pub ignore_eos: bool,
    /// Texts that end the request when they appear in the output.
    pub stop: Vec<String>,
    /// Keep the stop string in the text.
    pub include_stop: bool,
    /// Further tokens that end the request.
    pub stop_ids: Vec<TokenId>,
}

/// One generation to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// What to continue.
    pub prompt: Prompt,
    /// Who generates.
    pub target: Target,
    /// Parameters of the routing algorithm for this request: a JSON object with the keys to change.
    pub routing: Option<serde_json::Value>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// When to stop.
    pub stop: StopRules,
    /// What the answer must be. End-of-text comes when it is complete, and not before.
    pub constraint: Option<ConstraintSpec>,
    /// Report log-probabilities of each token and of this many alternatives.
    pub logprobs: Option<u8>,
    /// Report log-probabilities of the prompt's tokens too, and of this many alternatives: those of the model where the
    /// job enters. Nothing of the prompt is taken from its prefix cache then.
    pub prompt_logprobs: Option<u8>,
    /// Report the entropy behind each token even if the algorithm does not read it.
    pub entropy: bool,
}

/// One token as reported to the user: committed, or of the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenReport {
    /// The token.
    pub id: TokenId,
    /// Who made it; of a token of the prompt, whose log-probabilities these are.
    pub model: ModelIdx,
    /// Normalised entropy of the distribution it came from, when known.
    pub entropy: Option<f32>,
    /// What the routing dropped in its place, when entropies are reported.
    pub dropped: Option<Dropped>,
    /// Log-probabilities, when asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// A candidate that was not kept: another model made the token of its place.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropped {
    /// Who drew it.
    pub model: ModelIdx,
    /// Normalised entropy of the distribution it came from, when known.
    pub entropy: Option<f32>,
    /// Score of the learned head, when known.
    pub score: Option<f32>,
}

/// Why a request ended well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// End-of-text.
    EndOfText,
    /// One of the request's stop tokens.
    StopToken(TokenId),
    /// One of the request's stop strings (the string).
    StopString(String),
    /// `max_tokens` or the context length reached.
    Length,
}

impl FinishReason {
    /// The word of the OpenAI API: `stop` or `length`.
    pub fn wire(&self) -> &'static str {
        match self {
            FinishReason::Length => "length",
            _ => "stop",
        }
    }
}

/// What a request consumed and made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV came from the entry model's prefix cache.
    pub cached_tokens: u32,
    /// Tokens generated, the end-of-text token included.
    pub completion_tokens: u32,
    /// Generated tokens per model, by model index.
    pub by_model: Vec<u32>,
    /// Times control moved from one model to another.
    pub hops: u32,
}

/// What the user sees of a running job.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The tokens of the prompt with their log-probabilities (the first has none): once and before all else, if asked for.
    Prompt(Vec<TokenReport>),
    /// New text and the tokens behind it. Text may lag the tokens (unfinished characters, possible stop strings),
    /// so either may be empty.
    Delta {
        /// Text to append.
        text: String,
        /// Tokens committed since the last event.
        tokens: Vec<TokenReport>,
    },
    /// The job is done; nothing follows.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Totals.
        usage: Usage,
        /// From its acceptance to its first forward pass.
        queued: Duration,
    },
    /// The job failed after it was accepted; nothing follows.
    Failed(Failure),
}

/// An accepted job could not be completed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Failure {
    /// A model's executor failed and the request could not be recovered.
    #[error("model {model} failed: {reason}")]
    Executor {
        /// Name of the model.
        model: String,
        /// What it said.
        reason: String,
    },
    /// The routing algorithm did something it must not (for example hopping for ever without a token).
    #[error("routing failed: {0}")]
    Routing(String),
    /// The server is stopping.
    #[error("the server is shutting down")]
    Stopped,
    /// An internal part failed; the request's state is lost.
    #[error("internal failure: {0}")]
    Internal(String),
    /// The server's bound on the time of a request was passed.
    #[error("{overdue} within {} ms", limit.as_millis())]
    TimedOut {
        /// What did not come in time.
        overdue: Overdue,
        /// The bound.
        limit: Duration,
    },
}

/// What a request waited for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Overdue {
    /// Its first token.
    FirstToken,
    /// Its end.
    End,
}

impl fmt::Display for Overdue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Overdue::FirstToken => "the request made no token",
            Overdue::End => "the request did not end",
        })
    }
}

/// A job that was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Something in the job is wrong; `field` is the name of the request field.
    #[error("{field}: {message}")]
    Invalid {
        /// Request field.
        field: &'static str,
        /// What is wrong and what would be right.
        message: String,
    },
    /// Prompt and output cannot fit the context length.
    #[error(
        "the prompt has {prompt_tokens} tokens and {output_tokens} more may be generated, but the context holds {context_len}"
    )]
    ContextOverflow {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Output tokens asked for, at least 1.
        output_tokens: u32,
        /// Context length of the models involved.
        context_len: u32,
    },
    /// The request can never fit the KV memory of a model it may visit.
    #[error(
        "the request needs KV memory for {needed_tokens} tokens but model {model} holds {capacity_tokens}; ask for fewer tokens or raise kv memory"
    )]
    NeverFits {
        /// Name of the model.
        model: String,
        /// Prompt plus output tokens.
        needed_tokens: u32,
        /// Tokens the pool holds.
        capacity_tokens: u32,
    },
    /// Too much is live.
    #[error("{now} {load} are live and the limit is {limit}; try again later")]
    Overloaded {
        /// Of what.
        load: Load,
        /// How much is live.
        now: u64,
        /// The limit.
        limit: u64,
        /// When to try again.
        retry_after: Duration,
    },
    /// The server is stopping or a part of it is being rebuilt.
    #[error("the server is not ready: {0}")]
    Unavailable(String),
}

/// What there can be too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Requests.
    Requests,
    /// Tokens of their prompts.
    PromptTokens,
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Load::Requests => "requests",
            Load::PromptTokens => "prompt tokens",
        })
    }
}
