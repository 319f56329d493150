//! Tools of a chat request: what may be called, and whether it must be. Owner: the HTTP layer. Invariant: names are what
//! OpenAI allows, parameters are schemas of objects, and a choice names a tool that is there.

use super::fields::{Fields, wrong_type};
use crate::http::errors::ApiError;
use crate::text::tools::{Callable, Demand, ToolDialect, grammar};
use serde_json::{Map, Value, json};

/// Tools a request may have (OpenAI's limit).
pub(super) const TOOLS_MAX: usize = 128;
/// Characters of a name (OpenAI's limit).
pub(super) const NAME_MAX: usize = 64;

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name and parameters.
    pub callable: Callable,
    /// The definition as chat templates take it.
    pub definition: Value,
}

/// Whether the answer calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// It does not.
    None,
    /// The model chooses.
    #[default]
    Auto,
    /// It does.
    Required,
    /// It calls this one.
    Named(String),
}

/// How an answer with calls is made and read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calling {
    /// How calls are written.
    pub dialect: ToolDialect,
    /// What the answer may be.
    pub demand: Demand,
    /// The grammar of the answer, in llguidance's form of Lark.
    pub grammar: String,
}

/// What a request says of calls beside its tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calls {
    /// Whether to call.
    pub choice: Choice,
    /// Several calls in an answer.
    pub many: bool,
}

impl Calls {
    /// Takes `tool_choice` and `parallel_tool_calls` of a request with these tools.
    ///
    /// # Errors
    /// 400 naming the field that is wrong.
    pub fn read(fields: &mut Fields, tools: &[Tool]) -> Result<Self, ApiError> {
        let path = fields.path("tool_choice");
        let choice = match fields.take("tool_choice") {
            None => Choice::Auto,
            Some(value) => read_choice(value, &path)?,
        };
        let absent = |name: &String| tools.iter().all(|tool| tool.callable.name != *name);
        match &choice {
            Choice::Required if tools.is_empty() => {
                return Err(ApiError::field(path, "tool_choice \"required\" needs tools"));
            }
            Choice::Named(name) if absent(name) => {
                return Err(ApiError::field(path, format!("tool_choice names {name:?}, which is not among tools")));
            }
            _ => {}
        }
        Ok(Calls { choice, many: fields.flag("parallel_tool_calls")?.unwrap_or(true) })
    }

    /// How an answer by a model of this dialect is made; `None` without tools.
    ///
    /// # Errors
    /// 400 when the choice cannot be left to the model.
    pub fn plan(&self, tools: &[Tool], dialect: ToolDialect) -> Result<Option<Calling>, ApiError> {
        if tools.is_empty() || self.choice == Choice::None {
            return Ok(None);
        }
        if self.choice == Choice::Auto && dialect == ToolDialect::Plain {
            let message = "the chat template of this model does not show tools in a way that lets the model choose; \
                set tool_choice to \"required\" or to one function";
            return Err(ApiError::unsupported("tools", message));
        }
        let wanted = |tool: &&Tool| !matches!(&self.choice, Choice::Named(name) if *name != tool.callable.name);
        let callables: Vec<Callable> = tools.iter().filter(wanted).map(|tool| tool.callable.clone()).collect();
        let one = matches!(self.choice, Choice::Named(_));
        let demand = Demand { must: self.choice != Choice::Auto, many: self.many && !one };
        Ok(Some(Calling { dialect, demand, grammar: grammar(dialect, &callables, demand) }))
    }
}

