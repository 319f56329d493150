//! Chat templates: messages to the text a model was trained on. Owner: the model's text layer.
//!
//! Invariant: a template's control tokens are control tokens, a user's look-alikes are text: every string of the request
//! is escaped by the [`ControlGuard`] before the template sees it. A template cannot run for ever, nor write without
//! end, nor read anything but its input.

use super::guard::ControlGuard;
use super::python::{json_dumps, strftime};
use super::template_tools::ToolSupport;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde_json::{Map, Value as Json, json};

/// Instructions one rendering may take.
const FUEL: u64 = 20_000_000;
/// Longest rendered prompt, bytes.
const MAX_RENDERED_BYTES: usize = 64 << 20;
/// Longest template source, bytes.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Variable that carries the time of the request into `strftime_now`.
const NOW: &str = "__unix_seconds";
const NAME: &str = "chat_template";

/// A template cannot be used, or a request not be rendered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template does not compile or uses what does not exist here.
    #[error("chat template: {0}")]
    Unusable(String),
    /// The template refused the messages, in its own words.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// The messages do not fit the template.
    #[error("the chat template failed on these messages: {0}")]
    Failed(String),
}

/// What a template is rendered with.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// Messages in the form of the OpenAI API, oldest first.
    pub messages: &'a [Json],
    /// Tool definitions in the form of the OpenAI API.
    pub tools: Option<&'a [Json]>,
    /// Further variables (`chat_template_kwargs`), e.g. `enable_thinking`.
    pub variables: Option<&'a Map<String, Json>>,
    /// Whether the text ends with the head of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Time of the request, seconds since 1970 UTC.
    pub unix_seconds: i64,
}

impl<'a> ChatInput<'a> {
    /// Messages to be answered at this time, and nothing else.
    pub fn of(messages: &'a [Json], unix_seconds: i64) -> Self {
        ChatInput { messages, tools: None, variables: None, add_generation_prompt: true, unix_seconds }
    }
}

/// Texts of the tokens that templates refer to by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedTokens {
    /// `bos_token`.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: NamedTokens,
    tools: ToolSupport,
}

impl ChatTemplate {
    /// Compiles a template and tries it on a short conversation, so that a missing function shows now and not on the first request.
    ///
    /// # Errors
    /// [`TemplateError::Unusable`] with line and reason.
    pub fn new(source: &str, tokens: NamedTokens) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE_BYTES {
            let reason = format!("has {} bytes, more than the limit of {MAX_SOURCE_BYTES}", source.len());
            return Err(TemplateError::Unusable(reason));
        }
        let mut environment = environment().map_err(unusable)?;
        environment.add_template_owned(NAME, without_generation_blocks(source)).map_err(unusable)?;
        let mut template = ChatTemplate { environment, tokens, tools: ToolSupport::default() };
        template.try_out()?;
        template.tools = ToolSupport::of(&template);
        Ok(template)
    }

    /// How it is written, without the blocks that only trainers read.
    pub fn source(&self) -> Option<String> {
        self.environment.get_template(NAME).ok().map(|template| template.source().to_owned())
    }

    /// The names of the tokens it can write.
    pub fn tokens(&self) -> &NamedTokens {
        &self.tokens
    }

    /// What it makes of tools.
    pub fn tools(&self) -> ToolSupport {
        self.tools
    }

    /// Renders a conversation; the text is escaped and goes to [`super::Tokenizer::encode_escaped`].
    ///
    /// # Errors
    /// [`TemplateError::Refused`] with the template's own words, or [`TemplateError::Failed`].
    pub fn render(&self, input: &ChatInput, guard: &ControlGuard) -> Result<String, TemplateError> {
        self.render_raw(input, guard).map_err(|error| match raised(&error) {
            Some(message) => TemplateError::Refused(message),
            None => TemplateError::Failed(describe(&error)),
        })
    }

    fn render_raw(&self, input: &ChatInput, guard: &ControlGuard) -> Result<String, Error> {
        let context = self.context(input, guard);
        let mut out = Bounded::default();
        self.environment.get_template(NAME)?.render_captured_to(Value::from(Serde(context)), &mut out)?;
        String::from_utf8(out.0).map_err(|error| Error::new(ErrorKind::WriteFailure, error.to_string()))
    }

    fn context(&self, input: &ChatInput, guard: &ControlGuard) -> Map<String, Json> {
        let escaped = |value: &Json| escape_strings(value, guard);
        let mut context = Map::new();
        for (name, value) in input.variables.into_iter().flatten() {
            context.insert(name.clone(), escaped(value));
        }
        let messages: Vec<Json> =
            input.messages.iter().map(|message| escaped(&with_parsed_arguments(message))).collect();
        context.insert("messages".into(), messages.into());
        if let Some(tools) = input.tools.filter(|tools| !tools.is_empty()) {
            context.insert("tools".into(), tools.iter().map(escaped).collect());
        }
        context.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
        for (name, token) in [("bos_token", &self.tokens.bos), ("eos_token", &self.tokens.eos)] {
            if let Some(token) = token {
                context.insert(name.into(), token.as_str().into());
            }
        }
        context.insert(NOW.into(), input.unix_seconds.into());
        context
    }

    fn try_out(&self) -> Result<(), TemplateError> {
        let messages = [json!({ "role": "user", "content": "a" })];
        let input = ChatInput::of(&messages, 0);
        let unknown = [
            ErrorKind::UnknownFilter,
            ErrorKind::UnknownFunction,
            ErrorKind::UnknownMethod,
            ErrorKind::UnknownTest,
            ErrorKind::OutOfFuel,
        ];
        match self.render_raw(&input, &ControlGuard::default()) {
            Err(error) if unknown.contains(&error.kind()) => Err(unusable(error)),
            _ => Ok(()),
        }
    }
}

