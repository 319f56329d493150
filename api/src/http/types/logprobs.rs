//! Log-probabilities in the two shapes of the OpenAI API. Owner: the HTTP layer. Invariant: one entry a token, true bytes,
//! and only numbers JSON can carry: minus infinity is written as -9999.

use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt::Write;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::TokenReport;
use tokenrouter_core::text::{TextCodec, Utf8Stream};

/// What stands for minus infinity (as at vLLM).
const LOGPROB_MIN: f64 = -9999.0;

/// `choices[].logprobs` of chat.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ChatLogprobs {
    /// One entry a token.
    pub content: Vec<ChatToken>,
    /// Always null.
    pub refusal: Option<Vec<ChatToken>>,
}

/// A generated token.
#[derive(Clone, Debug, Serialize)]
pub struct ChatToken {
    /// The token and its log-probability.
    #[serde(flatten)]
    pub chosen: ScoredToken,
    /// The most probable tokens at this position, as many as asked for.
    pub top_logprobs: Vec<ScoredToken>,
}

/// A token with its log-probability.
#[derive(Clone, Debug, Serialize)]
pub struct ScoredToken {
    /// Its text; see [`token_name`].
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Its true bytes, also where they are only a part of a character.
    pub bytes: Vec<u8>,
}

/// `choices[].logprobs` of text completions: four lists of equal length.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LegacyLogprobs {
    /// Text of each token.
    pub tokens: Vec<String>,
    /// Log-probability of each token.
    pub token_logprobs: Vec<f64>,
    /// The most probable tokens at each position and the chosen one, by text.
    pub top_logprobs: Vec<Map<String, Value>>,
    /// Characters of the choice's text before each token.
    pub text_offset: Vec<usize>,
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
    utf8: Utf8Stream,
    begun: bool,
}

impl TextPosition {
    /// A choice whose text begins with `chars` characters that are not generated (an echoed prompt).
    pub fn after(chars: usize) -> Self {
        TextPosition { chars, ..TextPosition::default() }
    }

    /// Passes a token and returns where it started; a token inside a character starts where the character does.
    fn pass(&mut self, codec: &dyn TextCodec, id: TokenId) -> usize {
        let start = self.chars;
        if !codec.is_special(id) {
            let text = self.utf8.push(codec.token_bytes(id).unwrap_or_default());
            self.chars += text.chars().count();
            // The one leading space that decoding drops.
            if !self.begun && codec.strips_leading_space() && text.starts_with(' ') {
                self.chars -= 1;
            }
            self.begun |= !text.is_empty();
        }
        start
    }
}

/// The text completion shape of some tokens; `position` moves past them.
pub fn legacy(codec: &dyn TextCodec, tokens: &[TokenReport], position: &mut TextPosition) -> LegacyLogprobs {
    let mut lists = LegacyLogprobs::default();
    for report in tokens {
        let chosen = report.logprobs.as_ref().map_or(LOGPROB_MIN, |scores| finite(scores.chosen));
        let name = token_name(codec, report.id);
        let mut top = Map::new();
        for &(id, logprob) in report.logprobs.iter().flat_map(|scores| &scores.top) {
            // Descending order: of two tokens with the same text the more probable one is kept.
            top.entry(token_name(codec, id)).or_insert_with(|| Value::from(finite(logprob)));
        }
        top.entry(name.clone()).or_insert_with(|| Value::from(chosen));
        lists.text_offset.push(position.pass(codec, report.id));
        lists.tokens.push(name);
        lists.token_logprobs.push(chosen);
        lists.top_logprobs.push(top);
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
        let mut position = TextPosition::after(2);
        let lists = legacy(&codec, &tokens, &mut position);
        assert_eq!(lists.text_offset, vec![2, 3, 3, 4]);
        assert_eq!(lists.tokens[0], "a");
        assert_eq!(lists.tokens.len(), lists.token_logprobs.len());
        assert_eq!(lists.tokens.len(), lists.top_logprobs.len());
        assert!(lists.top_logprobs.iter().zip(&lists.tokens).all(|(top, token)| top.contains_key(token)));
        assert_eq!(position.pass(&codec, 65), 5);
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
