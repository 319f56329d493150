//! What is counted at the HTTP side. Owner: the registry of one server (no statics). Invariant: every accepted choice is
//! counted in exactly one `request_success_total{finished_reason}`, whatever becomes of it.
//!
//! Names and bucket sets are vLLM's where the meaning is equal, so that existing dashboards work; `model_name` is the
//! served model the client asked for.

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry, TextEncoder};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokenrouter_core::job::{Event, Load, Refusal};
use tracing::Span;

const TTFT_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const PER_TOKEN_SECONDS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const END_TO_END_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const TOKEN_COUNTS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0,
];

/// All series of one server.
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    series: Arc<Series>,
}

struct Series {
    ttft: HistogramVec,
    inter_token: HistogramVec,
    per_output_token: HistogramVec,
    end_to_end: HistogramVec,
    request_prompt_tokens: HistogramVec,
    request_generation_tokens: HistogramVec,
    prompt_tokens: IntCounterVec,
    prompt_tokens_cached: IntCounterVec,
    generation_tokens: IntCounterVec,
    finished: IntCounterVec,
    refused: IntCounterVec,
    http_requests: IntCounterVec,
}

impl Metrics {
    /// An empty registry with this server's series.
    ///
    /// # Errors
    /// Only if two series share a name.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let model: &[&str] = &["model_name"];
        let make = Maker { registry: &registry };
        let series = Series {
            ttft: make.histogram("vllm:time_to_first_token_seconds", "Time to the first token.", TTFT_SECONDS)?,
            inter_token: make.histogram(
                "vllm:inter_token_latency_seconds",
                "Time between tokens.",
                PER_TOKEN_SECONDS,
            )?,
            per_output_token: make.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first, by request.",
                PER_TOKEN_SECONDS,
            )?,
            end_to_end: make.histogram(
                "vllm:e2e_request_latency_seconds",
                "Time from request to end.",
                END_TO_END_SECONDS,
            )?,
            request_prompt_tokens: make.histogram(
                "vllm:request_prompt_tokens",
                "Prompt tokens by request.",
                TOKEN_COUNTS,
            )?,
            request_generation_tokens: make.histogram(
                "vllm:request_generation_tokens",
                "Generated tokens by request.",
                TOKEN_COUNTS,
            )?,
            prompt_tokens: make.counter("vllm:prompt_tokens_total", "Prompt tokens of accepted requests.", model)?,
            prompt_tokens_cached: make.counter(
                "vllm:prompt_tokens_cached_total",
                "Prompt tokens whose KV was already there, of finished requests.",
                model,
            )?,
            generation_tokens: make.counter("vllm:generation_tokens_total", "Tokens generated.", model)?,
            finished: make.counter(
                "vllm:request_success_total",
                "Requests that ended, by reason (stop, length, abort, error).",
                &["model_name", "finished_reason"],
            )?,
            refused: make.counter(
                "tokenrouter:requests_refused_total",
                "Jobs that were not accepted, by reason.",
                &["model_name", "reason"],
            )?,
            http_requests: make.counter(
                "tokenrouter:http_requests_total",
                "Answered HTTP requests.",
                &["method", "route", "status"],
            )?,
        };
        Ok(Metrics { registry, series: Arc::new(series) })
    }

    /// Where other parts of the server register what they count.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// All series in Prometheus' text format.
    ///
    /// # Errors
    /// When a series cannot be written in that format.
    pub fn render(&self) -> prometheus::Result<String> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    /// The meter of one HTTP request that asks for `model`.
    pub fn request(&self, model: &str) -> RequestMeter {
        let (series, span) = (Arc::clone(&self.series), Span::current());
        RequestMeter { series, model: model.into(), started: Instant::now(), span }
    }

    /// Counts an answered HTTP request; `route` is the pattern, never the path, so that labels stay few.
    pub fn http_request(&self, method: &str, route: &str, status: u16) {
        self.series.http_requests.with_label_values(&[method, route, &status.to_string()]).inc();
    }
}

struct Maker<'a> {
    registry: &'a Registry,
}

impl Maker<'_> {
    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<HistogramVec> {
        let made = HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), &["model_name"])?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn counter(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        let made = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }
}

/// Measures one HTTP request.
#[derive(Clone)]
pub struct RequestMeter {
    series: Arc<Series>,
    model: Arc<str>,
    started: Instant,
    /// Of the HTTP request, which is over for the log before its stream ends.
    span: Span,
}

impl RequestMeter {
    /// Starts to watch one of its choices.
    pub fn watch(&self) -> Watch {
        Watch { meter: self.clone(), state: WatchState::Submitted, first: None, last: self.started, tokens: 0 }
    }
}

/// Measures one choice from its events; counts it as aborted if it is dropped before its end.
pub struct Watch {
    meter: RequestMeter,
    state: WatchState,
    first: Option<Instant>,
    last: Instant,
    tokens: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WatchState {
    Submitted,
    Running,
    Ended,
}

impl Watch {
    /// The engine took it.
    pub fn accepted(&mut self, prompt_tokens: u32) {
        self.state = WatchState::Running;
        let (series, label) = (&self.meter.series, [&*self.meter.model]);
        series.prompt_tokens.with_label_values(&label).inc_by(u64::from(prompt_tokens));
        series.request_prompt_tokens.with_label_values(&label).observe(f64::from(prompt_tokens));
    }

