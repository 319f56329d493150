//! How long clients wait, by served name, finer than the buckets of `/metrics` are: what the dashboard makes its percentiles
//! of. Owner: the metrics of one server. Invariant: it is fed by the same observations as `/metrics`.

use dashmap::DashMap;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokenrouter_actors::histogram::Histogram;

/// Of one served name.
#[derive(Debug, Default)]
pub struct Latency {
    /// From the request to its first token.
    pub ttft: Histogram,
    /// Between tokens.
    pub inter_token: Histogram,
    /// From the request to its end.
    pub end_to_end: Histogram,
    tokens: AtomicU64,
    finished: Mutex<BTreeMap<String, u64>>,
}

impl Latency {
    /// So many more tokens were generated.
    pub fn generated(&self, tokens: u32) {
        self.tokens.fetch_add(u64::from(tokens), Ordering::Relaxed);
    }

    /// Tokens generated.
    pub fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// A request ended so.
    pub fn ended(&self, reason: &str) {
        let mut finished = self.finished.lock().unwrap_or_else(PoisonError::into_inner);
        *finished.entry(reason.to_owned()).or_default() += 1;
    }

    /// Requests that ended, by reason.
    pub fn finished(&self) -> BTreeMap<String, u64> {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Of all served names that were asked for.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Arc<DashMap<Arc<str>, Arc<Latency>>>);

impl Latencies {
    /// Of one name; empty before its first request.
    pub fn of(&self, model: &Arc<str>) -> Arc<Latency> {
        Arc::clone(&self.0.entry(Arc::clone(model)).or_default())
    }

    /// Of one name, if it was asked for.
    pub fn find(&self, model: &str) -> Option<Arc<Latency>> {
        self.0.get(model).map(|found| Arc::clone(found.value()))
    }
}
