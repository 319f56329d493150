//! The messages of a conversation. Owner: the HTTP layer. Invariant: roles and contents are what a chat template can show;
//! whatever it cannot is refused, and a result belongs to a call made before it.

use super::fields::{Fields, wrong_type};
use super::tools::{check_name, function_fields};
use crate::http::errors::ApiError;
use serde_json::{Map, Value, json};

/// Messages a conversation may have.
pub(super) const MESSAGES_MAX: usize = 4096;
/// Calls one message may make.
pub(super) const CALLS_MAX: usize = 128;
/// Characters of a speaker's name.
pub(super) const SPEAKER_CHARS_MAX: usize = 64;

const ROLES: &str = "system, developer, user, assistant or tool";

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions (`developer` is its newer name at OpenAI).
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// What a tool answered to a call.
    Tool,
}

impl Role {
    /// The word chat templates know.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// A call that the assistant made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Its id.
    pub id: String,
    /// What it called.
    pub name: String,
    /// The arguments as JSON text; what a model was cut at may be incomplete.
    pub arguments: String,
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; several text parts are joined as they are. Empty where a message only makes calls.
    pub content: String,
    /// Name of the speaker, or of the function that a result is of.
    pub name: Option<String>,
    /// Calls of an assistant.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a result answers.
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Message { role, content: content.into(), name: None, tool_calls: Vec::new(), tool_call_id: None }
    }

    /// As chat templates take it: in OpenAI's form, with the members it has.
    pub fn for_template(&self) -> Value {
        let mut members = Map::new();
        members.insert("role".into(), self.role.name().into());
        let silent = self.content.is_empty() && !self.tool_calls.is_empty();
        members.insert("content".into(), if silent { Value::Null } else { self.content.as_str().into() });
        if !self.tool_calls.is_empty() {
            let call = |call: &ToolCall| json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}});
            members.insert("tool_calls".into(), self.tool_calls.iter().map(call).collect());
        }
        for (key, text) in [("tool_call_id", &self.tool_call_id), ("name", &self.name)] {
            if let Some(text) = text {
                members.insert(key.into(), text.as_str().into());
            }
        }
        members.into()
    }

    /// Bytes of its texts.
    pub fn bytes(&self) -> usize {
        self.content.len() + self.tool_calls.iter().map(|call| call.arguments.len()).sum::<usize>()
    }
}

/// Takes the messages.
///
/// # Errors
/// 400 naming the field that is wrong or not available.
pub(super) fn read_messages(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
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
    let read = |(at, value)| read_message(value, format!("{path}[{at}]"));
    let mut messages = values.into_iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
    name_results(&mut messages, &path)?;
    Ok(messages)
}

fn read_message(value: Value, path: String) -> Result<Message, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let role = read_role(&mut fields)?;
    let tool_calls = read_calls(&mut fields, role)?;
    let content_path = fields.path("content");
    let content = match fields.take("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => join_parts(parts, &content_path)?,
        Some(other) => return Err(wrong_type(&content_path, "a string or a list of text parts", &other)),
        None if !tool_calls.is_empty() => String::new(),
        None => return Err(ApiError::field(content_path, "content is missing; send a string or a list of text parts")),
    };
    let tool_call_id = read_answered(&mut fields, role)?;
    let name = read_speaker(&mut fields)?;
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    fields.neutral("annotations", empty, "annotations are not supported")?;
    fields.finish()?;
    Ok(Message { role, content, name, tool_calls, tool_call_id })
}

fn read_role(fields: &mut Fields) -> Result<Role, ApiError> {
    let path = fields.path("role");
    match fields.text("role")?.as_deref() {
        Some("system" | "developer") => Ok(Role::System),
        Some("user") => Ok(Role::User),
        Some("assistant") => Ok(Role::Assistant),
        Some("tool") => Ok(Role::Tool),
        Some("function") => {
            let message = "role \"function\" is not supported; use role \"tool\" with the tool_call_id of the call";
            Err(ApiError::unsupported(path, message))
        }
        Some(other) => {
            let shown: String = other.chars().take(32).collect();
            Err(ApiError::field(path, format!("role {shown:?} is unknown; use {ROLES}")))
        }
        None => Err(ApiError::field(path, format!("role is missing; use {ROLES}"))),
    }
}

fn read_calls(fields: &mut Fields, role: Role) -> Result<Vec<ToolCall>, ApiError> {
    let path = fields.path("tool_calls");
    let values = match fields.take("tool_calls") {
        None => return Ok(Vec::new()),
        Some(Value::Array(values)) => values,
        Some(other) => return Err(wrong_type(&path, "a list of calls", &other)),
    };
    if !values.is_empty() && role != Role::Assistant {
        return Err(ApiError::field(path, "only the assistant makes calls; leave tool_calls out"));
    }
    if values.len() > CALLS_MAX {
        let message = format!("tool_calls has {} entries; at most {CALLS_MAX} are allowed", values.len());
        return Err(ApiError::field(path, message));
    }
    values.into_iter().enumerate().map(|(at, value)| read_call(value, format!("{path}[{at}]"))).collect()
}

fn read_call(value: Value, path: String) -> Result<ToolCall, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let id = fields.required_text("id")?;
    let mut function = function_fields(&mut fields)?;
    let name = function.required_text("name")?;
    check_name(&function.path("name"), &name)?;
    let arguments = function.required_text("arguments")?;
    function.finish()?;
    fields.finish()?;
    Ok(ToolCall { id, name, arguments })
}

fn read_answered(fields: &mut Fields, role: Role) -> Result<Option<String>, ApiError> {
    if role == Role::Tool {
        return fields.required_text("tool_call_id").map(Some);
    }
    fields.neutral("tool_call_id", |_| false, "only messages of role tool answer calls; leave tool_call_id out")?;
    Ok(None)
}

fn read_speaker(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let name = fields.text("name")?;
    match name.as_ref().map(|name| name.chars().count()) {
        Some(length) if !(1..=SPEAKER_CHARS_MAX).contains(&length) => {
            let message = format!("name has {length} characters; 1 to {SPEAKER_CHARS_MAX} are allowed");
            Err(ApiError::field(fields.path("name"), message))
        }
        _ => Ok(name),
    }
}

/// Every result must answer a call made before; it gets the name of what was called, which some templates show.
fn name_results(messages: &mut [Message], path: &str) -> Result<(), ApiError> {
    let mut called: Vec<(String, String)> = Vec::new();
    for (at, message) in messages.iter_mut().enumerate() {
        called.extend(message.tool_calls.iter().map(|call| (call.id.clone(), call.name.clone())));
        let Some(id) = &message.tool_call_id else { continue };
        match called.iter().rev().find(|(made, _)| made == id) {
            Some((_, name)) => message.name = message.name.take().or_else(|| Some(name.clone())),
            None => {
                let shown: String = id.chars().take(64).collect();
                let message = format!("no assistant message before this one makes a call with the id {shown:?}");
                return Err(ApiError::field(format!("{path}[{at}].tool_call_id"), message));
            }
        }
    }
    Ok(())
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
