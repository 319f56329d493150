//! Sends spans to the collector. Owner: a thread of its own. Invariant: whoever ends a span never waits: when the queue is
//! full the span is lost and counted.

use super::otlp::{Attribute, Span, Value, encode};
use super::settings::Settings;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Spans that may wait.
const QUEUE: usize = 2048;
/// Spans of one message.
const BATCH_MAX: usize = 512;
/// How long a span waits for others.
const BATCH_WAIT: Duration = Duration::from_secs(1);
/// How long a collector may take for a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Times a message is sent, with longer and longer rests between them.
const ATTEMPTS: u32 = 3;
const REST: Duration = Duration::from_millis(500);

enum Order {
    Send(Box<Span>),
    /// Everything before it was sent or lost.
    Flush(SyncSender<()>),
}

/// Where spans are left; cloning is cheap.
#[derive(Clone, Debug)]
pub struct Exporter {
    orders: SyncSender<Order>,
    counted: Arc<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    sent: AtomicU64,
    lost: AtomicU64,
}

impl Exporter {
    /// Starts the thread; it ends when nobody has the exporter any more.
    pub fn start(settings: Settings) -> Exporter {
        let (orders, received) = sync_channel(QUEUE);
        let counted = Arc::new(Counted::default());
        let sending = Sending::new(settings, Arc::clone(&counted));
        thread::spawn(move || sending.run(&received));
        Exporter { orders, counted }
    }

    /// Leaves a span to be sent.
    pub fn send(&self, span: Span) {
        if self.orders.try_send(Order::Send(Box::new(span))).is_err() {
            self.counted.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until what was left before is sent or lost, for so long at most.
    pub fn flush(&self, limit: Duration) {
        let (done, wait) = sync_channel(1);
        if self.orders.try_send(Order::Flush(done)).is_ok() && wait.recv_timeout(limit).is_err() {
            tracing::warn!("the collector did not take the last traces in time");
        }
    }

    /// Spans that the collector took, and spans that were lost.
    pub fn counts(&self) -> [u64; 2] {
        [&self.counted.sent, &self.counted.lost].map(|count| count.load(Ordering::Relaxed))
    }
}

/// The thread's side.
struct Sending {
    agent: ureq::Agent,
    settings: Settings,
    resource: Vec<Attribute>,
    counted: Arc<Counted>,
}

impl Sending {
    fn new(settings: Settings, counted: Arc<Counted>) -> Sending {
        let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).build().new_agent();
        let text = |(key, value): &(String, String)| (key.clone().into(), Value::Text(value.clone()));
        let mut resource: Vec<Attribute> = settings.resource.iter().map(text).collect();
        resource.push(("service.version".into(), Value::Text(env!("CARGO_PKG_VERSION").to_owned())));
        Sending { agent, settings, resource, counted }
    }

    fn run(&self, received: &Receiver<Order>) {
        let mut batch = Vec::new();
        let mut due = Instant::now();
        loop {
            let order = match batch.is_empty() {
                true => received.recv().map_err(RecvTimeoutError::from),
                false => received.recv_timeout(due.saturating_duration_since(Instant::now())),
            };
            let (is_due, flushed) = match order {
                Ok(Order::Send(span)) => {
                    if batch.is_empty() {
                        due = Instant::now() + BATCH_WAIT;
                    }
                    batch.push(*span);
                    (batch.len() >= BATCH_MAX, None)
                }
                Ok(Order::Flush(done)) => (true, Some(done)),
                Err(RecvTimeoutError::Timeout) => (true, None),
                Err(RecvTimeoutError::Disconnected) => return self.post(&std::mem::take(&mut batch)),
            };
            if is_due {
                self.post(&std::mem::take(&mut batch));
            }
            // Whoever waited may have gone.
            let _gone = flushed.map(|done| done.try_send(()));
        }
    }

    #[allow(clippy::disallowed_methods, reason = "a thread of its own that does nothing else")]
    fn post(&self, spans: &[Span]) {
        if spans.is_empty() {
            return;
        }
        let body = encode(&self.resource, spans);
        let mut attempt = 1;
        let (count, outcome) = loop {
            match self.try_post(&body) {
                Ok(()) => break (&self.counted.sent, None),
                Err(error) if attempt < ATTEMPTS && passes(&error) => thread::sleep(REST * attempt),
                Err(error) => break (&self.counted.lost, Some(error)),
            }
            attempt += 1;
        };
        count.fetch_add(spans.len() as u64, Ordering::Relaxed);
        if let Some(error) = outcome {
            let url = &self.settings.url;
            tracing::warn!(url, spans = spans.len(), %error, "the collector did not take traces: they are lost");
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
