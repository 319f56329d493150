//! The OpenAI error object and the map from what went wrong to an HTTP status. Owner: whoever answers. Invariant: every
//! error leaves the server in this one shape, and nothing internal (paths, addresses, panics) is in its message; only
//! who reloads the server's own files from its own machine is told where they are wrong.

use actix_web::http::{StatusCode, header};
use actix_web::{HttpResponse, ResponseError};
use serde_json::{Map, Value, json};
use std::fmt;
use std::time::Duration;
use tokenrouter_core::job::{Failure, Overdue, Refusal};

/// When a client should come back if nothing better is known.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

/// An error as the client sees it: `{"error": {"message", "type", "param", "code"}}`.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError(Box<Parts>);

#[derive(Clone, Debug, PartialEq)]
struct Parts {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    extra: Map<String, Value>,
    retry_after: Option<Duration>,
    allow: Option<&'static str>,
}

impl ApiError {
    fn of(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError(Box::new(Parts {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            extra: Map::new(),
            retry_after: None,
            allow: None,
        }))
    }

    fn with_code(mut self, code: &'static str) -> Self {
        self.0.code = Some(code);
        self
    }

    fn with_param(mut self, param: impl Into<String>) -> Self {
        self.0.param = Some(param.into());
        self
    }

    fn with_retry(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    fn with_extra(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.0.extra.insert(name.to_owned(), value.into());
        self
    }

    /// 400: a field of the request is wrong; `param` is its path.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError::of(StatusCode::BAD_REQUEST, "invalid_request_error", message).with_param(param)
    }

    /// 400: a field of the request is right at OpenAI but not available here.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError::field(param, message).with_code("unsupported_parameter")
    }

    /// 400: the request as a whole is wrong.
    pub fn request(message: impl Into<String>) -> Self {
        ApiError::of(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: a text that has more than `least` tokens for a context of `context_len`; it was not counted exactly.
    pub fn too_long(least: usize, context_len: u32) -> Self {
        let message = format!("the prompt has more than {least} tokens, but the context holds {context_len}");
        ApiError::request(message)
            .with_code("context_length_exceeded")
            .with_extra("n_prompt_tokens", least)
            .with_extra("n_ctx", context_len)
    }

    /// 401: no key, or a wrong one.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        ApiError::of(StatusCode::UNAUTHORIZED, "authentication_error", message).with_code("invalid_api_key")
    }

    /// 403: not for this client.
    pub fn forbidden(message: impl Into<String>) -> Self {
        ApiError::of(StatusCode::FORBIDDEN, "permission_error", message).with_code("forbidden")
    }

    /// 404: no such model; names the valid ones.
    pub fn unknown_model(name: &str, valid: &[&str]) -> Self {
        let message = format!("the model {name:?} does not exist; use one of: {}", valid.join(", "));
        ApiError::of(StatusCode::NOT_FOUND, "invalid_request_error", message)
            .with_param("model")
            .with_code("model_not_found")
    }

    /// 404: no such route.
    pub fn unknown_route(method: &str, path: &str) -> Self {
        ApiError::of(StatusCode::NOT_FOUND, "invalid_request_error", format!("unknown route: {method} {path}"))
            .with_code("unknown_url")
    }

    /// 405: the route exists but not with this method.
    pub fn wrong_method(method: &str, path: &str, allow: &'static str) -> Self {
        let message = format!("{path} does not answer to {method}; use {allow}");
        let mut error = ApiError::of(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
            .with_code("method_not_allowed");
        error.0.allow = Some(allow);
        error
    }

    /// 408: the client took longer than `limit` to send a body, or left a stream unread for so long.
    pub fn slow_client(what: &str, limit: Duration) -> Self {
        let message = format!("{what} within {} ms", limit.as_millis());
        ApiError::of(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message).with_code("client_timeout")
    }

    /// 413: the body is larger than the server takes.
    pub fn body_too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than the limit of {limit} bytes");
        ApiError::of(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message).with_code("request_too_large")
    }

    /// 415: the body is not declared as JSON.
    pub fn media_type(found: &str) -> Self {
        let message = format!("content-type {found:?} is not supported; send application/json");
        ApiError::of(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
            .with_code("unsupported_media_type")
    }

    /// 503: alive, but not able to serve now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        ApiError::of(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message)
            .with_code("unavailable")
            .with_retry(RETRY_AFTER_DEFAULT)
    }

    /// 500: the fault is the server's.
    pub fn internal(message: impl Into<String>) -> Self {
        ApiError::of(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).with_code("internal_error")
    }

    /// HTTP status.
    pub fn status(&self) -> StatusCode {
        self.0.status
    }

    /// Path of the field at fault, if one is.
    pub fn param(&self) -> Option<&str> {
        self.0.param.as_deref()
    }

    /// The error object, as sent in bodies and in event streams.
    pub fn body(&self) -> Value {
        let parts = &self.0;
        let mut error = Map::new();
        error.insert("message".to_owned(), json!(parts.message));
        error.insert("type".to_owned(), json!(parts.kind));
        error.insert("param".to_owned(), json!(parts.param));
        error.insert("code".to_owned(), json!(parts.code));
        error.extend(parts.extra.clone());
        json!({ "error": error })
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.param {
            Some(param) => write!(f, "{} {}: {}", self.0.status.as_u16(), param, self.0.message),
            None => write!(f, "{}: {}", self.0.status.as_u16(), self.0.message),
        }
    }
}

