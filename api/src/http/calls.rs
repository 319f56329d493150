//! Calls of tools in answers: the readers of the choices, and what they find in OpenAI's form. Owner: the answer's dialect.
//! Invariant: a streamed choice gives the calls that the whole one would; an answer that was cut has called nothing.

use super::types::response::{CallDelta, CallReport, Ending, FunctionDelta, FunctionReport};
use super::types::tools::Calling;
use crate::text::tools::{CallPart, CallReader};

const FUNCTION: &str = "function";

/// A whole answer taken apart.
pub struct Taken {
    /// Its text; `None` when there are calls and nothing else.
    pub content: Option<String>,
    /// Its calls.
    pub calls: Vec<CallReport>,
    /// Why it ended.
    pub ending: Ending,
}

/// What a piece of an answer adds.
pub struct Added {
    /// Text.
    pub content: String,
    /// Calls.
    pub calls: Vec<CallDelta>,
    /// Why it ended, with its last piece.
    pub ending: Ending,
}

/// Takes the answers to one request apart.
pub struct Calls {
    calling: Calling,
    /// By choice.
    readers: Vec<CallReader>,
}

impl Calls {
    /// For answers made like this.
    pub fn new(calling: Calling) -> Self {
        Calls { calling, readers: Vec::new() }
    }

    fn reader(&self) -> CallReader {
        CallReader::new(self.calling.dialect, self.calling.demand)
    }

    /// A whole answer.
    pub fn whole(&self, text: &str, ending: Ending) -> Taken {
        let mut reader = self.reader();
        let mut said = reader.push(text);
        said.text.push_str(&reader.finish().text);
        let calls: Vec<CallReport> = said.calls.into_iter().filter_map(report).collect();
        let content = Some(said.text).filter(|text| calls.is_empty() || !text.is_empty());
        Taken { content, calls, ending: settled(&reader, ending) }
    }

    /// The next piece of a choice's answer.
    pub fn piece(&mut self, index: usize, text: &str, ending: Ending) -> Added {
        while self.readers.len() <= index {
            self.readers.push(self.reader());
        }
        let reader = &mut self.readers[index];
        let mut said = reader.push(text);
        if ending.finish_reason.is_some() {
            said.text.push_str(&reader.finish().text);
        }
        let ending = settled(reader, ending);
        Added { content: said.text, calls: said.calls.into_iter().map(delta).collect(), ending }
    }
}

/// An answer that stopped after a whole call stopped for it.
fn settled(reader: &CallReader, ending: Ending) -> Ending {
    let called = reader.calls() > 0 && !reader.is_inside_call();
    match ending.finish_reason {
        Some("stop") if called => Ending { finish_reason: Some("tool_calls"), ..ending },
        _ => ending,
    }
}

fn new_id() -> String {
    format!("call_{}", uuid::Uuid::new_v4().simple())
}

/// A call read at once.
fn report(part: CallPart) -> Option<CallReport> {
    let function = FunctionReport { name: part.name?, arguments: part.arguments };
    Some(CallReport { id: new_id(), kind: FUNCTION, function })
}

fn delta(part: CallPart) -> CallDelta {
    let begins = part.name.is_some();
    CallDelta {
        index: part.index,
        id: begins.then(new_id),
        kind: begins.then_some(FUNCTION),
        function: FunctionDelta { name: part.name, arguments: part.arguments },
    }
}
