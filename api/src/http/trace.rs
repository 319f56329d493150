//! What a span tells of a request to generate, in the words of OpenTelemetry's conventions for HTTP and generative AI. Owner:
//! the meters of the request. Invariant: hops are told when the first token of the next model is, in its order in the answer.

use super::App;
use super::types::generation::Generation;
use crate::telemetry::Trace;
use actix_web::dev::ServiceRequest;
use actix_web::http::header::HeaderMap;
use actix_web::{HttpMessage, HttpRequest};
use opentelemetry::propagation::Extractor;
use opentelemetry::{Array, KeyValue, StringValue, Value};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::{Job, TokenReport, Usage};

/// The routes whose requests have a span.
const ROUTES: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

/// Begins the span of a request to generate, and leaves it where the handler finds it.
pub fn begin(app: &App, request: &ServiceRequest, (route, id): (&str, &str)) -> Option<Trace> {
    let tracer = app.tracer.as_ref().filter(|_| ROUTES.contains(&route) && request.method() == "POST")?;
    let trace = tracer.begin(format!("POST {route}"), &Headers(request.headers()))?;
    for (key, value) in [("http.request.method", "POST"), ("http.route", route), ("tokenrouter.request.id", id)] {
        trace.set(key, value.to_owned());
    }
    request.extensions_mut().insert(trace.clone());
    Some(trace)
}

/// Where a request says whose child its span is.
struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}

/// The span of a request, from where [`begin`] left it.
pub fn of(request: &HttpRequest) -> Option<Trace> {
    request.extensions_mut().remove::<Trace>()
}

/// What is added up for the span of a request whose choices are generated.
#[derive(Debug)]
pub struct Answering {
    trace: Trace,
    /// Of the models, by index.
    names: Arc<[String]>,
    /// Choices per prompt.
    n: u32,
    sums: Mutex<Sums>,
}

#[derive(Debug, Default)]
struct Sums {
    /// Prompt tokens, and those of them that were cached, each prompt `n` times.
    prompt: u64,
    cached: u64,
    /// By model.
    tokens: Vec<u64>,
    hops: u64,
    reasons: Vec<StringValue>,
}

impl Answering {
    /// Says what is asked for.
    pub fn new(
        trace: Trace,
        names: Arc<[String]>,
        (operation, id): (&str, &str),
        asked: (&Generation, &[Job]),
    ) -> Self {
        let (generation, jobs) = asked;
        trace.name(format!("{operation} {}", generation.model));
        let texts = [
            ("gen_ai.operation.name", operation),
            ("gen_ai.provider.name", "tokenrouter"),
            ("gen_ai.request.model", &generation.model),
            ("gen_ai.response.model", &generation.model),
            ("gen_ai.response.id", id),
        ];
        texts.into_iter().for_each(|(key, value)| trace.set(key, value.to_owned()));
        let mut numbers = vec![("gen_ai.request.choice.count", Value::I64(generation.n.into()))];
        if let Some(max) = generation.stop.max_tokens {
            numbers.push(("gen_ai.request.max_tokens", Value::I64(max.into())));
        }
        if let Some(sampling) = jobs.first().map(|job| &job.sampling) {
            numbers.push(("gen_ai.request.temperature", Value::F64(sampling.temperature.into())));
            numbers.push(("gen_ai.request.top_p", Value::F64(sampling.top_p.into())));
            numbers.push(("gen_ai.request.seed", Value::I64(sampling.seed.cast_signed())));
        }
        numbers.into_iter().for_each(|(key, value)| trace.set(key, value));
        let sums = Sums { tokens: vec![0; names.len()], ..Sums::default() };
        Answering { trace, names, n: generation.n.max(1), sums: Mutex::new(sums) }
    }

    fn sums(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self, model: ModelIdx) -> String {
        self.names.get(model.index()).cloned().unwrap_or_else(|| model.to_string())
    }

    /// A choice was accepted.
    pub fn accepted(&self, prompt_tokens: u32) {
        self.sums().prompt += u64::from(prompt_tokens);
    }

    /// A choice ended well.
    pub fn used(&self, usage: &Usage) {
        let mut sums = self.sums();
        sums.cached += u64::from(usage.cached_tokens);
        sums.hops += u64::from(usage.hops);
    }

    /// A choice ended.
    pub fn ended(&self, reason: &str) {
        self.sums().reasons.push(reason.to_owned().into());
    }

    /// A choice failed.
    pub fn failed(&self, message: &str) {
        self.trace.fail("generation", message);
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        let sums = std::mem::take(self.sums.get_mut().unwrap_or_else(PoisonError::into_inner));
        let int = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let (n, made): (u64, u64) = (self.n.into(), sums.tokens.iter().sum());
        self.trace.set("gen_ai.usage.input_tokens", int(sums.prompt / n));
        self.trace.set("gen_ai.usage.output_tokens", int(made));
        self.trace.set("gen_ai.usage.cache_read.input_tokens", int(sums.cached / n));
        self.trace.set("gen_ai.response.finish_reasons", Value::Array(Array::String(sums.reasons)));
        self.trace.set("tokenrouter.hops", int(sums.hops));
        for (name, tokens) in self.names.iter().zip(sums.tokens) {
            self.trace.set(format!("tokenrouter.tokens.{name}"), int(tokens));
        }
    }
}

/// Which models a choice's tokens came from.
#[derive(Debug, Default)]
pub struct Way {
    at: Option<ModelIdx>,
    /// Tokens in a row by that model.
    run: i64,
    /// Tokens so far.
    position: i64,
}

impl Way {
    /// The next tokens of a choice.
    pub fn follow(&mut self, answering: &Answering, (choice, tokens): (usize, &[TokenReport])) {
        for token in tokens {
            if self.at != Some(token.model) {
                let mut event = vec![
                    KeyValue::new("tokenrouter.to", answering.name(token.model)),
                    KeyValue::new("tokenrouter.position", self.position),
                    KeyValue::new("tokenrouter.choice", choice as i64),
                ];
                let name = match self.at {
                    Some(from) => {
                        event.push(KeyValue::new("tokenrouter.from", answering.name(from)));
                        event.push(KeyValue::new("tokenrouter.tokens", self.run));
                        "hop"
                    }
                    None => "first token",
                };
                answering.trace.event(name, event);
                (self.at, self.run) = (Some(token.model), 0);
            }
            self.run += 1;
            self.position += 1;
            if let Some(count) = answering.sums().tokens.get_mut(token.model.index()) {
                *count += 1;
            }
        }
    }
}