impl std::error::Error for ApiError {}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.0.status
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.0.status);
        if let Some(after) = self.0.retry_after {
            response.insert_header((header::RETRY_AFTER, seconds_rounded_up(after).to_string()));
        }
        if let Some(allow) = self.0.allow {
            response.insert_header((header::ALLOW, allow));
        }
        if self.0.status == StatusCode::UNAUTHORIZED {
            response.insert_header((header::WWW_AUTHENTICATE, "Bearer"));
        }
        if self.0.status == StatusCode::REQUEST_TIMEOUT {
            // The rest of the body is not waited for.
            response.force_close();
        }
        response.json(self.body())
    }
}

/// Whole seconds, at least one: `Retry-After: 0` makes clients spin.
fn seconds_rounded_up(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::Invalid { field, message } => ApiError::field(field, message),
            Refusal::ContextOverflow { prompt_tokens, context_len, .. } => ApiError::request(message)
                .with_code("context_length_exceeded")
                .with_extra("n_prompt_tokens", prompt_tokens)
                .with_extra("n_ctx", context_len),
            Refusal::NeverFits { needed_tokens, capacity_tokens, .. } => ApiError::request(message)
                .with_code("kv_memory_exceeded")
                .with_extra("needed_tokens", needed_tokens)
                .with_extra("capacity_tokens", capacity_tokens),
            Refusal::Overloaded { retry_after, .. } => {
                ApiError::of(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
                    .with_code("overloaded")
                    .with_retry(retry_after)
            }
            Refusal::Unavailable(_) => {
                // The reason may name processes and their addresses: it is for the log.
                tracing::warn!(%message, "a request was refused");
                ApiError::unavailable("the server takes no such requests now; try again later")
            }
        }
    }
}

