//! `GET /v1/models` and `/v1/models/{id}`. Owner: the HTTP layer. Invariant: the first model is the one a client should
//! take if it does not care.

use super::errors::ApiError;
use super::{App, Served};
use actix_web::{HttpRequest, HttpResponse, web};
use schemars::JsonSchema;
use serde::Serialize;

/// A name that can be asked for.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ModelCard {
    /// The name.
    id: String,
    /// Always `model`.
    object: &'static str,
    /// Unix time in seconds: when the server was started.
    created: u64,
    /// Always `tokenrouter`.
    owned_by: &'static str,
    /// Longest prompt plus answer, in tokens.
    max_model_len: u32,
}

/// All names that can be asked for.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ModelList {
    /// Always `list`.
    object: &'static str,
    /// The routed name first, then each model.
    data: Vec<ModelCard>,
}

fn card(app: &App, served: &Served) -> ModelCard {
    ModelCard {
        id: served.id.clone(),
        object: "model",
        created: app.started_unix,
        owned_by: "tokenrouter",
        max_model_len: served.context_len,
    }
}

/// All served models: the routed name first, then each model by its own name.
pub async fn list(app: web::Data<App>) -> HttpResponse {
    let data = app.served.iter().map(|served| card(&app, served)).collect();
    HttpResponse::Ok().json(ModelList { object: "list", data })
}

/// One of them.
///
/// # Errors
/// 404 naming the valid ids.
pub async fn one(app: web::Data<App>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(card(&app, app.served(request.match_info().query("id"))?)))
}
