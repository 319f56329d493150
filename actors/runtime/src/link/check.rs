//! Whether a frame from another process can be true. Owner: the gate. Invariant: what passes cannot index out of a
//! table, name a token no model knows or speak for a subserver that does not exist.

use super::wire::Parcel;
use crate::runtime::Server;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::peer::{PeerFrame, PeerReq};
use tokenrouter_core::request::RequestSpec;

/// What a connection was opened for and what the server is.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The subserver that speaks.
    pub from: ModelIdx,
    /// The subserver addressed.
    pub to: ModelIdx,
    /// Models of the server.
    pub models: usize,
    /// Every token is below this.
    pub vocab_size: u32,
    /// Longest sequence all of its models take, in tokens.
    pub context_len: u32,
}

impl Bounds {
    /// Of a connection between two subservers of this server.
    pub fn new(server: &Server, from: ModelIdx, to: ModelIdx) -> Self {
        let widest = server.models.iter().map(|model| model.limits.vocab_width).max();
        Bounds {
            from,
            to,
            models: server.models.len(),
            vocab_size: widest.unwrap_or(0).max(server.codec.vocab_size()),
            context_len: server.models.iter().map(|model| model.limits.context_len).min().unwrap_or(0),
        }
    }

    /// What is wrong with a frame, if anything.
    pub fn fault(&self, parcel: &Parcel) -> Option<String> {
        let envelope = &parcel.envelope;
        if (envelope.from, parcel.to) != (self.from, self.to) {
            return Some(format!("it goes from {} to {} on another's connection", envelope.from, parcel.to));
        }
        match &envelope.frame {
            PeerFrame::Request(message) => self.request_fault(message),
            PeerFrame::Emit(tokens) => {
                let stranger = tokens.iter().find(|token| !self.is_model(token.model))?;
                Some(format!("its token is of model {}", stranger.model))
            }
            PeerFrame::Failed(..) | PeerFrame::Release(_) | PeerFrame::Live(_) | PeerFrame::Restarted => None,
        }
    }

    fn request_fault(&self, message: &PeerReq) -> Option<String> {
        if (message.from, message.to) != (self.from, self.to) || !self.is_model(message.home) {
            return Some(format!("its request goes from {} to {} for {}", message.from, message.to, message.home));
        }
        if message.known.len() != self.models {
            return Some(format!("its request speaks of {} models; there are {}", message.known.len(), self.models));
        }
        let end = u64::from(message.base) + message.tokens.len() as u64;
        if end > u64::from(self.context_len) {
            return Some(format!("its request has {end} tokens; the context holds {}", self.context_len));
        }
        if let Some(token) = message.tokens.iter().find(|&&token| token >= self.vocab_size) {
            return Some(format!("its token {token} is not below {}", self.vocab_size));
        }
        message.spec.as_deref().and_then(|spec| self.spec_fault(spec, message))
    }

    fn spec_fault(&self, spec: &RequestSpec, message: &PeerReq) -> Option<String> {
        if spec.id != message.request || spec.home != message.home || usize::from(spec.models) != self.models {
            return Some(format!("its request {} is described as {} of {}", message.request, spec.id, spec.home));
        }
        (spec.len_max > self.context_len || spec.prompt_len > spec.len_max)
            .then(|| format!("its request wants {} tokens; the context holds {}", spec.len_max, self.context_len))
    }

    fn is_model(&self, model: ModelIdx) -> bool {
        model.index() < self.models
    }
}
