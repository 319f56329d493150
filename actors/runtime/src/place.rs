//! Where a child stands: what it shares with its siblings, and how it talks to them. Owner: the subserver makes one for each
//! life of its children. Invariant: what a child sends to a sibling arrives, or all children are rebuilt.

use crate::batcher::Batcher;
use crate::board::{Board, Role};
use crate::client::Client;
use crate::clock::Clock;
use crate::decode::Decode;
use crate::instruments::Instruments;
use crate::inter_model::InterModel;
use crate::mailbox::{Mailbox, Metered};
use crate::messages::{ChildDown, Epoch, Forward, Lost};
use crate::runtime::Server;
use crate::subserver::Subserver;
use actix::prelude::*;
use std::sync::Arc;
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_core::ids::{ModelIdx, RequestId};
use tokenrouter_core::job::Failure;
use tokenrouter_core::kv::KvPool;
use tokenrouter_core::peer::PeerFrame;
use tracing::error;

/// Messages a mailbox takes beyond what the live requests can cause.
const MAILBOX_SLACK: usize = 256;

/// Messages about one request that can be on their way to one actor.
const MESSAGES_PER_REQUEST: usize = 8;

/// The first life of a subserver's children.
pub const FIRST_LIFE: Epoch = 1;

/// The siblings of a child.
#[derive(Clone, Debug)]
pub struct Children {
    /// Streams.
    pub client: Mailbox<Client>,
    /// What waits.
    pub batcher: Mailbox<Batcher>,
    /// What runs.
    pub decode: Mailbox<Decode>,
    /// What is away.
    pub inter_model: Mailbox<InterModel>,
}

/// Where a child stands: what it shares with its siblings.
#[derive(Clone, Debug)]
pub struct Place {
    /// The model.
    pub me: ModelIdx,
    /// Which life of the children.
    pub life: Epoch,
    /// The whole server.
    pub server: Arc<Server>,
    /// Pages of this model.
    pub pool: KvPool,
    /// The time.
    pub clock: Clock,
    /// Where snapshots go.
    pub board: Board,
    /// What is measured.
    pub instruments: Arc<Instruments>,
    /// The supervisor.
    pub subserver: Mailbox<Subserver>,
    /// The siblings.
    pub children: Children,
}

impl Place {
    /// Name of the model.
    pub fn name(&self) -> &str {
        self.server.name(self.me)
    }

    /// What its device can do.
    pub fn limits(&self) -> &ExecutorLimits {
        &self.server.models[self.me.index()].limits
    }

    /// Messages a child's mailbox takes. More cannot be on their way, so a full mailbox is a fault.
    pub fn mailbox(&self) -> usize {
        mailbox(&self.server)
    }

    /// Which life, across those of the process.
    pub fn life_ever(&self) -> u64 {
        self.server.life.saturating_add(self.life)
    }

    /// Whether an earlier life ended.
    pub fn is_reborn(&self) -> bool {
        self.life > FIRST_LIFE
    }

    /// Sends to a sibling. A message that cannot be delivered carries state that would be lost, so the children are
    /// rebuilt and their requests failed; a closed mailbox means that this is under way already.
    pub fn post<A, M>(&self, to: &Mailbox<A>, message: M)
    where
        A: Actor<Context = Context<A>> + Handler<Metered<M>>,
        M: Message<Result = ()> + Send + 'static,
    {
        if let Err(SendError::Full(_)) = to.try_send(message) {
            error!(model = self.name(), to = std::any::type_name::<A>(), "mailbox full");
            self.down(Role::Subserver);
        }
    }

    /// Tells the home of a request that it cannot go on.
    pub fn tell_lost(&self, home: ModelIdx, id: RequestId, failure: Failure) {
        if home == self.me {
            self.post(&self.children.client, Lost(id, failure));
        } else {
            let frame = PeerFrame::Failed(id, failure);
            self.post(&self.children.inter_model, Forward { to: home, frame });
        }
    }

    /// A child is gone, or must be taken for gone.
    pub fn down(&self, role: Role) {
        self.subserver.send_last(ChildDown { role, life: self.life });
    }
}

/// Messages the mailbox of any of them takes.
pub(crate) fn mailbox(server: &Server) -> usize {
    server.live_anywhere_max() * MESSAGES_PER_REQUEST + MAILBOX_SLACK
}
