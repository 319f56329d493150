//! JSON Schemas of the request bodies, for the OpenAPI document. Owner: the HTTP layer. Invariant: a schema allows what the
//! readers beside it take and forbids what they refuse, as far as JSON Schema can say it; the tests hold field names and
//! bounds of both together.

use super::chat::RESERVED_VARIABLES;
use super::completions::MAX_TOKENS_DEFAULT;
use super::generation::{CHOICES_MAX, STOP_BYTES_MAX, STOPS_MAX, TOP_LOGPROBS_MAX};
use super::messages::{CALLS_MAX, MESSAGES_MAX, SPEAKER_CHARS_MAX};
use super::tools::{NAME_MAX, TOOLS_MAX};
use serde_json::{Map, Value, json};

/// What the schemas need to know of the server.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The names that can be asked for.
    pub models: Vec<String>,
    /// Token ids are below it.
    pub vocab_size: u32,
    /// Whether it asks for API keys.
    pub guarded: bool,
}

impl Shape {
    fn token_ids(&self) -> Value {
        json!({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": self.vocab_size.saturating_sub(1)}})
    }

    fn model(&self) -> Value {
        json!({"type": "string", "enum": self.models, "description": "One of the names of GET /v1/models."})
    }
}

/// An object of these fields and no others; a field that is null counts as absent, whatever its name.
fn object(required: &[&str], properties: Value) -> Value {
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": {"type": "null"},
    })
}

/// A value that may be null, with a description.
fn optional(mut schema: Value, description: &str) -> Value {
    if let Some(choices) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        choices.push(Value::Null);
    }
    match schema.get("type").cloned() {
        Some(kind) => schema["type"] = json!([kind, "null"]),
        None => schema = json!({"anyOf": [schema, {"type": "null"}]}),
    }
    schema["description"] = json!(description);
    schema
}

/// The members of an object written with `json!`.
fn members(object: Value) -> Map<String, Value> {
    match object {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

fn flag(description: &str) -> Value {
    optional(json!({"type": "boolean"}), description)
}

fn integer(low: i64, high: i64, description: &str) -> Value {
    optional(json!({"type": "integer", "minimum": low, "maximum": high}), description)
}

fn number(low: f64, high: f64, description: &str) -> Value {
    optional(json!({"type": "number", "minimum": low, "maximum": high}), description)
}

/// A field that is there for the sake of clients which always send it: only this value is taken.
fn only(value: Value, description: &str) -> Value {
    json!({"enum": [value, null], "description": description})
}

fn no_items(description: &str) -> Value {
    optional(json!({"type": "array", "maxItems": 0}), description)
}

fn response_format() -> Value {
    let kind = |name: &str| json!({"type": "string", "const": name});
    let named = object(
        &["name"],
        json!({
            "name": {"type": "string", "pattern": format!("^[a-zA-Z0-9_-]{{1,{NAME_MAX}}}$")},
            "description": optional(json!({"type": "string"}), "Not used."),
            "schema": optional(json!({"type": "object"}), "JSON schema of the answer. Default: any object."),
            "strict": flag("Accepted; answers always follow the schema."),
        }),
    );
    let formats = [
        object(&["type"], json!({"type": kind("text")})),
        object(&["type"], json!({"type": kind("json_object")})),
        object(&["type", "json_schema"], json!({"type": kind("json_schema"), "json_schema": named})),
    ];
    optional(json!({"anyOf": formats}), "What the answer must be; it ends when it is complete. Default: text.")
}

/// The fields of `Generation`.
fn generation(shape: &Shape) -> Map<String, Value> {
    let mut fields = stopping(shape);
    fields.extend(members(json!({
        "model": shape.model(),
        "n": integer(1, CHOICES_MAX, "Choices per prompt; choice i has seed + i."),
        "stream": flag("Answer as server-sent events."),
        "stream_options": optional(
            object(&[], json!({
                "include_usage": flag("A last chunk that carries the usage."),
                "continuous_usage_stats": flag("The usage so far on every chunk."),
            })),
            "Only with stream: true.",
        ),
        "temperature": number(0.0, 2.0, "0 takes the most probable token. Default: the model's, else 1."),
        "top_p": number(0.0, 1.0, "Nucleus sampling. Default: the model's, else 1."),
        "top_k": integer(-1, i64::from(i32::MAX), "Most probable tokens to choose from; 0 and -1 mean all."),
        "min_p": number(0.0, 1.0, "Least probability relative to the most probable token's."),
        "repetition_penalty": number(0.01, 10.0, "Divides the logits of tokens already seen."),
        "presence_penalty": number(-2.0, 2.0, "Taken off the logits of tokens already generated."),
        "frequency_penalty": number(-2.0, 2.0, "Taken off the logits for each time a token was generated."),
        "logit_bias": optional(
            json!({
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            }),
            "From token id to what is added to its logit.",
        ),
        "seed": optional(
            json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX}),
            "Any 64-bit number; the same seed gives the same answer.",
        ),
        "routing": optional(json!({"type": "object"}), "Parameters of the routing algorithm; see GET /v1/routers."),
        "return_token_models": flag("Report which model made each token."),
        "return_token_details": flag("Report each token's text, model, entropy and time, and what the routing dropped in its place."),
        "user": optional(json!({"type": "string"}), "Accepted and not used."),
        "metadata": optional(json!({"type": "object"}), "Accepted and not used."),
        "store": only(json!(false), "Nothing is stored."),
        "response_format": response_format(),
    })));
    fields
}

