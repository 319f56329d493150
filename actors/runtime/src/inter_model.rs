//! InterModel: the bridge to the peers. Owner: pending requests, whose KV stays here while a peer has control, and the
//! count of live requests. Invariant: a request that comes back becomes queued by appending its new tokens; no prefix
//! look-up and no page work for what is already there. When a peer, or what was on its way to or from it, is lost,
//! every request that may miss it ends: its memory goes back here and its home is told, at once or when it is reached.

mod doors;

use crate::board::{InterModelSnapshot, Role, Snapshot};
use crate::link::Link;
use crate::messages::{Departing, Emit, Enqueue, LiveNow, Release};
use crate::place::Place;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tokenrouter_core::execution::Execution;
use tokenrouter_core::ids::{ModelIdx, RequestId};
use tokenrouter_core::job::Failure;
use tokenrouter_core::live::{LiveTable, Stamp};
use tokenrouter_core::peer::{Ahead, Envelope, PeerError, PeerFrame, PeerReq, in_frames};
use tokenrouter_core::request::{Pending, Queued, Seat};
use tokenrouter_core::routing::stay::Stay;
use tokenrouter_core::tombstones::Tombstones;
use tracing::{debug, warn};

/// A peer as it is reached and heard.
#[derive(Debug)]
pub struct Way {
    /// To it.
    pub link: Box<dyn Link>,
    /// Whether frames come from it. Control goes only to a peer that could give it back.
    pub heard: bool,
}

/// The actor.
#[derive(Debug)]
pub struct InterModel {
    place: Place,
    ways: Vec<Option<Way>>,
    pending: HashMap<RequestId, Pending>,
    /// Homes of the requests that came from elsewhere and whose end is not known yet.
    visitors: HashMap<RequestId, ModelIdx>,
    /// Failures their homes do not know of, because they cannot be reached.
    untold: Vec<(ModelIdx, RequestId, Failure)>,
    ended: Tombstones,
    live: LiveTable,
    /// Of the last frame to every peer.
    sent: Vec<Stamp>,
    /// Of the last frame from every peer; none where any may come first.
    seen: Vec<Option<Stamp>>,
    said: InterModelSnapshot,
}

impl InterModel {
    /// A bridge with ways by model index (none to itself).
    pub fn new(place: Place, ways: Vec<Option<Way>>) -> Self {
        let models = ways.len();
        let said = match place.board.read(place.me, Role::InterModel) {
            Some(Snapshot::InterModel(earlier)) => earlier,
            _ => InterModelSnapshot { hops: vec![0; models], ..InterModelSnapshot::default() },
        };
        InterModel {
            ways,
            pending: HashMap::new(),
            visitors: HashMap::new(),
            untold: Vec::new(),
            ended: Tombstones::default(),
            live: LiveTable::new(place.me, models, place.life_ever()),
            sent: vec![Stamp::start(place.life_ever()); models],
            // What was said to an earlier life is over, and another process may have been there for long.
            seen: vec![(!place.is_reborn()).then(Stamp::default); models],
            said,
            place,
        }
    }

    fn send(&mut self, to: ModelIdx, frame: PeerFrame) -> bool {
        let Some(sent) = self.sent.get_mut(to.index()) else { return false };
        *sent = sent.next();
        let envelope = Envelope { from: self.place.me, stamp: *sent, frame };
        match self.way(to).map(|way| way.link.send(envelope)) {
            Some(Ok(())) => true,
            Some(Err(error)) => {
                debug!(from = self.place.name(), %to, %error, "frame not sent");
                false
            }
            None => false,
        }
    }

    fn way(&self, to: ModelIdx) -> Option<&Way> {
        self.ways.get(to.index())?.as_ref()
    }

    /// Tells the home of a request that it cannot go on, now or when it can be reached.
    fn tell(&mut self, home: ModelIdx, id: RequestId, failure: Failure) {
        if !self.send(home, PeerFrame::Failed(id, failure.clone())) && self.untold.len() < self.visitors_max() {
            self.untold.push((home, id, failure));
        }
    }

    /// Something for the Client of another subserver. Tokens that cannot be delivered leave a gap in their streams.
    fn forward(&mut self, to: ModelIdx, frame: PeerFrame) {
        match frame {
            PeerFrame::Failed(id, failure) => self.tell(to, id, failure),
            frame => {
                if !self.send(to, frame) {
                    self.lose(to, "cannot be reached");
                }
            }
        }
    }

    /// Requests of other homes that can be here at once: all that may be live.
    fn visitors_max(&self) -> usize {
        self.place.server.live_anywhere_max()
    }

