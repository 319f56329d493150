//! `POST /admin/reload`: reads the routing algorithm again. Owner: the HTTP layer. Invariant: only clients with the admin
//! key may ask, or of this machine where there is none, because the answer names files and lines; there is SIGHUP too.

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
/// 400 with what is wrong with the files, and the algorithm is as before; 401 and 403 for clients that may not; 404 when
/// there are no files to read.
pub async fn reload(app: web::Data<App>, request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let Some(reload) = app.reload.clone() else {
        return Err(ApiError::unknown_route(request.method().as_str(), request.path()));
    };
    app.keys.administer(&request)?;
    let outcome = web::block(move || reload()).await;
    match outcome.map_err(|error| ApiError::internal(format!("the reload did not run: {error}")))? {
        Ok(algorithm) => Ok(HttpResponse::Ok().json(json!({ "status": "reloaded", "algorithm": algorithm }))),
        Err(reason) => Err(ApiError::request(reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::testing::{ScriptedEngine, app};
    use actix_web::test::{TestRequest, call_service, init_service, read_body_json};
    use serde_json::Value;

    async fn ask(reload: Option<Reload>, peer: &str) -> (u16, Value) {
        let app = app(ScriptedEngine::new([]));
        let app = reload.into_iter().fold(app, App::with_reload);
        let service = actix_web::App::new().app_data(web::Data::new(app)).configure(crate::http::routes);
        let service = init_service(service).await;
        let request = TestRequest::post().uri("/admin/reload").peer_addr(peer.parse().unwrap()).to_request();
        let response = call_service(&service, request).await;
        (response.status().as_u16(), read_body_json(response).await)
    }

    #[actix_web::test]
    async fn only_clients_of_this_machine_reload() {
        let good: Reload = Arc::new(|| Ok("script".to_owned()));
        for here in ["127.0.0.1:9", "[::1]:9", "[::ffff:127.0.0.1]:9"] {
            let (status, body) = ask(Some(good.clone()), here).await;
            assert_eq!((status, &body["algorithm"]), (200, &json!("script")), "{here}");
        }
        let (status, body) = ask(Some(good), "192.0.2.7:9").await;
        assert_eq!((status, &body["error"]["code"]), (403, &json!("forbidden")));
        assert_eq!(ask(None, "127.0.0.1:9").await.0, 404, "nothing to read");
        let (status, body) = ask(Some(Arc::new(|| Err("a.rhai:1:2: no".to_owned()))), "127.0.0.1:9").await;
        assert_eq!((status, &body["error"]["message"]), (400, &json!("a.rhai:1:2: no")));
    }
}
