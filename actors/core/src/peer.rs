//! What travels between two models: the suffix the peer has not seen. Owner: InterModel. Invariant: positions are
//! absolute, so a receiver can trim what it has, and must refuse a gap.

use crate::ids::{ModelIdx, RequestId, Time, TokenId};
use crate::job::{Dropped, Failure};
use crate::live::{LiveNotes, Stamp};
use crate::request::{Committed, RequestSpec};
use serde::{Deserialize, Deserializer, Serialize};
use smallvec::{Array, SmallVec};
use std::sync::Arc;

/// Per model: length of the token prefix it holds as ids.
pub type Known = SmallVec<[u32; 4]>;

/// A request on its way to a peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeerReq {
    /// Whose.
    pub request: RequestId,
    /// The subserver whose Client owns the stream.
    pub home: ModelIdx,
    /// Who sends.
    pub from: ModelIdx,
    /// Who shall go on.
    pub to: ModelIdx,
    /// Present on the first visit of `to`.
    pub spec: Option<Arc<RequestSpec>>,
    /// Absolute position of the first token below.
    pub base: u32,
    /// The tokens from `base` on; `base + tokens.len()` is the committed length.
    #[serde(deserialize_with = "cautious")]
    pub tokens: SmallVec<[TokenId; 8]>,
    /// What every model holds once this message has arrived.
    #[serde(deserialize_with = "cautious")]
    pub known: Known,
    /// Hops of this request so far, this one included.
    pub hops: u32,
    /// Prompt tokens that the home's prefix cache held.
    pub cached: u32,
    /// Hops in a row that committed nothing, this one included if so.
    pub barren: u8,
    /// The candidate that this hop drops, if entropies are reported.
    pub dropped: Option<Dropped>,
    /// Live counts, filled in by InterModel as it sends.
    #[serde(deserialize_with = "cautious")]
    pub live: LiveNotes,
    /// Whatever the routing algorithm wants to tell itself at the peer.
    pub ext: Vec<u8>,
    /// When it left, for who has the same clock: it is not told to other processes.
    #[serde(skip)]
    pub left: Option<Time>,
}

/// A message from a peer does not fit what is known here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// Tokens between what is held and what was sent are missing.
    #[error("gap: {known} tokens are held here and the message starts at {base}")]
    Gap {
        /// Tokens held.
        known: u32,
        /// First position sent.
        base: u32,
    },
    /// The message would shorten or rewrite what is held.
    #[error("conflict: {known} tokens are held here and the message ends at {end} or differs before")]
    Conflict {
        /// Tokens held.
        known: u32,
        /// Length after the message.
        end: u32,
    },
    /// The message speaks of another number of models.
    #[error("the message speaks of {theirs} models; there are {ours}")]
    Models {
        /// Models here.
        ours: usize,
        /// Models there.
        theirs: usize,
    },
    /// No state is kept here and the message does not describe the request: this is not its first visit.
    #[error("nothing is known here of this request; its state was lost in a restart")]
    NoSpec,
    /// As many requests visit as all processes together may have live.
    #[error("{limit} requests visit already and no more can be live")]
    Crowded {
        /// The limit.
        limit: usize,
    },
    /// The form of the answer cannot be kept here.
    #[error("the form of its answer: {0}")]
    Constraint(String),
    /// The algorithm cannot take the message.
    #[error("{0}")]
    Routing(String),
}

impl PeerReq {
    /// Committed length after this message.
    pub fn end(&self) -> u32 {
        self.base + self.tokens.len() as u32
    }

    /// Appends what `tokens` lacks: overlap is trimmed (and must agree), a gap is refused.
    ///
    /// # Errors
    /// [`PeerError`]; `tokens` is unchanged then.
    pub fn append_to(&self, tokens: &mut Vec<TokenId>) -> Result<(), PeerError> {
        let known = tokens.len() as u32;
        if self.base > known {
            return Err(PeerError::Gap { known, base: self.base });
        }
        let overlap = (known - self.base) as usize;
        if self.end() < known || tokens[self.base as usize..] != self.tokens[..overlap] {
            return Err(PeerError::Conflict { known, end: self.end() });
        }
        tokens.extend_from_slice(&self.tokens[overlap..]);
        Ok(())
    }
}

/// Reads a list of any claimed length without taking memory for it before its items are there: `SmallVec` by itself
/// reserves what the sender claims.
fn cautious<'de, D: Deserializer<'de>, A: Array>(source: D) -> Result<SmallVec<A>, D::Error>
where
    A::Item: Deserialize<'de>,
{
    Vec::deserialize(source).map(SmallVec::from_vec)
}

/// A request that may come to a peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ahead {
    /// What is fixed about it.
    pub spec: Arc<RequestSpec>,
    /// The tokens of its prompt.
    pub prompt: Vec<TokenId>,
}

