//! The request fields chat and text completions share: sampling, stopping, streaming, reporting. Owner: the HTTP layer.
//! Invariant: every number is inside its range and every token id inside the vocabulary.

use super::fields::{Fields, token_id, token_ids, wrong_type};
use super::response_format::{self, RESPONSE_FORMAT};
use crate::http::errors::ApiError;
use serde_json::Value;
use tokenrouter_core::constraint::ConstraintSpec;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::{Job, Prompt, StopRules, Target};
use tokenrouter_core::sampling::SamplingParams;

/// Choices one HTTP request may ask for (`n` times the number of prompts).
pub const CHOICES_MAX: i64 = 128;
/// Stop strings a request may have (OpenAI's limit).
pub const STOPS_MAX: usize = 4;
/// Bytes of one stop string.
pub const STOP_BYTES_MAX: usize = 1024;
/// Alternatives reported per token (OpenAI's limit for chat).
pub const TOP_LOGPROBS_MAX: i64 = 20;

/// What a model's `generation_config.json` says about drawing tokens; used where a request is silent. A model that says
/// nothing gets OpenAI's defaults: temperature 1, everything else off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// See [`SamplingParams::temperature`].
    pub temperature: f32,
    /// See [`SamplingParams::top_p`].
    pub top_p: f32,
    /// See [`SamplingParams::top_k`].
    pub top_k: u32,
    /// See [`SamplingParams::min_p`].
    pub min_p: f32,
    /// See [`SamplingParams::repetition_penalty`].
    pub repetition_penalty: f32,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        SamplingDefaults { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

/// The sampling fields of a request; what is absent comes from the model.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sampling {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: f32,
    frequency_penalty: f32,
    logit_bias: Vec<(TokenId, f32)>,
    seed: u64,
}

/// How the answer is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streaming {
    /// As server-sent events.
    pub on: bool,
    /// With a last chunk that carries the usage.
    pub usage_last: bool,
    /// With the usage so far on every chunk.
    pub usage_always: bool,
}

/// The fields both routes share.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Name of the served model.
    pub model: String,
    /// Choices per prompt.
    pub n: u32,
    /// How the answer is sent.
    pub streaming: Streaming,
    /// Report which model made each token.
    pub token_models: bool,
    /// Report what is known of each token.
    pub token_details: bool,
    /// Parameters of the routing algorithm for this request: an object, checked by the algorithm.
    pub routing: Option<Value>,
    /// When generation ends.
    pub stop: StopRules,
    /// What the answer must be.
    pub constraint: Option<ConstraintSpec>,
    sampling: Sampling,
}

impl Generation {
    /// Takes the shared fields; log-probabilities and `max_tokens`' default differ by route and are taken there.
    ///
    /// # Errors
    /// 400 naming the field that is wrong or not available.
    pub fn read(fields: &mut Fields, vocab_size: u32) -> Result<Self, ApiError> {
        let model = fields.text("model")?.filter(|name| !name.is_empty());
        let model =
            model.ok_or_else(|| ApiError::field("model", "model is missing; GET /v1/models lists the valid names"))?;
        accept_harmless(fields)?;
        let n = fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1);
        let stop = read_stop_rules(fields, vocab_size)?;
        let constraint = response_format::read(fields)?;
        if constraint.is_some() {
            response_format::check_ends(RESPONSE_FORMAT, &stop)?;
        }
        Ok(Generation {
            model,
            n: u32::try_from(n).unwrap_or(1),
            streaming: read_streaming(fields)?,
            token_models: fields.flag("return_token_models")?.unwrap_or(false),
            token_details: fields.flag("return_token_details")?.unwrap_or(false),
            routing: read_routing(fields)?,
            stop,
            constraint,
            sampling: read_sampling(fields, vocab_size)?,
        })
    }

    /// The job of the `choice`-th continuation of a prompt: choices differ by their seed, `seed + choice`.
    pub fn job(&self, place: JobPlace, prompt: Prompt, choice: u32) -> Job {
        let (own, model) = (&self.sampling, place.defaults);
        Job {
            prompt,
            target: place.target,
            routing: self.routing.clone(),
            sampling: SamplingParams {
                temperature: own.temperature.unwrap_or(model.temperature),
                top_k: own.top_k.unwrap_or(model.top_k),
                // 0 would keep no token at all; the smallest positive number keeps the most probable one.
                top_p: own.top_p.unwrap_or(model.top_p).max(f32::MIN_POSITIVE),
                min_p: own.min_p.unwrap_or(model.min_p),
                repetition_penalty: own.repetition_penalty.unwrap_or(model.repetition_penalty),
                presence_penalty: own.presence_penalty,
                frequency_penalty: own.frequency_penalty,
                logit_bias: own.logit_bias.clone(),
                seed: own.seed.wrapping_add(u64::from(choice)),
            },
            stop: self.stop.clone(),
            logprobs: place.logprobs,
            constraint: self.constraint.clone(),
            prompt_logprobs: None,
            entropy: self.token_details,
        }
    }
}