    fn broadcast(&mut self, frame: &PeerFrame) {
        for index in 0..self.ways.len() {
            if self.ways[index].is_some() {
                self.send(ModelIdx(index as u8), frame.clone());
            }
        }
    }

    /// Those that go to the same peer go in one frame.
    fn depart(&mut self, leaving: Vec<Departing>) {
        let mut by_peer: BTreeMap<ModelIdx, Vec<PeerReq>> = BTreeMap::new();
        for Departing { mut pending, mut request } in leaving {
            let id = pending.id();
            if self.ended.holds(id) {
                pending.release();
                continue;
            }
            if self.place.server.batching.execution == Execution::StdServing {
                pending.park();
            }
            self.pending.insert(id, pending);
            request.live = self.live.notes();
            by_peer.entry(request.to).or_default().push(*request);
        }
        for (to, requests) in by_peer {
            for part in in_frames(requests) {
                self.hand_over(to, part);
            }
        }
    }

    fn hand_over(&mut self, to: ModelIdx, requests: Vec<PeerReq>) {
        let ids: Vec<RequestId> = requests.iter().map(|request| request.request).collect();
        if self.way(to).is_some_and(|way| way.heard) && self.send(to, PeerFrame::Requests(requests)) {
            self.said.hops[to.index()] += ids.len() as u64;
            return;
        }
        let failure = Failure::Internal(format!("model {} cannot be reached", self.place.server.name(to)));
        for pending in ids.iter().filter_map(|id| self.pending.remove(id)).collect::<Vec<_>>() {
            let (id, home) = (pending.id(), pending.home());
            pending.release();
            self.place.tell_lost(home, id, failure.clone());
        }
    }

    fn arrive(&mut self, messages: &[PeerReq]) {
        let queued: Vec<Queued> = messages.iter().filter_map(|message| self.take_over(message)).collect();
        if !queued.is_empty() {
            self.place.post(&self.place.children.batcher, Enqueue(queued));
        }
    }

