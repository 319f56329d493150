//! The state machine of a request at one model: Queued, Running, Pending, Finished, and the only functions between
//! them. Owner: Queued belongs to the Batcher, Running to Decode, Pending to InterModel; moving a state moves the
//! ownership. Invariant: `kv <= known <= len`; a token gets KV when it is consumed, never when it is drawn, so a
//! dropped candidate costs nothing.

mod body;
mod prompt;
mod spec;

use crate::constraint::Constraint;
use crate::executor::{Draw, Drawn, Needs, PAGE_TOKENS, Row, TokenLogprobs};
use crate::ids::{ModelIdx, RequestId, Time, TokenId};
use crate::job::{Failure, Target, TokenReport};
use crate::kv::{KvPool, KvShort, YOUNGEST};
use crate::live::LiveNotes;
use crate::peer::{PeerError, PeerReq};
use crate::routing::{Handoff, Route, StepView};
use body::{Body, checked};
use prompt::PromptLogprobs;
pub use spec::{Committed, RequestSpec};
use std::sync::Arc;

/// Hops in a row without a committed token that are allowed; one more fails the request.
pub const BARREN_HOPS_MAX: u8 = 1;

/// Tokens of one step that prefills ahead: what comes meanwhile waits no longer than these take.
pub const AHEAD_TOKENS_MAX: u32 = 64;

/// Waits for a batch of this model.
#[derive(Debug)]
pub struct Queued {
    body: Box<Body>,
    since: Time,
}

/// Is part of the step in flight.
#[derive(Debug)]
pub struct Running {
    body: Box<Body>,
    /// When it began to wait for this step.
    since: Time,
    consumes: u32,
    draws: bool,
}

/// Control is at a peer; KV and place are kept.
#[derive(Debug)]
pub struct Pending {
    body: Box<Body>,
    to: ModelIdx,
    since: Time,
}

/// Ended at this model; memory has gone back.
#[derive(Debug, PartialEq, Eq)]
pub struct Finished {
    /// Whose.
    pub request: RequestId,
}

/// What became of a running request after its step.
#[derive(Debug)]
pub enum Settled {
    /// Goes on here: to the Batcher.
    Stay(Queued),
    /// Goes on elsewhere: the state to InterModel, the message to the peer.
    Leave(Pending, Box<PeerReq>),
    /// Ended with the token reported beside.
    Done(Finished),
    /// Cannot go on.
    Failed(Finished, Failure),
}

impl Queued {
    /// A new request at its entry model.
    pub fn arrive(spec: Arc<RequestSpec>, prompt: Vec<TokenId>, seat: Seat<'_>) -> Self {
        let mut body = Box::new(Body::new(spec, seat.me, seat.route, seat.pool));
        body.tokens = prompt;
        body.known[seat.me.index()] = body.tokens.len() as u32;
        body.constraint = seat.constraint;
        body.follow(0);
        Queued { body, since: seat.now }
    }

    /// With log-probabilities of its prompt's tokens, and of this many alternatives, if they are wanted.
    pub fn with_prompt_logprobs(mut self, alternatives: Option<u8>) -> Self {
        self.body.prompt = alternatives.map(PromptLogprobs::new);
        self
    }

    /// A request that visits this model for the first time.
    ///
    /// # Errors
    /// [`PeerError`] when the message is not a complete first message.
    pub fn visit(message: &PeerReq, seat: Seat<'_>) -> Result<Self, PeerError> {
        let spec = message.spec.clone().ok_or(PeerError::NoSpec)?;
        let mut body = Box::new(Body::new(spec, seat.me, seat.route, seat.pool));
        body.constraint = seat.constraint;
        body.receive(message)?;
        Ok(Queued { body, since: seat.now })
    }

    /// The whole pages of a prompt, to be prefilled for the prefix cache before the request itself comes to this model;
    /// `None` when the prompt fills no page. It is over as soon as nothing is left to consume.
    pub fn ahead(spec: Arc<RequestSpec>, prompt: &[TokenId], seat: Seat<'_>) -> Option<Self> {
        let whole = prompt.len() / PAGE_TOKENS * PAGE_TOKENS;
        let mut body = Box::new(Body::new(spec, seat.me, seat.route, seat.pool));
        body.lease = seat.pool.lease(YOUNGEST, whole as u32);
        body.tokens = prompt[..whole].to_vec();
        body.ahead = true;
        (whole > 0).then_some(Queued { body, since: seat.now })
    }

    /// Whose.
    pub fn id(&self) -> RequestId {
        self.body.spec.id
    }

    /// Whether it only fills the prefix cache.
    pub fn is_ahead(&self) -> bool {
        self.body.ahead
    }

    /// As whom it asks for memory: the older, the more it gets.
    pub fn seniority(&self) -> RequestId {
        if self.body.ahead { YOUNGEST } else { self.id() }
    }