/// Where a job runs and what it reports: the part of a job that the shared fields do not say.
#[derive(Clone, Copy, Debug)]
pub struct JobPlace {
    /// Who generates.
    pub target: Target,
    /// What that model does where the request is silent.
    pub defaults: SamplingDefaults,
    /// Alternatives to report per token.
    pub logprobs: Option<u8>,
}

/// Fields that change nothing here and are accepted for the sake of clients that always send them.
fn accept_harmless(fields: &mut Fields) -> Result<(), ApiError> {
    fields.text("user")?;
    fields.neutral("metadata", Value::is_object, "metadata must be an object")?;
    fields.neutral("store", |value| value == &Value::Bool(false), "this server stores nothing; leave store out")?;
    Ok(())
}

fn read_routing(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    match fields.take("routing") {
        Some(value) if !value.is_object() => Err(wrong_type(&fields.path("routing"), "an object", &value)),
        routing => Ok(routing),
    }
}

fn read_sampling(fields: &mut Fields, vocab_size: u32) -> Result<Sampling, ApiError> {
    // -1 is how vLLM's clients say "all".
    let top_k = fields.integer("top_k", -1..=i64::from(i32::MAX))?;
    let seed = match fields.take("seed") {
        None => uuid::Uuid::new_v4().as_u64_pair().0,
        Some(value) => read_seed(&fields.path("seed"), &value)?,
    };
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0..=2.0)?,
        top_p: fields.number("top_p", 0.0..=1.0)?,
        top_k: top_k.map(|k| u32::try_from(k).unwrap_or(0)),
        min_p: fields.number("min_p", 0.0..=1.0)?,
        repetition_penalty: fields.number("repetition_penalty", 0.01..=10.0)?,
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        logit_bias: read_logit_bias(fields, vocab_size)?,
        seed,
    })
}

/// Any 64-bit whole number; a negative one is taken by its bits.
fn read_seed(path: &str, value: &Value) -> Result<u64, ApiError> {
    let number = value.as_number().filter(|number| !number.is_f64());
    let seed = number.and_then(|number| number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned)));
    seed.ok_or_else(|| wrong_type(path, "a whole number of 64 bits", value))
}

fn read_logit_bias(fields: &mut Fields, vocab_size: u32) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let path = fields.path("logit_bias");
    let map = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(wrong_type(&path, "an object from token id to bias", &other)),
    };
    map.iter()
        .map(|(key, value)| {
            let at = format!("{path}.{}", key.chars().take(24).collect::<String>());
            let digits = key.bytes().all(|byte| byte.is_ascii_digit());
            let id: Option<u64> = key.parse().ok().filter(|_| digits);
            let id = id.ok_or_else(|| ApiError::field(&path, format!("{at}: the key must be a token id")))?;
            let id = token_id(&path, &Value::from(id), vocab_size)?;
            let bias = value.as_f64().ok_or_else(|| wrong_type(&path, "an object from token id to a number", value))?;
            if !(-100.0..=100.0).contains(&bias) {
                return Err(ApiError::field(&path, format!("{at} must be between -100 and 100, not {value}")));
            }
            Ok((id, bias as f32))
        })
        .collect()
}

