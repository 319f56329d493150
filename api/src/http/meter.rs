//! Measures requests to generate, choice by choice, from their events. Owner: whoever answers. Invariant: every choice is
//! counted in exactly one of `request_success_total{finished_reason}` and `requests_refused_total{reason}`, whatever
//! becomes of it.

use super::latency::Latency;
use super::metrics::Series;
use super::trace::{Answering, Way};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokenrouter_core::job::{Event, Load, Refusal, Usage};
use tracing::Span;

/// What a request asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The served model.
    pub model: Arc<str>,
    /// Choices per prompt.
    pub n: u32,
    /// Tokens of an answer at most, if it says so.
    pub max_tokens: Option<u32>,
}

/// Measures one HTTP request.
#[derive(Clone)]
pub struct RequestMeter(Arc<Measured>);

/// It is over when its last choice is.
struct Measured {
    series: Arc<Series>,
    /// The same for the dashboard.
    latency: Arc<Latency>,
    /// If it is traced.
    trace: Option<Answering>,
    asked: Asked,
    started: Instant,
    /// Of the HTTP request, which is over for the log before its stream ends.
    span: Span,
    accepted: AtomicBool,
    /// Tokens of its longest choice.
    longest: AtomicU32,
}

impl RequestMeter {
    /// It begins now.
    pub fn new((series, latency): (Arc<Series>, Arc<Latency>), asked: Asked, trace: Option<Answering>) -> Self {
        let (accepted, longest) = (AtomicBool::new(false), AtomicU32::new(0));
        let (started, span) = (Instant::now(), Span::current());
        RequestMeter(Arc::new(Measured { series, latency, trace, asked, started, span, accepted, longest }))
    }

    /// Starts to watch one of its choices.
    pub fn watch(&self, index: usize) -> Watch {
        Watch {
            request: Arc::clone(&self.0),
            index,
            way: Way::default(),
            state: State::Submitted,
            first: None,
            last: self.0.started,
            tokens: 0,
        }
    }
}

impl Drop for Measured {
    fn drop(&mut self) {
        if *self.accepted.get_mut() {
            let (tokens, label) = (&self.series.tokens, [&*self.asked.model]);
            tokens.choices.with_label_values(&label).observe(f64::from(self.asked.n));
            tokens.longest.with_label_values(&label).observe(f64::from(*self.longest.get_mut()));
        }
    }
}

/// Measures one choice from its events; counts it as aborted if it is dropped before its end.
pub struct Watch {
    request: Arc<Measured>,
    index: usize,
    way: Way,
    state: State,
    first: Option<Instant>,
    last: Instant,
    tokens: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Submitted,
    Running,
    Ended,
}

impl Watch {
    fn model(&self) -> [&str; 1] {
        [&self.request.asked.model]
    }

    /// The engine took it.
    pub fn accepted(&mut self, prompt_tokens: u32) {
        self.state = State::Running;
        self.request.accepted.store(true, Ordering::Relaxed);
        let tokens = &self.request.series.tokens;
        tokens.prompt.with_label_values(&self.model()).inc_by(u64::from(prompt_tokens));
        tokens.prompt_each.with_label_values(&self.model()).observe(f64::from(prompt_tokens));
        if let Some(trace) = &self.request.trace {
            trace.accepted(prompt_tokens);
        }
    }

    /// The engine did not take it.
    pub fn refused(&mut self, refusal: &Refusal) {
        // All of them are in `metrics::REFUSALS`.
        let reason = match refusal {
            Refusal::Invalid { .. } => "invalid",
            Refusal::ContextOverflow { .. } => "context",
            Refusal::NeverFits { .. } => "kv_memory",
            Refusal::Overloaded { load: Load::Requests, .. } => "live_requests",
            Refusal::Overloaded { load: Load::PromptTokens, .. } => "prompt_tokens",
            Refusal::Unavailable(_) => "unavailable",
        };
        self.state = State::Ended;
        let [model] = self.model();
        self.request.series.refused.with_label_values(&[model, reason]).inc();
    }

    /// Something happened. Says how long each of its tokens took: the time since the tokens before them (or since the
    /// request), shared evenly.
    pub fn event(&mut self, event: &Event) -> Duration {
        match event {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => {
                if let Some(trace) = &self.request.trace {
                    self.way.follow(trace, (self.index, tokens));
                }
                return self.committed(u32::try_from(tokens.len()).unwrap_or(u32::MAX));
            }
            Event::Finished { reason, usage, queued } => {
                self.used(usage, *queued);
                self.end(reason.wire());
            }
            Event::Failed(failure) => {
                if let Some(trace) = &self.request.trace {
                    trace.failed(&failure.to_string());
                }
                self.end("error");
            }
        }
        Duration::ZERO
    }

