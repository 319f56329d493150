//! What Decode says of prompts: when they are read, and their log-probabilities on their way to the user. Owner: the Client.
//! Invariant: log-probabilities are delivered at once, before the first token, which is held while a lap goes around.

use super::Client;
use crate::messages::{Began, PromptRead};
use actix::prelude::*;
use tokenrouter_core::job::Event;

impl Handler<Began> for Client {
    type Result = ();

    fn handle(&mut self, Began(ids, at): Began, _: &mut Self::Context) {
        for id in ids {
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.began.get_or_insert(at);
            }
        }
    }
}

impl Handler<PromptRead> for Client {
    type Result = ();

    fn handle(&mut self, PromptRead(id, tokens): PromptRead, ctx: &mut Self::Context) {
        let Some(stream) = self.streams.get(&id) else { return };
        if stream.sink.try_send(Event::Prompt(tokens)).is_err() {
            self.abort(id, ctx);
        }
    }
}
