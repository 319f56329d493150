//! What an answer must be: the port to grammars. Owner: the request; every model it visits has a value of its own, built
//! from the same words and led through the same committed tokens, so all of them allow the same. Invariant: a token that is
//! not allowed is never drawn, and a dropped candidate changes nothing.

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Bytes of a [`ConstraintSpec`] at most: it travels to every process that a request visits.
pub const CONSTRAINT_BYTES_MAX: usize = 256 << 10;

/// What an answer must be, in words: it is compiled by whoever has the vocabulary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConstraintSpec {
    /// A value of this JSON schema.
    Json(String),
    /// A text of this grammar, in llguidance's form of Lark.
    Lark(String),
}

impl ConstraintSpec {
    /// The words.
    pub fn text(&self) -> &str {
        match self {
            ConstraintSpec::Json(text) | ConstraintSpec::Lark(text) => text,
        }
    }
}

/// One answer within its constraint, as far as it is committed.
pub trait Constraint: Send + fmt::Debug {
    /// Tokens that may come next. None, if it is broken: the row fails then, and with it the request.
    fn allowed(&mut self) -> Mask;

    /// This token was committed.
    fn commit(&mut self, token: TokenId);
}

/// A set of tokens; bit `id % 32` of word `id / 32`.
#[derive(Clone, PartialEq, Eq)]
pub struct Mask(Arc<[u32]>);

impl Mask {
    /// The tokens whose bits are set.
    pub fn new(words: impl Into<Arc<[u32]>>) -> Self {
        Mask(words.into())
    }

    /// These tokens.
    pub fn of(ids: &[TokenId]) -> Self {
        let len = ids.iter().max().map_or(0, |&last| last as usize / 32 + 1);
        let mut words = vec![0; len];
        ids.iter().for_each(|&id| words[id as usize / 32] |= 1 << (id % 32));
        Mask::new(words)
    }

    /// Whether a token is in it.
    pub fn allows(&self, id: TokenId) -> bool {
        self.0.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// The bits, as many words as it takes to name the last token that is in it, or more.
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    /// Takes all others out: their logits become -inf.
    pub fn apply(&self, logits: &mut [f32]) {
        let mut words = self.0.iter();
        for chunk in logits.chunks_mut(32) {
            match words.next().copied().unwrap_or(0) {
                u32::MAX => {}
                0 => chunk.fill(f32::NEG_INFINITY),
                word => chunk
                    .iter_mut()
                    .enumerate()
                    .filter(|(bit, _)| word >> bit & 1 == 0)
                    .for_each(|(_, logit)| *logit = f32::NEG_INFINITY),
            }
        }
    }
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mask({} tokens)", self.0.iter().map(|word| word.count_ones()).sum::<u32>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_not_in_a_mask_is_taken_out(ids in prop::collection::vec(0u32..200, 0..40), width in 1usize..200) {
            let mask = Mask::of(&ids);
            let mut logits = vec![1.0; width];
            mask.apply(&mut logits);
            for (id, logit) in (0u32..).zip(logits) {
                prop_assert_eq!(mask.allows(id), ids.contains(&id));
                prop_assert_eq!(logit.is_finite(), ids.contains(&id), "{}", id);
            }
        }
    }
}
