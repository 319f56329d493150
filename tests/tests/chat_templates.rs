//! Whole chat templates of real models against what Jinja2 itself makes of them (`fixtures/chat_templates.py`). Owner: the
//! text layer.

use serde_json::Value as Json;
use tokenrouter::text::tools::ToolDialect;
use tokenrouter::text::{ChatInput, ChatTemplate, ControlGuard, NamedTokens, TemplateError};
use tokenrouter_tests::conformance::{fixture, read_fixture};

/// The templates, how models of each call, and whether it takes results of tools.
const TEMPLATES: [(&str, ToolDialect, bool); 6] = [
    ("deepseek-r1", ToolDialect::Plain, true),
    ("gemma-2", ToolDialect::Plain, false),
    ("llama-3.1", ToolDialect::Bare, true),
    ("qwen2.5", ToolDialect::Tagged, true),
    ("qwen3", ToolDialect::Tagged, true),
    ("smollm3", ToolDialect::Plain, false),
];

fn text(value: &Json) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn render(template: &ChatTemplate, case: &Json, unix_seconds: i64, takes_results: bool) -> Json {
    let mut messages = case["messages"].as_array().expect("messages").clone();
    if takes_results {
        messages = template.tools().fit(messages);
    }
    let input = ChatInput {
        messages: &messages,
        tools: case["tools"].as_array().map(Vec::as_slice),
        variables: case["variables"].as_object(),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(true),
        unix_seconds,
    };
    match template.render(&input, &ControlGuard::default()) {
        Ok(text) => serde_json::json!({ "text": text }),
        Err(TemplateError::Refused(words)) => serde_json::json!({ "refused": words }),
        Err(error) => serde_json::json!({ "failed": error.to_string() }),
    }
}

#[test]
fn real_templates_render_as_jinja_renders_them() {
    let file: Json = read_fixture("chat-templates/expected.json");
    let unix_seconds = file["unix_seconds"].as_i64().expect("a time");
    let (templates, cases) = (file["templates"].as_object().unwrap(), file["cases"].as_object().unwrap());
    assert_eq!((templates.len(), cases.len()), (TEMPLATES.len(), 14));
    for (name, dialect, takes_results) in TEMPLATES {
        let path = fixture(&format!("chat-templates/{name}.jinja"));
        let source = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let said = &templates[name];
        let tokens = NamedTokens { bos: text(&said["bos_token"]), eos: text(&said["eos_token"]) };
        let template = ChatTemplate::new(&source, tokens).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(template.tools().dialect, dialect, "{name}");
        for (title, case) in cases {
            let rendered = render(&template, case, unix_seconds, takes_results);
            assert_eq!(rendered, said["expected"][title], "{name}: {title}");
        }
    }
}
