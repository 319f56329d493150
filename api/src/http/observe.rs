//! Around every request: its id, one log line, one count; gauges come down when its answer is sent or given up. Owner: the
//! HTTP layer. Invariant: every response that a handler or a route makes carries `x-request-id`, the client's own if it sent a printable one.

use super::metrics::HttpMeter;
use super::{App, trace};
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::middleware::Next;
use actix_web::web::{self, Bytes};
use std::pin::Pin;
use std::task::{Context, Poll};
use tracing::Instrument;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_ID_BYTES_MAX: usize = 128;

/// The middleware.
///
/// # Errors
/// Passes on what the service inside could not answer.
pub async fn observe<B: MessageBody + 'static>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse, actix_web::Error> {
    let id = request_id(request.headers().get(REQUEST_ID));
    let method = method_label(request.method());
    let route = request.match_pattern().unwrap_or_else(|| "unknown".to_owned());
    let app = request.app_data::<web::Data<App>>();
    let trace = app.and_then(|app| trace::begin(app, &request, (&route, id.to_str().unwrap_or_default())));
    let mut meter = app.map(|app| app.metrics.http_request(method, route, trace));
    // What is logged on the way, and when an answer ends, says whose it is.
    let span = tracing::info_span!("http", request_id = id.to_str().unwrap_or_default());
    let mut response = next.call(request).instrument(span).await?;
    let status = response.status().as_u16();
    if let Some(meter) = &mut meter {
        meter.answered(status);
        let (route, ms) = (meter.route(), meter.elapsed().as_millis() as u64);
        tracing::info!(request_id = id.to_str().unwrap_or_default(), method, route, status, ms, "http request");
    }
    response.headers_mut().insert(REQUEST_ID, id);
    Ok(response.map_body(|_, body| Measured { body: body.boxed(), _meter: meter }.boxed()))
}

/// An answer on its way to the client, counted until it is there or given up.
struct Measured {
    body: BoxBody,
    _meter: Option<HttpMeter>,
}

impl MessageBody for Measured {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Pin::new(&mut self.body).poll_next(cx)
    }
}

/// The client's id if it is short and printable, else a new one.
fn request_id(sent: Option<&HeaderValue>) -> HeaderValue {
    let fine = |id: &&HeaderValue| !id.is_empty() && id.len() <= REQUEST_ID_BYTES_MAX && id.to_str().is_ok();
    let made = || HeaderValue::from_str(&uuid::Uuid::new_v4().to_string());
    // A UUID is always a legal header value; the fallback only spares an unwrap.
    sent.filter(fine).cloned().unwrap_or_else(|| made().unwrap_or_else(|_| HeaderValue::from_static("none")))
}

/// Clients can invent methods; labels must stay few.
fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}