/// The fields of `StopRules`.
fn stopping(shape: &Shape) -> Map<String, Value> {
    let stop = json!({"type": "string", "minLength": 1, "maxLength": STOP_BYTES_MAX});
    members(json!({
        "max_tokens": integer(1, i64::from(i32::MAX), "Most tokens of an answer."),
        "min_tokens": integer(0, i64::from(i32::MAX), "Fewest tokens of an answer; at most max_tokens."),
        "ignore_eos": flag("Go on after an end-of-text token."),
        "stop": optional(
            json!({"anyOf": [stop, {"type": "array", "items": stop, "maxItems": STOPS_MAX}]}),
            "Texts that end an answer.",
        ),
        "include_stop_str_in_output": flag("Keep the stop string in the answer."),
        "stop_token_ids": optional(shape.token_ids(), "Tokens that end an answer."),
    }))
}

/// An object of type `function` with these members of its function.
fn function(required: &[&str], mut members: Value, mut beside: Value) -> Value {
    members["name"] = json!({"type": "string", "pattern": format!("^[a-zA-Z0-9_-]{{1,{NAME_MAX}}}$")});
    beside["type"] = json!({"type": "string", "const": "function"});
    beside["function"] = object(required, members);
    let names: Vec<&str> = beside.as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
    object(&names, beside.clone())
}

fn messages() -> Value {
    let part =
        object(&["type", "text"], json!({"type": {"type": "string", "const": "text"}, "text": {"type": "string"}}));
    let content = json!({"anyOf": [{"type": "string"}, {"type": "array", "items": part}]});
    let name = json!({"type": "string", "minLength": 1, "maxLength": SPEAKER_CHARS_MAX});
    let call =
        function(&["name", "arguments"], json!({"arguments": {"type": "string"}}), json!({"id": {"type": "string"}}));
    let turn = |roles: &[&str], required: &[&str], extra: Value| {
        let mut fields = members(json!({
            "role": {"type": "string", "enum": roles},
            "content": content,
            "name": optional(name.clone(), "Who speaks, where the chat template shows it."),
            "annotations": no_items("Annotations are not supported."),
            "tool_calls": no_items("Only the assistant makes calls."),
            "tool_call_id": {"type": "null", "description": "Only messages of role tool answer calls."},
        }));
        fields.extend(members(extra));
        object(&[&["role"], required].concat(), Value::Object(fields))
    };
    let said = turn(&["system", "developer", "user", "assistant"], &["content"], json!({}));
    let calls = json!({"type": "array", "items": call, "minItems": 1, "maxItems": CALLS_MAX});
    let nothing = json!({"anyOf": [content, {"type": "null"}]});
    let called = turn(&["assistant"], &["tool_calls"], json!({"content": nothing, "tool_calls": calls}));
    let answered = turn(&["tool"], &["content", "tool_call_id"], json!({"tool_call_id": {"type": "string"}}));
    let message = json!({"anyOf": [said, called, answered]});
    json!({"type": "array", "items": message, "minItems": 1, "maxItems": MESSAGES_MAX})
}

fn tools() -> Value {
    let about = json!({
        "description": optional(json!({"type": "string"}), "For the model."),
        "parameters": optional(json!({"type": "object"}), "JSON schema of an object; none without it."),
        "strict": flag("Accepted; arguments always follow the schema."),
    });
    let tool = function(&["name"], about, json!({}));
    optional(json!({"type": "array", "items": tool, "maxItems": TOOLS_MAX}), "Functions that the answer may call.")
}

