//! The shapes of answers: envelope, choices, chunks, usage. Owner: the HTTP layer. Invariant: exactly OpenAI's fields,
//! plus `token_models`, `token_details`, `stop_reason` and the per-model counts, which are additions and never replace one.

use super::logprobs::{ChatLogprobs, LegacyLogprobs};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::{FinishReason, Usage};

/// A whole answer or one chunk of it: `C` is the type of its choices.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "{C}Envelope")]
pub struct Envelope<C> {
    /// `chatcmpl-…` or `cmpl-…`, the same in all chunks of an answer.
    pub id: String,
    /// What this is.
    pub object: &'static str,
    /// Unix time in seconds, the same in all chunks of an answer.
    pub created: u64,
    /// The served model that was asked for.
    pub model: String,
    /// The choices; empty in the chunk that carries only the usage.
    pub choices: Vec<C>,
    /// Absent when not asked for, null on chunks before the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<UsageReport>>,
}

/// Why and at what a choice ended; null members before its end.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct Ending {
    /// `stop`, `length`, or of a chat that called a tool `tool_calls`.
    #[schemars(extend("enum" = ["stop", "length", "tool_calls", null]))]
    pub finish_reason: Option<&'static str>,
    /// The stop string or stop token that ended it, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
}

/// What was met (vLLM's extension).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop token of the request.
    Token(TokenId),
    /// A stop string of the request.
    Text(String),
}

impl From<&FinishReason> for Ending {
    fn from(reason: &FinishReason) -> Self {
        let stop_reason = match reason {
            FinishReason::StopToken(id) => Some(StopReason::Token(*id)),
            FinishReason::StopString(text) => Some(StopReason::Text(text.clone())),
            FinishReason::EndOfText | FinishReason::Length => None,
        };
        Ending { finish_reason: Some(reason.wire()), stop_reason }
    }
}

/// A choice of `chat.completion`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatChoice {
    /// Place among the choices.
    pub index: usize,
    /// The answer.
    pub message: AnswerMessage,
    /// Null unless asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    #[serde(flatten)]
    pub ending: Ending,
    /// Which model made each token, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_models: Option<Vec<String>>,
    /// What is known of each of these tokens, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_details: Option<Vec<TokenDetail>>,
}

/// The assistant's message.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct AnswerMessage {
    /// Always `assistant`.
    pub role: &'static str,
    /// The text; null when the answer only calls tools.
    pub content: Option<String>,
    /// The calls, if it makes any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallReport>,
    /// Always null: this server does not refuse on content.
    pub refusal: Option<String>,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CallReport {
    /// Unique; the result names it.
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What is called.
    pub function: FunctionReport,
}

/// Part of [`CallReport`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FunctionReport {
    /// One of the request's tools.
    pub name: String,
    /// JSON text that follows the tool's schema; incomplete when the answer was cut.
    pub arguments: String,
}

/// What a chunk says of a call: all but the arguments comes once, with its first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CallDelta {
    /// Place among the calls.
    pub index: usize,
    /// See [`CallReport::id`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Always `function`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// What is new of it.
    pub function: FunctionDelta,
}

/// Part of [`CallDelta`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FunctionDelta {
    /// See [`FunctionReport::name`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Text to append.
    pub arguments: String,
}

/// A choice of `chat.completion.chunk`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatChunkChoice {
    /// Place among the choices.
    pub index: usize,
    /// What is new.
    pub delta: Delta,
    /// Null unless asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended, in its last chunk.
    #[serde(flatten)]
    pub ending: Ending,
    /// Which model made each token of this chunk, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_models: Option<Vec<String>>,
    /// What is known of each of these tokens, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_details: Option<Vec<TokenDetail>>,
}

/// What a chunk adds to a message.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct Delta {
    /// In the first chunk of a choice only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text to append.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// What is new of calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallDelta>,
}

/// A choice of `text_completion`, whole or streamed.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TextChoice {
    /// Place among the choices.
    pub index: usize,
    /// The text, or what to append to it.
    pub text: String,
    /// Null unless asked for.
    pub logprobs: Option<LegacyLogprobs>,
    /// Why it ended.
    #[serde(flatten)]
    pub ending: Ending,
    /// Which model made each token, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_models: Option<Vec<String>>,
    /// What is known of each of these tokens, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_details: Option<Vec<TokenDetail>>,
}

impl TextChoice {
    /// Text that no model made, such as an echo.
    pub fn bare(index: usize, text: String) -> Self {
        TextChoice { index, text, logprobs: None, ending: Ending::default(), token_models: None, token_details: None }
    }
}

/// What is known of a generated token.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct TokenDetail {
    /// Its text; with replacement characters when it is only a part of a character.
    pub text: String,
    /// Name of the model that made it.
    pub model: String,
    /// Entropy of what it was drawn from: 0 when the model was certain, 1 when all tokens were equally probable; null
    /// when it is not known.
    pub entropy: Option<f32>,
    /// The candidate of another model that the routing dropped in its place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped: Option<DroppedDetail>,
    /// Milliseconds since the token before it, or since the request; tokens that came together share them evenly.
    pub ms: f64,
}

/// What is known of a candidate that was not kept.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct DroppedDetail {
    /// Name of the model that drew it and handed over.
    pub model: String,
    /// Entropy of what it was drawn from; null when it is not known.
    pub entropy: Option<f32>,
    /// Score of the learned router for it; null when there is none.
    pub score: Option<f32>,
}

