//! Spans while they are open, and whose children they are (W3C Trace Context). Owner: whoever holds the trace; the last one to
//! let go ends it. Invariant: a parent that does not want to be traced has no children.

use super::export::{self, Counted};
use super::settings::Settings;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{Span as _, SpanBuilder, SpanKind, Status, Tracer as _, TracerProvider};
use opentelemetry::{Context, InstrumentationScope, Key, KeyValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Begins traces; cloning is cheap.
#[derive(Clone, Debug)]
pub struct Tracer {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    counted: Arc<Counted>,
}

impl Tracer {
    /// Sends to the collector of these settings.
    pub fn start(settings: Settings) -> Tracer {
        let counted = Arc::default();
        let provider = export::start(settings, &counted);
        let scope = InstrumentationScope::builder(env!("CARGO_PKG_NAME")).with_version(env!("CARGO_PKG_VERSION"));
        let tracer = provider.tracer_with_scope(scope.build());
        Tracer { provider, tracer, counted }
    }

    /// Begins a span now, as a child of the one that the headers name; none if that one is not traced.
    pub fn begin(&self, name: String, headers: &dyn Extractor) -> Option<Trace> {
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), headers);
        let builder = SpanBuilder::from_name(name).with_kind(SpanKind::Server);
        let span = self.tracer.build_with_context(builder, &parent);
        span.is_recording().then(|| Trace(Arc::new(Mutex::new(Open { span, has_failed: false }))))
    }

    /// Sends what has ended, for so long at most; what ends later is lost.
    pub fn stop(&self, limit: Duration) {
        if self.provider.shutdown_with_timeout(limit).is_err() {
            tracing::warn!("the collector did not take the last traces in time");
        }
    }

    /// Spans that the collector took, and spans that were lost.
    pub fn counts(&self) -> [u64; 2] {
        self.counted.read()
    }
}

/// An open span; it ends with its last clone.
#[derive(Clone, Debug)]
pub struct Trace(Arc<Mutex<Open>>);

#[derive(Debug)]
struct Open {
    span: Span,
    has_failed: bool,
}

impl Trace {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is done.
    pub fn name(&self, name: String) {
        self.open().span.update_name(name);
    }

    /// Sets an attribute that is not set yet.
    pub fn set(&self, key: impl Into<Key>, value: impl Into<Value>) {
        self.open().span.set_attribute(KeyValue::new(key, value));
    }

    /// Something happens now.
    pub fn event(&self, name: &'static str, attributes: Vec<KeyValue>) {
        self.open().span.add_event(name, attributes);
    }

    /// It failed; the first reason counts.
    pub fn fail(&self, kind: &str, message: &str) {
        let mut open = self.open();
        if !std::mem::replace(&mut open.has_failed, true) {
            open.span.set_status(Status::error(message.to_owned()));
            open.span.set_attribute(KeyValue::new("error.type", kind.to_owned()));
        }
    }
}
