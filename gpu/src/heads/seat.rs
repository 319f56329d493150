//! A learned head at work in a runner. Owner: the runner. Invariant: after a step every output that asked for a score has
//! one.

use super::math;
use super::network::{Network, NetworkInput, Scratch};
use crate::ops::{HeadOutput, Ops, OpsError};
use std::sync::Arc;
use tokenrouter_core::ids::TokenId;

/// A head with its scratch.
pub struct Seat<O: Ops>(Kind<O>);

enum Kind<O: Ops> {
    Network(Box<Busy<O>>),
    Row(TokenId),
}

struct Busy<O: Ops> {
    network: Arc<Network<O>>,
    scratch: Scratch<O>,
}

/// What a head reads of the model.
pub struct Source<'a, O: Ops> {
    /// Hidden rows after the final norm, of all outputs of the step.
    pub hidden: &'a O::Rows,
    /// The model's token embedding.
    pub embed: &'a O::Matrix,
    /// The outputs that are scored.
    pub scored: &'a [u32],
}

impl<O: Ops> Seat<O> {
    /// A network that scores up to `rows_max` rows a step.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    pub fn network(ops: &mut O, network: Arc<Network<O>>, rows_max: usize) -> Result<Self, OpsError> {
        let scratch = Scratch::new(ops, network.config(), rows_max)?;
        Ok(Seat(Kind::Network(Box::new(Busy { network, scratch }))))
    }

    /// The row of the output layer of this token.
    pub fn row(token: TokenId) -> Self {
        Seat(Kind::Row(token))
    }

    /// Whether the device runs a network for it.
    pub fn is_network(&self) -> bool {
        matches!(self.0, Kind::Network(_))
    }

    /// How many of the highest logits it reads.
    pub fn top_k(&self) -> usize {
        match &self.0 {
            Kind::Network(busy) => busy.network.config().logits_size,
            Kind::Row(_) => 0,
        }
    }

    /// The column of the logits that is the head's own and has to be taken out of them, where it has one.
    pub fn column(&self) -> Option<TokenId> {
        match &self.0 {
            Kind::Network(_) => None,
            Kind::Row(token) => Some(*token),
        }
    }

    /// Scores the outputs that ask for it, by operations of the device where there is a network.
    pub fn score(&mut self, ops: &mut O, source: Source<'_, O>, found: &mut HeadOutput<O>) {
        let Source { hidden, embed, scored } = source;
        match &mut self.0 {
            Kind::Network(busy) if !scored.is_empty() => {
                let input = NetworkInput { hidden, embed, scored };
                busy.network.score(ops, input, (&mut busy.scratch, found));
            }
            Kind::Network(_) | Kind::Row(_) => {}
        }
    }

    /// The score of an output of a finished step.
    pub fn read(&self, output: usize, found: &HeadOutput<O>) -> f32 {
        match &self.0 {
            Kind::Network(_) => found.scores[output],
            Kind::Row(_) => math::sigmoid(found.column[output]),
        }
    }
}
