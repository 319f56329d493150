//! How InterModel reaches a peer. Owner: one link per peer. Invariant: frames arrive in the order sent, or not at all.

use std::fmt::Debug;
use tokenrouter_core::peer::Envelope;

pub mod local;
pub mod wire;

/// One direction to one peer.
pub trait Link: Send + Debug {
    /// Hands a frame over without waiting.
    ///
    /// # Errors
    /// [`LinkDown`] when the peer cannot be reached; the frame is lost then and the caller must act on it.
    fn send(&self, envelope: Envelope) -> Result<(), LinkDown>;
}

/// The peer cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("peer unreachable: {0}")]
pub struct LinkDown(pub String);
