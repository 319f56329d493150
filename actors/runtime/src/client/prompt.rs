//! Log-probabilities of prompts on their way to the user. Owner: the Client. Invariant: they are delivered at once, before
//! the first token, which is held while a lap goes around.

use super::Client;
use crate::messages::PromptRead;
use actix::prelude::*;
use tokenrouter_core::job::Event;

impl Handler<PromptRead> for Client {
    type Result = ();

    fn handle(&mut self, PromptRead(id, tokens): PromptRead, ctx: &mut Self::Context) {
        let Some(stream) = self.streams.get(&id) else { return };
        if stream.sink.try_send(Event::Prompt(tokens)).is_err() {
            self.abort(id, ctx);
        }
    }
}
