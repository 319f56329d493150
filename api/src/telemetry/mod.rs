//! OpenTelemetry traces: a span for each request to generate, sent to a collector by OTLP over HTTP. Owner: the serve command.
//! Invariant: nothing is recorded when no collector is named, and a collector that is slow or away holds no request up.
//!
//! The protocol is small and fixed (opentelemetry-proto v1), so it is written here rather than brought by an SDK; tests
//! decode what is sent with the protocol's own Python package.

mod export;
mod otlp;
mod settings;
mod span;

pub use export::Exporter;
pub use otlp::{Attribute, Value};
pub use settings::Settings;
pub use span::{Parent, Trace, Tracer};
