//! Log-probabilities in the two shapes of the OpenAI API. Owner: the HTTP layer. Invariant: one entry a token, true bytes,
//! and only numbers JSON can carry: minus infinity is written as -9999, what is not known (the first token of a prompt)
//! as null.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Write;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::TokenReport;
use tokenrouter_core::text::{TextCodec, Utf8Stream};

/// What stands for minus infinity (as at vLLM).
const LOGPROB_MIN: f64 = -9999.0;

/// `choices[].logprobs` of chat.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct ChatLogprobs {
    /// One entry a token.
    pub content: Vec<ChatToken>,
    /// Always null.
    pub refusal: Option<Vec<ChatToken>>,
}

/// A generated token.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChatToken {
    /// The token and its log-probability.
    #[serde(flatten)]
    pub chosen: ScoredToken,
    /// The most probable tokens at this position, as many as asked for.
    pub top_logprobs: Vec<ScoredToken>,
}

/// A token with its log-probability.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ScoredToken {
    /// Its text, or `bytes:\xf0\x9f` when it is only a part of a character.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Its true bytes, also where they are only a part of a character.
    pub bytes: Vec<u8>,
}

/// `choices[].logprobs` of text completions: four lists of equal length.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct LegacyLogprobs {
    /// Text of each token.
    pub tokens: Vec<String>,
    /// Log-probability of each token; null for the first of a prompt.
    pub token_logprobs: Vec<Option<f64>>,
    /// The most probable tokens at each position and the one that stands there, by text; null for the first of a prompt.
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Characters of the choice's text before each token.
    pub text_offset: Vec<usize>,
}

impl LegacyLogprobs {
    /// Those of the tokens that follow.
    pub fn extend(&mut self, more: LegacyLogprobs) {
        self.tokens.extend(more.tokens);
        self.token_logprobs.extend(more.token_logprobs);
        self.top_logprobs.extend(more.top_logprobs);
        self.text_offset.extend(more.text_offset);
    }
}

/// A token as text: its characters, or `bytes:\xf0\x9f` when it is only a part of one. Control tokens show their name.
pub fn token_name(codec: &dyn TextCodec, id: TokenId) -> String {
    let bytes = codec.token_bytes(id).unwrap_or_default();
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |mut name, byte| {
            // Writing to a String cannot fail.
            let _ = write!(name, "\\x{byte:02x}");
            name
        }),
    }
}

/// A finite number: JSON has no infinities and no NaN.
fn finite(logprob: f32) -> f64 {
    if logprob.is_nan() { LOGPROB_MIN } else { f64::from(logprob).clamp(LOGPROB_MIN, 0.0) }
}

fn scored(codec: &dyn TextCodec, id: TokenId, logprob: f32) -> ScoredToken {
    let bytes = codec.token_bytes(id).unwrap_or_default().to_vec();
    ScoredToken { token: token_name(codec, id), logprob: finite(logprob), bytes }
}

/// The chat shape of some tokens.
pub fn chat(codec: &dyn TextCodec, tokens: &[TokenReport]) -> ChatLogprobs {
    let entry = |report: &TokenReport| {
        let scores = report.logprobs.as_ref();
        ChatToken {
            chosen: scored(codec, report.id, scores.map_or(f32::NEG_INFINITY, |scores| scores.chosen)),
            top_logprobs: scores.map_or_else(Vec::new, |scores| {
                scores.top.iter().map(|&(id, logprob)| scored(codec, id, logprob)).collect()
            }),
        }
    };
    ChatLogprobs { content: tokens.iter().map(entry).collect(), refusal: None }
}

/// Where the next token of a choice starts in the choice's text, in characters.
#[derive(Clone, Debug, Default)]
pub struct TextPosition {
    chars: usize,
    bytes: usize,
    utf8: Utf8Stream,
    begun: bool,
}

impl TextPosition {
    /// A choice whose text begins with this, which is not generated (an echoed prompt).
    pub fn after(echo: &str) -> Self {
        let (chars, bytes) = (echo.chars().count(), echo.len());
        TextPosition { chars, bytes, begun: bytes > 0, ..TextPosition::default() }
    }

    /// As [`TextPosition::pass`] within an echoed prompt: a control token takes room where the text spells it.
    fn pass_in(&mut self, echo: &str, (codec, id): (&dyn TextCodec, TokenId)) -> usize {
        let (start, name) = (self.chars, codec.token_bytes(id).unwrap_or_default());
        let is_spelt = || echo.as_bytes().get(self.bytes..).is_some_and(|rest| rest.starts_with(name));
        if codec.is_special(id) && is_spelt() {
            self.chars += String::from_utf8_lossy(name).chars().count();
            self.bytes += name.len();
            self.begun = true;
            return start;
        }
        self.pass(codec, id)
    }

