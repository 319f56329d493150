//! What the HTTP layer asks of the part that generates. Owner: the HTTP layer. Invariant: HTTP knows jobs and events and
//! nothing of actors, so routes are tested with scripted events and served by the runtime.

use futures_util::future::{FutureExt, LocalBoxFuture, join_all};
use std::collections::VecDeque;
use tokenrouter_actors::journal::Entry;
use tokenrouter_actors::runtime::{Reply, Runtime, RuntimeSnapshot};
use tokenrouter_core::job::{Job, Refusal};

/// Takes jobs.
pub trait Engine: Send + Sync {
    /// Accepts or refuses a job. Dropping the future or the events of the reply aborts the job everywhere.
    fn submit(&self, job: Job) -> LocalBoxFuture<'_, Result<Reply, Refusal>>;

    /// Accepts or refuses the jobs of one request, each as [`Engine::submit`] does; for lack of room all or none.
    fn submit_all(&self, jobs: Vec<Job>) -> LocalBoxFuture<'_, Vec<Result<Reply, Refusal>>> {
        join_all(jobs.into_iter().map(|job| self.submit(job))).boxed_local()
    }

    /// How the engine is now; never waits.
    fn snapshot(&self) -> RuntimeSnapshot;

    /// Whether new requests are taken; never waits.
    fn is_open(&self) -> bool {
        self.snapshot().open
    }

    /// What happened to requests since this was asked last, by model.
    fn take_journals(&self) -> Vec<VecDeque<Entry>> {
        Vec::new()
    }
}

impl Engine for Runtime {
    fn submit(&self, job: Job) -> LocalBoxFuture<'_, Result<Reply, Refusal>> {
        Runtime::submit(self, job).boxed_local()
    }

    fn submit_all(&self, jobs: Vec<Job>) -> LocalBoxFuture<'_, Vec<Result<Reply, Refusal>>> {
        async move {
            match self.admit(&jobs) {
                Ok(permits) => {
                    join_all(jobs.into_iter().zip(permits).map(|(job, permit)| self.hand_in(job, permit))).await
                }
                Err(refusal) => jobs.iter().map(|_| Err(refusal.clone())).collect(),
            }
        }
        .boxed_local()
    }

    fn snapshot(&self) -> RuntimeSnapshot {
        Runtime::snapshot(self)
    }

    fn is_open(&self) -> bool {
        Runtime::is_open(self)
    }

    fn take_journals(&self) -> Vec<VecDeque<Entry>> {
        Runtime::take_journals(self)
    }
}
