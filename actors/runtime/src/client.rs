//! Client: the users' side of a subserver. Owner: the streams of requests that entered here, their text and totals.
//! Invariant: every accepted job ends in exactly one `Finished` or `Failed`, and its memory is released everywhere.

mod deliveries;
mod overdue;
mod prompt;

use crate::admission::Permit;
use crate::board::{ClientSnapshot, Role, Snapshot};
use crate::journal::{Ending, Entry, What};
use crate::mailbox::takes_metered;
use crate::messages::{Announce, Began, Emit, Enqueue, Lap, Lost, OwnLive, PromptRead, Release, Stop, Submit, Ticket};
use crate::place::Place;
use crate::stream::{Start, Transcript};
use actix::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use tokenrouter_core::executor::PAGE_TOKENS;
use tokenrouter_core::ids::{RequestId, Time, TokenId};
use tokenrouter_core::job::{Event, Failure, Job, Prompt, Refusal, Target};
use tokenrouter_core::peer::Ahead;
use tokenrouter_core::request::{Committed, Queued, RequestSpec, Seat};
use tokio::sync::mpsc;
use tracing::{debug, warn};

/// The actor.
#[derive(Debug)]
pub struct Client {
    place: Place,
    streams: HashMap<RequestId, Stream>,
    /// Tokens that came and are not delivered yet, in the order in which they came. A [`Lap`] is on its way while there
    /// are some.
    held: Vec<Committed>,
    /// When the next look for overdue requests is due.
    alarm: Option<(Time, SpawnHandle)>,
    said: ClientSnapshot,
    warned: bool,
}

#[derive(Debug)]
struct Stream {
    sink: mpsc::Sender<Event>,
    transcript: Transcript,
    routed: bool,
    /// When it was accepted.
    since: Time,
    /// When its first step began.
    began: Option<Time>,
    /// Waits for the user to go away.
    watch: SpawnHandle,
    /// Its place among the live requests; given back with it.
    _permit: Permit,
}

impl Client {
    /// A Client without streams.
    pub fn new(place: Place) -> Self {
        let said = match place.board.read(place.me, Role::Client) {
            Some(Snapshot::Client(earlier)) => earlier,
            _ => ClientSnapshot::default(),
        };
        Client { place, streams: HashMap::new(), held: Vec::new(), alarm: None, said, warned: false }
    }

    fn accept(&mut self, submit: Submit, ctx: &mut Context<Self>) -> Result<Ticket, Refusal> {
        let Submit { id, job, mut permit } = submit;
        let prompt = self.tokenise(&job.prompt)?;
        let spec = Arc::new(self.describe(id, &job, prompt.len())?);
        let constraint = self
            .place
            .server
            .constraint_for(&spec)
            .map_err(|error| Refusal::Invalid { field: "response_format", message: error.0 })?;
        permit.begin(spec.prompt_len)?;
        self.warn_if_greedy(&job);
        let (sink, events) = mpsc::channel(self.room_for(&spec));
        let (prompt_tokens, prompt_logprobs) = (spec.prompt_len, job.prompt_logprobs);
        self.open(&spec, job, (sink, permit), ctx);
        let seat = Seat {
            me: self.place.me,
            pool: &self.place.pool,
            route: self.place.server.route_for(&spec),
            constraint,
            now: self.place.clock.now(),
        };
        if self.place.server.batching.prefill_ahead && spec.target == Target::Routed {
            let ahead = Ahead { spec: Arc::clone(&spec), prompt: prompt.clone() };
            self.place.post(&self.place.children.inter_model, Announce(Arc::new(ahead)));
        }
        let queued = Queued::arrive(spec, prompt, seat).with_prompt_logprobs(prompt_logprobs);
        self.place.post(&self.place.children.batcher, Enqueue(vec![queued]));
        Ok(Ticket { prompt_tokens, events })
    }

    /// Says once that the algorithm does not work with greedy decoding, when somebody asks for it.
    fn warn_if_greedy(&mut self, job: &Job) {
        if self.warned || job.target != Target::Routed || job.sampling.temperature > 0.0 {
            return;
        }
        if let Some(warning) = self.place.server.algorithm.greedy_warning() {
            warn!("a request asks for temperature 0, but {warning}");
            self.warned = true;
        }
    }

