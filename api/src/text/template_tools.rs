//! What a chat template makes of tools, found by trying it. Owner: the chat template. Invariant: what a conversation says of
//! calls and their results is shown by the template or written as text; none of it is lost.

use super::guard::ControlGuard;
use super::template::{ChatInput, ChatTemplate};
use super::tools::ToolDialect;
use serde_json::{Value as Json, json};

/// What a chat template makes of tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ToolSupport {
    /// How models of this template write calls.
    pub dialect: ToolDialect,
    /// Whether it shows definitions of tools.
    pub shows_tools: bool,
    history: History,
}

/// How calls and results of a conversation reach the template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum History {
    /// As they are.
    AsSent,
    /// With an empty text where there is none.
    WithText,
    /// As text: calls are the assistant's, results the user's.
    #[default]
    AsText,
}

const NAME: &str = "zqname";
const ABOUT: &str = "zqabout";
const RESULT: &str = "zqresult";

impl ToolSupport {
    /// Tries a template on a call and its result.
    pub(super) fn of(template: &ChatTemplate) -> ToolSupport {
        let schema = json!({"type": "object", "properties": {"zqkey": {"type": "string"}}, "required": ["zqkey"]});
        let tool = json!({"type": "function", "function": {"name": NAME, "description": ABOUT, "parameters": schema}});
        let render = |messages: &[Json]| {
            let tools = std::slice::from_ref(&tool);
            let input = ChatInput { tools: Some(tools), ..ChatInput::of(messages, 0) };
            template.render(&input, &ControlGuard::default()).unwrap_or_default()
        };
        let shows_tools = render(&[user()]).contains(ABOUT);
        for (history, content) in [(History::AsSent, Json::Null), (History::WithText, "".into())] {
            let shown = render(&[user(), call(content), result()]);
            if shown.contains("zqvalue") && shown.contains(RESULT) {
                let dialect = if shows_tools { dialect(&shown) } else { ToolDialect::Plain };
                return ToolSupport { dialect, shows_tools, history };
            }
        }
        ToolSupport { dialect: ToolDialect::Plain, shows_tools, history: History::AsText }
    }

    /// The messages as the template takes them.
    pub fn fit(&self, messages: Vec<Json>) -> Vec<Json> {
        match self.history {
            History::AsSent => messages,
            History::WithText => messages.into_iter().map(with_text).collect(),
            History::AsText => as_text(messages),
        }
    }
}

fn user() -> Json {
    json!({"role": "user", "content": "a"})
}

fn call(content: Json) -> Json {
    // Some templates ask for ids of nine letters or digits.
    let function = json!({"name": NAME, "arguments": {"zqkey": "zqvalue"}});
    let calls = json!([{"id": "zqcall001", "type": "function", "function": function}]);
    json!({"role": "assistant", "content": content, "tool_calls": calls})
}

fn result() -> Json {
    json!({"role": "tool", "tool_call_id": "zqcall001", "name": NAME, "content": RESULT})
}

/// The dialect that the template itself wrote the call in.
fn dialect(shown: &str) -> ToolDialect {
    let mut known = [ToolDialect::Tagged, ToolDialect::Bare].into_iter();
    let found = known.find(|dialect| shown.contains(&dialect.write(NAME, "{\"zqkey\": \"zqvalue\"}")));
    found.unwrap_or_default()
}

fn with_text(mut message: Json) -> Json {
    if message["content"].is_null() {
        message["content"] = "".into();
    }
    message
}

/// Calls as the assistant's text, results as the user's; neighbouring turns of the user that come of it are joined, as
/// some templates want the speakers to take turns.
fn as_text(messages: Vec<Json>) -> Vec<Json> {
    let mut out: Vec<Json> = Vec::with_capacity(messages.len());
    let mut after_result = false;
    for message in messages {
        let is_result = message["role"] == "tool";
        let content = message["content"].as_str().unwrap_or_default();
        match out.last_mut().filter(|_| after_result && (is_result || message["role"] == "user")) {
            Some(last) => {
                let joined = format!("{}\n{content}", last["content"].as_str().unwrap_or_default());
                last["content"] = joined.into();
            }
            None if is_result => out.push(json!({"role": "user", "content": content})),
            None if message["tool_calls"].is_array() => out.push(json!({
                "role": "assistant",
                "content": calls_as_text(content, &message["tool_calls"]),
            })),
            None => out.push(message),
        }
        after_result = is_result;
    }
    out
}

fn calls_as_text(content: &str, calls: &Json) -> String {
    let mut lines: Vec<String> = Some(content).filter(|text| !text.is_empty()).map(str::to_owned).into_iter().collect();
    for call in calls.as_array().into_iter().flatten() {
        let text = |key: &str| call["function"][key].as_str().unwrap_or_default().to_owned();
        lines.push(ToolDialect::Plain.write(&text("name"), &text("arguments")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::template::NamedTokens;
    use super::*;

    fn support(source: &str) -> ToolSupport {
        ChatTemplate::new(source, NamedTokens::default()).unwrap().tools()
    }

    #[test]
    fn a_template_without_tools_gets_them_as_text() {
        let plain = support("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}");
        assert_eq!(plain, ToolSupport::default());
        let mut asked = call(Json::Null);
        asked["tool_calls"][0]["function"]["arguments"] = "{\"zqkey\": 1}".into();
        let fitted = plain.fit(vec![user(), asked, result(), result(), user(), user()]);
        let texts: Vec<_> = fitted.iter().map(|m| format!("{}:{}", m["role"], m["content"])).collect();
        assert_eq!(
            texts,
            [
                r#""user":"a""#,
                r#""assistant":"{\"name\": \"zqname\", \"arguments\": {\"zqkey\": 1}}""#,
                r#""user":"zqresult\nzqresult\na""#,
                r#""user":"a""#,
            ]
        );
    }

    #[test]
    fn the_dialect_is_the_one_the_template_writes() {
        let source = |call: &str| {
            format!(
                "{{{{ tools | tojson }}}}{{% for m in messages %}}{{{{ m.content }}}}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{{% endfor %}}"
            )
        };
        let tagged = r#"<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>"#;
        let bare = r#"{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}"#;
        let other = "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>";
        for (call, dialect) in [(tagged, ToolDialect::Tagged), (bare, ToolDialect::Bare), (other, ToolDialect::Plain)] {
            let found = support(&source(call));
            assert_eq!((found.dialect, found.shows_tools, found.history), (dialect, true, History::AsSent), "{call}");
        }
        let unshown = support(&source(tagged).replace("{{ tools | tojson }}", ""));
        assert_eq!((unshown.dialect, unshown.shows_tools), (ToolDialect::Plain, false));
        let wants_text = support(&source(tagged).replace("m.content", "m.content + ''"));
        assert_eq!((wants_text.dialect, wants_text.history), (ToolDialect::Tagged, History::WithText));
        assert_eq!(wants_text.fit(vec![call(Json::Null)])[0]["content"], "");
    }
}