impl From<&Failure> for ApiError {
    /// The reason inside a failure is for the log; the client learns which model failed and that it may try again.
    fn from(failure: &Failure) -> Self {
        match failure {
            Failure::Executor { model, .. } => ApiError::internal(format!("model {model} failed while generating")),
            Failure::Routing(_) => ApiError::internal("the routing algorithm failed while generating"),
            Failure::Stopped => ApiError::unavailable(failure.to_string()),
            Failure::Internal(_) => ApiError::internal("an internal part of the server failed while generating"),
            Failure::TimedOut { overdue: Overdue::FirstToken, .. } => {
                let message = format!("{failure}; try again later");
                ApiError::of(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message)
                    .with_code("queue_timeout")
                    .with_retry(RETRY_AFTER_DEFAULT)
            }
            Failure::TimedOut { overdue: Overdue::End, .. } => {
                let message = format!("{failure}; ask for fewer tokens");
                ApiError::of(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message).with_code("request_timeout")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::job::Load;

    fn header_of(response: &HttpResponse, name: header::HeaderName) -> Option<String> {
        response.headers().get(name).map(|value| value.to_str().unwrap().to_owned())
    }

    fn overloaded(load: Load) -> Refusal {
        Refusal::Overloaded { load, now: 4, limit: 4, retry_after: Duration::from_millis(1500) }
    }

    #[test]
    fn every_refusal_has_its_status() {
        let cases = [
            (Refusal::Invalid { field: "logit_bias", message: "id 9 is not a token".into() }, 400, None),
            (Refusal::ContextOverflow { prompt_tokens: 70, output_tokens: 1, context_len: 64 }, 400, None),
            (Refusal::NeverFits { model: "m".into(), needed_tokens: 65, capacity_tokens: 64 }, 400, None),
            (overloaded(Load::Requests), 429, Some("2")),
            (overloaded(Load::PromptTokens), 429, Some("2")),
            (Refusal::Unavailable("draining".into()), 503, Some("1")),
        ];
        for (refusal, status, retry) in cases {
            let error = ApiError::from(refusal.clone());
            let response = error.error_response();
            assert_eq!(response.status().as_u16(), status, "{refusal}");
            assert_eq!(header_of(&response, header::RETRY_AFTER).as_deref(), retry, "{refusal}");
        }
    }

    #[test]
    fn an_overflow_carries_its_counts_in_the_error_object() {
        let body =
            ApiError::from(Refusal::ContextOverflow { prompt_tokens: 70, output_tokens: 1, context_len: 64 }).body();
        assert_eq!(body["error"]["code"], "context_length_exceeded");
        assert_eq!(body["error"]["n_prompt_tokens"], 70);
        assert_eq!(body["error"]["n_ctx"], 64);
        assert!(body["error"]["param"].is_null());
    }

    #[test]
    fn a_failure_does_not_tell_its_inside() {
        let failure = Failure::Executor { model: "large".into(), reason: "panic at /home/x/y.rs:3".into() };
        let error = ApiError::from(&failure);
        assert_eq!(error.status().as_u16(), 500);
        let text = error.body().to_string();
        assert!(text.contains("large") && !text.contains("/home"), "{text}");
        assert_eq!(ApiError::from(&Failure::Stopped).status().as_u16(), 503);
    }

    #[test]
    fn a_refusal_does_not_tell_where_processes_are() {
        let refusal = Refusal::Unavailable("ask the one that peers reach at /run/peers/a.sock".into());
        let text = ApiError::from(refusal).body().to_string();
        assert!(text.contains("try again later") && !text.contains("sock"), "{text}");
    }

    #[test]
    fn what_takes_too_long_says_what_and_whether_to_try_again() {
        let limit = Duration::from_millis(2500);
        for (overdue, status, code, retry) in
            [(Overdue::FirstToken, 503, "queue_timeout", Some("1")), (Overdue::End, 504, "request_timeout", None)]
        {
            let error = ApiError::from(&Failure::TimedOut { overdue, limit });
            let response = error.error_response();
            assert_eq!((response.status().as_u16(), &error.body()["error"]["code"]), (status, &json!(code)));
            assert_eq!(header_of(&response, header::RETRY_AFTER).as_deref(), retry);
            assert!(error.body().to_string().contains("within 2500 ms"), "{error}");
        }
    }

    #[test]
    fn a_wrong_key_is_told_how_keys_are_sent() {
        let error = ApiError::unauthorized("no");
        let response = error.error_response();
        assert_eq!(response.status().as_u16(), 401);
        assert_eq!(header_of(&response, header::WWW_AUTHENTICATE).as_deref(), Some("Bearer"));
        assert_eq!(error.body()["error"]["code"], "invalid_api_key");
    }

    #[test]
    fn a_wrong_method_names_the_right_one() {
        let response = ApiError::wrong_method("GET", "/v1/completions", "POST").error_response();
        assert_eq!(response.status().as_u16(), 405);
        assert_eq!(header_of(&response, header::ALLOW).as_deref(), Some("POST"));
    }
}
