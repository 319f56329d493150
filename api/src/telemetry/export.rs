//! Sends spans to the collector. Owner: the SDK's thread for batches. Invariants: whoever ends a span never waits: when the
//! queue is full the span is lost and counted; and nothing is left for the SDK to take from the environment.

use super::settings::Settings;
use opentelemetry::{Context, KeyValue};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracerProvider, Span, SpanData, SpanExporter, SpanLimits,
    SpanProcessor,
};
use prost::Message;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Spans that may wait.
const QUEUE: usize = 2048;
/// Spans of one message.
const BATCH_MAX: usize = 512;
/// How long a span waits for others.
const BATCH_WAIT: Duration = Duration::from_secs(1);
/// Events of a span; more are only counted.
const EVENTS_MAX: u32 = 128;
/// How long a collector may take for a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Times a message is sent, with longer and longer rests between them.
const ATTEMPTS: u32 = 3;
const REST: Duration = Duration::from_millis(500);

/// What became of the spans that ended.
#[derive(Debug, Default)]
pub struct Counted {
    waiting: AtomicUsize,
    sent: AtomicU64,
    lost: AtomicU64,
}

impl Counted {
    /// Spans that the collector took, and spans that were lost.
    pub fn read(&self) -> [u64; 2] {
        [&self.sent, &self.lost].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Starts the thread; it ends with the provider.
pub fn start(settings: Settings, counted: &Arc<Counted>) -> SdkTracerProvider {
    let resource = Resource::builder_empty()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_attributes(settings.resource.iter().cloned().map(|(key, value)| KeyValue::new(key, value)))
        .build();
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).build().new_agent();
    let exporter = Exporter { agent, settings, resource: (&resource).into(), counted: Arc::clone(counted) };
    let batches = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE)
        .with_max_export_batch_size(BATCH_MAX)
        .with_scheduled_delay(BATCH_WAIT)
        .build();
    let batches = BatchSpanProcessor::builder(exporter).with_batch_config(batches).build();
    // Every model has an attribute.
    let limits =
        SpanLimits { max_events_per_span: EVENTS_MAX, max_attributes_per_span: u32::MAX, ..SpanLimits::default() };
    SdkTracerProvider::builder()
        .with_resource(resource)
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOn)))
        .with_span_limits(limits)
        .with_span_processor(Door { batches, counted: Arc::clone(counted) })
        .build()
}

/// Counts what finds no room in the queue, which the SDK keeps to itself.
#[derive(Debug)]
struct Door {
    batches: BatchSpanProcessor,
    counted: Arc<Counted>,
}

impl SpanProcessor for Door {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.batches.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.counted.waiting.fetch_add(1, Ordering::Relaxed) < QUEUE {
            self.batches.on_end(span);
        } else {
            self.counted.waiting.fetch_sub(1, Ordering::Relaxed);
            self.counted.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, limit: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(limit)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// The thread's side.
#[derive(Debug)]
struct Exporter {
    agent: ureq::Agent,
    settings: Settings,
    resource: ResourceAttributesWithSchema,
    counted: Arc<Counted>,
}

impl SpanExporter for Exporter {
    async fn export(&self, spans: Vec<SpanData>) -> OTelSdkResult {
        let count = spans.len();
        self.counted.waiting.fetch_sub(count, Ordering::Relaxed);
        let resource_spans = group_spans_by_resource_and_scope(spans, &self.resource);
        let outcome = self.post(&ExportTraceServiceRequest { resource_spans }.encode_to_vec());
        let counter = if outcome.is_ok() { &self.counted.sent } else { &self.counted.lost };
        counter.fetch_add(count as u64, Ordering::Relaxed);
        outcome.map_err(|error| {
            let url = &self.settings.url;
            tracing::warn!(url, spans = count, %error, "the collector did not take traces: they are lost");
            OTelSdkError::InternalFailure(error.to_string())
        })
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.resource = resource.into();
    }
}

impl Exporter {
    #[allow(clippy::disallowed_methods, reason = "a thread of its own that does nothing else")]
    fn post(&self, body: &[u8]) -> Result<(), ureq::Error> {
        let mut attempt = 1;
        loop {
            match self.try_post(body) {
                Err(error) if attempt < ATTEMPTS && passes(&error) => thread::sleep(REST * attempt),
                outcome => return outcome,
            }
            attempt += 1;
        }
    }

    fn try_post(&self, body: &[u8]) -> Result<(), ureq::Error> {
        let mut request = self.agent.post(&self.settings.url).content_type("application/x-protobuf");
        for (name, value) in &self.settings.headers {
            request = request.header(name, value);
        }
        request.send(body).map(|_| ())
    }
}

/// Whether it may go better next time.
fn passes(error: &ureq::Error) -> bool {
    !matches!(error, ureq::Error::StatusCode(status) if ![429, 502, 503, 504].contains(status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Tracer;
    use std::collections::HashMap;
    use std::net::TcpListener;
    use std::time::Instant;

    #[test]
    fn what_finds_no_room_is_lost_and_counted_at_once() {
        const MORE: usize = 10;
        // It listens and never answers.
        let collector = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1/traces", collector.local_addr().unwrap());
        let tracer = Tracer::start(Settings { url, headers: Vec::new(), resource: Vec::new() });
        let began = Instant::now();
        for _ in 0..QUEUE + BATCH_MAX + MORE {
            drop(tracer.begin("x".to_owned(), &HashMap::new()).expect("it is traced"));
        }
        let [sent, lost] = tracer.counts();
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
        // The thread holds one batch at most.
        assert!(sent == 0 && (MORE..=BATCH_MAX + MORE).contains(&(lost as usize)), "{sent} {lost}");
        tracer.stop(Duration::ZERO);
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    }
}
