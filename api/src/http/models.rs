//! `GET /v1/models` and `/v1/models/{id}`. Owner: the HTTP layer. Invariant: the first model is the one a client should
//! take if it does not care.

use super::errors::ApiError;
use super::{App, Served};
use actix_web::{HttpRequest, HttpResponse, web};
use serde_json::{Value, json};

fn card(app: &App, served: &Served) -> Value {
    json!({
        "id": served.id,
        "object": "model",
        "created": app.started_unix,
        "owned_by": "tokenrouter",
        "max_model_len": served.context_len,
    })
}

/// All served models: the routed name first, then each model by its own name.
pub async fn list(app: web::Data<App>) -> HttpResponse {
    let cards: Vec<Value> = app.served.iter().map(|served| card(&app, served)).collect();
    HttpResponse::Ok().json(json!({ "object": "list", "data": cards }))
}

/// One of them.
///
/// # Errors
/// 404 naming the valid ids.
pub async fn one(app: web::Data<App>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(card(&app, app.served(request.match_info().query("id"))?)))
}