    fn committed(&mut self, count: u32) -> Duration {
        if count == 0 {
            return Duration::ZERO;
        }
        let (latency, now) = (&self.request.series.latency, Instant::now());
        let each = (now - self.last) / count;
        if self.first.is_none() {
            self.first = Some(now);
            let took = now - self.request.started;
            latency.first_token.with_label_values(&self.model()).observe(took.as_secs_f64());
            self.request.latency.ttft.observe(took);
        } else {
            let histogram = latency.inter_token.with_label_values(&self.model());
            (0..count).for_each(|_| histogram.observe(each.as_secs_f64()));
            self.request.latency.inter_token.observe_times(each, count.into());
        }
        self.request.series.tokens.generated.with_label_values(&self.model()).inc_by(u64::from(count));
        self.request.latency.generated(count);
        self.last = now;
        self.tokens = self.tokens.saturating_add(count);
        each
    }

    /// What is known of a choice that ended well.
    fn used(&self, usage: &Usage, queued: Duration) {
        let Measured { series, started, trace, .. } = &*self.request;
        if let Some(trace) = trace {
            trace.used(usage);
        }
        let (label, [model]) = (self.model(), self.model());
        let computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
        series.tokens.cached.with_label_values(&label).inc_by(u64::from(usage.cached_tokens));
        for (source, count) in [("local_compute", computed), ("local_cache_hit", usage.cached_tokens)] {
            series.tokens.by_source.with_label_values(&[model, source]).inc_by(u64::from(count));
        }
        series.tokens.computed_each.with_label_values(&label).observe(f64::from(computed));
        let Some(first) = self.first else { return };
        let (to_first, to_last) = (first - *started, self.last - *started);
        // The engine's clock began a little later than this one.
        let queued = queued.min(to_first);
        let latency = &series.latency;
        for (histogram, took) in [
            (&latency.queue, queued),
            (&latency.prefill, to_first - queued),
            (&latency.decode, to_last - to_first),
            (&latency.inference, to_last - queued),
        ] {
            histogram.with_label_values(&label).observe(took.as_secs_f64());
        }
    }

