//! Subserver: one model's supervisor. Owner: its five children, the page pool and their lives. Invariant: its address
//! stays the same for ever; a dead child means new children, a dead executor means a new executor and empty memory.

use crate::batcher::Batcher;
use crate::board::{Board, Role, Snapshot, SubserverSnapshot};
use crate::client::Client;
use crate::clock::Clock;
use crate::decode::Decode;
use crate::gpu_executor::{Executors, Seat};
use crate::instruments::{Instruments, LogEntry};
use crate::inter_model::{InterModel, Way};
use crate::link::Link;
use crate::link::faulty::FaultyLink;
use crate::link::identity::Identity;
use crate::link::local::{Directory, Local};
use crate::link::socket::{Ends, Socket};
use crate::mailbox::{Mailbox, Metered, takes_metered};
use crate::messages::{
    ChildDown, Epoch, ExecutorLost, ExecutorReplaced, Frame, LinkEvent, Offered, Said, Stop, Submit, Ticket,
};
use crate::place::{Children, FIRST_LIFE, Place, mailbox};
use crate::runtime::{ModelSpec, Server};
use actix::prelude::*;
use std::sync::Arc;
use tokenrouter_core::execution::Word;
use tokenrouter_core::faults::LinkFaults;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::Refusal;
use tokenrouter_core::kv::KvPool;
use tracing::{error, warn};

/// The actor.
#[derive(Debug)]
pub struct Subserver {
    me: ModelIdx,
    server: Arc<Server>,
    seat: Seat,
    /// To peers in other processes, by model index; they outlive the children.
    sockets: Vec<Option<Socket>>,
    /// Which of them are connected to this subserver.
    heard: Vec<bool>,
    directory: Directory,
    clock: Clock,
    board: Board,
    pool: KvPool,
    executors: Executors,
    instruments: Arc<Instruments>,
    /// Of the children.
    life: Epoch,
    /// Of the executor.
    epoch: Epoch,
    children: Option<Children>,
    said: SubserverSnapshot,
}

impl Subserver {
    /// The supervisor of model `me`; children come to life when it is started.
    pub fn new(me: ModelIdx, shared: Shared) -> Self {
        let Shared { server, seat, directory, clock, board, pool, executors, instruments } = shared;
        let said = SubserverSnapshot::default();
        Subserver {
            me,
            server,
            seat,
            sockets: Vec::new(),
            heard: Vec::new(),
            directory,
            clock,
            board,
            pool,
            executors,
            instruments,
            life: FIRST_LIFE,
            epoch: FIRST_LIFE,
            children: None,
            said,
        }
    }

    fn spawn_children(&mut self, ctx: &Context<Self>) {
        let contexts = (Context::new(), Context::new(), Context::new(), Context::new());
        let (client, batcher, decode, inter_model) = &contexts;
        let meter = |role| self.instruments.meter(role);
        let children = Children {
            client: Mailbox::new(client.address(), meter(Role::Client)),
            batcher: Mailbox::new(batcher.address(), meter(Role::Batcher)),
            decode: Mailbox::new(decode.address(), meter(Role::Decode)),
            inter_model: Mailbox::new(inter_model.address(), meter(Role::InterModel)),
        };
        let place = Place {
            me: self.me,
            life: self.life,
            server: Arc::clone(&self.server),
            pool: self.pool.clone(),
            clock: self.clock,
            board: self.board.clone(),
            instruments: Arc::clone(&self.instruments),
            subserver: Mailbox::new(ctx.address(), meter(Role::Subserver)),
            children: children.clone(),
        };
        let executor = self.seat.start(&self.executors, meter(Role::Executor));
        let policy = self.server.policy();
        contexts.0.run(Client::new(place.clone()));
        contexts.1.run(Batcher::new(place.clone(), policy));
        contexts.2.run(Decode::new(place.clone(), executor, self.epoch));
        contexts.3.run(InterModel::new(place, self.ways()));
        self.children = Some(children);
    }