/// Jinja as chat templates expect it: block trimming and Python's methods, `tojson`, `raise_exception`, `strftime_now`.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_fuel(Some(FUEL));
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

/// `tojson` as transformers defines it: Python's `json.dumps`, nothing escaped for HTML.
fn tojson(value: &Value, args: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = args.get("indent")?;
    let sort_keys: Option<bool> = args.get("sort_keys")?;
    let _ensure_ascii: Option<bool> = args.get("ensure_ascii")?;
    args.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}")))?;
    Ok(Value::from_safe_string(json_dumps(&json, indent, sort_keys.unwrap_or(false))))
}

/// A message that a template raised.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, Error> {
    let message = ControlGuard::strip(&message);
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Raised(message)))
}

/// The message of `raise_exception`, wherever in the chain of causes it is.
fn raised(error: &Error) -> Option<String> {
    causes(error).find_map(|cause| cause.downcast_ref::<Raised>().map(|raised| raised.0.clone()))
}

fn strftime_now(state: &State, format: String) -> Result<String, Error> {
    let seconds = state.lookup(NOW).and_then(|value| i64::try_from(value).ok()).unwrap_or(0);
    strftime(seconds, &format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
}

fn causes(error: &Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |cause| cause.source())
}

/// An error and its causes on one line, without marks.
fn describe(error: &Error) -> String {
    let words: Vec<String> = causes(error).map(ToString::to_string).collect();
    ControlGuard::strip(&words.join(": "))
}

fn unusable(error: Error) -> TemplateError {
    TemplateError::Unusable(describe(&error))
}

/// `{% generation %}` marks what an assistant said, for training; rendering must pass through it, so it becomes a
/// condition that always holds, with its white-space control.
fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let word = tag.trim_start_matches(['-', '+']).trim_start();
        let length = word.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(word.len());
        let statement = match &word[..length] {
            "generation" => "if true",
            "endgeneration" => "endif",
            other => other,
        };
        out.push_str(&tag[..tag.len() - word.len()]);
        out.push_str(statement);
        rest = &word[length..];
    }
    out.push_str(rest);
    out
}

/// Every string of a value escaped, keys too.
fn escape_strings(value: &Json, guard: &ControlGuard) -> Json {
    match value {
        Json::String(text) => guard.escape_fragment(text).into_owned().into(),
        Json::Array(values) => values.iter().map(|value| escape_strings(value, guard)).collect(),
        Json::Object(fields) => fields
            .iter()
            .map(|(key, value)| (guard.escape_fragment(key).into_owned(), escape_strings(value, guard)))
            .collect(),
        other => other.clone(),
    }
}

/// The OpenAI API carries the arguments of a tool call as JSON text; templates expect the value itself.
fn with_parsed_arguments(message: &Json) -> Json {
    let mut message = message.clone();
    for call in message.get_mut("tool_calls").and_then(Json::as_array_mut).into_iter().flatten() {
        let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments")) else {
            continue;
        };
        let text = arguments.as_str().map(|text| if text.trim().is_empty() { "{}" } else { text });
        let parsed = text.and_then(|text| serde_json::from_str::<Map<String, Json>>(text).ok());
        if let Some(parsed) = parsed {
            *arguments = parsed.into();
        }
    }
    message
}

/// A buffer that refuses to grow beyond the limit.
#[derive(Default)]
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERED_BYTES {
            let reason = format!("the rendered text exceeds {MAX_RENDERED_BYTES} bytes");
            return Err(std::io::Error::other(reason));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