    /// Passes a token and returns where it started; a token inside a character starts where the character does.
    fn pass(&mut self, codec: &dyn TextCodec, id: TokenId) -> usize {
        let start = self.chars;
        if !codec.is_special(id) {
            let text = self.utf8.push(codec.token_bytes(id).unwrap_or_default());
            self.chars += text.chars().count();
            self.bytes += text.len();
            // The one leading space that decoding drops.
            if !self.begun && codec.strips_leading_space() && text.starts_with(' ') {
                self.chars -= 1;
                self.bytes -= 1;
            }
            self.begun |= !text.is_empty();
        }
        start
    }
}

/// The text completion shape of some tokens; `position` moves past them.
pub fn legacy(codec: &dyn TextCodec, tokens: &[TokenReport], position: &mut TextPosition) -> LegacyLogprobs {
    lists(codec, tokens, |id| position.pass(codec, id))
}

/// The text completion shape of a prompt whose text is `echo`.
pub fn legacy_prompt(codec: &dyn TextCodec, tokens: &[TokenReport], echo: &str) -> LegacyLogprobs {
    let mut position = TextPosition::default();
    lists(codec, tokens, |id| position.pass_in(echo, (codec, id)))
}

fn lists(codec: &dyn TextCodec, tokens: &[TokenReport], mut start: impl FnMut(TokenId) -> usize) -> LegacyLogprobs {
    let mut lists = LegacyLogprobs::default();
    for report in tokens {
        let name = token_name(codec, report.id);
        lists.text_offset.push(start(report.id));
        lists.token_logprobs.push(report.logprobs.as_ref().map(|scores| finite(scores.chosen)));
        lists.top_logprobs.push(report.logprobs.as_ref().map(|scores| {
            let mut top = Map::new();
            for &(id, logprob) in &scores.top {
                // Descending order: of two tokens with the same text the more probable one is kept.
                top.entry(token_name(codec, id)).or_insert_with(|| Value::from(finite(logprob)));
            }
            top.entry(name.clone()).or_insert_with(|| Value::from(finite(scores.chosen)));
            top
        }));
        lists.tokens.push(name);
    }
    lists
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::testing::{ByteCodec, report};

    #[test]
    fn chat_entries_carry_true_bytes_and_finite_numbers() {
        let codec = ByteCodec;
        let mut token = report(0xF0, 0, -0.5);
        token.logprobs.as_mut().unwrap().top = vec![(0xF0, -0.5), (65, f32::NEG_INFINITY)];
        let json = serde_json::to_value(chat(&codec, &[token])).unwrap();
        assert_eq!(json["content"][0]["token"], "bytes:\\xf0");
        assert_eq!(json["content"][0]["bytes"], serde_json::json!([0xF0]));
        assert_eq!(json["content"][0]["top_logprobs"][1]["token"], "A");
        assert_eq!(json["content"][0]["top_logprobs"][1]["logprob"], -9999.0);
        assert!(json["refusal"].is_null());
    }

    #[test]
    fn legacy_lists_are_equally_long_and_offsets_count_characters() {
        let codec = ByteCodec;
        let tokens: Vec<TokenReport> = "aé!".bytes().map(|byte| report(u32::from(byte), 0, -1.0)).collect();
        let mut position = TextPosition::after("é!");
        let lists = legacy(&codec, &tokens, &mut position);
        assert_eq!(lists.text_offset, vec![2, 3, 3, 4]);
        assert_eq!(lists.tokens[0], "a");
        assert_eq!(lists.tokens.len(), lists.token_logprobs.len());
        assert_eq!(lists.tokens.len(), lists.top_logprobs.len());
        assert!(
            lists.top_logprobs.iter().zip(&lists.tokens).all(|(top, token)| top.as_ref().unwrap().contains_key(token))
        );
        assert_eq!(position.pass(&codec, 65), 5);
    }

    /// A prompt of text may spell control tokens and may have one in front that it does not spell.
    #[test]
    fn control_tokens_of_a_prompt_take_room_where_it_spells_them() {
        let codec = ByteCodec;
        let mut tokens: Vec<TokenReport> =
            [ByteCodec::EOS, 65, ByteCodec::EOS, 0xC3, 0xA9, 66].map(|id| report(id, 0, -1.0)).to_vec();
        tokens[0].logprobs = None;
        let lists = legacy_prompt(&codec, &tokens, "A<|eos|>éB");
        assert_eq!(lists.text_offset, [0, 0, 1, 8, 8, 9]);
        assert_eq!(lists.tokens[..3], ["<|eos|>", "A", "<|eos|>"]);
        let json = serde_json::to_value(&lists).unwrap();
        assert!(json["token_logprobs"][0].is_null() && json["top_logprobs"][0].is_null());
        assert_eq!(
            (&json["token_logprobs"][5], &json["top_logprobs"][5]),
            (&(-1.0).into(), &serde_json::json!({"B": -1.0}))
        );
    }

    #[test]
    fn a_control_token_takes_no_room_in_the_text() {
        let codec = ByteCodec;
        let mut position = TextPosition::default();
        assert_eq!(position.pass(&codec, ByteCodec::EOS), 0);
        assert_eq!(position.pass(&codec, 65), 0);
        assert_eq!(token_name(&codec, ByteCodec::EOS), "<|eos|>");
    }
}
