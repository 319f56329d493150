//! How models write calls of tools: the grammar that holds them to it, and the reader that takes answers apart.
//!
//! Owner: the model's text layer. Invariant: what the grammar of a dialect allows, its reader understands; reading a text
//! in pieces gives the same calls and the same text as reading it whole, and no text is lost but white space around calls.

use serde_json::{Map, Value as Json, json};
use std::fmt::Write as _;

/// How a model writes a call; [`super::ToolSupport`] finds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ToolDialect {
    /// `<tool_call>\n{"name": …, "arguments": …}\n</tool_call>`, one after the other, after text or at once: the way of
    /// Hermes and Qwen.
    Tagged,
    /// Text, or one `{"name": …, "parameters": …}`: the way of Llama 3.
    Bare,
    /// The chat template does not show tools, or has models call them in a way that is not known here. A model can be
    /// held to one `{"name": …, "arguments": …}`, but not be left the choice.
    #[default]
    Plain,
}

/// Texts of tokens that a vocabulary may call special and that must show in answers: [`ToolDialect::Tagged`] is read
/// from the text.
pub const SHOWN_TOKENS: [&str; 2] = [OPEN_TAG, "</tool_call>"];

const OPEN_TAG: &str = "<tool_call>";

impl ToolDialect {
    /// What a call starts with: models left the choice say it to call.
    fn marker(self) -> &'static str {
        match self {
            ToolDialect::Tagged => OPEN_TAG,
            ToolDialect::Bare | ToolDialect::Plain => "{\"name\": \"",
        }
    }

    /// Between the marker and the name.
    fn lead(self) -> &'static str {
        if self == ToolDialect::Tagged { "\n{\"name\": \"" } else { "" }
    }

    /// Between the name and the arguments.
    fn middle(self) -> &'static str {
        if self == ToolDialect::Bare { "\", \"parameters\": " } else { "\", \"arguments\": " }
    }

    /// After the arguments.
    fn tail(self) -> &'static str {
        if self == ToolDialect::Tagged { "}\n</tool_call>" } else { "}" }
    }

    /// Whether an answer can hold several calls.
    pub fn calls_many(self) -> bool {
        self == ToolDialect::Tagged
    }

    /// A call as the model would have written it.
    pub fn write(self, name: &str, arguments: &str) -> String {
        [self.marker(), self.lead(), name, self.middle(), arguments, self.tail()].concat()
    }
}

/// What a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Callable {
    /// Its name: letters, digits, `_`, `-`.
    pub name: String,
    /// JSON schema of the arguments; an object's.
    pub schema: Map<String, Json>,
}

/// What an answer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Only calls, not text.
    pub must: bool,
    /// Several calls, where the dialect has them.
    pub many: bool,
}

/// The grammar of answers, in llguidance's form of Lark.
pub fn grammar(dialect: ToolDialect, tools: &[Callable], demand: Demand) -> String {
    let names: Vec<String> = (0..tools.len()).map(|at| format!("call_{at}")).collect();
    let mut out = String::from("%llguidance {}\n");
    let marker = quoted(dialect.marker());
    let more = match demand.many && dialect.calls_many() {
        true => format!(" ({} call)*", quoted(&format!("\n{}", dialect.marker()))),
        false => String::new(),
    };
    match (demand.must, dialect) {
        (true, _) => writeln!(out, "start: {marker} call{more}"),
        (false, ToolDialect::Tagged) => {
            writeln!(out, "start: text | lead call{more}\ntext: TEXT\nlead[lazy]: TEXT {marker}\nTEXT: /(\\n|.)*/")
        }
        (false, _) => writeln!(
            out,
            "start: TEXT | {marker} call\nTEXT: /(\\n|.)*/ & ~/{}(\\n|.)*/",
            regex_escaped(dialect.marker())
        ),
    }
    .ok();
    writeln!(out, "call: {}", names.join(" | ")).ok();
    for (name, tool) in names.iter().zip(tools) {
        let head = quoted(&[dialect.lead(), tool.name.as_str(), dialect.middle()].concat());
        writeln!(out, "{name}: {head} %json {} {}", arguments(&tool.schema), quoted(dialect.tail())).ok();
    }
    out
}

