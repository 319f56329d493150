//! OpenTelemetry traces: a span for each request to generate, sent to a collector by OTLP over HTTP. Owner: the serve command.
//! Invariant: nothing is recorded when no collector is named, and a collector that is slow or away holds no request up.
//!
//! Spans, their queue and the protocol are OpenTelemetry's own crates; its exporter is not among them, because it reads the
//! environment by itself, and this program reads it in one place.

mod export;
mod settings;
mod span;

pub use settings::Settings;
pub use span::{Trace, Tracer};
