//! The executor port: what a device is asked to do (`Step`) and what it answers (`StepOutput`).
//! Owner: the executor owns device memory; a step only names pages of it. Invariant: one step at a time, rows are
//! independent, and the answer for a row does not depend on the other rows.

use crate::constraint::Mask;
use crate::ids::{RequestId, TokenId};
use crate::sampling::{SamplingParams, TokenCounts};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Tokens whose keys and values share one page of KV memory.
pub const PAGE_TOKENS: usize = 16;

/// A page of KV memory on one device; the same id names the page in every layer.
pub type PageId = u32;

/// Which signals of a finished row a routing algorithm reads. Only these are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// Entropy of the softmax of the raw logits.
    pub entropy: bool,
    /// The k highest raw logits, descending; 0 = none.
    pub top_k: u16,
    /// The hidden row after the final norm.
    pub hidden: bool,
    /// The score of the learned head that the executor carries.
    pub score: bool,
}

impl Needs {
    /// Both sets together.
    pub fn union(self, other: Needs) -> Needs {
        Needs {
            entropy: self.entropy || other.entropy,
            top_k: self.top_k.max(other.top_k),
            hidden: self.hidden || other.hidden,
            score: self.score || other.score,
        }
    }
}

/// One forward pass over any mix of prefill chunks, extends and decodes.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// One row per request; a request appears at most once.
    pub rows: Vec<Row>,
}

impl Step {
    /// Tokens consumed by the whole step.
    pub fn tokens(&self) -> usize {
        self.rows.iter().map(|row| row.tokens.len()).sum()
    }
}

/// What one request adds to a step: `tokens` at positions `start..start + tokens.len()`, all earlier keys and values
/// being in `pages` already.
#[derive(Clone, Debug)]
pub struct Row {
    /// Whose row it is.
    pub request: RequestId,
    /// Absolute position of the first token, which is also the number of tokens that have KV.
    pub start: u32,
    /// Tokens to consume; never empty.
    pub tokens: Vec<TokenId>,
    /// Page table: page `p` holds positions `p * PAGE_TOKENS ..`; covers `start + tokens.len()`.
    pub pages: Vec<PageId>,
    /// How to draw the next token; `None` for a prefill chunk that is not the last.
    pub draw: Option<Draw>,
    /// Tokens whose log-probabilities are wanted.
    pub targets: Option<Targets>,
}

/// How probable were these tokens? `tokens[i]` is asked for after token `first + i` of the row, so there are no more of
/// them than tokens from there on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets {
    /// Place in the row of the token that comes before the first target.
    pub first: u32,
    /// The tokens, whether they follow in the row or in a later one.
    pub tokens: Vec<TokenId>,
    /// Most probable tokens to report beside each.
    pub alternatives: u8,
}

/// How the token after a row is drawn and what is reported beside it; by default greedily, and nothing.
#[derive(Clone, Debug, Default)]
pub struct Draw {
    /// Parameters of the request.
    pub params: Arc<SamplingParams>,
    /// Occurrences for the penalties; present exactly when the parameters read history.
    pub history: Option<Arc<TokenCounts>>,
    /// Tokens that must not be drawn (end-of-text before `min_tokens`).
    pub banned: Arc<[TokenId]>,
    /// The tokens that may be drawn, if the answer has a form; applied after all else.
    pub mask: Option<Mask>,
    /// Signals to report.
    pub needs: Needs,
    /// Report log-probabilities of the drawn token and of this many alternatives.
    pub logprobs: Option<u8>,
}

/// The answer to a step, row by row in the order of the step.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One entry per row.
    pub rows: Vec<RowOutput>,
}

/// What became of a row.
#[derive(Clone, Debug)]
pub enum RowOutput {
    /// Consumed; nothing was to be drawn. The log-probabilities of the row's targets.
    Fed(Vec<TokenLogprobs>),
    /// Consumed and a candidate drawn (not yet committed: the routing decision comes next).
    Drawn(Drawn),
    /// This row cannot go on (for example: its logits are not numbers). Other rows are unaffected.
    Failed(String),
}

/// A candidate token with the signals asked for.
#[derive(Clone, Debug, Default)]
pub struct Drawn {
    /// The candidate.
    pub token: TokenId,
    /// Signals of the position that produced it, from raw logits: before temperature, penalties, bias, bans and mask.
    pub signals: Signals,
    /// Log-probabilities, when asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Log-probabilities of the row's targets.
    pub targets: Vec<TokenLogprobs>,
}

/// Signals a routing algorithm may read; fields that were not asked for are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signals {
    /// Entropy of the next-token distribution at temperature 1.
    pub entropy: Option<Entropy>,
    /// The highest raw logits with their ids, descending; ties by lower id.
    pub top: Vec<(TokenId, f32)>,
    /// Hidden row after the final norm, `[hidden_size]`.
    pub hidden: Vec<f32>,
    /// Score of the learned head, after its sigmoid: within 0 and 1.
    pub score: Option<f32>,
}

/// Entropy of a next-token distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entropy {
    /// `-sum p ln p`, in nats, with `0 ln 0 = 0`.
    pub nats: f32,
    /// Width of the logits row the distribution is over (padded vocabulary size).
    pub width: u32,
}

impl Entropy {
    /// Entropy divided by `ln(width)`: 0 = certain, 1 = uniform. (R-Stitch, Algorithm 1.)
    pub fn normalised(self) -> f32 {
        if self.width < 2 { 0.0 } else { self.nats / (self.width as f32).ln() }
    }
}

/// Log-probabilities at one position, from the raw logits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the drawn token, or of the target.
    pub chosen: f32,
    /// The most probable tokens, descending.
    pub top: Vec<(TokenId, f32)>,
}

/// What a device can hold and do; fixed for the life of an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecutorLimits {
    /// Pages of KV memory.
    pub pages: u32,
    /// Rows per step at most.
    pub rows_max: u32,
    /// Tokens per step at most (prefill is cut into chunks to stay below).
    pub step_tokens_max: u32,
    /// Longest sequence the model was built for, in tokens.
    pub context_len: u32,
    /// Width of a logits row.
    pub vocab_width: u32,
}

/// Why a whole step failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorError {
    /// The step was refused or failed; the device is still sound and its memory intact.
    #[error("step failed: {0}")]
    Step(String),
    /// The device or its memory is lost; the executor must be rebuilt.
    #[error("executor lost: {0}")]
    Lost(String),
}

/// A device that runs one model.
pub trait Executor {
    /// Capacity of the device, constant.
    fn limits(&self) -> ExecutorLimits;

    /// Runs one forward pass. Keys and values of every consumed token are written to the named pages.
    ///
    /// # Errors
    /// [`ExecutorError`] when the step as a whole has no answer; nothing may be assumed about the pages of its rows.
    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError>;
}