    /// Dials the peers in other processes. Must be called on the arbiter of this subserver.
    fn dial(&mut self, ctx: &Context<Self>) {
        let mailbox = Mailbox::new(ctx.address(), self.instruments.meter(Role::Subserver));
        let socket = |(index, model): (usize, &ModelSpec)| {
            let address = model.site.peer()?.clone();
            let (from, to) = (self.me, ModelIdx(index as u8));
            let ends = Ends { from, to, address, server: Identity::of(&self.server) };
            let (socket, connection) = Socket::new(ends, mailbox.outlet());
            // It ends by itself when the link is dropped.
            actix_rt::spawn(connection);
            Some(socket)
        };
        self.sockets = self.server.models.iter().enumerate().map(socket).collect();
        self.heard = vec![false; self.sockets.len()];
    }

    fn ways(&self) -> Vec<Option<Way>> {
        let way = |(index, socket): (usize, &Option<Socket>)| {
            let to = ModelIdx(index as u8);
            let local = || Box::new(Local { directory: Arc::clone(&self.directory), to });
            match socket.clone() {
                Some(socket) => Some(Way { link: self.tried(to, Box::new(socket)), heard: self.heard[index] }),
                None => (to != self.me).then(|| Way { link: self.tried(to, local()), heard: true }),
            }
        };
        self.sockets.iter().enumerate().map(way).collect()
    }

    /// The link with the faults that were ordered, others in each direction.
    fn tried(&self, to: ModelIdx, link: Box<dyn Link>) -> Box<dyn Link> {
        if self.server.faults.is_empty() {
            return link;
        }
        let direction = u64::from(self.me.0) << 8 | u64::from(to.0);
        let own = |faults: &LinkFaults| LinkFaults { seed: faults.seed ^ direction << 32, ..*faults };
        Box::new(FaultyLink::new(link, self.server.faults.iter().map(own).collect()))
    }

    /// Hands something from a peer to InterModel. What cannot be delivered would be missed for ever, so the children
    /// are rebuilt then; while they are, peers are about to be told that all is lost here.
    fn pass<M>(&mut self, message: M, ctx: &Context<Self>)
    where
        M: Message<Result = ()> + Send + 'static,
        InterModel: Handler<Metered<M>>,
    {
        let Some(children) = &self.children else { return };
        match children.inter_model.try_send(message) {
            Ok(()) => {}
            Err(SendError::Closed(_)) => warn!(model = self.server.name(self.me), "a peer's message found nobody"),
            Err(SendError::Full(_)) => self.rebuild(Role::InterModel, ctx),
        }
    }

    /// A child is gone and with it whatever it owned: all control actors start again, their requests are failed.
    fn rebuild(&mut self, role: Role, ctx: &Context<Self>) {
        error!(model = self.server.name(self.me), ?role, "child down; rebuilding");
        self.life += 1;
        self.epoch += 1;
        self.stop_children(Stop::Rebuild);
        self.pool.revoke_all();
        if let Some(conductor) = &self.server.conductor
            && let Err(error) = conductor.try_send(Said { model: self.me, life: self.life, word: Word::Reborn })
        {
            error!(model = self.server.name(self.me), %error, "a turn may be lost");
        }
        self.said.children_restarts += 1;
        self.said.last_error = Some(format!("{role:?} went down"));
        self.log(role, "went down; all control actors of the model were rebuilt".to_owned());
        self.spawn_children(ctx);
        self.say();
    }

    fn stop_children(&mut self, why: Stop) {
        if let Some(old) = self.children.take() {
            // A closed mailbox is a child that is down already. Client first: it fails its streams through the others.
            let told = [
                old.client.try_send(why).is_ok(),
                old.inter_model.try_send(why).is_ok(),
                old.decode.try_send(why).is_ok(),
                old.batcher.try_send(why).is_ok(),
            ];
            tracing::debug!(model = self.server.name(self.me), ?told, "children stopped");
        }
    }

