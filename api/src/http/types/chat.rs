//! `POST /v1/chat/completions`: the request. Owner: the HTTP layer. Invariant: what a request says is honoured or refused
//! by name.

use super::fields::{Fields, wrong_type};
use super::generation::{Generation, TOP_LOGPROBS_MAX, check_token_bounds};
use super::messages::read_messages;
pub use super::messages::{Message, Role, ToolCall};
use super::tools::{Calls, Choice, Tool, read_tools};
use crate::http::errors::ApiError;
use serde_json::{Map, Value};

/// Template variables the server sets itself.
pub(super) const RESERVED_VARIABLES: [&str; 5] =
    ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];

/// What a chat template is given.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The turns so far; at least one.
    pub messages: Vec<Message>,
    /// What may be called.
    pub tools: Vec<Tool>,
    /// Further variables of the template (`chat_template_kwargs`), for example `enable_thinking`.
    pub variables: Option<Map<String, Value>>,
}

impl Conversation {
    /// A conversation of nothing but messages.
    pub fn of(messages: Vec<Message>) -> Self {
        Conversation { messages, tools: Vec::new(), variables: None }
    }

    /// Takes the messages, the tools and the variables of the template.
    ///
    /// # Errors
    /// 400 naming the field that is wrong or not available.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        Ok(Conversation {
            messages: read_messages(fields)?,
            tools: read_tools(fields)?,
            variables: read_variables(fields)?,
        })
    }

    /// Bytes of its texts.
    pub fn bytes(&self) -> usize {
        self.messages.iter().map(Message::bytes).sum()
    }
}

/// A valid chat request.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// What is said so far.
    pub conversation: Conversation,
    /// Whether the answer calls tools.
    pub calls: Calls,
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
        let mut conversation = Conversation::read(&mut fields)?;
        let calls = Calls::read(&mut fields, &conversation.tools)?;
        if calls.choice == Choice::None {
            conversation.tools.clear();
        }
        let logprobs = read_logprobs(&mut fields)?;
        let newer = fields.count("max_completion_tokens")?;
        generation.stop.max_tokens = one_limit(generation.stop.max_tokens, newer)?;
        check_token_bounds(&generation.stop)?;
        refuse_unavailable(&mut fields)?;
        fields.finish()?;
        Ok(ChatRequest { conversation, calls, logprobs, generation })
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
    fields.neutral("functions", empty, "functions are not supported; use tools")?;
    let none = |value: &Value| value == "none";
    fields.neutral("function_call", none, "functions are not supported; use tools and tool_choice")?;
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

    fn call(id: &str, name: &str) -> Value {
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}})
    }

    #[test]
    fn calls_and_results_reach_the_template_as_openai_writes_them() {
        let messages = json!([
            {"role": "user", "content": "x", "name": "bob"},
            {"role": "assistant", "content": null, "tool_calls": [call("1", "f"), call("2", "g")]},
            {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "2"},
            {"role": "assistant", "content": "y", "tool_calls": [call("1", "h")]},
            {"role": "tool", "content": "s", "tool_call_id": "1", "name": "own"},
        ]);
        let request = with("messages", messages.clone()).unwrap();
        let shown: Vec<Value> = request.conversation.messages.iter().map(Message::for_template).collect();
        let mut expected = messages;
        expected[2]["content"] = json!("r");
        expected[2]["name"] = json!("g");
        assert_eq!(json!(shown), expected);
    }

    #[test]
    fn a_choice_of_none_shows_no_tools() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let body = |choice: &str| json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": choice});
        let shown = |choice| ChatRequest::read(body(choice), 100).unwrap().conversation.tools.len();
        assert_eq!((shown("none"), shown("auto"), shown("required")), (0, 1, 1));
    }

    #[test]
    fn what_a_message_cannot_be_is_refused_by_path() {
        let cases = [
            ("messages", json!([])),
            ("messages", json!("hi")),
            ("messages[0]", json!(["hi"])),
            ("messages[0].role", json!([{"content": "x"}])),
            ("messages[0].role", json!([{"role": "function", "name": "f", "content": "x"}])),
            ("messages[0].tool_call_id", json!([{"role": "tool", "content": "x"}])),
            ("messages[0].tool_call_id", json!([{"role": "tool", "content": "x", "tool_call_id": "1"}])),
            ("messages[0].tool_call_id", json!([{"role": "user", "content": "x", "tool_call_id": "1"}])),
            ("messages[0].tool_calls", json!([{"role": "user", "content": "x", "tool_calls": [call("1", "f")]}])),
            ("messages[0].tool_calls", json!([{"role": "assistant", "tool_calls": vec![call("1", "f"); 129]}])),
            ("messages[0].tool_calls[0].id", json!([{"role": "assistant", "tool_calls": [{"type": "function"}]}])),
            (
                "messages[0].tool_calls[1].function.name",
                json!([{"role": "assistant", "tool_calls": [call("1", "f"), call("2", "f g")]}]),
            ),
            ("messages[0].content", json!([{"role": "assistant", "tool_calls": []}])),
            ("messages[0].role", json!([{"role": "wizard", "content": "x"}])),
            ("messages[0].content", json!([{"role": "user"}])),
            ("messages[0].content", json!([{"role": "user", "content": 3}])),
            ("messages[0].name", json!([{"role": "user", "content": "x", "name": ""}])),
            ("messages[0].name", json!([{"role": "user", "content": "x", "name": "x".repeat(65)}])),
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
            ("function_call", json!("auto"), json!("none")),
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
