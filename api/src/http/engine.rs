//! What the HTTP layer asks of the part that generates. Owner: the HTTP layer. Invariant: HTTP knows jobs and events and
//! nothing of actors, so routes are tested with scripted events and served by the runtime.

use futures_util::future::{FutureExt, LocalBoxFuture};
use tokenrouter_actors::runtime::{Reply, Runtime, RuntimeSnapshot};
use tokenrouter_core::job::{Job, Refusal};

/// Takes jobs.
pub trait Engine: Send + Sync {
    /// Accepts or refuses a job. Dropping the future or the events of the reply aborts the job everywhere.
    fn submit(&self, job: Job) -> LocalBoxFuture<'_, Result<Reply, Refusal>>;

    /// How the engine is now; never waits.
    fn snapshot(&self) -> RuntimeSnapshot;
}

impl Engine for Runtime {
    fn submit(&self, job: Job) -> LocalBoxFuture<'_, Result<Reply, Refusal>> {
        Runtime::submit(self, job).boxed_local()
    }

    fn snapshot(&self) -> RuntimeSnapshot {
        Runtime::snapshot(self)
    }
}
