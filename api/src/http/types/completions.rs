//! `POST /v1/completions`: the request. Owner: the HTTP layer. Invariant: at least one prompt, every id in the vocabulary.

use super::fields::{Fields, token_ids, wrong_type};
use super::generation::{CHOICES_MAX, Generation, TOP_LOGPROBS_MAX, check_token_bounds};
use crate::http::errors::ApiError;
use serde_json::Value;
use tokenrouter_core::job::Prompt;
use tokenrouter_core::text::SpecialTokens;

/// Tokens generated when a request does not say (OpenAI's default for this route).
pub(super) const MAX_TOKENS_DEFAULT: u32 = 16;

/// A valid text completion request.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// What to continue, each `generation.n` times; at least one.
    pub prompts: Vec<Prompt>,
    /// Put the prompt's text before the completion, and the log-probabilities of its tokens before those of the completion.
    pub echo: bool,
    /// Alternatives to report per token, when log-probabilities were asked for.
    pub logprobs: Option<u8>,
    /// The shared fields.
    pub generation: Generation,
}

impl CompletionRequest {
    /// Reads and checks the body.
    ///
    /// # Errors
    /// 400 naming the field that is wrong, unknown or not available.
    pub fn read(body: Value, vocab_size: u32) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body, "")?;
        let mut generation = Generation::read(&mut fields, vocab_size)?;
        generation.stop.max_tokens.get_or_insert(MAX_TOKENS_DEFAULT.max(generation.stop.min_tokens));
        check_token_bounds(&generation.stop)?;
        let prompts = read_prompts(&mut fields, vocab_size)?;
        let choices = prompts.len() as i64 * i64::from(generation.n);
        if choices > CHOICES_MAX {
            let message =
                format!("{} prompts times n = {choices} choices; at most {CHOICES_MAX} are allowed", prompts.len());
            return Err(ApiError::field("prompt", message));
        }
        let logprobs = fields.integer("logprobs", 0..=TOP_LOGPROBS_MAX)?;
        let logprobs = logprobs.map(|top| u8::try_from(top).unwrap_or(0));
        let echo = fields.flag("echo")?.unwrap_or(false);
        refuse_unavailable(&mut fields, generation.n)?;
        fields.finish()?;
        Ok(CompletionRequest { prompts, echo, logprobs, generation })
    }
}

fn refuse_unavailable(fields: &mut Fields, n: u32) -> Result<(), ApiError> {
    let best_of = fields.integer("best_of", 1..=CHOICES_MAX)?;
    if best_of.is_some_and(|best_of| best_of != i64::from(n)) {
        return Err(ApiError::unsupported("best_of", "best_of is not supported; use n"));
    }
    fields.neutral("suffix", |value| value == "", "suffix is not supported; leave it out")
}

fn read_prompts(fields: &mut Fields, vocab_size: u32) -> Result<Vec<Prompt>, ApiError> {
    let path = fields.path("prompt");
    let values = match fields.take("prompt") {
        None => return Err(ApiError::field(path, "prompt is missing; send a text, a list of texts or token ids")),
        Some(Value::String(text)) => return Ok(vec![raw(text)]),
        Some(Value::Array(values)) => values,
        Some(other) => return Err(wrong_type(&path, "a text, a list of texts or token ids", &other)),
    };
    match values.first() {
        None => Err(ApiError::field(path, "prompt is empty; send at least one token or text")),
        Some(Value::Number(_)) => Ok(vec![Prompt::Ids(token_ids(&path, &values, vocab_size)?)]),
        Some(_) => values.into_iter().map(|value| read_prompt(value, &path, vocab_size)).collect(),
    }
}

fn read_prompt(value: Value, path: &str, vocab_size: u32) -> Result<Prompt, ApiError> {
    match value {
        Value::String(text) => Ok(raw(text)),
        Value::Array(ids) if ids.is_empty() => Err(ApiError::field(path, "a prompt in the list has no tokens")),
        Value::Array(ids) => Ok(Prompt::Ids(token_ids(path, &ids, vocab_size)?)),
        other => Err(wrong_type(path, "a text, a list of texts or token ids", &other)),
    }
}

/// A raw prompt may spell control tokens (that is how one writes a chat by hand) and gets the vocabulary's begin token.
fn raw(text: String) -> Prompt {
    Prompt::Text { text, special: SpecialTokens::Parse, add_bos: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(field: &str, value: Value) -> Result<CompletionRequest, ApiError> {
        let mut body = json!({"model": "m", "prompt": "hi"});
        body[field] = value;
        CompletionRequest::read(body, 100)
    }

    #[test]
    fn a_prompt_has_four_forms() {
        assert_eq!(with("prompt", json!("a")).unwrap().prompts, vec![raw("a".into())]);
        assert_eq!(with("prompt", json!(["a", "b"])).unwrap().prompts, vec![raw("a".into()), raw("b".into())]);
        assert_eq!(with("prompt", json!([1, 2])).unwrap().prompts, vec![Prompt::Ids(vec![1, 2])]);
        let lists = with("prompt", json!([[1], [2, 3]])).unwrap().prompts;
        assert_eq!(lists, vec![Prompt::Ids(vec![1]), Prompt::Ids(vec![2, 3])]);
    }

    #[test]
    fn what_a_prompt_cannot_be_is_refused() {
        for bad in [
            json!(null),
            json!([]),
            json!([[]]),
            json!([-1]),
            json!([100]),
            json!([1, "a"]),
            json!(["a", 1]),
            json!([1.5]),
            json!({}),
            json!(3),
            json!([[1], []]),
            json!(vec!["x"; 129]),
        ] {
            let error = with("prompt", bad.clone()).unwrap_err();
            assert_eq!((error.status().as_u16(), error.param()), (400, Some("prompt")), "{bad}");
        }
    }

    #[test]
    fn the_default_length_is_openais() {
        assert_eq!(with("n", json!(1)).unwrap().generation.stop.max_tokens, Some(16));
        assert_eq!(with("min_tokens", json!(20)).unwrap().generation.stop.max_tokens, Some(20));
    }

    #[test]
    fn unavailable_features_are_refused_and_their_neutral_values_accepted() {
        for (field, bad, neutral) in [
            ("best_of", json!(2), json!(1)),
            ("suffix", json!("end"), json!("")),
            ("logprobs", json!(true), json!(0)),
            ("logprobs", json!(21), json!(20)),
            ("echo", json!(1), json!(true)),
        ] {
            assert_eq!(with(field, bad).unwrap_err().param(), Some(field));
            with(field, neutral).unwrap();
        }
        assert_eq!(with("messages", json!([])).unwrap_err().param(), Some("messages"));
    }
}
