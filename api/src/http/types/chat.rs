//! `POST /v1/chat/completions`: the request. Owner: the HTTP layer. Invariant: roles and contents are text the template
//! can show; whatever it cannot is refused.

use super::fields::{Fields, wrong_type};
use super::generation::{Generation, TOP_LOGPROBS_MAX, check_token_bounds};
use crate::http::errors::ApiError;
use serde_json::{Map, Value};

/// Messages a conversation may have.
pub(super) const MESSAGES_MAX: usize = 4096;

/// Template variables the server sets itself.
pub(super) const RESERVED_VARIABLES: [&str; 5] =
    ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions (`developer` is its newer name at OpenAI).
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// The word chat templates know.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; several text parts are joined as they are.
    pub content: String,
}

/// What a chat template is given.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The turns so far; at least one.
    pub messages: Vec<Message>,
    /// Further variables of the template (`chat_template_kwargs`), for example `enable_thinking`.
    pub variables: Option<Map<String, Value>>,
}

impl Conversation {
    /// Takes the messages and the variables of the template.
    ///
    /// # Errors
    /// 400 naming the field that is wrong or not available.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        Ok(Conversation { messages: read_messages(fields)?, variables: read_variables(fields)? })
    }
}

/// A valid chat request.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// What is said so far.
    pub conversation: Conversation,
    /// Alternatives to report per token, when log-probabilities were asked for.
    pub logprobs: Option<u8>,
    /// The shared fields.
    pub generation: Generation,
}

impl ChatRequest {
    /// Reads and checks the body.
    ///
    /// # Errors
    /// 400 naming the field that is wrong, unknown or not available.
    pub fn read(body: Value, vocab_size: u32) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body, "")?;
        let mut generation = Generation::read(&mut fields, vocab_size)?;
        let conversation = Conversation::read(&mut fields)?;
        let logprobs = read_logprobs(&mut fields)?;
        let newer = fields.count("max_completion_tokens")?;
        generation.stop.max_tokens = one_limit(generation.stop.max_tokens, newer)?;
        check_token_bounds(&generation.stop)?;
        refuse_unavailable(&mut fields)?;
        fields.finish()?;
        Ok(ChatRequest { conversation, logprobs, generation })
    }
}

/// `max_tokens` and its newer name `max_completion_tokens` mean the same.
fn one_limit(older: Option<u32>, newer: Option<u32>) -> Result<Option<u32>, ApiError> {
    match (older, newer) {
        (Some(older), Some(newer)) if older != newer => Err(ApiError::field(
            "max_completion_tokens",
            format!("max_tokens ({older}) and max_completion_tokens ({newer}) mean the same and differ; send one"),
        )),
        (older, newer) => Ok(newer.or(older)),
    }
}

fn read_logprobs(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX)?;
    match (wanted, top) {
        (false, Some(top)) if top > 0 => Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs: true")),
        (false, _) => Ok(None),
        (true, top) => Ok(Some(u8::try_from(top.unwrap_or(0)).unwrap_or(0))),
    }
}

fn refuse_unavailable(fields: &mut Fields) -> Result<(), ApiError> {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.neutral("tools", empty, "tools are not supported; leave tools out")?;
    fields.neutral("functions", empty, "functions are not supported; leave functions out")?;
    let none = |value: &Value| value == "none";
    fields.neutral("tool_choice", none, "tools are not supported; tool_choice can only be \"none\"")?;
    fields.neutral("function_call", none, "functions are not supported; function_call can only be \"none\"")?;
    fields.neutral(
        "response_format",
        |value| value.as_object().is_some_and(|format| format.len() == 1) && value["type"] == "text",
        "response_format can only be {\"type\": \"text\"}",
    )?;
    fields.neutral("echo", |value| value == &Value::Bool(false), "echo is for /v1/completions")
}