fn read_stop_rules(fields: &mut Fields, vocab_size: u32) -> Result<StopRules, ApiError> {
    let max_tokens = fields.count("max_tokens")?;
    let min_tokens = fields.integer("min_tokens", 0..=i64::from(i32::MAX))?.unwrap_or(0);
    Ok(StopRules {
        max_tokens,
        min_tokens: u32::try_from(min_tokens).unwrap_or(0),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        stop: read_stop_strings(fields)?,
        include_stop: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
        stop_ids: match fields.take("stop_token_ids") {
            None => Vec::new(),
            Some(Value::Array(ids)) => token_ids(&fields.path("stop_token_ids"), &ids, vocab_size)?,
            Some(other) => return Err(wrong_type(&fields.path("stop_token_ids"), "a list of token ids", &other)),
        },
    })
}

/// `min_tokens` must leave room below `max_tokens`; called when the route has settled the latter.
///
/// # Errors
/// 400 naming `min_tokens`.
pub fn check_token_bounds(stop: &StopRules) -> Result<(), ApiError> {
    match stop.max_tokens {
        Some(max) if stop.min_tokens > max => {
            let message = format!("min_tokens ({}) must not exceed max_tokens ({max})", stop.min_tokens);
            Err(ApiError::field("min_tokens", message))
        }
        _ => Ok(()),
    }
}

fn read_stop_strings(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let path = fields.path("stop");
    let values = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(values)) => values,
        Some(value) => vec![value],
    };
    if values.len() > STOPS_MAX {
        return Err(ApiError::field(
            &path,
            format!("stop has {} strings; at most {STOPS_MAX} are allowed", values.len()),
        ));
    }
    let text = |value: Value| match value {
        Value::String(text) if text.is_empty() => Err(ApiError::field(&path, "stop must not contain an empty string")),
        Value::String(text) if text.len() > STOP_BYTES_MAX => {
            Err(ApiError::field(&path, format!("a stop string is longer than {STOP_BYTES_MAX} bytes")))
        }
        Value::String(text) => Ok(text),
        other => Err(wrong_type(&path, "a string or a list of strings", &other)),
    };
    values.into_iter().map(text).collect()
}