/// What one subserver tells another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum PeerFrame {
    /// Control of these requests moves here, at the same time: none of them starts a batch without the others.
    Requests(Vec<PeerReq>),
    /// Tokens for the streams of the Client here.
    Emit(Vec<Committed>),
    /// A request of the Client here cannot go on.
    Failed(RequestId, Failure),
    /// A request has ended; drop whatever is held for it.
    Release(RequestId),
    /// Live counts changed.
    Live(#[serde(deserialize_with = "cautious")] LiveNotes),
    /// The sender has lost all its requests.
    Restarted,
    /// A request has entered elsewhere and may come: its prompt can be prefilled when there is time.
    Ahead(Arc<Ahead>),
    /// Frames from the receiver of this to its sender were lost.
    Missed,
}

/// Bytes of the requests in one frame at most, by a generous estimate and unless one alone has more: a frame to another
/// process has a limit, and one that is too long would be lost with all its requests.
const FRAME_BYTES: usize = 1 << 20;
/// Bytes of a token on the wire at most, and of all that is fixed about a request.
const TOKEN_BYTES: usize = 5;
const SPEC_BYTES: usize = 4096;

/// Requests for the same peer, in their order, in as few frames as may be.
pub fn in_frames(requests: Vec<PeerReq>) -> Vec<Vec<PeerReq>> {
    let mut frames: Vec<Vec<PeerReq>> = Vec::new();
    let mut bytes = 0;
    for request in requests {
        let own = TOKEN_BYTES * request.tokens.len() + request.ext.len() + SPEC_BYTES;
        bytes += own;
        match frames.last_mut().filter(|_| bytes <= FRAME_BYTES) {
            Some(frame) => frame.push(request),
            None => {
                bytes = own;
                frames.push(vec![request]);
            }
        }
    }
    frames
}

/// A frame on its way. The stamp grows by one with every frame of a sender to a receiver, and further with every life of
/// the sender, so that repeated, late and lost frames are seen.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Envelope {
    /// Who sends.
    pub from: ModelIdx,
    /// Number of this frame.
    pub stamp: Stamp,
    /// What it says.
    pub frame: PeerFrame,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_one_frame_unless_it_is_long() {
        let request = |(id, (tokens, ext)): (u64, (usize, usize))| PeerReq {
            request: RequestId(id),
            home: ModelIdx(0),
            from: ModelIdx(0),
            to: ModelIdx(1),
            spec: None,
            base: 0,
            tokens: smallvec::smallvec![7; tokens],
            known: [0, 0].as_slice().into(),
            hops: 0,
            cached: 0,
            barren: 0,
            dropped: None,
            live: LiveNotes::new(),
            ext: vec![0; ext],
            left: None,
        };
        let framed = |sizes: &[(usize, usize)]| -> Vec<Vec<u64>> {
            let requests = (0..).zip(sizes.iter().copied()).map(request).collect();
            in_frames(requests).iter().map(|frame| frame.iter().map(|one| one.request.0).collect()).collect()
        };
        let (all, none): (Vec<Vec<u64>>, Vec<Vec<u64>>) = (vec![vec![0, 1, 2]], Vec::new());
        assert_eq!((framed(&[(1, 0), (30, 9), (0, 0)]), framed(&[])), (all, none));
        let half = (FRAME_BYTES / 2 - SPEC_BYTES) / TOKEN_BYTES;
        let tokens = [(half, 0), (half, 0), (1, 0), (4 * half, 0), (1, 0)];
        assert_eq!(framed(&tokens), [vec![0, 1], vec![2], vec![3], vec![4]]);
        assert_eq!(framed(&[(1, FRAME_BYTES / 2), (1, FRAME_BYTES / 2)]), [[0], [1]], "state of the algorithm counts");
        assert_eq!(framed(&[(1, 0); 600]).len(), 3, "so does what every request has");
    }

    #[track_caller]
    fn check(held: &[TokenId], base: u32, sent: &[TokenId], expected: Result<&[TokenId], PeerError>) {
        let message = PeerReq {
            request: RequestId(1),
            home: ModelIdx(0),
            from: ModelIdx(0),
            to: ModelIdx(1),
            spec: None,
            base,
            tokens: sent.into(),
            known: Known::new(),
            hops: 1,
            cached: 0,
            barren: 0,
            dropped: None,
            live: LiveNotes::new(),
            ext: Vec::new(),
            left: None,
        };
        let mut tokens = held.to_vec();
        let outcome = message.append_to(&mut tokens);
        assert_eq!(tokens, *expected.as_ref().unwrap_or(&held));
        assert_eq!(outcome, expected.map(|_| ()));
    }

    #[test]
    fn suffixes_are_appended_overlap_is_trimmed_gaps_are_refused() {
        check(&[7, 8], 2, &[9], Ok(&[7, 8, 9]));
        check(&[7, 8], 0, &[7, 8, 9], Ok(&[7, 8, 9]));
        check(&[7, 8], 2, &[], Ok(&[7, 8]));
        check(&[7, 8], 3, &[9], Err(PeerError::Gap { known: 2, base: 3 }));
        check(&[7, 8], 1, &[5, 9], Err(PeerError::Conflict { known: 2, end: 3 }));
        check(&[7, 8], 0, &[7], Err(PeerError::Conflict { known: 2, end: 1 }));
    }
}
