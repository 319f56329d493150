//! InterModel: the bridge to the peers. Owner: pending requests, whose KV stays here while a peer has control, and the
//! count of live requests. Invariant: a request that comes back becomes queued by appending its new tokens; no prefix
//! look-up and no page work for what is already there.

use crate::board::{InterModelSnapshot, Role, Snapshot};
use crate::link::Link;
use crate::messages::{Depart, Emit, Enqueue, Forward, Frame, LiveNow, Lost, OwnLive, Release, Stop};
use crate::subserver::Place;
use actix::prelude::*;
use std::collections::HashMap;
use tokenrouter_core::ids::{ModelIdx, RequestId};
use tokenrouter_core::job::Failure;
use tokenrouter_core::live::{LiveTable, Stamp};
use tokenrouter_core::peer::{Envelope, PeerFrame, PeerReq};
use tokenrouter_core::request::{Pending, Queued, Seat};
use tokenrouter_core::tombstones::Tombstones;
use tracing::warn;

/// The actor.
#[derive(Debug)]
pub struct InterModel {
    place: Place,
    links: Vec<Option<Box<dyn Link>>>,
    pending: HashMap<RequestId, Pending>,
    ended: Tombstones,
    live: LiveTable,
    sent: Stamp,
    seen: Vec<Stamp>,
    said: InterModelSnapshot,
}

impl InterModel {
    /// A bridge with links by model index (none to itself).
    pub fn new(place: Place, links: Vec<Option<Box<dyn Link>>>) -> Self {
        let models = links.len();
        InterModel {
            links,
            pending: HashMap::new(),
            ended: Tombstones::default(),
            live: LiveTable::new(place.me, models, place.life),
            sent: Stamp::start(place.life),
            seen: vec![Stamp::default(); models],
            said: InterModelSnapshot { hops: vec![0; models], ..InterModelSnapshot::default() },
            place,
        }
    }

    fn send(&mut self, to: ModelIdx, frame: PeerFrame) -> bool {
        self.sent = self.sent.next();
        let envelope = Envelope { from: self.place.me, stamp: self.sent, frame };
        let link = self.links.get(to.index()).and_then(Option::as_ref);
        match link.map(|link| link.send(envelope)) {
            Some(Ok(())) => true,
            Some(Err(error)) => {
                warn!(from = self.place.name(), %to, %error, "frame not sent");
                false
            }
            None => false,
        }
    }

    fn broadcast(&mut self, frame: &PeerFrame) {
        for index in 0..self.links.len() {
            if self.links[index].is_some() {
                self.send(ModelIdx(index as u8), frame.clone());
            }
        }
    }

    fn depart(&mut self, depart: Depart) {
        let Depart { pending, mut request } = depart;
        let id = pending.id();
        if self.ended.holds(id) {
            pending.release();
            return;
        }
        let (home, to) = (pending.home(), request.to);
        self.pending.insert(id, pending);
        request.live = self.live.notes();
        if self.send(to, PeerFrame::Request(request)) {
            self.said.hops[to.index()] += 1;
        } else if let Some(pending) = self.pending.remove(&id) {
            pending.release();
            self.place.tell_lost(home, id, Failure::Internal(format!("model {to} cannot be reached")));
        }
    }

    fn arrive(&mut self, message: &PeerReq) {
        let id = message.request;
        if self.live.absorb(message.from, &message.live) {
            self.place.post(&self.place.children.batcher, LiveNow(self.live.total()));
        }
        if self.ended.holds(id) {
            self.said.dropped_frames += 1;
            return;
        }
        let now = self.place.clock.now();
        let queued = match self.pending.remove(&id) {
            Some(pending) => {
                self.said.returned += 1;
                self.said.away += now.since(pending.since());
                pending.resume(message, now).map_err(|(_, error)| error)
            }
            None => self.visit(message),
        };
        match queued {
            Ok(queued) => {
                self.said.catchup_tokens += message.tokens.len() as u64;
                self.place.post(&self.place.children.batcher, Enqueue(vec![queued]));
            }
            Err(error) => {
                let failure = Failure::Internal(format!("message to model {}: {error}", self.place.name()));
                self.place.tell_lost(message.home, id, failure);
            }
        }
    }

    fn visit(&self, message: &PeerReq) -> Result<Queued, tokenrouter_core::peer::PeerError> {
        let spec = message.spec.as_ref().ok_or(tokenrouter_core::peer::PeerError::NoSpec)?;
        let route = self.place.server.route_for(spec);
        let seat = Seat { me: self.place.me, pool: &self.place.pool, route, now: self.place.clock.now() };
        Queued::visit(message, seat)
    }

    fn release(&mut self, release: Release) {
        self.ended.bury(release.0);
        if let Some(pending) = self.pending.remove(&release.0) {
            pending.release();
        }
        self.place.post(&self.place.children.decode, release);
    }

    /// The peer has lost every request it had control of, and knows no counts.
    fn peer_restarted(&mut self, peer: ModelIdx) {
        let lost: Vec<_> = self.pending.extract_if(|_, pending| pending.to() == peer).collect();
        for (id, pending) in lost {
            let home = pending.home();
            pending.release();
            self.place.tell_lost(home, id, Failure::Internal(format!("the actors of model {peer} were rebuilt")));
        }
        self.send(peer, PeerFrame::Live(self.live.notes()));
    }

    fn frame(&mut self, envelope: Envelope) {
        let from = envelope.from;
        match self.seen.get_mut(from.index()) {
            Some(seen) if *seen < envelope.stamp => *seen = envelope.stamp,
            _ => {
                self.said.dropped_frames += 1;
                return;
            }
        }
        let children = &self.place.children;
        match envelope.frame {
            PeerFrame::Request(message) => self.arrive(&message),
            PeerFrame::Emit(tokens) => self.place.post(&children.client, Emit(tokens)),
            PeerFrame::Failed(id, failure) => self.place.post(&children.client, Lost(id, failure)),
            PeerFrame::Release(id) => self.release(Release(id)),
            PeerFrame::Live(notes) => {
                if self.live.absorb(from, &notes) {
                    self.place.post(&children.batcher, LiveNow(self.live.total()));
                }
            }
            PeerFrame::Restarted => self.peer_restarted(from),
        }
    }

    fn say(&mut self) {
        self.said.pending = self.pending.len() as u32;
        self.place.board.post(self.place.me, Role::InterModel, Snapshot::InterModel(self.said.clone()));
    }
}

impl Actor for InterModel {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.place.mailbox());
        if self.place.is_reborn() {
            self.broadcast(&PeerFrame::Restarted);
        }
        self.say();
    }
}

impl Drop for InterModel {
    fn drop(&mut self) {
        self.place.down(Role::InterModel);
    }
}

impl Handler<Depart> for InterModel {
    type Result = ();

    fn handle(&mut self, message: Depart, _: &mut Self::Context) {
        self.depart(message);
        self.say();
    }
}

impl Handler<Forward> for InterModel {
    type Result = ();

    fn handle(&mut self, Forward { to, frame }: Forward, _: &mut Self::Context) {
        self.send(to, frame);
    }
}

impl Handler<Frame> for InterModel {
    type Result = ();

    fn handle(&mut self, Frame(envelope): Frame, _: &mut Self::Context) {
        self.frame(envelope);
        self.say();
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
