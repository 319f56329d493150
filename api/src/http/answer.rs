//! From jobs to a response, whole or streamed; the same for chat and text. Owner: the handler. Invariant: no header is
//! sent before the engine's first event, and an answer that fails before it is a plain HTTP error.

use super::App;
use super::choices::{Choices, Unanswered};
use super::dialect::{Dialect, Head};
use super::errors::ApiError;
use super::meter::Asked;
use super::sse;
use super::trace::Answering;
use super::types::generation::Generation;
use super::types::response::Tally;
use crate::telemetry::Trace;
use actix_web::HttpResponse;
use std::sync::Arc;
use tokenrouter_core::job::{Failure, Job};

/// What is to be answered.
pub struct Answer<'a, D> {
    /// How.
    pub dialect: D,
    /// One job a choice.
    pub jobs: Vec<Job>,
    /// Consecutive jobs that continue the same prompt.
    pub per_prompt: usize,
    /// The request's shared fields.
    pub generation: &'a Generation,
    /// The request's span, if it is traced.
    pub trace: Option<Trace>,
}

/// Runs the jobs and answers.
///
/// # Errors
/// What the engine refuses or fails with before anything was sent.
pub async fn answer<D: Dialect + 'static>(app: &App, plan: Answer<'_, D>) -> Result<HttpResponse, ApiError> {
    let Answer { mut dialect, jobs, per_prompt, generation, trace } = plan;
    let head = Head::new(D::ID_PREFIX, &generation.model);
    let (model, max_tokens) = (generation.model.as_str().into(), generation.stop.max_tokens);
    let names = || Arc::clone(&app.model_names);
    let trace = trace.map(|trace| Answering::new(trace, names(), (D::OPERATION, &head.id), (generation, &jobs)));
    let meter = app.metrics.request(Asked { model, n: generation.n, max_tokens }, trace);
    let choices = match Choices::start(&*app.engine, jobs, &meter).await {
        Ok(choices) => choices,
        Err(Unanswered::Refused(refusal)) => return Err(refusal.into()),
        Err(Unanswered::Failed(failure)) => return Err(failed(&head, &failure)),
    };
    let mut tally = Tally::new(app.model_names.to_vec(), per_prompt, choices.prompt_tokens().to_vec());
    if generation.streaming.on {
        let writer = sse::Writer::new(head, dialect, generation.streaming, tally);
        return Ok(sse::response(choices, writer, app.limits));
    }
    let outcomes = choices.collect().await.map_err(|failure| failed(&head, &failure))?;
    let mut whole = Vec::with_capacity(outcomes.len());
    for (index, outcome) in outcomes.into_iter().enumerate() {
        tally.finish(index, outcome.usage.clone());
        whole.push(dialect.whole(index, outcome));
    }
    let mut envelope = head.envelope(D::WHOLE, whole);
    envelope.usage = Some(Some(tally.report()));
    Ok(HttpResponse::Ok().json(envelope))
}

fn failed(head: &Head, failure: &Failure) -> ApiError {
    tracing::error!(id = %head.id, %failure, "an answer failed");
    ApiError::from(failure)
}
