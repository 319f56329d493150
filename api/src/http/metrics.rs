//! What is counted at the HTTP side. Owner: the registry of one server (no statics). Invariant: every label has few values,
//! and each series that rates are made of exists from the start.
//!
//! Names and bucket sets are vLLM's where the meaning is equal, so that existing dashboards work; `model_name` is the
//! served model the client asked for, `engine` is always 0. docs/metrics.md lists everything.

use super::latency::Latencies;
use super::meter::{Asked, RequestMeter};
use super::trace::Answering;
use crate::telemetry::Trace;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, Opts, Registry, Result, TextEncoder,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TTFT_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const PER_TOKEN_SECONDS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const REQUEST_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const HTTP_SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
const TOKEN_COUNTS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0,
];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// What vLLM puts beside `model_name`; there is one engine.
pub const ENGINE: (&str, &str) = ("engine", "0");
/// What vLLM's names begin with.
pub const VLLM: &str = "vllm:";

/// How an accepted choice ends.
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];
/// Why a job is not accepted.
pub const REFUSALS: [&str; 6] = ["invalid", "context", "kv_memory", "live_requests", "prompt_tokens", "unavailable"];

/// All series of one server.
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    series: Arc<Series>,
    latencies: Latencies,
}

/// What the meters write.
pub struct Series {
    /// How long things take.
    pub latency: Latency,
    /// Sizes of requests, and tokens in all.
    pub tokens: Tokens,
    /// Accepted choices that ended, by reason.
    pub finished: IntCounterVec,
    /// Jobs that were not accepted, by reason.
    pub refused: IntCounterVec,
    http: Http,
}

/// Seconds, by `model_name`.
pub struct Latency {
    /// From the request to its first token.
    pub first_token: HistogramVec,
    /// Between tokens.
    pub inter_token: HistogramVec,
    /// Mean of a request between its tokens.
    pub per_token: HistogramVec,
    /// From the request to its end.
    pub end_to_end: HistogramVec,
    /// From the request to its first forward pass.
    pub queue: HistogramVec,
    /// From the first forward pass to the first token.
    pub prefill: HistogramVec,
    /// From the first token to the last.
    pub decode: HistogramVec,
    /// From the first forward pass to the last token.
    pub inference: HistogramVec,
}

impl Latency {
    fn new(make: &Maker<'_>) -> Result<Self> {
        let seconds = |name, help| make.by_model(name, help, REQUEST_SECONDS);
        Ok(Latency {
            first_token: make.by_model("vllm:time_to_first_token_seconds", "Time to the first token.", TTFT_SECONDS)?,
            inter_token: make.by_model(
                "vllm:inter_token_latency_seconds",
                "Time between tokens.",
                PER_TOKEN_SECONDS,
            )?,
            per_token: make.by_model(
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first, by choice.",
                PER_TOKEN_SECONDS,
            )?,
            end_to_end: seconds("vllm:e2e_request_latency_seconds", "Time from the request to the end of a choice.")?,
            queue: seconds(
                "vllm:request_queue_time_seconds",
                "Time before the first forward pass, of finished choices.",
            )?,
            prefill: seconds(
                "vllm:request_prefill_time_seconds",
                "Time from the first forward pass to the first token, of finished choices.",
            )?,
            decode: seconds(
                "vllm:request_decode_time_seconds",
                "Time from the first token to the last, of finished choices.",
            )?,
            inference: seconds(
                "vllm:request_inference_time_seconds",
                "Time from the first forward pass to the last token, of finished choices.",
            )?,
        })
    }
}