    /// The request as it waits here; none when it has ended or cannot go on.
    fn take_over(&mut self, message: &PeerReq) -> Option<Queued> {
        let id = message.request;
        if self.live.absorb(message.from, &message.live) {
            self.place.post(&self.place.children.batcher, LiveNow(self.live.total()));
        }
        if self.ended.holds(id) {
            self.said.dropped_frames += 1;
            // It has ended, or what was held of it here was lost with a message: its home knows which.
            self.send(message.from, PeerFrame::Failed(id, Failure::Internal("it has ended at a peer".into())));
            return None;
        }
        let now = self.place.clock.now();
        if let Some(left) = message.left {
            self.place.instruments.hop(message.from, now.since(left));
        }
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
                Some(queued)
            }
            Err(error) => {
                let failure = match error {
                    PeerError::Routing(fault) => Failure::Routing(fault),
                    error => Failure::Internal(format!("message to model {}: {error}", self.place.name())),
                };
                // The sender keeps state of it too, and may reach a home that is out of reach from here.
                if message.from != message.home {
                    self.send(message.from, PeerFrame::Failed(id, failure.clone()));
                }
                self.place.tell_lost(message.home, id, failure);
                None
            }
        }
    }

    fn visit(&mut self, message: &PeerReq) -> Result<Queued, PeerError> {
        let spec = message.spec.as_ref().ok_or(PeerError::NoSpec)?;
        if self.visitors.len() >= self.visitors_max() {
            return Err(PeerError::Crowded { limit: self.visitors_max() });
        }
        let route = self.place.server.route_for(spec);
        let constraint =
            self.place.server.constraint_for(spec).map_err(|error| PeerError::Constraint(error.to_string()))?;
        let seat = Seat { me: self.place.me, pool: &self.place.pool, route, constraint, now: self.place.clock.now() };
        let queued = Queued::visit(message, seat)?;
        if message.home != self.place.me {
            self.visitors.insert(message.request, message.home);
        }
        Ok(queued)
    }

    /// A prompt may be prefilled here, unless its request is here already or has ended.
    fn ahead(&self, ahead: &Ahead) {
        let id = ahead.spec.id;
        if self.ended.holds(id) || self.visitors.contains_key(&id) {
            return;
        }
        let route = Box::new(Stay { models: self.ways.len() });
        let (me, pool, now) = (self.place.me, &self.place.pool, self.place.clock.now());
        let seat = Seat { me, pool, route, constraint: None, now };
        if let Some(queued) = Queued::ahead(Arc::clone(&ahead.spec), &ahead.prompt, seat) {
            self.place.post(&self.place.children.batcher, Enqueue(vec![queued]));
        }
    }

    /// A request cannot go on at a peer: it ends here too if it waits for one.
    fn failed(&mut self, id: RequestId, failure: Failure) {
        let mut home = self.place.me;
        if let Some(pending) = self.pending.remove(&id) {
            home = pending.home();
            pending.release();
        }
        self.place.tell_lost(home, id, failure);
    }

    fn release(&mut self, release: Release) {
        self.ended.bury(release.0);
        self.visitors.remove(&release.0);
        if let Some(pending) = self.pending.remove(&release.0) {
            pending.release();
        }
        self.place.post(&self.place.children.decode, release);
    }

    /// The peer may have lost any request it had control of, and any word about those that are at home there.
    fn lose(&mut self, peer: ModelIdx, what: &str) {
        let failure = Failure::Internal(format!("model {} {what}", self.place.server.name(peer)));
        let visitors: Vec<_> = self.visitors.extract_if(|_, home| *home == peer).collect();
        for (id, home) in visitors {
            self.release(Release(id));
            self.tell(home, id, failure.clone());
        }
        let waiting: Vec<_> = self.pending.extract_if(|_, pending| pending.to() == peer).collect();
        for (id, pending) in waiting {
            let home = pending.home();
            pending.release();
            self.place.tell_lost(home, id, failure.clone());
        }
        if self.live.forget(peer) {
            self.place.post(&self.place.children.batcher, LiveNow(self.live.total()));
        }
    }

    fn reached(&mut self, peer: ModelIdx) {
        self.send(peer, PeerFrame::Live(self.live.notes()));
        let untold: Vec<_> = self.untold.extract_if(.., |(home, ..)| *home == peer).collect();
        for (home, id, failure) in untold {
            self.tell(home, id, failure);
        }
    }

    /// Whatever the peer said before has arrived or never will: nothing of it may be waited for. It may count its
    /// frames from anywhere, because its connection keeps their order.
    fn heard(&mut self, peer: ModelIdx) {
        self.lose(peer, "was lost");
        let ways = self.ways.get_mut(peer.index()).and_then(Option::as_mut);
        if let (Some(way), Some(seen)) = (ways, self.seen.get_mut(peer.index())) {
            (way.heard, *seen) = (true, None);
            way.link.wake();
        }
        self.send(peer, PeerFrame::Live(self.live.notes()));
    }

    /// Frames of the peer were lost on the way. What they said of which requests nobody knows here, so it is as if the
    /// peer had been lost; and it is told, because it knows nothing of it.
    fn missed(&mut self, peer: ModelIdx) {
        warn!(model = self.place.name(), peer = self.place.server.name(peer), "messages of a peer were lost");
        self.said.gaps += 1;
        self.lose(peer, "was not heard in full");
        self.send(peer, PeerFrame::Missed);
    }

    fn frame(&mut self, envelope: Envelope) {
        let from = envelope.from;
        match self.seen.get_mut(from.index()) {
            Some(seen) if seen.is_none_or(|seen| seen < envelope.stamp) => {
                let is_next = seen.is_none_or(|seen| envelope.stamp.follows(seen));
                *seen = Some(envelope.stamp);
                if !is_next {
                    self.missed(from);
                }
            }
            _ => {
                self.said.dropped_frames += 1;
                return;
            }
        }
        let children = &self.place.children;
        match envelope.frame {
            PeerFrame::Requests(messages) => self.arrive(&messages),
            PeerFrame::Emit(tokens) => self.place.post(&children.client, Emit(tokens)),
            PeerFrame::Failed(id, failure) => self.failed(id, failure),
            PeerFrame::Release(id) => self.release(Release(id)),
            PeerFrame::Ahead(ahead) => self.ahead(&ahead),
            PeerFrame::Live(notes) => {
                if self.live.absorb(from, &notes) {
                    self.place.post(&children.batcher, LiveNow(self.live.total()));
                }
            }
            PeerFrame::Missed => {
                self.lose(from, "did not hear everything");
                self.send(from, PeerFrame::Live(self.live.notes()));
            }
            PeerFrame::Restarted => {
                self.lose(from, "was rebuilt");
                self.send(from, PeerFrame::Live(self.live.notes()));
            }
        }
    }

    fn say(&mut self) {
        self.said.pending = self.pending.len() as u32;
        let connected = |way: &Option<Way>| way.as_ref().is_none_or(|way| way.heard && way.link.is_up());
        self.said.connected = self.ways.iter().map(connected).collect();
        self.place.board.post(self.place.me, Role::InterModel, Snapshot::InterModel(self.said.clone()));
    }
}