    /// What is fixed about it.
    pub fn spec(&self) -> &Arc<RequestSpec> {
        &self.body.spec
    }

    /// Waiting since.
    pub fn since(&self) -> Time {
        self.since
    }

    /// Whether it may never go to another model, so that nothing is gained by letting it wait for others.
    pub fn is_pinned(&self) -> bool {
        matches!(self.body.spec.target, Target::Only(_))
    }

    /// Tokens to consume before the next one can be drawn: 1 = decode, more = extend or prefill.
    pub fn behind(&self) -> u32 {
        let behind = self.body.tokens.len() as u32 - self.body.lease.kv_len();
        if self.body.ahead { behind.min(AHEAD_TOKENS_MAX) } else { behind }
    }

    /// Whether it holds no KV here, so that starting it means admitting it to the pool.
    pub fn is_cold(&self) -> bool {
        self.body.lease.kv_len() == 0
    }

    /// Committed tokens, prompt included.
    pub fn tokens(&self) -> &[TokenId] {
        &self.body.tokens
    }

    /// Looks the tokens up in the prefix cache, once, when it is new here; a request that comes back from a peer is not
    /// looked up unless it was [parked](Pending::park). The cache knows no log-probabilities, so a prompt whose are wanted
    /// is computed.
    pub fn adopt_prefix(&mut self) {
        if std::mem::take(&mut self.body.fresh) && self.body.prompt.is_none() {
            let found = self.body.lease.adopt_prefix(&self.body.tokens);
            if self.body.hops == 0 {
                self.body.cached = found;
            }
        }
    }

    /// Takes `consumes` tokens into a step. Memory for them is made sure of; the row is complete.
    ///
    /// # Errors
    /// The request itself, unchanged, when memory is short at this moment.
    pub fn start(mut self, consumes: u32, needs: Needs) -> Result<(Running, Row), (Self, KvShort)> {
        let start = self.body.lease.kv_len();
        let end = start + consumes;
        if let Err(short) = self.body.lease.grow(end) {
            return Err((self, short));
        }
        let mut body = self.body;
        let draws = end as usize == body.tokens.len() && !body.ahead;
        let needs = if body.spec.entropy { needs.union(Needs { entropy: true, ..Needs::default() }) } else { needs };
        let early = (body.tokens.len() as u32) < body.spec.len_min;
        let mask = body.constraint.as_mut().filter(|_| draws).map(|constraint| constraint.allowed());
        let draw = draws.then(|| Draw {
            params: Arc::clone(&body.spec.sampling),
            history: body.counts.clone(),
            banned: if early { Arc::clone(&body.banned) } else { Arc::from([]) },
            mask,
            needs,
            logprobs: body.spec.logprobs,
        });
        let range = start as usize..end as usize;
        let targets = body.prompt.as_ref().and_then(|prompt| prompt.ask(&body.tokens, range.clone()));
        let tokens = body.tokens[range].to_vec();
        let row = Row { request: body.spec.id, start, tokens, pages: body.lease.pages(), draw, targets };
        Ok((Running { body, since: self.since, consumes: end, draws }, row))
    }

    /// Ends it before its next token.
    pub fn abort(self) -> Finished {
        self.body.end()
    }
}

/// Where a request sits down: the model, its pool, the algorithm's value for it, and the time.
pub struct Seat<'a> {
    /// The model.
    pub me: ModelIdx,
    /// Its pages.
    pub pool: &'a KvPool,
    /// What follows the request here.
    pub route: Box<dyn Route>,
    /// What keeps its answer in form, at its start.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Now.
    pub now: Time,
}

impl Running {
    /// Whose.
    pub fn id(&self) -> RequestId {
        self.body.spec.id
    }

    /// What is fixed about it.
    pub fn spec(&self) -> &Arc<RequestSpec> {
        &self.body.spec
    }

    /// Waited for this step since.
    pub fn since(&self) -> Time {
        self.since
    }

    /// Whether it only fills the prefix cache.
    pub fn is_ahead(&self) -> bool {
        self.body.ahead
    }

    /// Whether this step draws a token (it is not a prefill chunk before the last).
    pub fn draws(&self) -> bool {
        self.draws
    }

    /// A prefill chunk is done, and its targets have their answers: back to the queue for the next.
    pub fn fed(mut self, targets: Vec<TokenLogprobs>, now: Time) -> Queued {
        self.body.take_targets(targets);
        self.body.lease.consumed(self.consumes);
        self.body.attempts = 0;
        Queued { body: self.body, since: now }
    }

    /// A candidate was drawn: what its user is told of the prompt, if log-probabilities of it were wanted; once.
    ///
    /// # Errors
    /// What the executor left out.
    pub fn prompt_logprobs(&mut self, drawn: &mut Drawn) -> Result<Option<Vec<TokenReport>>, String> {
        let body = &mut self.body;
        body.take_targets(std::mem::take(&mut drawn.targets));
        body.prompt.take().map(|prompt| prompt.report(&body.tokens, body.me)).transpose()
    }