/// Variables for the template; the ones the server sets itself can not be replaced.
fn read_variables(fields: &mut Fields) -> Result<Option<Map<String, Value>>, ApiError> {
    let path = fields.path("chat_template_kwargs");
    let variables = match fields.take("chat_template_kwargs") {
        None => return Ok(None),
        Some(Value::Object(variables)) => variables,
        Some(other) => return Err(wrong_type(&path, "an object", &other)),
    };
    let taken = |name: &&String| RESERVED_VARIABLES.contains(&name.as_str()) || name.starts_with('_');
    match variables.keys().find(taken) {
        Some(name) => {
            Err(ApiError::field(format!("{path}.{name}"), format!("{name} is set by the server; leave it out")))
        }
        None => Ok(Some(variables)),
    }
}

fn read_messages(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let path = fields.path("messages");
    let values = match fields.take("messages") {
        None => return Err(ApiError::field(path, "messages is missing; send a list of {role, content}")),
        Some(Value::Array(values)) => values,
        Some(other) => return Err(wrong_type(&path, "a list of messages", &other)),
    };
    if values.is_empty() {
        return Err(ApiError::field(path, "messages is empty; send at least one message"));
    }
    if values.len() > MESSAGES_MAX {
        return Err(ApiError::field(
            path,
            format!("messages has {} entries; at most {MESSAGES_MAX} are allowed", values.len()),
        ));
    }
    values.into_iter().enumerate().map(|(at, value)| read_message(value, format!("{path}[{at}]"))).collect()
}

fn read_message(value: Value, path: String) -> Result<Message, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let role_path = fields.path("role");
    let role = match fields.text("role")?.as_deref() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some(role @ ("tool" | "function")) => {
            return Err(ApiError::unsupported(
                role_path,
                format!("role {role:?} is not supported: tools are not available"),
            ));
        }
        Some(other) => {
            let shown: String = other.chars().take(32).collect();
            let message = format!("role {shown:?} is unknown; use system, developer, user or assistant");
            return Err(ApiError::field(role_path, message));
        }
        None => return Err(ApiError::field(role_path, "role is missing; use system, developer, user or assistant")),
    };
    let content_path = fields.path("content");
    let content = match fields.take("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => join_parts(parts, &content_path)?,
        Some(other) => return Err(wrong_type(&content_path, "a string or a list of text parts", &other)),
        None => return Err(ApiError::field(content_path, "content is missing; send a string or a list of text parts")),
    };
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.neutral("tool_calls", empty, "tool calls are not supported")?;
    fields.neutral("annotations", empty, "annotations are not supported")?;
    fields.neutral("name", |_| false, "names of speakers are not supported; leave name out")?;
    fields.finish()?;
    Ok(Message { role, content })
}