    fn log(&self, role: Role, what: String) {
        self.instruments.log(LogEntry { at: self.clock.now(), role, what });
    }

    fn say(&self) {
        self.board.post(self.me, Role::Subserver, Snapshot::Subserver(self.said.clone()));
    }
}

/// What a subserver shares with the others.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The whole server.
    pub server: Arc<Server>,
    /// Where the executor of this model lives and how it is built.
    pub seat: Seat,
    /// Addresses of the subservers here.
    pub directory: Directory,
    /// The time.
    pub clock: Clock,
    /// Where snapshots go.
    pub board: Board,
    /// Pages of this model.
    pub pool: KvPool,
    /// Counts the executors of this model.
    pub executors: Executors,
    /// What is measured of the actors of this model.
    pub instruments: Arc<Instruments>,
}

impl Actor for Subserver {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(mailbox(&self.server));
        self.dial(ctx);
        self.spawn_children(ctx);
        self.say();
    }
}

takes_metered!(Subserver: Submit, Frame, Offered, LinkEvent, ExecutorLost, ChildDown, Stop);

impl Handler<Submit> for Subserver {
    type Result = ResponseFuture<Result<Ticket, Refusal>>;

    fn handle(&mut self, message: Submit, _: &mut Self::Context) -> Self::Result {
        let client = self.children.as_ref().map(|children| children.client.clone());
        let name = self.server.name(self.me).to_owned();
        Box::pin(async move {
            let rebuilding = || Refusal::Unavailable(format!("the actors of model {name} are being rebuilt"));
            let client = client.ok_or_else(rebuilding)?;
            client.send(message).await.unwrap_or_else(|_| Err(rebuilding()))
        })
    }
}

impl Handler<Frame> for Subserver {
    type Result = ();

    fn handle(&mut self, message: Frame, ctx: &mut Self::Context) {
        self.pass(message, ctx);
    }
}

impl Handler<Offered> for Subserver {
    type Result = ();

    /// An offer to children that were replaced is over: the Conductor has been told.
    fn handle(&mut self, offered: Offered, ctx: &mut Self::Context) {
        if offered.0.life == self.life {
            self.pass(offered, ctx);
        }
    }
}

impl Handler<LinkEvent> for Subserver {
    type Result = ();

    fn handle(&mut self, event: LinkEvent, ctx: &mut Self::Context) {
        match event {
            LinkEvent::Heard(peer) => self.heard[peer.index()] = true,
            LinkEvent::Unheard(peer) => self.heard[peer.index()] = false,
            LinkEvent::Reached(_) | LinkEvent::Unreached(_) => {}
        }
        self.pass(event, ctx);
    }
}

impl Handler<ExecutorLost> for Subserver {
    type Result = ();

    /// A new executor with empty memory; requests keep their tokens and are prefilled again.
    fn handle(&mut self, message: ExecutorLost, _: &mut Self::Context) {
        let Some(children) = self.children.as_ref().filter(|_| message.epoch == self.epoch) else { return };
        self.epoch += 1;
        self.pool.revoke_all();
        self.said.executor_restarts += 1;
        self.log(Role::Executor, format!("lost and rebuilt: {}", message.reason));
        self.said.last_error = Some(message.reason);
        let executor = self.seat.start(&self.executors, self.instruments.meter(Role::Executor));
        let replaced = ExecutorReplaced { executor, epoch: self.epoch };
        if let Err(error) = children.decode.try_send(replaced) {
            warn!(model = self.server.name(self.me), %error, "no Decode for the new executor");
        }
        self.say();
    }
}

impl Handler<ChildDown> for Subserver {
    type Result = ();

    fn handle(&mut self, message: ChildDown, ctx: &mut Self::Context) {
        if self.children.is_some() && message.life == self.life {
            self.rebuild(message.role, ctx);
        }
    }
}

impl Handler<Stop> for Subserver {
    type Result = ();

    fn handle(&mut self, why: Stop, ctx: &mut Self::Context) {
        self.stop_children(why);
        ctx.stop();
    }
}
