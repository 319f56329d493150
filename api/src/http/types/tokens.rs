//! `POST /tokenize` and `/detokenize`: what they take and give. Owner: the HTTP layer. Invariant: the shapes are vLLM's,
//! so that its clients can ask.

use super::chat::Conversation;
use super::fields::{Fields, token_ids, wrong_type};
use crate::http::errors::ApiError;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use tokenrouter_core::ids::TokenId;

/// What is to become tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A text, as a raw prompt: what it spells of control tokens is parsed.
    Text {
        /// The text.
        text: String,
        /// Begin with the token a raw prompt begins with.
        add_special: bool,
    },
    /// A conversation, as the chat template writes it.
    Chat(Conversation),
}

/// A valid request for tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// Whose template and context; the routed name when absent.
    pub model: Option<String>,
    /// What is to become tokens.
    pub source: Source,
    /// Report the text of each token too.
    pub with_names: bool,
}

impl TokenizeRequest {
    /// Reads and checks the body.
    ///
    /// # Errors
    /// 400 naming the field that is wrong or unknown.
    pub fn read(body: Value) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body, "")?;
        let model = fields.text("model")?;
        let with_names = fields.flag("return_token_strs")?.unwrap_or(false);
        let source = match fields.take("prompt") {
            Some(Value::String(text)) => {
                Source::Text { text, add_special: fields.flag("add_special_tokens")?.unwrap_or(true) }
            }
            Some(other) => return Err(wrong_type("prompt", "a text", &other)),
            None => Source::Chat(read_chat(&mut fields)?),
        };
        fields.finish()?;
        Ok(TokenizeRequest { model, source, with_names })
    }
}

fn read_chat(fields: &mut Fields) -> Result<Conversation, ApiError> {
    let conversation = Conversation::read(fields)?;
    let head = |value: &Value| value == &Value::Bool(true);
    fields.neutral("add_generation_prompt", head, "the head of the answer always follows, as in a chat")?;
    let no = |value: &Value| value == &Value::Bool(false);
    fields.neutral("continue_final_message", no, "a message cannot be continued; use prompt")?;
    fields.neutral("add_special_tokens", no, "the chat template writes all special tokens")?;
    Ok(conversation)
}

/// A valid request for text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// Any of the served names: all share one vocabulary.
    pub model: Option<String>,
    /// Tokens, all in the vocabulary.
    pub tokens: Vec<TokenId>,
}

impl DetokenizeRequest {
    /// Reads and checks the body.
    ///
    /// # Errors
    /// 400 naming the field that is wrong or unknown.
    pub fn read(body: Value, vocab_size: u32) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body, "")?;
        let model = fields.text("model")?;
        let tokens = match fields.take("tokens") {
            Some(Value::Array(ids)) => token_ids("tokens", &ids, vocab_size)?,
            Some(other) => return Err(wrong_type("tokens", "a list of token ids", &other)),
            None => return Err(ApiError::field("tokens", "tokens is missing; send a list of token ids")),
        };
        fields.finish()?;
        Ok(DetokenizeRequest { model, tokens })
    }
}

/// The tokens of a text or a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Tokenized {
    /// How many.
    pub count: usize,
    /// Longest prompt plus answer of this model, in tokens.
    pub max_model_len: u32,
    /// Their ids.
    pub tokens: Vec<TokenId>,
    /// Their texts, when asked for; a part of a character is written `bytes:\xf0`.
    pub token_strs: Option<Vec<String>>,
}

/// What a client that keeps no tokenizer needs to know of the server's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenizerInfo {
    /// The token that begins a text, if the vocabulary or the chat template has one.
    pub bos_token: Option<String>,
    /// The token that ends a text, if the chat template names one.
    pub eos_token: Option<String>,
    /// How conversations are written.
    pub chat_template: Option<String>,
    /// Token ids are below it.
    pub vocab_size: u32,
    /// Longest prompt plus answer of the routed name, in tokens.
    pub model_max_length: u32,
}

/// The text of some tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Detokenized {
    /// The text, control tokens by their names; bytes that are no text show as U+FFFD.
    pub prompt: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_text_or_a_conversation_but_not_both() {
        let text = TokenizeRequest::read(json!({"prompt": "a", "return_token_strs": true, "messages": null})).unwrap();
        assert_eq!(text.source, Source::Text { text: "a".to_owned(), add_special: true });
        assert!(text.with_names && text.model.is_none());
        let bare = TokenizeRequest::read(json!({"prompt": "", "add_special_tokens": false, "model": "m"})).unwrap();
        assert_eq!(bare.source, Source::Text { text: String::new(), add_special: false });
        let turns = json!([{"role": "user", "content": "hi"}]);
        let chat = json!({"messages": turns, "add_generation_prompt": true, "add_special_tokens": false});
        let Source::Chat(conversation) = TokenizeRequest::read(chat).unwrap().source else { panic!("a chat") };
        assert_eq!(conversation.messages[0].content, "hi");
        for (field, body) in [
            ("messages", json!({})),
            ("messages", json!({"prompt": "a", "messages": turns})),
            ("prompt", json!({"prompt": ["a"]})),
            ("prompt", json!({"prompt": 3, "messages": turns})),
            ("add_generation_prompt", json!({"messages": turns, "add_generation_prompt": false})),
            ("continue_final_message", json!({"messages": turns, "continue_final_message": true})),
            ("add_special_tokens", json!({"messages": turns, "add_special_tokens": true})),
            ("add_special_tokens", json!({"prompt": "a", "add_special_tokens": 1})),
            ("return_token_strs", json!({"prompt": "a", "return_token_strs": "yes"})),
            ("max_tokens", json!({"prompt": "a", "max_tokens": 3})),
        ] {
            let error = TokenizeRequest::read(body.clone()).unwrap_err();
            assert_eq!((error.status().as_u16(), error.param()), (400, Some(field)), "{body}: {error}");
        }
    }

    #[test]
    fn tokens_are_ids_of_the_vocabulary() {
        assert_eq!(DetokenizeRequest::read(json!({"tokens": [3, 9]}), 10).unwrap().tokens, vec![3, 9]);
        assert!(DetokenizeRequest::read(json!({"tokens": []}), 10).unwrap().tokens.is_empty());
        for body in [json!({}), json!({"tokens": "3"}), json!({"tokens": [10]}), json!({"tokens": [-1]})] {
            assert_eq!(DetokenizeRequest::read(body.clone(), 10).unwrap_err().param(), Some("tokens"), "{body}");
        }
        assert_eq!(DetokenizeRequest::read(json!({"tokens": [], "n": 1}), 10).unwrap_err().param(), Some("n"));
    }
}