    /// The engine did not take it.
    pub fn refused(&mut self, refusal: &Refusal) {
        let reason = match refusal {
            Refusal::Invalid { .. } => "invalid",
            Refusal::ContextOverflow { .. } => "context",
            Refusal::NeverFits { .. } => "kv_memory",
            Refusal::Overloaded { load: Load::Requests, .. } => "live_requests",
            Refusal::Overloaded { load: Load::PromptTokens, .. } => "prompt_tokens",
            Refusal::Unavailable(_) => "unavailable",
        };
        self.state = WatchState::Ended;
        self.meter.series.refused.with_label_values(&[&*self.meter.model, reason]).inc();
    }

    /// Something happened. Says how long each of its tokens took: the time since the tokens before them (or since the
    /// request), shared evenly.
    pub fn event(&mut self, event: &Event) -> Duration {
        match event {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => return self.committed(u32::try_from(tokens.len()).unwrap_or(u32::MAX)),
            Event::Finished { reason, usage } => {
                let (series, label) = (&self.meter.series, [&*self.meter.model]);
                series.prompt_tokens_cached.with_label_values(&label).inc_by(u64::from(usage.cached_tokens));
                self.end(reason.wire());
            }
            Event::Failed(_) => self.end("error"),
        }
        Duration::ZERO
    }

    fn committed(&mut self, count: u32) -> Duration {
        if count == 0 {
            return Duration::ZERO;
        }
        let (series, label) = (&self.meter.series, [&*self.meter.model]);
        let now = Instant::now();
        let each = (now - self.last) / count;
        if self.first.is_none() {
            self.first = Some(now);
            series.ttft.with_label_values(&label).observe((now - self.meter.started).as_secs_f64());
        } else {
            let histogram = series.inter_token.with_label_values(&label);
            (0..count).for_each(|_| histogram.observe(each.as_secs_f64()));
        }
        series.generation_tokens.with_label_values(&label).inc_by(u64::from(count));
        self.last = now;
        self.tokens = self.tokens.saturating_add(count);
        each
    }

    fn end(&mut self, reason: &str) {
        self.state = WatchState::Ended;
        let (series, label) = (&self.meter.series, [&*self.meter.model]);
        let now = Instant::now();
        series.finished.with_label_values(&[&*self.meter.model, reason]).inc();
        let ms = (now - self.meter.started).as_millis() as u64;
        let (model, tokens) = (&*self.meter.model, self.tokens);
        tracing::info!(parent: &self.meter.span, model, reason, tokens, ms, "choice ended");
        series.end_to_end.with_label_values(&label).observe((now - self.meter.started).as_secs_f64());
        series.request_generation_tokens.with_label_values(&label).observe(f64::from(self.tokens));
        if let Some(first) = self.first.filter(|_| self.tokens > 1) {
            let each = (self.last - first).as_secs_f64() / f64::from(self.tokens - 1);
            series.per_output_token.with_label_values(&label).observe(each);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.state != WatchState::Ended {
            self.end("abort");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::testing::{delta, finished};
    use tokenrouter_core::job::Failure;

    fn value(metrics: &Metrics, line: &str) -> String {
        let text = metrics.render().unwrap();
        let found = text.lines().find_map(|found| found.strip_prefix(line)).unwrap_or("absent");
        found.trim().to_owned()
    }

    fn ended(metrics: &Metrics, reason: &str) -> String {
        value(metrics, &format!("vllm:request_success_total{{finished_reason=\"{reason}\",model_name=\"m\"}}"))
    }

    #[test]
    fn each_choice_is_counted_once_whatever_becomes_of_it() {
        let metrics = Metrics::new().unwrap();
        let meter = metrics.request("m");
        for event in [Some(finished("stop")), Some(finished("length")), Some(Event::Failed(Failure::Stopped)), None] {
            let mut watch = meter.watch();
            watch.accepted(3);
            watch.event(&delta("ab"));
            watch.event(&delta("c"));
            for event in &event {
                watch.event(event);
            }
        }
        for reason in ["stop", "length", "error", "abort"] {
            assert_eq!(ended(&metrics, reason), "1", "{reason}");
        }
        assert_eq!(value(&metrics, "vllm:prompt_tokens_total{model_name=\"m\"}"), "12");
        assert_eq!(value(&metrics, "vllm:generation_tokens_total{model_name=\"m\"}"), "12");
        assert_eq!(value(&metrics, "vllm:time_to_first_token_seconds_count{model_name=\"m\"}"), "4");
        assert_eq!(value(&metrics, "vllm:inter_token_latency_seconds_count{model_name=\"m\"}"), "4");
    }

    #[test]
    fn a_refused_job_is_not_an_abort() {
        let metrics = Metrics::new().unwrap();
        metrics.request("m").watch().refused(&Refusal::Unavailable("stopping".to_owned()));
        assert_eq!(ended(&metrics, "abort"), "absent");
        let refused = "tokenrouter:requests_refused_total{model_name=\"m\",reason=\"unavailable\"}";
        assert_eq!(value(&metrics, refused), "1");
    }
}