fn tool_choice() -> Value {
    let one = function(&["name"], json!({}), json!({}));
    let choice = json!({"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, one]});
    optional(choice, "Whether the answer calls tools, or which one. Default: auto.")
}

fn template_variables() -> Value {
    let names = json!({"not": {"anyOf": [{"enum": RESERVED_VARIABLES}, {"pattern": "^_"}]}});
    let variables = json!({"type": "object", "propertyNames": names});
    optional(variables, "Further variables of the chat template, for example enable_thinking.")
}

/// The body of `POST /v1/chat/completions`.
pub fn chat(shape: &Shape) -> Value {
    let mut fields = generation(shape);
    fields.extend(members(json!({
        "messages": messages(),
        "max_completion_tokens": integer(1, i64::from(i32::MAX), "The newer name of max_tokens."),
        "logprobs": flag("Report log-probabilities."),
        "top_logprobs": integer(0, TOP_LOGPROBS_MAX, "Alternatives per token; only with logprobs: true."),
        "chat_template_kwargs": template_variables(),
        "tools": tools(),
        "tool_choice": tool_choice(),
        "parallel_tool_calls": flag("Several calls in an answer, where the model's way of calling has them. Default: true."),
        "functions": no_items("Use tools."),
        "function_call": only(json!("none"), "Use tools."),
        "echo": only(json!(false), "For /v1/completions."),
    })));
    object(&["model", "messages"], Value::Object(fields))
}

/// The body of `POST /v1/completions`.
pub fn completion(shape: &Shape) -> Value {
    let mut ids = shape.token_ids();
    ids["minItems"] = json!(1);
    let text = json!({"type": "string"});
    let list = json!({
        "type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1, "maxItems": CHOICES_MAX,
    });
    let mut fields = generation(shape);
    fields.extend(members(json!({
        "prompt": {
            "anyOf": [text, ids, list],
            "description": "A text, a list of texts, a list of token ids, or a list of such lists.",
        },
        "echo": flag("Put the prompt before the completion."),
        "logprobs": integer(0, TOP_LOGPROBS_MAX, "Report log-probabilities, with so many alternatives per token."),
        "best_of": integer(1, CHOICES_MAX, "Only the value of n."),
        "suffix": only(json!(""), "Not available."),
    })));
    fields["max_tokens"]["default"] = json!(MAX_TOKENS_DEFAULT);
    object(&["model", "prompt"], Value::Object(fields))
}

/// The body of `POST /tokenize`: a text or a conversation.
pub fn tokenize(shape: &Shape) -> Value {
    let model = optional(shape.model(), "Default: the routed name.");
    let names = flag("Report the text of each token too.");
    let text = object(
        &["prompt"],
        json!({
            "model": model,
            "prompt": {"type": "string"},
            "add_special_tokens": flag("Begin as a raw prompt does. Default: true."),
            "return_token_strs": names,
        }),
    );
    let chat = object(
        &["messages"],
        json!({
            "model": model,
            "messages": messages(),
            "tools": tools(),
            "prompt": {"type": "null", "description": "A text or a conversation, not both."},
            "chat_template_kwargs": template_variables(),
            "add_generation_prompt": only(json!(true), "The answer's head always follows, as in a chat."),
            "continue_final_message": only(json!(false), "Not available."),
            "add_special_tokens": only(json!(false), "The chat template writes all of them."),
            "return_token_strs": names,
        }),
    );
    json!({"anyOf": [text, chat]})
}

/// The body of `POST /detokenize`.
pub fn detokenize(shape: &Shape) -> Value {
    object(
        &["tokens"],
        json!({"model": optional(shape.model(), "All models share one vocabulary."), "tokens": shape.token_ids()}),
    )
}

#[cfg(test)]
mod tests {
    use super::super::chat::ChatRequest;
    use super::super::completions::CompletionRequest;
    use super::super::fields::taken;
    use super::super::tokens::{DetokenizeRequest, TokenizeRequest};
    use super::*;
    use crate::http::errors::ApiError;
    use std::collections::BTreeSet;

    const VOCAB: u32 = 100;

    /// A body, its schema, its reader, and a body that fills all its objects.
    struct Case {
        schema: Value,
        read: fn(Value) -> Result<(), ApiError>,
        body: Value,
    }

    fn cases() -> [Case; 5] {
        let shape = Shape { models: vec!["m".to_owned()], vocab_size: VOCAB, guarded: false };
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let parts = json!([
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ]);
        let function = json!({"type": "function", "function": {"name": "f"}});
        let [text, chat] = [0, 1].map(|index| tokenize(&shape)["anyOf"][index].clone());
        let stream = json!({"include_usage": true});
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}});
        [
            Case {
                schema: super::chat(&shape),
                read: |body| ChatRequest::read(body, VOCAB).map(drop),
                body: json!({"model": "m", "messages": parts, "tools": [function], "tool_choice": function, "response_format": format,
                    "stream": true, "stream_options": stream, "logprobs": true}),
            },
            Case {
                schema: completion(&shape),
                read: |body| CompletionRequest::read(body, VOCAB).map(drop),
                body: json!({"model": "m", "prompt": "hi", "stream": true, "stream_options": stream,
                    "response_format": format}),
            },
            Case { schema: text, read: |body| TokenizeRequest::read(body).map(drop), body: json!({"prompt": "hi"}) },
            Case {
                schema: chat,
                read: |body| TokenizeRequest::read(body).map(drop),
                body: json!({"messages": parts, "tools": [function]}),
            },
            Case {
                schema: detokenize(&shape),
                read: |body| DetokenizeRequest::read(body, VOCAB).map(drop),
                body: json!({"tokens": [1]}),
            },
        ]
    }

    /// Paths of all fields of a schema, without the places in lists: `messages.content.text`.
    fn fields(schema: &Value, at: &str, found: &mut BTreeSet<String>) {
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
            fields(property, &path, found);
            found.insert(path);
        }
        let inner = schema["anyOf"].as_array().into_iter().flatten();
        inner.chain(schema.get("items")).for_each(|inner| fields(inner, at, found));
    }

    /// A path as errors name it, without the places in lists.
    fn without_places(path: &str) -> String {
        let outside = |(at, part): (usize, &str)| {
            if at == 0 { part.to_owned() } else { part.split_once(']').unwrap().1.to_owned() }
        };
        path.split('[').enumerate().map(outside).collect()
    }

    #[test]
    fn what_a_reader_takes_is_in_its_schema_and_nothing_else() {
        for Case { schema, read, body } in cases() {
            let taken = taken::during(|| read(body.clone()).unwrap());
            let taken: BTreeSet<String> = taken.iter().map(|path| without_places(path)).collect();
            let mut written = BTreeSet::new();
            fields(&schema, "", &mut written);
            assert_eq!(taken, written);
            for name in schema["required"].as_array().unwrap() {
                let mut lacking = body.clone();
                lacking.as_object_mut().unwrap().remove(name.as_str().unwrap());
                assert!(read(lacking).is_err(), "{name} is required");
            }
        }
    }

    /// Values at the edge of a schema, inside and outside.
    fn edges(schema: &Value) -> (Vec<Value>, Vec<Value>) {
        let (mut inside, mut outside) = (vec![Value::Null], Vec::new());
        let whole = schema["type"].as_array().is_some_and(|kinds| kinds.contains(&json!("integer")));
        for (key, step) in [("minimum", -1), ("maximum", 1)] {
            let Some(edge) = schema.get(key) else { continue };
            inside.push(edge.clone());
            outside.push(match edge.as_i64() {
                Some(edge) if whole => edge.checked_add(step).map_or(json!(edge as f64 * 2.0), Value::from),
                _ => json!(edge.as_f64().unwrap() + 0.001 * step as f64),
            });
        }
        if whole {
            outside.push(json!(1.5));
        }
        if let Some(choices) = schema["enum"].as_array() {
            inside.extend(choices.clone());
            outside.push(json!("no such choice"));
        }
        if let Some(most) = schema["maxItems"].as_u64() {
            outside.push(Value::Array(vec![json!({}); most as usize + 1]));
        }
        let kinds = schema["type"].as_array().cloned().unwrap_or_default();
        let others = [("string", json!("x")), ("boolean", json!(true)), ("number", json!(0.5)), ("object", json!({}))];
        let others = others.into_iter().filter(|(kind, _)| !kinds.is_empty() && !kinds.contains(&json!(kind)));
        outside.extend(others.map(|(_, value)| value));
        (inside, outside)
    }

    #[test]
    fn the_bounds_of_a_schema_are_those_of_its_reader() {
        for Case { schema, read, body } in cases() {
            let required = schema["required"].as_array().unwrap();
            for (name, property) in schema["properties"].as_object().unwrap() {
                // Its value must be that of another field, or names a model, which the reader does not know.
                if required.contains(&json!(name))
                    || ["best_of", "model", "stream", "logprobs"].contains(&name.as_str())
                {
                    continue;
                }
                let with = |value: &Value| {
                    let mut body = body.clone();
                    // An answer in a form does not go with some of the other fields.
                    body.as_object_mut().unwrap().remove("response_format");
                    body[name] = value.clone();
                    read(body)
                };
                let (inside, outside) = edges(property);
                for value in inside {
                    let refused = with(&value).err().filter(|error| error.param() == Some(name));
                    assert!(refused.is_none(), "{name} = {value}: {refused:?}");
                }
                for value in outside {
                    let error = with(&value).expect_err(&format!("{name} = {value} is outside {property}"));
                    let named = error.param().is_some_and(|param| param.starts_with(name.as_str()));
                    assert!(named && error.status().as_u16() == 400, "{name} = {value}: {error}");
                }
            }
        }
    }

    #[test]
    fn unknown_fields_are_taken_only_as_null() {
        for Case { schema, read, body } in cases() {
            assert_eq!(schema["additionalProperties"], json!({"type": "null"}));
            let with = |value: Value| {
                let mut body = body.clone();
                body["no_such_field"] = value;
                read(body)
            };
            with(Value::Null).unwrap();
            assert_eq!(with(json!(1)).unwrap_err().param(), Some("no_such_field"));
        }
    }
}