/// The schema in the spelling that templates show to models (that of Python's `json.dumps`), and closed where it does not
/// say: a model is not to make up parameters.
fn arguments(schema: &Map<String, Json>) -> Json {
    const OPENING: [&str; 9] = [
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
        "if",
        "not",
    ];
    let mut schema = schema.clone();
    if schema.contains_key("properties") && !OPENING.iter().any(|key| schema.contains_key(*key)) {
        schema.insert("additionalProperties".into(), false.into());
    }
    schema.entry("type").or_insert_with(|| "object".into());
    let spelling = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    schema.insert("x-guidance".into(), spelling);
    schema.into()
}

fn quoted(text: &str) -> String {
    Json::from(text).to_string()
}

fn regex_escaped(text: &str) -> String {
    let special = |c: char| !c.is_ascii_alphanumeric() && c != ' ' && c != '"';
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// What a piece of an answer adds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// Text.
    pub text: String,
    /// Calls, in order; of each call at most one entry.
    pub calls: Vec<CallPart>,
}

/// What is new of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallPart {
    /// Which call of the answer.
    pub index: usize,
    /// Its name, when it begins.
    pub name: Option<String>,
    /// More of its arguments' JSON text.
    pub arguments: String,
}

/// Where a reader stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In text that a call may follow.
    Text,
    /// Behind a marker that ends at this place of what is held.
    Head(usize),
    /// In arguments.
    Arguments(Depth),
    /// Behind arguments.
    Tail,
    /// In text that no call can follow.
    Rest,
}

/// Place inside a JSON value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Depth {
    open: usize,
    in_string: bool,
    escaped: bool,
}

impl Depth {
    /// Goes over a character; true when the value ends with it.
    fn ends_with(&mut self, c: char) -> bool {
        match c {
            _ if self.escaped => self.escaped = false,
            '\\' if self.in_string => self.escaped = true,
            '"' => self.in_string = !self.in_string,
            '{' | '[' if !self.in_string => self.open += 1,
            '}' | ']' if !self.in_string => self.open = self.open.saturating_sub(1),
            _ => {}
        }
        self.open == 0 && !self.in_string
    }
}

/// How far a text goes along an expected one.
enum Along {
    Whole,
    Part,
    Off,
}

fn along(text: &str, expected: &str) -> Along {
    match (text.starts_with(expected), expected.starts_with(text)) {
        (true, _) => Along::Whole,
        (_, true) => Along::Part,
        _ => Along::Off,
    }
}

/// Takes one answer apart as it comes.
#[derive(Clone, Debug)]
pub struct CallReader {
    dialect: ToolDialect,
    must: bool,
    state: State,
    /// Read, but not said yet.
    held: String,
    calls: usize,
}

impl CallReader {
    /// At the start of an answer that meets this demand.
    pub fn new(dialect: ToolDialect, demand: Demand) -> Self {
        CallReader { dialect, must: demand.must, state: State::Text, held: String::new(), calls: 0 }
    }

    /// Calls begun so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Whether the arguments of the last call lack their end.
    pub fn is_inside_call(&self) -> bool {
        matches!(self.state, State::Arguments(_))
    }

    /// Reads on.
    pub fn push(&mut self, text: &str) -> Said {
        self.held.push_str(text);
        let mut said = Said::default();
        while self.step(&mut said) {}
        said
    }

