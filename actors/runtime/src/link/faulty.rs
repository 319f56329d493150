//! A link with faults on order. Owner: the InterModel behind it. Invariant: the sender is told nothing of a fault, just as
//! nobody would tell it of a real one.

use super::{Link, LinkDown};
use std::sync::{Mutex, PoisonError};
use tokenrouter_core::faults::{LinkFault, LinkFaults};
use tokenrouter_core::peer::Envelope;

/// A link that loses, repeats or swaps frames.
#[derive(Debug)]
pub struct FaultyLink {
    inner: Box<dyn Link>,
    faults: Vec<LinkFaults>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    frames: u64,
    /// To be sent after the next one.
    held: Option<Envelope>,
}

impl FaultyLink {
    /// `inner` with these faults.
    pub fn new(inner: Box<dyn Link>, faults: Vec<LinkFaults>) -> Self {
        FaultyLink { inner, faults, state: Mutex::default() }
    }
}

impl Link for FaultyLink {
    fn send(&self, envelope: Envelope) -> Result<(), LinkDown> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = self.faults.iter().find_map(|faults| faults.of(state.frames));
        state.frames += 1;
        match (fault, state.held.take()) {
            (Some(LinkFault::Reordered), None) => state.held = Some(envelope),
            (fault, held) => {
                if fault == Some(LinkFault::Duplicate) {
                    self.inner.send(envelope.clone())?;
                }
                if fault != Some(LinkFault::Lost) {
                    self.inner.send(envelope)?;
                }
                if let Some(late) = held {
                    self.inner.send(late)?;
                }
            }
        }
        Ok(())
    }

    fn is_up(&self) -> bool {
        self.inner.is_up()
    }

    fn wake(&self) {
        self.inner.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokenrouter_core::ids::{ModelIdx, RequestId};
    use tokenrouter_core::live::Stamp;
    use tokenrouter_core::peer::PeerFrame;

    #[derive(Clone, Debug, Default)]
    struct Paper(Arc<Mutex<Vec<u64>>>);

    impl Link for Paper {
        fn send(&self, envelope: Envelope) -> Result<(), LinkDown> {
            self.0.lock().expect("one thread").push(envelope.stamp.seq);
            Ok(())
        }
    }

    #[test]
    fn frames_are_lost_repeated_or_swapped_and_the_others_go_as_they_are() {
        for fault in [LinkFault::Lost, LinkFault::Duplicate, LinkFault::Reordered] {
            let (paper, faults) = (Paper::default(), LinkFaults { fault, every: 7, seed: 3 });
            let link = FaultyLink::new(Box::new(paper.clone()), vec![faults]);
            for seq in 0..500 {
                let frame = PeerFrame::Release(RequestId(seq));
                link.send(Envelope { from: ModelIdx(0), stamp: Stamp { life: 1, seq }, frame })
                    .expect("paper takes all");
            }
            let seen = paper.0.lock().expect("one thread").clone();
            let struck = |seq: &u64| faults.of(*seq).is_some();
            let mut sorted = seen.clone();
            sorted.sort_unstable();
            match fault {
                LinkFault::Lost => assert_eq!(seen, (0..500).filter(|seq| !struck(seq)).collect::<Vec<_>>()),
                LinkFault::Duplicate => {
                    let twice = |seq: u64| std::iter::repeat_n(seq, 1 + usize::from(struck(&seq)));
                    assert_eq!(seen, (0..500).flat_map(twice).collect::<Vec<_>>());
                }
                LinkFault::Reordered => {
                    let early = seen.windows(2).filter(|pair| pair[1] < pair[0]).count();
                    assert!(early > 40, "{early}");
                    assert!(sorted.len() >= 499 && (0..499).all(|seq| sorted[seq as usize] == seq));
                }
            }
        }
    }
}