/// Takes the tools.
///
/// # Errors
/// 400 naming the field that is wrong.
pub(super) fn read_tools(fields: &mut Fields) -> Result<Vec<Tool>, ApiError> {
    let path = fields.path("tools");
    let values = match fields.take("tools") {
        None => return Ok(Vec::new()),
        Some(Value::Array(values)) => values,
        Some(other) => return Err(wrong_type(&path, "a list of tools", &other)),
    };
    if values.len() > TOOLS_MAX {
        let message = format!("tools has {} entries; at most {TOOLS_MAX} are allowed", values.len());
        return Err(ApiError::field(path, message));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(values.len());
    for (at, value) in values.into_iter().enumerate() {
        let tool = read_tool(value, format!("{path}[{at}]"))?;
        if tools.iter().any(|other| other.callable.name == tool.callable.name) {
            let message = format!("the name {:?} is taken by a tool before it", tool.callable.name);
            return Err(ApiError::field(format!("{path}[{at}].function.name"), message));
        }
        tools.push(tool);
    }
    Ok(tools)
}

fn read_tool(value: Value, path: String) -> Result<Tool, ApiError> {
    let mut fields = Fields::of(value, path)?;
    let mut function = function_fields(&mut fields)?;
    let name = function.required_text("name")?;
    check_name(&function.path("name"), &name)?;
    let description = function.text("description")?;
    let schema_path = function.path("parameters");
    let schema = match function.take("parameters") {
        None => None,
        Some(Value::Object(schema)) => Some(schema),
        Some(other) => return Err(wrong_type(&schema_path, "a JSON schema", &other)),
    };
    if let Some(kind) = schema.as_ref().and_then(|schema| schema.get("type")).filter(|kind| *kind != "object") {
        let message = format!("{schema_path}.type must be \"object\", not {kind}; arguments have names");
        return Err(ApiError::field(format!("{schema_path}.type"), message));
    }
    // Arguments always follow the schema.
    function.flag("strict")?;
    function.finish()?;
    fields.finish()?;
    let mut shown = Map::from_iter([("name".to_owned(), Value::from(name.as_str()))]);
    shown.extend(description.map(|text| ("description".to_owned(), text.into())));
    shown.extend(schema.clone().map(|schema| ("parameters".to_owned(), schema.into())));
    let schema = schema.unwrap_or_else(|| Map::from_iter([("properties".to_owned(), json!({}))]));
    let definition = json!({"type": "function", "function": shown});
    Ok(Tool { callable: Callable { name, schema }, definition })
}

fn read_choice(value: Value, path: &str) -> Result<Choice, ApiError> {
    match value {
        Value::String(word) => match word.as_str() {
            "none" => Ok(Choice::None),
            "auto" => Ok(Choice::Auto),
            "required" => Ok(Choice::Required),
            other => {
                let shown: String = other.chars().take(32).collect();
                let message = format!("tool_choice {shown:?} is unknown; use none, auto, required or one function");
                Err(ApiError::field(path, message))
            }
        },
        Value::Object(_) => {
            let mut fields = Fields::of(value, path)?;
            let mut function = function_fields(&mut fields)?;
            let name = function.required_text("name")?;
            check_name(&function.path("name"), &name)?;
            function.finish()?;
            fields.finish()?;
            Ok(Choice::Named(name))
        }
        other => Err(wrong_type(path, "none, auto, required or one function", &other)),
    }
}

/// The members of `function`, in an object that is of type `function`.
///
/// # Errors
/// 400 naming the field that is wrong.
pub(super) fn function_fields(fields: &mut Fields) -> Result<Fields, ApiError> {
    let kind = fields.required_text("type")?;
    if kind != "function" {
        let shown: String = kind.chars().take(32).collect();
        let message = format!("type {shown:?} is not supported; only \"function\" is");
        return Err(ApiError::unsupported(fields.path("type"), message));
    }
    let path = fields.path("function");
    match fields.take("function") {
        Some(function) => Fields::of(function, path),
        None => Err(ApiError::field(path, "function is missing; send an object with a name")),
    }
}

/// Names are 1 to 64 letters, digits, `_` and `-`.
///
/// # Errors
/// 400 naming the field.
pub(super) fn check_name(path: &str, name: &str) -> Result<(), ApiError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(allowed) {
        return Ok(());
    }
    let shown: String = name.chars().take(NAME_MAX).collect();
    let message = format!("{shown:?} is no name of a function; use 1 to {NAME_MAX} letters, digits, _ and -");
    Err(ApiError::field(path, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<(Vec<Tool>, Calls), ApiError> {
        let mut fields = Fields::of(body, "")?;
        let tools = read_tools(&mut fields)?;
        let calls = Calls::read(&mut fields, &tools)?;
        fields.finish()?;
        Ok((tools, calls))
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    #[test]
    fn tools_are_read_and_shown_without_what_models_do_not_know() {
        let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let function = json!({"strict": true, "parameters": parameters, "description": "adds", "name": "add-1"});
        let (tools, calls) = read(json!({"tools": [{"type": "function", "function": function}, tool("b")]})).unwrap();
        let shown = tools[0].definition.to_string();
        let parameters = r#"{"type":"object","properties":{"a":{"type":"integer"}}}"#;
        let expected = r#"{"type":"function","function":{"name":"add-1","description":"adds","parameters":"#;
        assert_eq!(shown, format!("{expected}{parameters}}}}}"));
        assert_eq!(tools[1].definition, tool("b"));
        assert_eq!(calls, Calls { choice: Choice::Auto, many: true });
    }

    #[test]
    fn what_tools_cannot_be_is_refused_by_path() {
        let with = |function: Value| json!({"tools": [tool("a"), {"type": "function", "function": function}]});
        let cases = [
            ("tools", json!({"tools": "x"})),
            ("tools", json!({"tools": vec![tool("a"); 129]})),
            ("tools[0]", json!({"tools": [1]})),
            ("tools[0].type", json!({"tools": [{}]})),
            ("tools[0].type", json!({"tools": [{"type": "web_search"}]})),
            ("tools[0].function", json!({"tools": [{"type": "function"}]})),
            ("tools[1].function.name", with(json!({}))),
            ("tools[1].function.name", with(json!({"name": "a b"}))),
            ("tools[1].function.name", with(json!({"name": "x".repeat(65)}))),
            ("tools[1].function.name", with(json!({"name": "a"}))),
            ("tools[1].function.parameters", with(json!({"name": "b", "parameters": []}))),
            ("tools[1].function.parameters.type", with(json!({"name": "b", "parameters": {"type": "string"}}))),
            ("tools[1].function.strict", with(json!({"name": "b", "strict": 1}))),
            ("tools[1].function.params", with(json!({"name": "b", "params": {}}))),
            ("tool_choice", json!({"tools": [tool("a")], "tool_choice": "sometimes"})),
            ("tool_choice", json!({"tools": [tool("a")], "tool_choice": tool("b")})),
            ("tool_choice", json!({"tool_choice": "required"})),
            ("tool_choice", json!({"tool_choice": tool("a")})),
            ("tool_choice", json!({"tool_choice": 1})),
            ("tool_choice.type", json!({"tools": [tool("a")], "tool_choice": {"type": "allowed_tools"}})),
            ("tool_choice.function.name", json!({"tools": [tool("a")], "tool_choice": tool("")})),
            ("parallel_tool_calls", json!({"parallel_tool_calls": 1})),
        ];
        for (path, body) in cases {
            let error = read(body).unwrap_err();
            assert_eq!((error.status().as_u16(), error.param()), (400, Some(path)), "{error}");
        }
    }

    #[test]
    fn who_cannot_choose_must_be_told() {
        let (tools, _) = read(json!({"tools": [tool("a"), tool("b")]})).unwrap();
        let plan = |choice: Choice, dialect| Calls { choice, many: true }.plan(&tools, dialect);
        let refused = plan(Choice::Auto, ToolDialect::Plain).unwrap_err();
        assert_eq!((refused.status().as_u16(), refused.param()), (400, Some("tools")));
        assert_eq!(plan(Choice::None, ToolDialect::Plain), Ok(None));
        assert_eq!(Calls { choice: Choice::Auto, many: true }.plan(&[], ToolDialect::Plain), Ok(None));
        let named = plan(Choice::Named("b".to_owned()), ToolDialect::Tagged).unwrap().unwrap().grammar;
        assert!(named.contains("b\\\", ") && !named.contains("a\\\", ") && !named.contains('*'), "{named}");
        let any = plan(Choice::Required, ToolDialect::Tagged).unwrap().unwrap().grammar;
        assert!(any.contains("call_0 | call_1") && any.contains(")*"), "{any}");
    }
}
