//! Reads request bodies. Owner: the HTTP layer. Invariant: no more than the limit is ever held, and what is not JSON never
//! reaches a handler.

use super::errors::ApiError;
use actix_web::HttpMessage;
use actix_web::http::header;
use actix_web::{HttpRequest, web};
use serde_json::Value;

/// The body as JSON.
///
/// # Errors
/// 415 when it is declared as something else, 413 above `limit` bytes, 400 when it is not JSON.
pub async fn read_json(request: &HttpRequest, payload: web::Payload, limit: usize) -> Result<Value, ApiError> {
    let declared = request.content_type();
    if !declared.is_empty() && !declared.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::media_type(&declared.chars().take(64).collect::<String>()));
    }
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: usize| length > limit) {
        return Err(ApiError::body_too_large(limit));
    }
    let bytes = match payload.to_bytes_limited(limit).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(_)) => return Err(ApiError::request("the request body broke off before its end")),
        Err(_) => return Err(ApiError::body_too_large(limit)),
    };
    serde_json::from_slice(&bytes).map_err(|error| ApiError::request(format!("the body is not valid JSON: {error}")))
}