/// Numbers of tokens and of choices, by `model_name`.
pub struct Tokens {
    /// Of the prompt, by choice.
    pub prompt_each: HistogramVec,
    /// Generated, by choice.
    pub generated_each: HistogramVec,
    /// Generated in the longest choice of a request.
    pub longest: HistogramVec,
    /// Of the prompt that were computed, by choice.
    pub computed_each: HistogramVec,
    /// `n`.
    pub choices: HistogramVec,
    /// `max_tokens`.
    pub max_tokens: HistogramVec,
    /// Of prompts.
    pub prompt: IntCounterVec,
    /// Of prompts, by where their KV came from.
    pub by_source: IntCounterVec,
    /// Of prompts, from the prefix cache.
    pub cached: IntCounterVec,
    /// Generated.
    pub generated: IntCounterVec,
}

impl Tokens {
    fn new(make: &Maker<'_>) -> Result<Self> {
        let count = |name, help| make.by_model(name, help, TOKEN_COUNTS);
        let total = |name, help| make.counter(name, help, &["model_name"]);
        Ok(Tokens {
            prompt_each: count("vllm:request_prompt_tokens", "Prompt tokens, by choice.")?,
            generated_each: count("vllm:request_generation_tokens", "Generated tokens, by choice.")?,
            longest: count(
                "vllm:request_max_num_generation_tokens",
                "Generated tokens of the longest choice, by request.",
            )?,
            computed_each: count(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens whose KV was not there and was computed, by finished choice.",
            )?,
            choices: make.by_model("vllm:request_params_n", "n, by request.", CHOICES)?,
            max_tokens: count("vllm:request_params_max_tokens", "max_tokens, by choice that has it.")?,
            prompt: total("vllm:prompt_tokens_total", "Prompt tokens of accepted choices.")?,
            by_source: make.counter(
                "vllm:prompt_tokens_by_source_total",
                "Prompt tokens of finished choices, by where their KV came from (local_compute, local_cache_hit).",
                &["model_name", "source"],
            )?,
            cached: total(
                "vllm:prompt_tokens_cached_total",
                "Prompt tokens whose KV was already there, of finished choices.",
            )?,
            generated: total("vllm:generation_tokens_total", "Tokens generated.")?,
        })
    }
}

/// HTTP itself.
struct Http {
    requests: IntCounterVec,
    seconds: HistogramVec,
    in_flight: IntGauge,
}

impl Http {
    fn new(make: &Maker<'_>) -> Result<Self> {
        let in_flight = IntGauge::with_opts(
            make.opts("tokenrouter:http_requests_in_flight", "HTTP requests whose answers are not sent to their ends."),
        )?;
        make.registry.register(Box::new(in_flight.clone()))?;
        Ok(Http {
            requests: make.counter(
                "tokenrouter:http_requests_total",
                "HTTP requests, by the status of their answers; 499 when the client went before there was one.",
                &["method", "route", "status"],
            )?,
            seconds: make.histogram(
                ("http_request_duration_seconds", "Time from the head of an HTTP request to the end of its answer."),
                HTTP_SECONDS,
                &["handler", "method"],
            )?,
            in_flight,
        })
    }
}

impl Metrics {
    /// The series of a server of these names.
    ///
    /// # Errors
    /// Only if two series share a name.
    pub fn new<'a>(served: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let registry = Registry::new();
        let make = Maker { registry: &registry };
        let series = Series {
            latency: Latency::new(&make)?,
            tokens: Tokens::new(&make)?,
            finished: make.counter(
                "vllm:request_success_total",
                "Accepted choices that ended, by reason (stop, length, abort, error).",
                &["finished_reason", "model_name"],
            )?,
            refused: make.counter(
                "tokenrouter:requests_refused_total",
                "Choices that were not accepted, by reason.",
                &["model_name", "reason"],
            )?,
            http: Http::new(&make)?,
        };
        served.into_iter().for_each(|name| series.begin(name));
        Ok(Metrics { registry, series: Arc::new(series), latencies: Latencies::default() })
    }

    /// Where other parts of the server register what they count.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// What is counted for the dashboard.
    pub fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    /// All series in Prometheus' text format.
    ///
    /// # Errors
    /// When a series cannot be written in that format.
    pub fn render(&self) -> Result<String> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }

    /// The meter of a request to generate.
    pub fn request(&self, asked: Asked, trace: Option<Answering>) -> RequestMeter {
        let latency = self.latencies.of(&asked.model);
        RequestMeter::new((Arc::clone(&self.series), latency), asked, trace)
    }

    /// Counts an HTTP request from now to the end of its answer. `route` is the pattern, never the path, so that labels stay
    /// few.
    pub fn http_request(&self, method: &'static str, route: String, trace: Option<Trace>) -> HttpMeter {
        self.series.http.in_flight.inc();
        HttpMeter { series: Arc::clone(&self.series), method, route, trace, began: Instant::now(), answered: false }
    }
}

