//! Every message, in the order a token meets them. The state of a request is the payload of the message that moves
//! it; replies come as messages tagged with an epoch, so results from a previous life of a child are dropped.

use crate::admission::Permit;
use crate::mailbox::Outlet;
use actix::prelude::*;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_core::execution::{Offer, Word};
use tokenrouter_core::executor::{ExecutorError, Step, StepOutput};
use tokenrouter_core::ids::{ModelIdx, RequestId, Time};
use tokenrouter_core::job::{Event, Failure, Job, Refusal, TokenReport};
use tokenrouter_core::peer::{Ahead, Envelope, PeerFrame, PeerReq};
use tokenrouter_core::request::{Committed, Pending, Queued};
use tokenrouter_core::theory::table::Table;
use tokio::sync::mpsc;

/// Counts lives: of a subserver's children, or of its executor.
pub type Epoch = u64;

/// HTTP -> Client: a job and where its events go.
#[derive(Debug, Message)]
#[rtype(result = "Result<Ticket, Refusal>")]
pub struct Submit {
    /// Assigned by the runtime.
    pub id: RequestId,
    /// What to do.
    pub job: Job,
    /// Its place among the live requests.
    pub permit: Permit,
}

/// An accepted job. Dropping `events` aborts it.
#[derive(Debug)]
pub struct Ticket {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// What happens, ending in `Finished` or `Failed`.
    pub events: mpsc::Receiver<Event>,
}

/// Client -> InterModel: this many routed requests of this Client are live.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct OwnLive(pub u32);

/// Client, Decode, InterModel -> Batcher: these wait for a batch.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Enqueue(pub Vec<Queued>);

/// InterModel -> Batcher: this many routed requests are live anywhere.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct LiveNow(pub u32);

/// Planner -> Batcher: these thresholds from now on.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct Thresholds(pub Arc<Table>);

/// Client -> InterModel: peers may prefill this prompt when they have time.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Announce(pub Arc<Ahead>);

/// Batcher -> InterModel: what is to be said to the Conductor, after all that goes to peers before.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Say(pub Word);

/// InterModel, Subserver -> Conductor: a model speaks of turns.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Said {
    /// Which model.
    pub model: ModelIdx,
    /// Which life of its actors.
    pub life: Epoch,
    /// What.
    pub word: Word,
}

/// Conductor -> Subserver -> InterModel -> Batcher: a turn.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Offered(pub Offer);

/// Batcher -> Decode: start with these.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct RunBatch(pub Vec<Queued>);

/// Decode -> executor: one forward pass.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct RunStep {
    /// Life of the executor that is asked.
    pub epoch: Epoch,
    /// What to do.
    pub step: Step,
    /// Who wants the answer.
    pub reply: Outlet<Stepped>,
}

/// Executor -> Decode: the answer.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Stepped {
    /// Life of the executor that was asked.
    pub epoch: Epoch,
    /// The answer, or why there is none.
    pub result: Result<StepOutput, ExecutorError>,
    /// Time the executor took.
    pub took: Duration,
}

/// Decode -> Batcher: the credit. A step is over, or none could be made of the batch.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Ready {
    /// Short of memory or budget; to be offered again when something changed.
    pub deferred: Vec<Queued>,
}

/// Decode -> Client: prompts of these requests, which entered here, are in the step that began then; the first word counts.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Began(pub Vec<RequestId>, pub Time);

/// Decode -> Client: the prompt of this request with its log-probabilities; before its first token.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct PromptRead(pub RequestId, pub Vec<TokenReport>);

/// Decode, InterModel -> Client: committed tokens.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Emit(pub Vec<Committed>);

/// Client -> Batcher -> Decode -> Client: once around the ring, behind what leads to the next step. The Client delivers
/// what it has when it comes back.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Lap;

/// Decode, InterModel -> Client: this request cannot go on.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Lost(pub RequestId, pub Failure);

/// Decode -> InterModel: control of these requests of one step goes to peers.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Depart(pub Vec<Departing>);

/// Control goes to a peer; the state stays here.
#[derive(Debug)]
pub struct Departing {
    /// What is kept.
    pub pending: Pending,
    /// What the peer gets.
    pub request: Box<PeerReq>,
}

/// Decode, InterModel -> InterModel -> peer: something for the Client of another subserver.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Forward {
    /// Index of the subserver.
    pub to: ModelIdx,
    /// What to say there.
    pub frame: PeerFrame,
}

/// Link -> Subserver -> InterModel: a frame from a peer.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Frame(pub Envelope);

/// Link -> Subserver -> InterModel: what became of the connections to and from a peer in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Message)]
#[rtype(result = "()")]
pub enum LinkEvent {
    /// Frames reach this peer from now on.
    Reached(ModelIdx),
    /// The connection to this peer has ended; frames that were sent may be lost.
    Unreached(ModelIdx),
    /// Frames come from this peer from now on; any that it sent before may be lost.
    Heard(ModelIdx),
    /// The connection from this peer has ended.
    Unheard(ModelIdx),
}

/// Client -> InterModel -> Decode -> Batcher (and all peers): the request has ended; drop what is held for it.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub struct Release(pub RequestId);

/// Decode -> Subserver: the executor of this life is lost.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct ExecutorLost {
    /// Life of the executor.
    pub epoch: Epoch,
    /// What happened.
    pub reason: String,
}

/// Subserver -> Decode: go on with this executor; memory is empty.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct ExecutorReplaced {
    /// The new executor.
    pub executor: Outlet<RunStep>,
    /// Life of the executor from now on.
    pub epoch: Epoch,
}

/// A dying child -> Subserver.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub struct ChildDown {
    /// Which.
    pub role: crate::board::Role,
    /// Which life.
    pub life: Epoch,
}

/// Subserver -> children: end; open requests are failed.
#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
pub enum Stop {
    /// The server stops.
    Shutdown,
    /// New children take over.
    Rebuild,
}