    /// A candidate was drawn: route, commit or drop it, and move on.
    pub fn settle(mut self, drawn: Drawn, now: Time) -> (Option<Committed>, Settled) {
        let body = &mut self.body;
        body.lease.consumed(self.consumes);
        body.attempts = 0;
        let decision = body.route.route(&StepView {
            request: body.spec.id,
            model: body.me,
            seed: body.spec.sampling.seed,
            prompt_len: body.spec.prompt_len,
            tokens: &body.tokens,
            candidate: drawn.token,
            signals: &drawn.signals,
        });
        let decision = match decision.and_then(|decision| checked(decision, body)) {
            Ok(decision) => decision,
            Err(fault) => return (None, self.fail(Failure::Routing(fault))),
        };
        let token = match decision.keep {
            true => Some(body.accept(drawn)),
            false => {
                body.reject(&drawn);
                None
            }
        };
        if token.as_ref().is_some_and(|token| token.finish.is_some()) {
            return (token, Settled::Done(self.body.end()));
        }
        if decision.to == self.body.me {
            return (token, Settled::Stay(Queued { body: self.body, since: now }));
        }
        match self.depart(decision.to, now) {
            Ok((pending, message)) => (token, Settled::Leave(pending, message)),
            Err((body, fault)) => (token, Settled::Failed(body.end(), Failure::Routing(fault))),
        }
    }

    /// The step failed as a whole; the request may try again from its tokens, up to `attempts_max` times in a row.
    pub fn retry(mut self, attempts_max: u8, now: Time) -> Result<Queued, Finished> {
        self.body.lease.forget();
        self.body.attempts += 1;
        if self.body.attempts > attempts_max {
            return Err(Finished { request: self.body.spec.id });
        }
        Ok(Queued { body: self.body, since: now })
    }

    /// Ends it with an error.
    pub fn fail(self, failure: Failure) -> Settled {
        let request = self.body.spec.id;
        drop(self.body);
        Settled::Failed(Finished { request }, failure)
    }

    /// Ends it because nobody wants it any more.
    pub fn abort(mut self) -> Finished {
        self.body.lease.unpin();
        self.body.end()
    }

    fn depart(mut self, to: ModelIdx, now: Time) -> Result<(Pending, Box<PeerReq>), (Box<Body>, String)> {
        let body = &mut self.body;
        let handoff = Handoff { request: body.spec.id, from: body.me, to, tokens: &body.tokens, known: &body.known };
        let suffix = match body.route.send(&handoff) {
            Ok(suffix) => suffix,
            Err(fault) => return Err((self.body, fault)),
        };
        let len = body.tokens.len() as u32;
        if suffix.base > body.known[to.index()].min(len) {
            let (base, known) = (suffix.base, body.known[to.index()]);
            return Err((self.body, format!("send starts at {base} but model {to} holds only {known} tokens")));
        }
        let first = body.known[to.index()] == 0;
        body.known[to.index()] = len;
        body.hops += 1;
        let message = Box::new(PeerReq {
            request: body.spec.id,
            home: body.spec.home,
            from: body.me,
            to,
            spec: first.then(|| Arc::clone(&body.spec)),
            base: suffix.base,
            tokens: body.tokens[suffix.base as usize..].into(),
            known: body.known.clone(),
            hops: body.hops,
            cached: body.cached,
            barren: body.barren,
            dropped: body.dropped.take(),
            live: LiveNotes::new(),
            ext: suffix.ext,
            left: Some(now),
        });
        Ok((Pending { body: self.body, to, since: now }, message))
    }
}

impl Pending {
    /// Whose.
    pub fn id(&self) -> RequestId {
        self.body.spec.id
    }

    /// Who home is.
    pub fn home(&self) -> ModelIdx {
        self.body.spec.home
    }

    /// The peer control was given to.
    pub fn to(&self) -> ModelIdx {
        self.to
    }

    /// Away since.
    pub fn since(&self) -> Time {
        self.since
    }

    /// Keeps nothing on the device: full pages are left to the prefix cache, and a return is like a new request.
    pub fn park(&mut self) {
        let body = &mut self.body;
        body.lease.leave(&body.tokens);
        body.fresh = true;
    }

    /// Control comes back with the tokens that were made elsewhere: no prefix look-up, and pages only for what is new.
    ///
    /// # Errors
    /// The end of the request here and what did not fit.
    pub fn resume(mut self, message: &PeerReq, now: Time) -> Result<Queued, (Finished, PeerError)> {
        match self.body.receive(message) {
            Ok(()) => Ok(Queued { body: self.body, since: now }),
            Err(error) => Err((self.release(), error)),
        }
    }

    /// The request ended elsewhere.
    pub fn release(self) -> Finished {
        self.body.end()
    }
}
