//! `GET /health` and `GET /metrics`. Owner: the HTTP layer. Invariant: both answer without asking an actor, so they answer
//! while the engine is busy or stuck; a server whose work does not move is not called healthy.

use super::App;
use super::errors::ApiError;
use actix_web::{HttpResponse, web};
use serde_json::json;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokenrouter_actors::runtime::{ModelSnapshot, RuntimeSnapshot};
use tokenrouter_core::ids::Time;

/// Whether the server is alive and its work moves.
///
/// # Errors
/// 503 when a model has work waiting and has made no step for the time in [`super::Limits::stall`].
pub async fn health(app: web::Data<App>) -> Result<HttpResponse, ApiError> {
    let snapshot = app.engine.snapshot();
    match app.progress.stuck(&snapshot, app.limits.stall) {
        Some(model) => {
            let seconds = app.limits.stall.as_secs();
            Err(ApiError::unavailable(format!("model {model} has work waiting and made no step for {seconds} s")))
        }
        None => Ok(HttpResponse::Ok().json(json!({ "status": "ok", "live_requests": snapshot.live }))),
    }
}

/// All series in Prometheus' text format.
///
/// # Errors
/// 500 when a series cannot be written.
pub async fn metrics(app: web::Data<App>) -> Result<HttpResponse, ApiError> {
    let mut text =
        app.metrics.render().map_err(|error| ApiError::internal(format!("metrics cannot be written: {error}")))?;
    text.push_str(&super::engine_metrics::render(&app.engine.snapshot()));
    Ok(HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(text))
}

/// Remembers, from one look to the next, since when a model has work but makes no step.
#[derive(Debug, Default)]
pub struct Progress(Mutex<Vec<Option<Standstill>>>);

#[derive(Clone, Copy, Debug)]
struct Standstill {
    steps: u64,
    since: Time,
}

impl Progress {
    /// The first model that had work at every look of the last `limit` and made no step between them.
    fn stuck(&self, snapshot: &RuntimeSnapshot, limit: Duration) -> Option<String> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.resize(snapshot.models.len(), None);
        let mut stuck = None;
        for (model, last) in snapshot.models.iter().zip(seen.iter_mut()) {
            *last = standstill(model, *last, snapshot.now);
            if last.is_some_and(|still| snapshot.now.since(still.since) >= limit) && stuck.is_none() {
                stuck = Some(model.name.clone());
            }
        }
        stuck
    }
}

fn standstill(model: &ModelSnapshot, last: Option<Standstill>, now: Time) -> Option<Standstill> {
    let steps = model.decode.steps + model.decode.steps_failed;
    if model.batcher.waiting + model.batcher.stalled + model.decode.running == 0 {
        return None;
    }
    Some(last.filter(|still| still.steps == steps).unwrap_or(Standstill { steps, since: now }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(seconds: u64, waiting: u32, steps: u64) -> RuntimeSnapshot {
        let mut model = ModelSnapshot { name: "m".to_owned(), ..ModelSnapshot::default() };
        model.batcher.waiting = waiting;
        model.decode.steps = steps;
        RuntimeSnapshot { now: Time(seconds * 1_000_000_000), live: waiting, open: true, models: vec![model] }
    }

    #[test]
    fn only_waiting_work_without_a_step_is_stuck() {
        let limit = Duration::from_secs(60);
        let looks = [
            // A long idle time before the work came does not count.
            (1000, 0, 5, false),
            (2000, 1, 5, false),
            (2059, 1, 5, false),
            (2060, 1, 5, true),
            (2100, 1, 5, true),
            // A step, or no work, ends it.
            (2101, 1, 6, false),
            (2160, 1, 6, false),
            (2161, 1, 6, true),
            (2162, 0, 6, false),
            (2300, 2, 6, false),
        ];
        let progress = Progress::default();
        for (seconds, waiting, steps, stuck) in looks {
            assert_eq!(progress.stuck(&snapshot(seconds, waiting, steps), limit).is_some(), stuck, "at {seconds} s");
        }
    }
}