impl Series {
    /// Counters of a served name at 0: what has not happened yet can be told from what is not counted.
    fn begin(&self, name: &str) {
        let Tokens { prompt, by_source, cached, generated, .. } = &self.tokens;
        for counter in [prompt, cached, generated] {
            counter.with_label_values(&[name]).inc_by(0);
        }
        for source in ["local_compute", "local_cache_hit"] {
            by_source.with_label_values(&[name, source]).inc_by(0);
        }
        REASONS.iter().for_each(|reason| self.finished.with_label_values(&[reason, name]).inc_by(0));
        REFUSALS.iter().for_each(|reason| self.refused.with_label_values(&[name, reason]).inc_by(0));
        let Latency { first_token, inter_token, per_token, end_to_end, queue, prefill, decode, inference } =
            &self.latency;
        let Tokens { prompt_each, generated_each, longest, computed_each, choices, max_tokens, .. } = &self.tokens;
        let latencies = [first_token, inter_token, per_token, end_to_end, queue, prefill, decode, inference];
        let sizes = [prompt_each, generated_each, longest, computed_each, choices, max_tokens];
        for histogram in latencies.into_iter().chain(sizes) {
            let _made: Histogram = histogram.with_label_values(&[name]);
        }
    }
}

/// An HTTP request on its way. Invariant: it is counted once, whether it is answered or its client goes away before.
pub struct HttpMeter {
    series: Arc<Series>,
    method: &'static str,
    route: String,
    trace: Option<Trace>,
    began: Instant,
    answered: bool,
}

impl HttpMeter {
    /// Its answer begins.
    pub fn answered(&mut self, status: u16) {
        self.answered = true;
        if let Some(trace) = &self.trace {
            trace.set("http.response.status_code", i64::from(status));
            if status >= 500 {
                trace.fail(&status.to_string(), "the answer is an error");
            }
        }
        let status = status.to_string();
        self.series.http.requests.with_label_values(&[self.method, self.route.as_str(), status.as_str()]).inc();
    }

    /// The pattern it fits.
    pub fn route(&self) -> &str {
        &self.route
    }

    /// Since it came.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}

impl Drop for HttpMeter {
    fn drop(&mut self) {
        if !self.answered {
            self.answered(499);
        }
        self.series.http.in_flight.dec();
        let histogram = self.series.http.seconds.with_label_values(&[self.route.as_str(), self.method]);
        histogram.observe(self.began.elapsed().as_secs_f64());
    }
}

struct Maker<'a> {
    registry: &'a Registry,
}

impl Maker<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        let opts = Opts::new(name, help);
        if name.starts_with(VLLM) { opts.const_label(ENGINE.0, ENGINE.1) } else { opts }
    }

    fn by_model(&self, name: &str, help: &str, buckets: &[f64]) -> Result<HistogramVec> {
        self.histogram((name, help), buckets, &["model_name"])
    }

    fn histogram(&self, (name, help): (&str, &str), buckets: &[f64], labels: &[&str]) -> Result<HistogramVec> {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        let made = HistogramVec::new(opts, labels)?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn counter(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec> {
        let made = IntCounterVec::new(self.opts(name, help), labels)?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }
}