    fn end(&mut self, reason: &str) {
        self.state = State::Ended;
        let Measured { series, latency, asked, started, span, longest, .. } = &*self.request;
        let (label, took) = ([&*asked.model], started.elapsed());
        series.finished.with_label_values(&[reason, &*asked.model]).inc();
        let (model, tokens, ms) = (&*asked.model, self.tokens, took.as_millis() as u64);
        tracing::info!(parent: span, model, reason, tokens, ms, "choice ended");
        latency.end_to_end.observe(took);
        latency.ended(reason);
        if let Some(trace) = &self.request.trace {
            trace.ended(reason);
        }
        series.latency.end_to_end.with_label_values(&label).observe(took.as_secs_f64());
        series.tokens.generated_each.with_label_values(&label).observe(f64::from(self.tokens));
        if let Some(max) = asked.max_tokens {
            series.tokens.max_tokens.with_label_values(&label).observe(f64::from(max));
        }
        longest.fetch_max(self.tokens, Ordering::Relaxed);
        if let Some(first) = self.first.filter(|_| self.tokens > 1) {
            let each = (self.last - first).as_secs_f64() / f64::from(self.tokens - 1);
            series.latency.per_token.with_label_values(&label).observe(each);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.state != State::Ended {
            self.end("abort");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::metrics::{Metrics, REFUSALS};
    use crate::http::testing::{delta, finished};
    use tokenrouter_core::job::Failure;

    #[allow(clippy::disallowed_methods, reason = "time is what is measured, on the clock of the meter")]
    fn pass(ms: u64) {
        std::thread::sleep(Duration::from_millis(ms));
    }

    fn asked() -> Asked {
        Asked { model: "m".into(), n: 4, max_tokens: Some(30) }
    }

    #[track_caller]
    fn check(metrics: &Metrics, expected: &[(&str, &str)]) {
        let text = metrics.render().unwrap();
        for (series, value) in expected {
            let found = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
            assert_eq!(found, Some(*value), "{series} in\n{text}");
        }
    }

    #[test]
    fn each_choice_is_counted_once_whatever_becomes_of_it() {
        let metrics = Metrics::new(["m"]).unwrap();
        let meter = metrics.request(asked(), None);
        for event in [Some(finished("stop")), Some(finished("length")), Some(Event::Failed(Failure::Stopped)), None] {
            let mut watch = meter.watch(0);
            watch.accepted(3);
            watch.event(&delta("ab"));
            watch.event(&delta("c"));
            if let Some(event) = &event {
                watch.event(event);
            }
        }
        for reason in ["stop", "length", "error", "abort"] {
            let series =
                format!(r#"vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}}"#);
            check(&metrics, &[(&series, "1")]);
        }
        check(
            &metrics,
            &[
                (r#"vllm:prompt_tokens_total{engine="0",model_name="m"}"#, "12"),
                (r#"vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"}"#, "4"),
                (r#"vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"}"#, "2"),
                (r#"vllm:generation_tokens_total{engine="0",model_name="m"}"#, "12"),
                (r#"vllm:time_to_first_token_seconds_count{engine="0",model_name="m"}"#, "4"),
                (r#"vllm:inter_token_latency_seconds_count{engine="0",model_name="m"}"#, "4"),
                (r#"vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"}"#, "4"),
                (r#"vllm:request_params_max_tokens_sum{engine="0",model_name="m"}"#, "120"),
                (r#"vllm:request_queue_time_seconds_count{engine="0",model_name="m"}"#, "2"),
                (r#"vllm:request_params_n_count{engine="0",model_name="m"}"#, "0"),
            ],
        );
        drop(meter);
        check(
            &metrics,
            &[
                (r#"vllm:request_params_n_sum{engine="0",model_name="m"}"#, "4"),
                (r#"vllm:request_params_n_count{engine="0",model_name="m"}"#, "1"),
                (r#"vllm:request_max_num_generation_tokens_sum{engine="0",model_name="m"}"#, "3"),
            ],
        );
    }

    #[test]
    fn parts_of_a_request_add_up() {
        let metrics = Metrics::new(["m"]).unwrap();
        let mut watch = metrics.request(asked(), None).watch(0);
        watch.accepted(3);
        pass(20);
        watch.event(&delta("a"));
        pass(10);
        watch.event(&delta("b"));
        let Event::Finished { reason, usage, .. } = finished("stop") else { unreachable!() };
        watch.event(&Event::Finished { reason, usage, queued: Duration::from_millis(5) });
        let text = metrics.render().unwrap();
        let sum = |part: &str| -> f64 {
            let series = format!(r#"vllm:request_{part}_time_seconds_sum{{engine="0",model_name="m"}} "#);
            text.lines().find_map(|line| line.strip_prefix(&series)).unwrap().parse().unwrap()
        };
        assert_eq!(sum("queue"), 0.005);
        assert!(sum("prefill") >= 0.0149 && sum("decode") >= 0.0099, "{} {}", sum("prefill"), sum("decode"));
        assert!((sum("prefill") + sum("decode") - sum("inference")).abs() < 1e-6);
    }

    #[test]
    fn tokens_that_come_together_share_their_time() {
        let mut watch = Metrics::new(["m"]).unwrap().request(asked(), None).watch(0);
        pass(8);
        let (four, none) = (watch.event(&delta("abcd")), watch.event(&delta("")));
        assert!((Duration::from_millis(2)..Duration::from_secs(60)).contains(&four), "{four:?}");
        assert_eq!(none, Duration::ZERO);
        pass(2);
        assert!(watch.event(&delta("e")) >= Duration::from_millis(2), "since the tokens before");
    }

    #[test]
    fn a_refused_job_is_not_an_abort() {
        let metrics = Metrics::new(["m"]).unwrap();
        metrics.request(asked(), None).watch(0).refused(&Refusal::Unavailable("stopping".to_owned()));
        check(
            &metrics,
            &[
                (r#"vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}"#, "0"),
                (r#"tokenrouter:requests_refused_total{model_name="m",reason="unavailable"}"#, "1"),
                (r#"vllm:request_params_n_count{engine="0",model_name="m"}"#, "0"),
            ],
        );
        let text = metrics.render().unwrap();
        let reasons = text.lines().filter(|line| line.starts_with("tokenrouter:requests_refused_total{")).count();
        assert_eq!(reasons, REFUSALS.len());
    }
}
