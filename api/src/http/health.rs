//! `GET /health`, `GET /ready` and `GET /metrics`. Owner: the HTTP layer. Invariant: all answer without asking an actor, so
//! they answer while the engine is busy or stuck; a server whose work does not move is not called healthy, however long
//! nobody has looked.

use super::errors::ApiError;
use super::exposition::Text;
use super::{App, actor_metrics, engine_metrics, process_metrics};
use crate::telemetry::Tracer;
use actix_web::{HttpResponse, web};
use serde_json::json;
use std::time::Duration;
use tokenrouter_actors::runtime::{ModelSnapshot, RuntimeSnapshot};
use tokenrouter_core::ids::Time;

/// Whether the server is alive and its work moves.
///
/// # Errors
/// 503 when a model has work waiting and has made no step for the time in [`super::Limits::stall`].
pub async fn health(app: web::Data<App>) -> Result<HttpResponse, ApiError> {
    let snapshot = app.engine.snapshot();
    match stuck(&snapshot, app.limits.stall) {
        Some(model) => {
            let ms = app.limits.stall.as_millis();
            Err(ApiError::unavailable(format!("model {model} has work waiting and made no step for {ms} ms")))
        }
        None => Ok(HttpResponse::Ok().json(json!({ "status": "ok", "live_requests": snapshot.live }))),
    }
}

/// Whether new requests are taken. The port opens when all models are loaded.
///
/// # Errors
/// 503 while the server is stopping.
pub async fn ready(app: web::Data<App>) -> Result<HttpResponse, ApiError> {
    match app.engine.is_open() {
        true => Ok(HttpResponse::Ok().json(json!({ "status": "ready" }))),
        false => Err(ApiError::unavailable("the server is stopping: it takes no new requests")),
    }
}

/// All series in Prometheus' text format.
///
/// # Errors
/// 500 when a series cannot be written.
pub async fn metrics(app: web::Data<App>) -> Result<HttpResponse, ApiError> {
    let mut text =
        app.metrics.render().map_err(|error| ApiError::internal(format!("metrics cannot be written: {error}")))?;
    let (mut others, snapshot) = (Text::default(), app.engine.snapshot());
    engine_metrics::render(&mut others, &snapshot);
    actor_metrics::render(&mut others, &snapshot.models);
    trace_counts(&mut others, app.tracer.as_ref().map(Tracer::counts).unwrap_or_default());
    process_metrics::render(&mut others);
    text.push_str(&others.finish());
    Ok(HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(text))
}

/// Spans that were sent to a collector, and spans that were lost.
fn trace_counts(out: &mut Text, counts: [u64; 2]) {
    let name = "tokenrouter:trace_spans_total";
    out.family(name, "counter", "Spans of requests, by what became of them (sent, lost).");
    for (outcome, count) in ["sent", "lost"].into_iter().zip(counts) {
        out.line(name, &[("outcome", outcome)], count as f64);
    }
}

/// The first model that has had work for `limit` and made no step meanwhile.
fn stuck(snapshot: &RuntimeSnapshot, limit: Duration) -> Option<String> {
    let models = &snapshot.models;
    let last_step = models.iter().map(|model| model.decode.last_step).max()?;
    // What is away at another process cannot be judged from here.
    let all_here = models.iter().all(|model| model.elsewhere.is_none());
    let is_stuck = |model: &&ModelSnapshot| {
        let away = (all_here && model.inter_model.pending > 0).then_some(last_step);
        let moved = waits_since(model).into_iter().chain(away).min();
        moved.is_some_and(|moved| snapshot.now.since(moved) >= limit)
    };
    models.iter().find(is_stuck).map(|model| model.name.clone())
}

/// Since when a model has work and has not moved: a step in flight since it began, and what waits since it came or the
/// last step ended.
fn waits_since(model: &ModelSnapshot) -> Option<Time> {
    match model.decode.running {
        0 => model.batcher.oldest.map(|oldest| oldest.max(model.decode.last_step)),
        _ => Some(model.decode.began),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000_000_000)
    }

    /// Idle; its last step ended at 5 s.
    fn model(name: &str) -> ModelSnapshot {
        let mut model = ModelSnapshot { name: name.to_owned(), ..ModelSnapshot::default() };
        model.decode.last_step = at(5);
        model
    }

    #[track_caller]
    fn check(models: &[ModelSnapshot], seconds: u64, expected: Option<&str>) {
        let models = models.to_vec();
        let snapshot = RuntimeSnapshot { now: at(seconds), open: true, models, ..RuntimeSnapshot::default() };
        assert_eq!(stuck(&snapshot, LIMIT).as_deref(), expected, "at {seconds} s");
    }

    #[test]
    fn an_idle_server_is_never_stuck() {
        check(&[model("a")], 10_000, None);
    }

    #[test]
    fn what_waits_without_a_step_is_stuck_at_the_first_look() {
        let mut waiting = model("b");
        waiting.batcher.oldest = Some(at(1000));
        check(&[model("a"), waiting.clone()], 1059, None);
        check(&[model("a"), waiting.clone()], 1060, Some("b"));
        waiting.decode.last_step = at(1030);
        check(&[model("a"), waiting.clone()], 1089, None);
        check(&[model("a"), waiting], 1090, Some("b"));
    }

    #[test]
    fn a_step_that_does_not_end_is_stuck() {
        let mut running = model("a");
        (running.decode.running, running.decode.began) = (3, at(1000));
        check(std::slice::from_ref(&running), 1059, None);
        check(&[running], 1060, Some("a"));
    }

    #[test]
    fn what_is_away_is_stuck_when_no_model_steps() {
        let mut away = model("a");
        away.inter_model.pending = 1;
        let mut peer = model("b");
        peer.decode.last_step = at(1000);
        check(&[away.clone(), peer.clone()], 1059, None);
        check(&[away.clone(), peer.clone()], 1060, Some("a"));
        peer.elsewhere = Some("another process".to_owned());
        check(&[away, peer], 2000, None);
    }
}
