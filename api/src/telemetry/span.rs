//! Spans while they are open, and whose children they are (W3C Trace Context). Owner: whoever holds the trace; the last one to
//! let go ends it. Invariant: a parent that does not want to be traced has no children.

use super::export::Exporter;
use super::otlp::{Attribute, Span, SpanEvent, Value};
use super::settings::Settings;
use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// Events of a span; more are only counted (the usual limit).
const EVENTS_MAX: usize = 128;
/// Bytes of a state that is passed on.
const STATE_MAX: usize = 512;

/// Begins traces.
#[derive(Clone, Debug)]
pub struct Tracer(Exporter);

/// The span that asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    trace: [u8; 16],
    span: [u8; 8],
    is_sampled: bool,
    state: String,
}

impl Parent {
    /// Reads `traceparent` and `tracestate`; none when the former is not one.
    pub fn read(traceparent: &str, tracestate: &str) -> Option<Parent> {
        let mut parts = traceparent.trim().split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let [version] = bytes::<1>(version)?;
        // Later versions may add parts, the first may not.
        if version == 0xff || (version == 0 && parts.next().is_some()) {
            return None;
        }
        let (trace, span, [flags]) = (bytes::<16>(trace)?, bytes::<8>(span)?, bytes::<1>(flags)?);
        if trace == [0; 16] || span == [0; 8] {
            return None;
        }
        let state = if tracestate.len() <= STATE_MAX { tracestate.to_owned() } else { String::new() };
        Some(Parent { trace, span, is_sampled: flags & 1 == 1, state })
    }
}

/// Lower-case hexadecimal digits.
fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 2 * N || !text.as_bytes().iter().all(is_digit) {
        return None;
    }
    let mut out = [0; N];
    for (at, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(out)
}

impl Tracer {
    /// Sends to the collector of these settings.
    pub fn start(settings: Settings) -> Tracer {
        Tracer(Exporter::start(settings))
    }

    /// Begins a span now; none if its parent is not traced.
    pub fn begin(&self, parent: Option<Parent>) -> Option<Trace> {
        if parent.as_ref().is_some_and(|parent| !parent.is_sampled) {
            return None;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        let [id, ..] = *Uuid::new_v4().into_bytes().as_chunks::<8>().0 else { return None };
        let (trace, parent, state) = match parent {
            Some(parent) => (parent.trace, Some(parent.span), parent.state),
            None => (Uuid::new_v4().into_bytes(), None, String::new()),
        };
        let span = Span { trace, id, parent, state, began: now, ..Span::default() };
        Some(Trace(Arc::new(Open { span: Mutex::new(span), began: Instant::now(), exporter: self.0.clone() })))
    }

    /// See [`Exporter::flush`].
    pub fn flush(&self, limit: Duration) {
        self.0.flush(limit);
    }

    /// See [`Exporter::counts`].
    pub fn counts(&self) -> [u64; 2] {
        self.0.counts()
    }
}

/// An open span; it ends with its last clone.
#[derive(Clone, Debug)]
pub struct Trace(Arc<Open>);

#[derive(Debug)]
struct Open {
    span: Mutex<Span>,
    began: Instant,
    exporter: Exporter,
}

impl Trace {
    fn span(&self) -> MutexGuard<'_, Span> {
        self.0.span.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is done.
    pub fn name(&self, name: String) {
        self.span().name = name;
    }

    /// Sets an attribute that is not set yet.
    pub fn set(&self, key: impl Into<Cow<'static, str>>, value: Value) {
        self.span().attributes.push((key.into(), value));
    }

    /// Something happens now.
    pub fn event(&self, name: &'static str, attributes: Vec<Attribute>) {
        let since = self.0.began.elapsed();
        let mut span = self.span();
        if span.events.len() < EVENTS_MAX {
            let at = span.began + since.as_nanos() as u64;
            span.events.push(SpanEvent { at, name, attributes });
        } else {
            span.events_dropped += 1;
        }
    }

    /// It failed; the first reason counts.
    pub fn fail(&self, kind: &str, message: &str) {
        let mut span = self.span();
        if span.error.is_none() {
            span.error = Some(message.to_owned());
            span.attributes.push(("error.type".into(), Value::Text(kind.to_owned())));
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut span = std::mem::take(self.span.get_mut().unwrap_or_else(PoisonError::into_inner));
        span.ended = span.began + self.began.elapsed().as_nanos() as u64;
        self.exporter.send(span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    #[test]
    fn parents_are_read_as_the_standard_says() {
        let parent = Parent::read(&format!("00-{TRACE}-{SPAN}-01"), "a=1").unwrap();
        assert_eq!((parent.trace[0], parent.trace[15], parent.span[7]), (0x4b, 0x36, 0xb7));
        assert!(parent.is_sampled && parent.state == "a=1");
        assert!(!Parent::read(&format!("00-{TRACE}-{SPAN}-00"), "").unwrap().is_sampled);
        assert!(Parent::read(&format!("cc-{TRACE}-{SPAN}-03-what-comes-later"), "").unwrap().is_sampled);
        assert_eq!(Parent::read(&format!("00-{TRACE}-{SPAN}-01"), &"x".repeat(513)).unwrap().state, "");
        for wrong in [
            String::new(),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}0-{SPAN}-01"),
            format!("00-{TRACE}-é{}-01", &SPAN[2..]),
            format!("0-{TRACE}-{SPAN}-01"),
        ] {
            assert_eq!(Parent::read(&wrong, ""), None, "{wrong}");
        }
    }
}
