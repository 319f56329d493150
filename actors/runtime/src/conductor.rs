//! Conductor: turns of the models of this process, in the execution modes that have them. Owner: who has a turn now.
//! Invariant: it only carries between the models and [`Turns`], which decides; a turn that cannot be offered now is
//! offered again, and one whose model is gone is over.
//!
//! What a model says goes by its InterModel, and an offer by that of the model it is for. So when a turn is over, the
//! requests that left in it have arrived before the next turn is offered.

use crate::link::local::{self, Directory};
use crate::mailbox::takes_metered;
use crate::messages::{Offered, Said};
use actix::prelude::*;
use std::time::Duration;
use tokenrouter_core::execution::{Offer, Turns, Word};
use tracing::warn;

/// Messages that wait here at most: what models say of turns is a few words each.
const MAILBOX: usize = 1024;

/// When an offer to a subserver with a full mailbox is made again.
const OFFER_AGAIN: Duration = Duration::from_millis(5);

/// The actor.
#[derive(Debug)]
pub struct Conductor {
    turns: Turns,
    directory: Directory,
}

impl Conductor {
    /// A conductor of the models in this directory; nobody has a turn.
    pub fn new(turns: Turns, directory: Directory) -> Self {
        Conductor { turns, directory }
    }

    fn hear(&mut self, said: Said, ctx: &mut Context<Self>) {
        for offer in self.turns.hear(said.model, said.life, said.word) {
            self.offer(offer, ctx);
        }
    }

    fn offer(&mut self, offer: Offer, ctx: &mut Context<Self>) {
        let subserver = local::find(&self.directory, offer.model);
        match subserver.map(|subserver| subserver.try_send(Offered(offer))) {
            Some(Ok(())) => {}
            Some(Err(SendError::Full(_))) => {
                warn!(model = %offer.model, "mailbox full; the turn is offered again");
                ctx.run_later(OFFER_AGAIN, move |conductor, ctx| conductor.offer(offer, ctx));
            }
            Some(Err(SendError::Closed(_))) | None => {
                self.hear(Said { model: offer.model, life: offer.life, word: Word::Back(offer.turn) }, ctx);
            }
        }
    }
}

impl Actor for Conductor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
    }
}

takes_metered!(Conductor: Said);

impl Handler<Said> for Conductor {
    type Result = ();

    fn handle(&mut self, said: Said, ctx: &mut Self::Context) {
        self.hear(said, ctx);
    }
}
