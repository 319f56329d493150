//! Whether a frame from another process can be true. Owner: the gate. Invariant: what passes cannot index out of a
//! table, name a token no model knows or speak for a subserver that does not exist.

use super::wire::Parcel;
use crate::runtime::Server;
use tokenrouter_core::constraint::CONSTRAINT_BYTES_MAX;
use tokenrouter_core::ids::{ModelIdx, RequestId};
use tokenrouter_core::peer::{Ahead, PeerFrame, PeerReq};
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
            PeerFrame::Requests(messages) => messages.iter().find_map(|message| self.request_fault(message)),
            PeerFrame::Emit(tokens) => {
                let stranger = tokens.iter().find(|token| !self.is_model(token.model))?;
                Some(format!("its token is of model {}", stranger.model))
            }
            PeerFrame::Ahead(ahead) => self.ahead_fault(ahead),
            PeerFrame::Failed(..)
            | PeerFrame::Release(_)
            | PeerFrame::Live(_)
            | PeerFrame::Restarted
            | PeerFrame::Missed => None,
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
        message.spec.as_deref().and_then(|spec| self.spec_fault(spec, (message.request, message.home)))
    }

    fn ahead_fault(&self, ahead: &Ahead) -> Option<String> {
        let spec = &*ahead.spec;
        if ahead.prompt.len() as u64 != u64::from(spec.prompt_len) {
            return Some(format!("its prompt has {} tokens and says {}", ahead.prompt.len(), spec.prompt_len));
        }
        if let Some(token) = ahead.prompt.iter().find(|&&token| token >= self.vocab_size) {
            return Some(format!("its token {token} is not below {}", self.vocab_size));
        }
        self.spec_fault(spec, (spec.id, self.from))
    }

    fn spec_fault(&self, spec: &RequestSpec, (request, home): (RequestId, ModelIdx)) -> Option<String> {
        if spec.id != request || spec.home != home || usize::from(spec.models) != self.models {
            return Some(format!("its request {request} is described as {} of {}", spec.id, spec.home));
        }
        let form_bytes = spec.constraint.as_ref().map_or(0, |form| form.text().len());
        if form_bytes > CONSTRAINT_BYTES_MAX {
            return Some(format!(
                "the form of its answer has {form_bytes} bytes; at most {CONSTRAINT_BYTES_MAX} are allowed"
            ));
        }
        (spec.len_max > self.context_len || spec.prompt_len > spec.len_max)
            .then(|| format!("its request wants {} tokens; the context holds {}", spec.len_max, self.context_len))
    }

    fn is_model(&self, model: ModelIdx) -> bool {
        model.index() < self.models
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokenrouter_core::job::Target;
    use tokenrouter_core::live::{LiveNotes, Stamp};
    use tokenrouter_core::peer::Envelope;
    use tokenrouter_core::request::Committed;
    use tokenrouter_core::sampling::SamplingParams;

    const BOUNDS: Bounds = Bounds { from: ModelIdx(0), to: ModelIdx(1), models: 2, vocab_size: 100, context_len: 64 };

    fn parcel(frame: PeerFrame) -> Parcel {
        Parcel { to: ModelIdx(1), envelope: Envelope { from: ModelIdx(0), stamp: Stamp::default(), frame } }
    }

    fn spec() -> RequestSpec {
        RequestSpec {
            id: RequestId(5),
            home: ModelIdx(0),
            models: 2,
            prompt_len: 3,
            len_max: 64,
            len_min: 3,
            eos: vec![1],
            stop_ids: Vec::new(),
            sampling: Arc::new(SamplingParams::default()),
            constraint: None,
            target: Target::Routed,
            algorithm: 0,
            routing: None,
            logprobs: None,
            entropy: false,
        }
    }

    fn request(change: impl FnOnce(&mut PeerReq)) -> Parcel {
        let mut message = PeerReq {
            request: RequestId(5),
            home: ModelIdx(0),
            from: ModelIdx(0),
            to: ModelIdx(1),
            spec: Some(Arc::new(spec())),
            base: 0,
            tokens: [7, 8, 99].as_slice().into(),
            known: [3, 3].as_slice().into(),
            hops: 1,
            cached: 0,
            barren: 0,
            dropped: None,
            live: LiveNotes::new(),
            ext: Vec::new(),
            left: None,
        };
        change(&mut message);
        parcel(PeerFrame::Requests(vec![message]))
    }

    fn described(change: impl FnOnce(&mut RequestSpec)) -> Parcel {
        let mut spec = spec();
        change(&mut spec);
        request(|message| message.spec = Some(Arc::new(spec)))
    }

    fn ahead(change: impl FnOnce(&mut RequestSpec), prompt: &[u32]) -> Parcel {
        let mut spec = spec();
        change(&mut spec);
        parcel(PeerFrame::Ahead(Arc::new(Ahead { spec: Arc::new(spec), prompt: prompt.to_vec() })))
    }

    fn emit(model: u8) -> Parcel {
        parcel(PeerFrame::Emit(vec![Committed {
            request: RequestId(5),
            position: 3,
            token: 4,
            model: ModelIdx(model),
            entropy: None,
            dropped: None,
            logprobs: None,
            hops: 0,
            cached: 0,
            finish: None,
        }]))
    }

    #[test]
    fn only_what_can_be_true_passes() {
        let right = [
            request(|_| {}),
            request(|message| message.spec = None),
            request(|message| message.base = 61),
            emit(1),
            ahead(|_| {}, &[7, 8, 99]),
            parcel(PeerFrame::Restarted),
            parcel(PeerFrame::Missed),
        ];
        for parcel in right {
            assert_eq!(BOUNDS.fault(&parcel), None, "{parcel:?}");
        }
        let wrong = [
            (Parcel { to: ModelIdx(0), ..parcel(PeerFrame::Restarted) }, "another's connection"),
            (request(|message| message.from = ModelIdx(1)), "goes from m1 to m1"),
            (request(|message| message.to = ModelIdx(7)), "goes from m0 to m7"),
            (request(|message| message.home = ModelIdx(2)), "for m2"),
            (request(|message| message.known.push(1)), "speaks of 3 models; there are 2"),
            (request(|message| message.base = 62), "has 65 tokens; the context holds 64"),
            (request(|message| message.base = u32::MAX), "has 4294967298 tokens"),
            (request(|message| message.tokens[0] = 100), "token 100 is not below 100"),
            (described(|spec| spec.id = RequestId(6)), "r5 is described as r6"),
            (described(|spec| spec.home = ModelIdx(1)), "described as r5 of m1"),
            (described(|spec| spec.models = 200), "described as r5"),
            (described(|spec| spec.len_max = 65), "wants 65 tokens"),
            (described(|spec| spec.prompt_len = 65), "wants 64 tokens"),
            (emit(2), "token is of model m2"),
            (ahead(|_| {}, &[7, 8]), "has 2 tokens and says 3"),
            (ahead(|_| {}, &[7, 8, 100]), "token 100 is not below 100"),
            (ahead(|spec| spec.home = ModelIdx(1), &[7, 8, 9]), "described as r5 of m1"),
            (ahead(|spec| spec.len_max = 65, &[7, 8, 9]), "wants 65 tokens"),
        ];
        for (parcel, part) in wrong {
            let fault = BOUNDS.fault(&parcel).unwrap_or_else(|| panic!("taken: {parcel:?}"));
            assert!(fault.contains(part), "{fault}");
        }
    }
}
