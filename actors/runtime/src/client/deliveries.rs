//! What is delivered, and when. Owner: the Client. Invariant: tokens reach their streams in the order in which they came, and
//! nothing after the end.
//!
//! A delivery may wake a sleeping reader, which takes longer than all the rest that is needed between a step's output
//! and the next step's start. So what comes is held while a [`Lap`] goes around the ring, behind the messages that lead
//! to the next step: if one can start it has been handed over when the lap is back, and if none can nothing waits for it.

use super::Client;
use crate::journal::{Ending, What};
use crate::messages::{Lap, Release};
use crate::stream::Added;
use actix::prelude::*;
use std::time::Duration;
use tokenrouter_core::ids::RequestId;
use tokenrouter_core::job::{Event, Failure, FinishReason, TokenReport};
use tokenrouter_core::request::Committed;
use tracing::debug;

/// Text and tokens of one message, per stream.
#[derive(Default)]
struct Delta {
    text: String,
    tokens: Vec<TokenReport>,
    finish: Option<FinishReason>,
}

impl Delta {
    /// Nothing is added after the end.
    fn add(&mut self, added: Added) {
        if self.finish.is_none() {
            self.text.push_str(&added.text);
            self.tokens.push(added.token);
            self.finish = added.finish;
        }
    }
}

impl Client {
    pub(super) fn hold(&mut self, tokens: Vec<Committed>) {
        if self.held.is_empty() {
            self.held = tokens;
            self.place.post(&self.place.children.batcher, Lap);
        } else {
            self.held.extend(tokens);
        }
    }

    pub(super) fn deliver_held(&mut self, ctx: &mut Context<Self>) {
        let mut deltas: Vec<(RequestId, Delta)> = Vec::new();
        for token in std::mem::take(&mut self.held) {
            let id = token.request;
            let Some(stream) = self.streams.get_mut(&id) else {
                // Ended here but not yet everywhere: say it again.
                self.place.post(&self.place.children.inter_model, Release(id));
                continue;
            };
            if deltas.last().is_none_or(|(last, _)| *last != id) {
                deltas.push((id, Delta::default()));
            }
            let Some((_, delta)) = deltas.last_mut() else { continue };
            if delta.finish.is_some() {
                continue;
            }
            match stream.transcript.take(&*self.place.server.codec, token) {
                Ok(added) => added.into_iter().for_each(|added| delta.add(added)),
                Err(error) => {
                    deltas.pop();
                    self.fail(id, Failure::Internal(error.to_string()), ctx);
                }
            }
        }
        for (id, delta) in deltas {
            self.deliver(id, delta, ctx);
        }
        self.say();
    }

    fn deliver(&mut self, id: RequestId, delta: Delta, ctx: &mut Context<Self>) {
        let Some(stream) = self.streams.get(&id) else { return };
        if delta.tokens.is_empty() {
            return;
        }
        self.said.completion_tokens += delta.tokens.len() as u64;
        let sent = stream.sink.try_send(Event::Delta { text: delta.text, tokens: delta.tokens });
        if let Err(error) = sent {
            // The user is gone (the watch will say so too), or the bound on events is wrong.
            debug!(%id, %error, "a delta was not taken");
            return self.abort(id, ctx);
        }
        if let Some(reason) = delta.finish {
            let (count, ending) = match reason {
                FinishReason::Length => (&mut self.said.length, Ending::Length),
                _ => (&mut self.said.stopped, Ending::Stop),
            };
            *count += 1;
            self.note(id, What::Ended(ending));
            let usage = stream.transcript.usage().clone();
            let queued = stream.began.map_or(Duration::ZERO, |began| began.since(stream.since));
            self.end(id, Some(Event::Finished { reason, usage, queued }), ctx);
        }
    }
}
