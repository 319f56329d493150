//! How jobs come in. Owner: whoever asks. Invariant: what is refused leaves nothing behind; the jobs of one request are admitted
//! together or not at all.

use super::{Reply, Runtime};
use crate::admission::Permit;
use crate::link::local;
use crate::messages::{Submit, Ticket};
use std::time::Duration;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::{Job, Refusal, Target};
use tokenrouter_core::routing::Algorithm;

/// Where a routed job enters, by its own routing parameters if it has some. Wrong ones are refused by the Client.
fn first_model(algorithm: &dyn Algorithm, job: &Job) -> ModelIdx {
    let own = job.routing.as_ref().and_then(|overrides| algorithm.with(overrides).ok());
    own.as_deref().unwrap_or(algorithm).entry(job.sampling.seed)
}

impl Runtime {
    /// Hands a job in.
    ///
    /// # Errors
    /// [`Refusal`] when it is not accepted; nothing of it remains then.
    pub async fn submit(&self, job: Job) -> Result<Reply, Refusal> {
        let mut permits = self.admit(std::slice::from_ref(&job))?;
        let permit = permits.pop().ok_or_else(|| Refusal::Unavailable("no place".into()))?;
        self.hand_in(job, permit).await
    }

    /// Places for all jobs of one request, or for none; to be given to [`Runtime::hand_in`] with each.
    ///
    /// # Errors
    /// [`Refusal`] when they are too many now.
    pub fn admit(&self, jobs: &[Job]) -> Result<Vec<Permit>, Refusal> {
        if !self.is_open() {
            return Err(Refusal::Unavailable("shutting down".into()));
        }
        Permit::all(&self.0.server, self.0.clock, jobs).inspect_err(|refusal| {
            let entries = jobs.iter().map(|job| self.entry(job));
            entries.for_each(|entry| self.0.server.refused.count(entry, refusal));
        })
    }

    fn entry(&self, job: &Job) -> ModelIdx {
        match job.target {
            Target::Routed => first_model(&*self.0.server.algorithm, job),
            Target::Only(model) => model,
        }
    }

    /// Hands in a job that was admitted.
    ///
    /// # Errors
    /// As [`Runtime::submit`].
    pub async fn hand_in(&self, job: Job, permit: Permit) -> Result<Reply, Refusal> {
        let (server, entry) = (&self.0.server, self.entry(&job));
        if let Some(address) = server.models.get(entry.index()).and_then(|model| model.site.peer()) {
            let name = server.name(entry);
            return Err(Refusal::Unavailable(format!(
                "model {name} is in another process; ask the one that peers reach at {address}"
            )));
        }
        let unavailable = || Refusal::Unavailable(format!("no subserver for model {entry}"));
        let subserver = local::find(&self.0.directory, entry).ok_or_else(unavailable)?;
        let id = self.0.numbers.next(Duration::from_nanos(self.0.clock.now().0));
        let Ticket { prompt_tokens, events } =
            subserver.send(Submit { id, job, permit }).await.unwrap_or_else(|_| Err(unavailable()))?;
        Ok(Reply { id, prompt_tokens, events })
    }
}
