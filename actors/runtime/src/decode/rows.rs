//! What the rows of a step are, and where they go. Pure. Owner: Decode. Invariant: a row is of its prompt as long as it
//! consumes a token of it.

use crate::instruments::StepKind;
use tokenrouter_core::executor::{Row, Step};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::request::{Running, Settled};

/// Whether a row consumes tokens of the prompt.
pub(super) fn prefills((row, running): (&Row, &Running)) -> bool {
    row.start < running.spec().prompt_len
}

/// What the rows of a step consume.
pub(super) fn kind(step: &Step, running: &[Running]) -> StepKind {
    if step.rows.iter().zip(running).any(prefills) {
        StepKind::Prefill
    } else if step.rows.iter().any(|row| row.tokens.len() > 1) {
        StepKind::Extend
    } else {
        StepKind::Decode
    }
}

/// The model that goes on, itself included; none when the request has ended.
pub(super) fn way(me: ModelIdx, next: &Settled) -> Option<ModelIdx> {
    match next {
        Settled::Stay(_) => Some(me),
        Settled::Leave(_, request) => Some(request.to),
        Settled::Done(_) | Settled::Failed(..) => None,
    }
}