    /// Events of a stream, at most: the prompt, one per token, and the end. A slow reader therefore never holds up an
    /// actor, and what it may leave unread is bounded by the length of its prompt and answer.
    fn room_for(&self, spec: &RequestSpec) -> usize {
        (spec.len_max - spec.prompt_len) as usize + 3
    }

    fn tokenise(&self, prompt: &Prompt) -> Result<Vec<TokenId>, Refusal> {
        let codec = &self.place.server.codec;
        let invalid = |message: String| Refusal::Invalid { field: "prompt", message };
        let tokens = match prompt {
            Prompt::Ids(ids) => {
                if let Some(id) = ids.iter().find(|&&id| id >= codec.vocab_size()) {
                    return Err(invalid(format!(
                        "token id {id} is not below the vocabulary size {}",
                        codec.vocab_size()
                    )));
                }
                ids.clone()
            }
            Prompt::Text { text, special, add_bos } => {
                let ids = if *add_bos { codec.encode_prompt(text, *special) } else { codec.encode(text, *special) };
                ids.map_err(|error| invalid(error.to_string()))?
            }
        };
        if tokens.is_empty() {
            return Err(invalid("the prompt has no tokens; give at least one".into()));
        }
        Ok(tokens)
    }

    fn describe(&self, id: RequestId, job: &Job, prompt_len: usize) -> Result<RequestSpec, Refusal> {
        let server = &self.place.server;
        let prompt_len = u32::try_from(prompt_len).unwrap_or(u32::MAX);
        let involved = server.models.iter().enumerate().filter(|&(index, _)| match job.target {
            Target::Routed => true,
            Target::Only(model) => model.index() == index,
        });
        let routing = self.overrides(job)?;
        let mut room = u32::MAX;
        for (_, model) in involved {
            let context_len = model.limits.context_len;
            let output_tokens = job.stop.max_tokens.unwrap_or(1).max(1);
            let needed_tokens = prompt_len.saturating_add(output_tokens);
            if needed_tokens > context_len {
                return Err(Refusal::ContextOverflow { prompt_tokens: prompt_len, output_tokens, context_len });
            }
            let capacity_tokens = model.limits.pages.saturating_mul(PAGE_TOKENS as u32);
            if needed_tokens > capacity_tokens {
                return Err(Refusal::NeverFits { model: model.name.clone(), needed_tokens, capacity_tokens });
            }
            room = room.min(context_len).min(capacity_tokens);
        }
        let len_max = job.stop.max_tokens.map_or(room, |max| prompt_len + max.max(1));
        Ok(RequestSpec {
            id,
            home: self.place.me,
            models: server.models.len() as u8,
            prompt_len,
            len_max,
            len_min: prompt_len + job.stop.min_tokens.min(len_max - prompt_len),
            eos: if job.stop.ignore_eos { Vec::new() } else { server.eos.clone() },
            stop_ids: job.stop.stop_ids.clone(),
            sampling: Arc::new(job.sampling.clone()),
            constraint: job.constraint.clone().map(Arc::new),
            target: job.target,
            algorithm: server.algorithm.version(),
            routing,
            logprobs: job.logprobs,
            entropy: job.entropy,
        })
    }

    /// The routing parameters of a job as text, checked by the algorithm.
    fn overrides(&self, job: &Job) -> Result<Option<String>, Refusal> {
        let Some(overrides) = &job.routing else { return Ok(None) };
        let invalid = |message: String| Refusal::Invalid { field: "routing", message };
        if job.target != Target::Routed {
            return Err(invalid("a request for a single model is not routed; ask for the routed model".into()));
        }
        self.place.server.algorithm.with(overrides).map_err(|error| invalid(error.to_string()))?;
        Ok(Some(overrides.to_string()))
    }

    fn open(
        &mut self,
        spec: &RequestSpec,
        job: Job,
        (sink, permit): (mpsc::Sender<Event>, Permit),
        ctx: &mut Context<Self>,
    ) {
        let id = spec.id;
        let closed = sink.clone();
        let watch = ctx.spawn(async move { closed.closed().await }.into_actor(self).map(move |(), client, ctx| {
            client.abort(id, ctx);
        }));
        let transcript = Transcript::new(Start {
            prompt_tokens: spec.prompt_len,
            len_max: spec.len_max,
            models: self.place.server.models.len(),
            stops: job.stop.stop,
            include_stop: job.stop.include_stop,
            trims_space: self.place.server.codec.strips_leading_space(),
        });
        let routed = matches!(spec.target, Target::Routed);
        let since = self.place.clock.now();
        self.streams.insert(id, Stream { sink, transcript, routed, since, began: None, watch, _permit: permit });
        if let Some((moment, _)) = self.place.server.bounds.due(since, false) {
            self.wake_at(moment, ctx);
        }
        self.note(id, What::Arrived { is_routed: routed, prompt_tokens: spec.prompt_len });
        self.said.accepted += 1;
        self.said.prompt_tokens += u64::from(spec.prompt_len);
        self.count_live(routed);
    }