    /// The rest, when the answer has ended. A call that was cut before its arguments began was none.
    pub fn finish(&mut self) -> Said {
        let held = std::mem::take(&mut self.held);
        let text = match self.state {
            State::Text if self.must => String::new(),
            State::Text if self.calls > 0 => held.trim().to_owned(),
            State::Text | State::Rest => held,
            State::Head(_) | State::Arguments(_) | State::Tail => String::new(),
        };
        Said { text, calls: Vec::new() }
    }

    /// One change of state; false when more text is needed for one.
    fn step(&mut self, said: &mut Said) -> bool {
        match self.state {
            State::Text if self.dialect == ToolDialect::Tagged => self.text(said),
            State::Text => match along(&self.held, self.dialect.marker()) {
                Along::Whole => self.enter(State::Head(self.dialect.marker().len())),
                Along::Part => false,
                Along::Off => self.enter(State::Rest),
            },
            State::Head(marker_end) => self.head(marker_end, said),
            State::Arguments(depth) => self.arguments(depth, said),
            State::Tail => match along(&self.held, self.dialect.tail()) {
                Along::Part => false,
                outcome => {
                    if matches!(outcome, Along::Whole) {
                        self.held.drain(..self.dialect.tail().len());
                    }
                    self.enter(if self.dialect.calls_many() { State::Text } else { State::Rest })
                }
            },
            State::Rest => {
                said.text.push_str(&std::mem::take(&mut self.held));
                false
            }
        }
    }

    fn enter(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    /// Says what cannot belong to a call any more: white space before one does.
    fn text(&mut self, said: &mut Said) -> bool {
        let found = self.held.find(OPEN_TAG);
        let until = found.unwrap_or_else(|| self.held.len() - marker_begun(&self.held, OPEN_TAG));
        let shown = self.held[..until].trim_end().len();
        said.text.push_str(&self.held[..shown]);
        self.held.drain(..shown);
        match found {
            Some(at) => self.enter(State::Head(at - shown + OPEN_TAG.len())),
            None => false,
        }
    }

    fn head(&mut self, marker_end: usize, said: &mut Said) -> bool {
        let (lead, middle) = (self.dialect.lead(), self.dialect.middle());
        let rest = &self.held[marker_end..];
        match along(rest, lead) {
            Along::Part => return false,
            Along::Off => return self.no_call(marker_end, said),
            Along::Whole => {}
        }
        let rest = &rest[lead.len()..];
        let Some(length) = rest.find('"') else { return false };
        match along(&rest[length..], middle) {
            Along::Part => return false,
            Along::Off => return self.no_call(marker_end, said),
            Along::Whole => {}
        }
        let name = rest[..length].to_owned();
        self.held.drain(..marker_end + lead.len() + length + middle.len());
        said.calls.push(CallPart { index: self.calls, name: Some(name), arguments: String::new() });
        self.calls += 1;
        self.enter(State::Arguments(Depth::default()))
    }

    /// What looked like a call is text after all.
    fn no_call(&mut self, marker_end: usize, said: &mut Said) -> bool {
        said.text.push_str(&self.held[..marker_end]);
        self.held.drain(..marker_end);
        self.enter(if self.dialect.calls_many() { State::Text } else { State::Rest })
    }

    fn arguments(&mut self, mut depth: Depth, said: &mut Said) -> bool {
        let end = self.held.char_indices().find(|&(_, c)| depth.ends_with(c)).map(|(at, c)| at + c.len_utf8());
        let arguments: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
        if !arguments.is_empty() {
            let index = self.calls - 1;
            match said.calls.last_mut().filter(|part| part.index == index) {
                Some(part) => part.arguments.push_str(&arguments),
                None => said.calls.push(CallPart { index, name: None, arguments }),
            }
        }
        self.state = if end.is_some() { State::Tail } else { State::Arguments(depth) };
        end.is_some()
    }
}

/// Bytes at the end of the text that may be the beginning of a marker.
fn marker_begun(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&length| text.ends_with(&marker[..length])).unwrap_or(0)
}

#[cfg(test)]
#[path = "tools_tests.rs"]
mod tests;