fn read_streaming(fields: &mut Fields) -> Result<Streaming, ApiError> {
    let on = fields.flag("stream")?.unwrap_or(false);
    let path = fields.path("stream_options");
    let Some(value) = fields.take("stream_options") else {
        return Ok(Streaming { on, ..Streaming::default() });
    };
    if !on {
        return Err(ApiError::field(path, "stream_options needs stream: true"));
    }
    let mut options = Fields::of(value, path)?;
    let streaming = Streaming {
        on,
        usage_last: options.flag("include_usage")?.unwrap_or(false),
        usage_always: options.flag("continuous_usage_stats")?.unwrap_or(false),
    };
    options.finish()?;
    Ok(streaming)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const VOCAB: u32 = 100;

    fn read(body: Value) -> Result<Generation, ApiError> {
        let mut body = body;
        body.as_object_mut().unwrap().entry("model").or_insert(json!("m"));
        let mut fields = Fields::of(body, "")?;
        let generation = Generation::read(&mut fields, VOCAB)?;
        fields.finish()?;
        Ok(generation)
    }

    fn place(defaults: SamplingDefaults) -> JobPlace {
        JobPlace { target: Target::Routed, defaults, logprobs: None }
    }

    #[test]
    fn every_bad_value_is_refused_by_name() {
        let cases = [
            ("model", json!("")),
            ("model", json!(3)),
            ("temperature", json!(2.5)),
            ("temperature", json!("hot")),
            ("top_p", json!(-0.1)),
            ("top_p", json!(1.5)),
            ("top_k", json!(-2)),
            ("top_k", json!(1.5)),
            ("min_p", json!(2)),
            ("seed", json!(1.5)),
            ("seed", json!("7")),
            ("n", json!(0)),
            ("n", json!(129)),
            ("presence_penalty", json!(2.1)),
            ("frequency_penalty", json!(-2.1)),
            ("repetition_penalty", json!(0)),
            ("max_tokens", json!(0)),
            ("max_tokens", json!(-1)),
            ("max_tokens", json!(99_999_999_999_i64)),
            ("min_tokens", json!(-1)),
            ("stop", json!("")),
            ("stop", json!(["a", ""])),
            ("stop", json!(["a", "b", "c", "d", "e"])),
            ("stop", json!([1])),
            ("stop", json!({})),
            ("stop_token_ids", json!([VOCAB])),
            ("stop_token_ids", json!([-1])),
            ("stop_token_ids", json!("x")),
            ("logit_bias", json!({"999999": 1})),
            ("logit_bias", json!({"x": 1})),
            ("logit_bias", json!({"+1": 1})),
            ("logit_bias", json!({"1": 101})),
            ("logit_bias", json!({"1": "a"})),
            ("logit_bias", json!([1])),
            ("ignore_eos", json!("yes")),
            ("include_stop_str_in_output", json!(1)),
            ("stream", json!("true")),
            ("return_token_models", json!(1)),
            ("return_token_details", json!("all")),
            ("store", json!(true)),
            ("metadata", json!(5)),
            ("user", json!(5)),
            ("service_tier", json!("flex")),
        ];
        for (field, value) in cases {
            let error = read(json!({ field: value })).unwrap_err();
            assert_eq!(error.param(), Some(field), "{field}: {value}: {error}");
            assert_eq!(error.status().as_u16(), 400, "{field}: {value}");
        }
        assert_eq!(read(json!({"stream_options": {}})).unwrap_err().param(), Some("stream_options"));
        let typo = read(json!({"stream": true, "stream_options": {"include_usag": true}})).unwrap_err();
        assert_eq!(typo.param(), Some("stream_options.include_usag"));
    }

    #[test]
    fn harmless_fields_and_nulls_are_accepted() {
        let body = json!({"user": "u", "metadata": {"a": "b"}, "store": false,
            "temperature": null, "stop": null, "logit_bias": null, "stream_options": null, "seed": null, "n": null});
        assert_eq!(read(body).unwrap().n, 1);
    }

    #[test]
    fn a_request_overrides_the_model_and_the_model_the_defaults() {
        let model = SamplingDefaults { temperature: 0.6, top_p: 0.95, top_k: 20, min_p: 0.1, repetition_penalty: 1.1 };
        let silent = read(json!({})).unwrap().job(place(model), Prompt::Ids(vec![1]), 0);
        assert_eq!((silent.sampling.temperature, silent.sampling.top_k), (0.6, 20));
        let body = json!({"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1.0, "seed": -1,
            "logit_bias": {"3": -100}, "stop": "x", "stop_token_ids": [5], "min_tokens": 2, "max_tokens": 9});
        let job = read(body).unwrap().job(place(model), Prompt::Ids(vec![1]), 0);
        assert_eq!((job.sampling.temperature, job.sampling.top_k, job.sampling.top_p), (0.0, 0, 1.0));
        assert_eq!(job.sampling.logit_bias, vec![(3, -100.0)]);
        assert_eq!(job.sampling.seed, u64::MAX);
        assert_eq!(job.stop.stop, vec!["x".to_owned()]);
        assert_eq!((job.stop.max_tokens, job.stop.min_tokens, job.stop.stop_ids), (Some(9), 2, vec![5]));
    }

    #[test]
    fn choices_differ_by_seed_and_silent_requests_too() {
        let fixed = read(json!({"seed": 7, "n": 3})).unwrap();
        let seeds: Vec<u64> = (0..3)
            .map(|i| fixed.job(place(SamplingDefaults::default()), Prompt::Ids(vec![1]), i).sampling.seed)
            .collect();
        assert_eq!(seeds, vec![7, 8, 9]);
        let seed = |request: Generation| {
            request.job(place(SamplingDefaults::default()), Prompt::Ids(vec![1]), 0).sampling.seed
        };
        assert_ne!(seed(read(json!({})).unwrap()), seed(read(json!({})).unwrap()));
    }

    #[test]
    fn a_zero_top_p_still_keeps_one_token() {
        let job = read(json!({"top_p": 0})).unwrap().job(place(SamplingDefaults::default()), Prompt::Ids(vec![1]), 0);
        assert!(job.sampling.top_p > 0.0);
    }

    #[test]
    fn min_tokens_may_not_exceed_max_tokens() {
        let stop = read(json!({"min_tokens": 5, "max_tokens": 4})).unwrap().stop;
        assert_eq!(check_token_bounds(&stop).unwrap_err().param(), Some("min_tokens"));
    }
}
