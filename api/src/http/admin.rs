//! `POST /admin/reload`: reads the routing algorithm again. Owner: the HTTP layer. Invariant: only clients of this machine
//! may ask, because the answer names files and lines; from elsewhere there is the signal SIGHUP.

use super::App;
use super::errors::ApiError;
use actix_web::{HttpRequest, HttpResponse, web};
use serde_json::json;
use std::sync::Arc;

/// Reads the routing algorithm again: its name, or what is wrong with the files.
pub type Reload = Arc<dyn Fn() -> Result<String, String> + Send + Sync>;

/// Reloads.
///
/// # Errors
/// 400 with what is wrong with the files, and the algorithm is as before; 403 for clients of other machines; 404 when
/// there are no files to read.
pub async fn reload(app: web::Data<App>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let Some(reload) = app.reload.clone() else {
        return Err(ApiError::unknown_route(request.method().as_str(), request.path()));
    };
    if !request.peer_addr().is_some_and(|peer| peer.ip().to_canonical().is_loopback()) {
        return Err(ApiError::forbidden("only clients on the server's machine may reload; there is also SIGHUP"));
    }
    let outcome = web::block(move || reload()).await;
    match outcome.map_err(|error| ApiError::internal(format!("the reload did not run: {error}")))? {
        Ok(algorithm) => Ok(HttpResponse::Ok().json(json!({ "status": "reloaded", "algorithm": algorithm }))),
        Err(reason) => Err(ApiError::request(reason)),
    }
}