    fn abort(&mut self, id: RequestId, ctx: &mut Context<Self>) {
        if self.streams.contains_key(&id) {
            debug!(%id, "the user is gone");
            self.said.aborted += 1;
            self.note(id, What::Ended(Ending::Abort));
            self.end(id, None, ctx);
        }
    }

    fn fail(&mut self, id: RequestId, failure: Failure, ctx: &mut Context<Self>) {
        if self.streams.contains_key(&id) {
            warn!(%id, %failure, "request failed");
            self.said.failed += 1;
            self.note(id, What::Ended(Ending::Error));
            self.end(id, Some(Event::Failed(failure)), ctx);
        }
    }

    fn end(&mut self, id: RequestId, last: Option<Event>, ctx: &mut Context<Self>) {
        let Some(stream) = self.streams.remove(&id) else { return };
        ctx.cancel_future(stream.watch);
        if let Some(event) = last
            && stream.sink.try_send(event).is_err()
        {
            debug!(%id, "the user left before the end");
        }
        self.place.post(&self.place.children.inter_model, Release(id));
        self.count_live(stream.routed);
    }

    fn note(&self, request: RequestId, what: What) {
        self.place.instruments.journal.add([Entry { request, at: self.place.clock.now(), what }]);
    }

    fn count_live(&mut self, routed: bool) {
        if routed {
            let live = self.streams.values().filter(|stream| stream.routed).count();
            self.place.post(&self.place.children.inter_model, OwnLive(live as u32));
        }
        self.say();
    }

    fn say(&mut self) {
        self.said.live = self.streams.len() as u32;
        self.place.board.post(self.place.me, Role::Client, Snapshot::Client(self.said.clone()));
    }
}

impl Actor for Client {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.place.mailbox());
        self.say();
    }
}

takes_metered!(Client: Submit, Began, PromptRead, Emit, Lap, Lost, Stop);

impl Drop for Client {
    /// Streams that are still open here are lost: their users see the channel close without an end.
    fn drop(&mut self) {
        self.place.down(Role::Client);
    }
}

impl Handler<Submit> for Client {
    type Result = Result<Ticket, Refusal>;

    fn handle(&mut self, message: Submit, ctx: &mut Self::Context) -> Self::Result {
        let outcome = self.accept(message, ctx);
        if let Err(refusal) = &outcome {
            self.said.refused += 1;
            self.place.server.refused.count(self.place.me, refusal);
            self.say();
        }
        outcome
    }
}

impl Handler<Emit> for Client {
    type Result = ();

    fn handle(&mut self, Emit(tokens): Emit, _: &mut Self::Context) {
        self.hold(tokens);
    }
}

impl Handler<Lap> for Client {
    type Result = ();

    fn handle(&mut self, _: Lap, ctx: &mut Self::Context) {
        self.deliver_held(ctx);
    }
}

impl Handler<Lost> for Client {
    type Result = ();

    /// What came before the end is delivered before it.
    fn handle(&mut self, Lost(id, failure): Lost, ctx: &mut Self::Context) {
        self.deliver_held(ctx);
        if !self.streams.contains_key(&id) {
            // Ended here but not yet everywhere: say it again.
            return self.place.post(&self.place.children.inter_model, Release(id));
        }
        self.fail(id, failure, ctx);
    }
}

impl Handler<Stop> for Client {
    type Result = ();

    fn handle(&mut self, stop: Stop, ctx: &mut Self::Context) {
        self.deliver_held(ctx);
        let open: Vec<RequestId> = self.streams.keys().copied().collect();
        for id in open {
            let failure = match stop {
                Stop::Shutdown => Failure::Stopped,
                Stop::Rebuild => Failure::Internal(format!("the actors of model {} were rebuilt", self.place.name())),
            };
            self.fail(id, failure, ctx);
        }
        ctx.stop();
    }
}
