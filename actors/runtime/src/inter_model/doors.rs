//! How messages come in: each is one call of the bridge. Owner: [`InterModel`]. Invariant: what changed is said on the board.

use super::InterModel;
use crate::board::Role;
use crate::mailbox::takes_metered;
use crate::messages::{
    Announce, Depart, Forward, Frame, LinkEvent, LiveNow, Offered, OwnLive, Release, Said, Say, Stop,
};
use actix::prelude::*;
use std::time::Duration;
use tokenrouter_core::peer::PeerFrame;
use tracing::error;

/// How often peers hear something at least; it bounds the time for which a lost frame is not missed.
const WORD_EVERY: Duration = Duration::from_secs(1);

impl Actor for InterModel {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.place.mailbox());
        if self.place.is_reborn() {
            self.broadcast(&PeerFrame::Restarted);
        }
        // A frame that was lost is missed when the next one comes: there always is one.
        ctx.run_interval(WORD_EVERY, |bridge, _| bridge.broadcast(&PeerFrame::Live(bridge.live.notes())));
        self.say();
    }
}

takes_metered!(InterModel: Depart, Forward, Frame, LinkEvent, Announce, Say, Offered, OwnLive, Release, Stop);

impl Drop for InterModel {
    fn drop(&mut self) {
        self.place.down(Role::InterModel);
    }
}

impl Handler<Depart> for InterModel {
    type Result = ();

    fn handle(&mut self, Depart(leaving): Depart, _: &mut Self::Context) {
        self.depart(leaving);
        self.say();
    }
}

impl Handler<Forward> for InterModel {
    type Result = ();

    fn handle(&mut self, Forward { to, frame }: Forward, _: &mut Self::Context) {
        self.forward(to, frame);
    }
}

impl Handler<Frame> for InterModel {
    type Result = ();

    fn handle(&mut self, Frame(envelope): Frame, _: &mut Self::Context) {
        self.frame(envelope);
        self.say();
    }
}

impl Handler<LinkEvent> for InterModel {
    type Result = ();

    fn handle(&mut self, event: LinkEvent, _: &mut Self::Context) {
        match event {
            LinkEvent::Reached(peer) => self.reached(peer),
            LinkEvent::Unreached(peer) => self.lose(peer, "was lost"),
            LinkEvent::Heard(peer) => self.heard(peer),
            LinkEvent::Unheard(peer) => {
                self.lose(peer, "was lost");
                if let Some(Some(way)) = self.ways.get_mut(peer.index()) {
                    way.heard = false;
                }
            }
        }
        self.say();
    }
}

impl Handler<Announce> for InterModel {
    type Result = ();

    fn handle(&mut self, Announce(ahead): Announce, _: &mut Self::Context) {
        self.broadcast(&PeerFrame::Ahead(ahead));
    }
}

impl Handler<Say> for InterModel {
    type Result = ();

    fn handle(&mut self, Say(word): Say, _: &mut Self::Context) {
        let said = Said { model: self.place.me, life: self.place.life, word };
        let Some(conductor) = &self.place.server.conductor else { return };
        if let Err(SendError::Full(_)) = conductor.try_send(said) {
            error!(model = self.place.name(), "mailbox of the conductor full");
            self.place.down(Role::InterModel);
        }
    }
}

impl Handler<Offered> for InterModel {
    type Result = ();

    fn handle(&mut self, offered: Offered, _: &mut Self::Context) {
        self.place.post(&self.place.children.batcher, offered);
    }
}

impl Handler<OwnLive> for InterModel {
    type Result = ();

    fn handle(&mut self, OwnLive(count): OwnLive, _: &mut Self::Context) {
        self.live.set_own(count);
        self.place.post(&self.place.children.batcher, LiveNow(self.live.total()));
        self.broadcast(&PeerFrame::Live(self.live.notes()));
    }
}

impl Handler<Release> for InterModel {
    type Result = ();

    fn handle(&mut self, release: Release, _: &mut Self::Context) {
        self.release(release);
        self.broadcast(&PeerFrame::Release(release.0));
        self.say();
    }
}

impl Handler<Stop> for InterModel {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        ctx.stop();
    }
}
