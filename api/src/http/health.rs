//! `GET /health` and `GET /metrics`. Owner: the HTTP layer. Invariant: both answer without asking an actor, so they answer
//! while the engine is busy or stuck.

use super::App;
use super::errors::ApiError;
use actix_web::{HttpResponse, web};
use serde_json::json;

/// Whether the server is alive.
pub async fn health() -> HttpResponse {
    HttpResponse::Ok().json(json!({ "status": "ok" }))
}

/// All series in Prometheus' text format.
///
/// # Errors
/// 500 when a series cannot be written.
pub async fn metrics(app: web::Data<App>) -> Result<HttpResponse, ApiError> {
    let text =
        app.metrics.render().map_err(|error| ApiError::internal(format!("metrics cannot be written: {error}")))?;
    Ok(HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(text))
}
