//! Reads request bodies. Owner: the HTTP layer. Invariant: no more than the limit is ever held, and what is not JSON never
//! reaches a handler.

use super::errors::ApiError;
use super::{App, Limits};
use actix_web::HttpMessage;
use actix_web::http::header;
use actix_web::{HttpRequest, web};
use serde_json::Value;
use tokio::time::timeout;

/// The body as JSON.
///
/// # Errors
/// 415 when it is declared as something else, 413 above `limit` bytes, 408 when it does not come in time, 400 when it is
/// not JSON.
pub async fn read_json(request: &HttpRequest, payload: web::Payload, limit: usize) -> Result<Value, ApiError> {
    let declared = request.content_type();
    if !declared.is_empty() && !declared.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::media_type(&declared.chars().take(64).collect::<String>()));
    }
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: usize| length > limit) {
        return Err(ApiError::body_too_large(limit));
    }
    let patience = request.app_data::<web::Data<App>>().map_or(Limits::default().client, |app| app.limits.client);
    let bytes = match timeout(patience, payload.to_bytes_limited(limit)).await {
        Ok(Ok(Ok(bytes))) => bytes,
        Ok(Ok(Err(_))) => return Err(ApiError::request("the request body broke off before its end")),
        Ok(Err(_)) => return Err(ApiError::body_too_large(limit)),
        Err(_) => return Err(ApiError::slow_client("the request body did not come", patience)),
    };
    serde_json::from_slice(&bytes).map_err(|error| ApiError::request(format!("the body is not valid JSON: {error}")))
}