/// Tokens consumed and made by a whole HTTP request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UsageReport {
    /// Tokens of the prompts, each prompt once however many choices it has.
    pub prompt_tokens: u32,
    /// Tokens generated in all choices, end-of-text tokens included.
    pub completion_tokens: u32,
    /// Both together.
    pub total_tokens: u32,
    /// Known once every choice has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptDetails>,
    /// Who made the tokens.
    pub completion_tokens_details: CompletionDetails,
}

/// Part of [`UsageReport`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PromptDetails {
    /// Prompt tokens whose KV was already there.
    pub cached_tokens: u32,
}

/// Part of [`UsageReport`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct CompletionDetails {
    /// Tokens made per model, by name; models that made none are left out.
    pub by_model: Map<String, Value>,
    /// Times control moved from one model to another; known once every choice has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hops: Option<u32>,
}

/// Adds up the usage of an HTTP request while its choices run. Shape: `choices` entries, `per_prompt` consecutive ones
/// continuing the same prompt.
#[derive(Clone, Debug)]
pub struct Tally {
    names: Vec<String>,
    per_prompt: usize,
    prompt_tokens: Vec<u32>,
    by_model: Vec<Vec<u32>>,
    finished: Vec<Option<Usage>>,
}

impl Tally {
    /// Nothing generated yet. `names` are the models in the order of their index, `prompt_tokens` has one entry a choice.
    pub fn new(names: Vec<String>, per_prompt: usize, prompt_tokens: Vec<u32>) -> Self {
        let by_model = vec![vec![0; names.len()]; prompt_tokens.len()];
        let finished = vec![None; prompt_tokens.len()];
        Tally { names, per_prompt: per_prompt.max(1), prompt_tokens, by_model, finished }
    }

    /// One more token of a choice.
    pub fn token(&mut self, choice: usize, model: usize) {
        if let Some(count) = self.by_model.get_mut(choice).and_then(|counts| counts.get_mut(model)) {
            *count += 1;
        }
    }

    /// The totals of a choice that ended replace what was counted.
    pub fn finish(&mut self, choice: usize, usage: Usage) {
        if let Some(place) = self.finished.get_mut(choice) {
            *place = Some(usage);
        }
    }

    /// The usage so far; exact once every choice has finished.
    pub fn report(&self) -> UsageReport {
        let prompt_tokens = self.prompt_tokens.iter().step_by(self.per_prompt).sum();
        let mut by_model = vec![0u32; self.names.len()];
        let mut completion_tokens = 0;
        for (counted, finished) in self.by_model.iter().zip(&self.finished) {
            let counts = finished.as_ref().map_or(counted, |usage| &usage.by_model);
            completion_tokens += finished.as_ref().map_or(counted.iter().sum(), |usage| usage.completion_tokens);
            by_model.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        let all: Option<Vec<&Usage>> = self.finished.iter().map(Option::as_ref).collect();
        let cached = |all: &Vec<&Usage>| all.iter().step_by(self.per_prompt).map(|usage| usage.cached_tokens).sum();
        UsageReport {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: all.as_ref().map(|all| PromptDetails { cached_tokens: cached(all) }),
            completion_tokens_details: CompletionDetails {
                by_model: named(&self.names, &by_model),
                hops: all.map(|all| all.iter().map(|usage| usage.hops).sum()),
            },
        }
    }
}

fn named(names: &[String], counts: &[u32]) -> Map<String, Value> {
    let made = names.iter().zip(counts).filter(|(_, count)| **count > 0);
    made.map(|(name, count)| (name.clone(), Value::from(*count))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(cached: u32, by_model: &[u32], hops: u32) -> Usage {
        let completion_tokens = by_model.iter().sum();
        Usage { prompt_tokens: 5, cached_tokens: cached, completion_tokens, by_model: by_model.to_vec(), hops }
    }

    #[test]
    fn prompts_count_once_and_choices_add_up() {
        let mut tally = Tally::new(vec!["s".into(), "l".into()], 2, vec![5, 5, 7, 7]);
        tally.token(0, 0);
        tally.token(0, 1);
        let early = tally.report();
        assert_eq!((early.prompt_tokens, early.completion_tokens, early.total_tokens), (12, 2, 14));
        assert!(early.prompt_tokens_details.is_none());
        for (choice, made) in [[3, 1], [2, 0], [0, 0], [1, 0]].iter().enumerate() {
            tally.finish(choice, usage(choice as u32 + 1, made, 1));
        }
        let whole = tally.report();
        assert_eq!((whole.prompt_tokens, whole.completion_tokens, whole.total_tokens), (12, 7, 19));
        assert_eq!(whole.prompt_tokens_details.unwrap().cached_tokens, 1 + 3);
        let by_model = Value::Object(whole.completion_tokens_details.by_model);
        assert_eq!(by_model, serde_json::json!({"s": 6, "l": 1}));
        assert_eq!(whole.completion_tokens_details.hops, Some(4));
    }

    #[test]
    fn an_ending_says_what_it_met() {
        let json = |reason| serde_json::to_string(&Ending::from(&reason)).unwrap();
        assert_eq!(json(FinishReason::EndOfText), r#"{"finish_reason":"stop"}"#);
        assert_eq!(json(FinishReason::Length), r#"{"finish_reason":"length"}"#);
        assert_eq!(json(FinishReason::StopToken(7)), r#"{"finish_reason":"stop","stop_reason":7}"#);
        assert_eq!(json(FinishReason::StopString("x".into())), r#"{"finish_reason":"stop","stop_reason":"x"}"#);
    }
}