fn join_parts(parts: Vec<Value>, path: &str) -> Result<String, ApiError> {
    let mut content = String::new();
    for (at, part) in parts.into_iter().enumerate() {
        let mut fields = Fields::of(part, format!("{path}[{at}]"))?;
        let kind_path = fields.path("type");
        match fields.text("type")?.as_deref() {
            Some("text") => {}
            Some(kind) => {
                let shown: String = kind.chars().take(32).collect();
                return Err(ApiError::unsupported(
                    kind_path,
                    format!("{shown:?} parts are not supported; only text parts are"),
                ));
            }
            None => return Err(ApiError::field(kind_path, "type is missing; only text parts are supported")),
        }
        let text_path = fields.path("text");
        let text = fields.text("text")?;
        content.push_str(&text.ok_or_else(|| ApiError::field(text_path, "text is missing"))?);
        fields.finish()?;
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(field: &str, value: Value) -> Result<ChatRequest, ApiError> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        body[field] = value;
        ChatRequest::read(body, 100)
    }

    #[test]
    fn messages_are_text_in_either_form() {
        let request = with(
            "messages",
            json!([
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c", "refusal": null, "tool_calls": null},
            ]),
        )
        .unwrap();
        let seen: Vec<_> = request.conversation.messages.iter().map(|m| (m.role, m.content.as_str())).collect();
        assert_eq!(seen, vec![(Role::System, "be brief"), (Role::User, "ab"), (Role::Assistant, "c")]);
    }

    #[test]
    fn what_a_message_cannot_be_is_refused_by_path() {
        let cases = [
            ("messages", json!([])),
            ("messages", json!("hi")),
            ("messages[0]", json!(["hi"])),
            ("messages[0].role", json!([{"content": "x"}])),
            ("messages[0].role", json!([{"role": "tool", "content": "x", "tool_call_id": "1"}])),
            ("messages[0].role", json!([{"role": "wizard", "content": "x"}])),
            ("messages[0].content", json!([{"role": "user"}])),
            ("messages[0].content", json!([{"role": "user", "content": 3}])),
            ("messages[0].name", json!([{"role": "user", "content": "x", "name": "bob"}])),
            ("messages[0].audio", json!([{"role": "user", "content": "x", "audio": {}}])),
            (
                "messages[1].content[0].type",
                json!([
                    {"role": "user", "content": "x"},
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]),
            ),
            ("messages[0].content[0].text", json!([{"role": "user", "content": [{"type": "text"}]}])),
        ];
        for (path, messages) in cases {
            let error = with("messages", messages).unwrap_err();
            assert_eq!((error.status().as_u16(), error.param()), (400, Some(path)), "{error}");
        }
    }

    #[test]
    fn unavailable_features_are_refused_and_their_neutral_values_accepted() {
        let cases = [
            ("tools", json!([{"type": "function"}]), json!([])),
            ("tool_choice", json!("auto"), json!("none")),
            ("response_format", json!({"type": "json_object"}), json!({"type": "text"})),
            ("functions", json!([{}]), json!(null)),
            ("echo", json!(true), json!(false)),
        ];
        for (field, bad, neutral) in cases {
            assert_eq!(with(field, bad).unwrap_err().param(), Some(field));
            with(field, neutral).unwrap();
        }
        for field in ["reasoning_effort", "audio", "best_of", "suffix", "prompt", "web_search_options"] {
            assert_eq!(with(field, json!("x")).unwrap_err().param(), Some(field));
        }
    }

    #[test]
    fn template_variables_are_passed_on_but_replace_nothing() {
        let request = with("chat_template_kwargs", json!({"enable_thinking": false})).unwrap();
        assert_eq!(request.conversation.variables.unwrap()["enable_thinking"], false);
        for bad in [json!({"messages": []}), json!({"bos_token": "x"}), json!({"__unix_seconds": 1}), json!("x")] {
            let error = with("chat_template_kwargs", bad.clone()).unwrap_err();
            assert!(error.param().unwrap().starts_with("chat_template_kwargs"), "{bad}");
        }
    }

    #[test]
    fn logprobs_need_their_flag_and_their_range() {
        assert_eq!(with("logprobs", json!(true)).unwrap().logprobs, Some(0));
        assert_eq!(with("top_logprobs", json!(3)).unwrap_err().param(), Some("top_logprobs"));
        let body = |top: i64| json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": true, "top_logprobs": top});
        assert_eq!(ChatRequest::read(body(20), 100).unwrap().logprobs, Some(20));
        assert_eq!(ChatRequest::read(body(21), 100).unwrap_err().param(), Some("top_logprobs"));
        assert_eq!(with("logprobs", json!(2)).unwrap_err().param(), Some("logprobs"));
    }

    #[test]
    fn both_names_of_the_token_limit_work_but_not_against_each_other() {
        assert_eq!(with("max_completion_tokens", json!(5)).unwrap().generation.stop.max_tokens, Some(5));
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "max_completion_tokens": 5});
        assert_eq!(ChatRequest::read(body, 100).unwrap_err().param(), Some("max_completion_tokens"));
    }
}
