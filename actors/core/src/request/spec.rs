//! What is fixed about a request, and what it commits. Owner: every state of the request reads it. Invariant: the same at
//! every model, so that any of them can tell the end of a request.

use crate::constraint::ConstraintSpec;
use crate::executor::TokenLogprobs;
use crate::ids::{ModelIdx, RequestId, TokenId};
use crate::job::{Dropped, FinishReason, Target};
use crate::sampling::SamplingParams;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What is fixed about a request; the same at every model it visits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestSpec {
    /// Unique, growing with arrival.
    pub id: RequestId,
    /// The subserver whose Client owns the stream.
    pub home: ModelIdx,
    /// Models of the router.
    pub models: u8,
    /// Tokens of the prompt.
    pub prompt_len: u32,
    /// Length at which generation ends, prompt included; within every model's context.
    pub len_max: u32,
    /// Length below which no stopping token may be drawn.
    pub len_min: u32,
    /// End-of-text tokens (of any of the models); empty when they are to be ignored.
    pub eos: Vec<TokenId>,
    /// Further stopping tokens.
    pub stop_ids: Vec<TokenId>,
    /// How tokens are drawn.
    pub sampling: Arc<SamplingParams>,
    /// What the answer must be.
    pub constraint: Option<Arc<ConstraintSpec>>,
    /// Who generates.
    pub target: Target,
    /// The version of the routing algorithm that this request follows; known in the process of its home.
    pub algorithm: u32,
    /// Parameters of the routing algorithm for this request, as JSON text; checked at home.
    pub routing: Option<String>,
    /// Log-probabilities to report.
    pub logprobs: Option<u8>,
    /// Report entropies.
    pub entropy: bool,
}

/// A token that is part of the answer now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Committed {
    /// Whose.
    pub request: RequestId,
    /// Absolute position, prompt included.
    pub position: u32,
    /// The token.
    pub token: TokenId,
    /// Who made it.
    pub model: ModelIdx,
    /// Normalised entropy behind it, if it was computed.
    pub entropy: Option<f32>,
    /// What the routing dropped in its place, if entropies are reported.
    pub dropped: Option<Dropped>,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Hops of the request so far.
    pub hops: u32,
    /// Prompt tokens that the prefix cache of the entry model held.
    pub cached: u32,
    /// Set on the last token.
    pub finish: Option<FinishReason>,
}
