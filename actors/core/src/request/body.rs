//! What a request carries at one model, whatever its state: tokens, pages, what peers know, the algorithm's value.
//! Owner: the state around it. Invariant: `kv <= known <= len`, and counts follow exactly the committed tokens.

use super::prompt::PromptLogprobs;
use super::spec::{Committed, RequestSpec};
use super::{BARREN_HOPS_MAX, Finished};
use crate::constraint::Constraint;
use crate::executor::{Drawn, Signals, TokenLogprobs};
use crate::ids::{ModelIdx, TokenId};
use crate::job::{Dropped, FinishReason};
use crate::kv::{KvPool, Lease};
use crate::peer::{Known, PeerError, PeerReq};
use crate::routing::{Decision, Route};
use crate::sampling::TokenCounts;
use std::sync::Arc;

/// What a request carries at one model, whatever its state.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) spec: Arc<RequestSpec>,
    pub(super) me: ModelIdx,
    pub(super) tokens: Vec<TokenId>,
    pub(super) known: Known,
    pub(super) lease: Lease,
    /// Prompt tokens that the home's prefix cache held.
    pub(super) cached: u32,
    pub(super) fresh: bool,
    /// Only fills the prefix cache; nothing is ever drawn.
    pub(super) ahead: bool,
    pub(super) route: Box<dyn Route>,
    pub(super) counts: Option<Arc<TokenCounts>>,
    pub(super) banned: Arc<[TokenId]>,
    /// Has seen exactly the committed output.
    pub(super) constraint: Option<Box<dyn Constraint>>,
    /// Present until the log-probabilities of the prompt that were asked for are complete.
    pub(super) prompt: Option<PromptLogprobs>,
    pub(super) hops: u32,
    /// The candidate of the next place that was not kept, if entropies are reported.
    pub(super) dropped: Option<Dropped>,
    pub(super) barren: u8,
    pub(super) attempts: u8,
}

impl Body {
    pub(super) fn new(spec: Arc<RequestSpec>, me: ModelIdx, route: Box<dyn Route>, pool: &KvPool) -> Self {
        let banned = spec.eos.iter().chain(&spec.stop_ids).copied().collect();
        Body {
            me,
            tokens: Vec::new(),
            known: Known::from_elem(0, usize::from(spec.models)),
            lease: pool.lease(spec.id, spec.len_max),
            cached: 0,
            fresh: true,
            ahead: false,
            route,
            counts: None,
            banned,
            constraint: None,
            prompt: None,
            hops: 0,
            dropped: None,
            barren: 0,
            attempts: 0,
            spec,
        }
    }

    pub(super) fn receive(&mut self, message: &PeerReq) -> Result<(), PeerError> {
        let (ours, theirs) = (self.known.len(), message.known.len());
        if ours != theirs {
            return Err(PeerError::Models { ours, theirs });
        }
        let before = self.tokens.len();
        self.route.receive(&mut self.tokens, message)?;
        self.known.copy_from_slice(&message.known);
        self.known[self.me.index()] = self.tokens.len() as u32;
        self.hops = message.hops;
        self.dropped = message.dropped;
        if self.me != self.spec.home {
            self.cached = message.cached;
        }
        self.barren = message.barren;
        self.follow(before);
        Ok(())
    }

    /// Tells what follows the output of the tokens from this place on.
    pub(super) fn follow(&mut self, before: usize) {
        let prompt_len = self.spec.prompt_len as usize;
        if let Some(constraint) = &mut self.constraint {
            self.tokens.iter().skip(before.max(prompt_len)).for_each(|&token| constraint.commit(token));
        }
        if !self.spec.sampling.reads_history() {
            return;
        }
        match &mut self.counts {
            Some(counts) => {
                let counts = Arc::make_mut(counts);
                self.tokens[before..].iter().for_each(|&token| counts.commit(token));
            }
            None => self.counts = Some(Arc::new(TokenCounts::of(&self.tokens, prompt_len))),
        }
    }

    fn commit(&mut self, token: TokenId) {
        self.tokens.push(token);
        self.known[self.me.index()] = self.tokens.len() as u32;
        self.follow(self.tokens.len() - 1);
        self.barren = 0;
    }

    fn finish_of(&self, token: TokenId) -> Option<FinishReason> {
        if self.spec.eos.contains(&token) {
            Some(FinishReason::EndOfText)
        } else if self.spec.stop_ids.contains(&token) {
            Some(FinishReason::StopToken(token))
        } else if self.tokens.len() as u32 >= self.spec.len_max {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    pub(super) fn take_targets(&mut self, targets: Vec<TokenLogprobs>) {
        if let Some(prompt) = &mut self.prompt {
            prompt.take(targets);
        }
    }

    pub(super) fn end(self) -> Finished {
        let request = self.spec.id;
        self.lease.retire(&self.tokens);
        Finished { request }
    }

    /// A candidate is not kept.
    pub(super) fn reject(&mut self, drawn: &Drawn) {
        self.barren += 1;
        let Signals { entropy, score, .. } = &drawn.signals;
        let entropy = entropy.map(|entropy| entropy.normalised());
        self.dropped = self.spec.entropy.then_some(Dropped { model: self.me, entropy, score: *score });
    }

    pub(super) fn accept(&mut self, drawn: Drawn) -> Committed {
        let position = self.tokens.len() as u32;
        self.commit(drawn.token);
        Committed {
            request: self.spec.id,
            position,
            token: drawn.token,
            model: self.me,
            entropy: drawn.signals.entropy.map(|entropy| entropy.normalised()),
            dropped: self.dropped.take(),
            logprobs: drawn.logprobs,
            hops: self.hops,
            cached: self.cached,
            finish: self.finish_of(drawn.token),
        }
    }
}

/// The decision, or what is wrong with it.
pub(super) fn checked(decision: Decision, body: &Body) -> Result<Decision, String> {
    let Decision { to, keep } = decision;
    if to.0 >= body.spec.models {
        return Err(format!("the algorithm chose model {to} of {}", body.spec.models));
    }
    if to == body.me && !keep {
        return Err(format!("the algorithm stays at model {to} without keeping the token"));
    }
    if to != body.me && !keep && body.barren >= BARREN_HOPS_MAX {
        return Err("two hops in a row committed no token".into());
    }
    Ok(decision)
}
