//! What the HTTP layer asks of the part that generates. Owner: the HTTP layer. Invariant: HTTP knows jobs and events and
//! nothing of actors, so routes are tested with scripted events and served by the runtime.

use futures_util::future::LocalBoxFuture;
use tokenrouter_core::ids::RequestId;
use tokenrouter_core::job::{Event, Job, Refusal};
use tokio::sync::mpsc::Receiver;

/// Takes jobs.
pub trait Engine: Send + Sync {
    /// Accepts or refuses a job. Dropping the future or the events of the [`Accepted`] job aborts it everywhere.
    fn submit(&self, job: Job) -> LocalBoxFuture<'_, Result<Accepted, Refusal>>;
}

/// A job that was accepted.
pub struct Accepted {
    /// Its id, for logs.
    pub id: RequestId,
    /// Tokens of its prompt, begin-of-text included.
    pub prompt_tokens: u32,
    /// What becomes of it; ends after `Finished` or `Failed`.
    pub events: Receiver<Event>,
}
