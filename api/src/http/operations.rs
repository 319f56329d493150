//! Every route of the server: where it is, who answers, what it takes and what it gives. Owner: the HTTP layer. Invariant:
//! the routes and the OpenAPI document are made from this one list, so neither has what the other lacks.

use super::types::response::{ChatChoice, ChatChunkChoice, Envelope, TextChoice};
use super::types::schema::{self, Shape};
use super::types::tokens::{Detokenized, Tokenized, TokenizerInfo};
use super::{admin, chat, completions, dashboard, health, models, openapi, routers, tokens, version};
use actix_web::http::Method;
use actix_web::{Route, web};
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

/// A path and the one method it answers to.
pub struct Operation {
    /// The path; `{id:.+}` is a parameter and its pattern.
    pub path: &'static str,
    /// The method.
    pub method: Method,
    /// Who answers, whatever the method.
    pub handler: fn() -> Route,
    /// Its name for programs that are made from the document.
    pub id: &'static str,
    /// What it does, in a line.
    pub summary: &'static str,
    /// Schema of the body, if it takes one.
    pub body: Option<fn(&Shape) -> Value>,
    /// What it gives: from media type to `{"schema": …}`.
    pub answer: fn(&mut SchemaGenerator) -> Value,
    /// Statuses of its errors.
    pub errors: &'static [u16],
}

/// What can go wrong with any request.
const ANY: &[u16] = &[401, 404];
/// What can go wrong with a body.
const BODY: &[u16] = &[400, 401, 404, 408, 413, 415, 500];
/// What can go wrong with a body and while generating.
const GENERATES: &[u16] = &[400, 401, 404, 408, 413, 415, 429, 500, 503, 504];

/// All of them.
pub static OPERATIONS: &[Operation] = &[
    Operation {
        path: "/v1/chat/completions",
        method: Method::POST,
        handler: || web::to(chat::create),
        id: "createChatCompletion",
        summary: "Answer a conversation",
        body: Some(schema::chat),
        answer: generated::<ChatChoice, ChatChunkChoice>,
        errors: GENERATES,
    },
    Operation {
        path: "/v1/completions",
        method: Method::POST,
        handler: || web::to(completions::create),
        id: "createCompletion",
        summary: "Continue one or several prompts",
        body: Some(schema::completion),
        answer: generated::<TextChoice, TextChoice>,
        errors: GENERATES,
    },
    Operation {
        path: "/tokenize",
        method: Method::POST,
        handler: || web::to(tokens::tokenize),
        id: "tokenize",
        summary: "Tokens of a text or of a conversation",
        body: Some(schema::tokenize),
        answer: one::<Tokenized>,
        errors: BODY,
    },
    Operation {
        path: "/detokenize",
        method: Method::POST,
        handler: || web::to(tokens::detokenize),
        id: "detokenize",
        summary: "Text of tokens",
        body: Some(schema::detokenize),
        answer: one::<Detokenized>,
        errors: BODY,
    },
    Operation {
        path: "/tokenizer_info",
        method: Method::GET,
        handler: || web::to(tokens::info),
        id: "tokenizerInfo",
        summary: "Special tokens and chat template of the routed name",
        body: None,
        answer: one::<TokenizerInfo>,
        errors: ANY,
    },
    Operation {
        path: "/v1/models",
        method: Method::GET,
        handler: || web::to(models::list),
        id: "listModels",
        summary: "The names that can be asked for",
        body: None,
        answer: one::<models::ModelList>,
        errors: ANY,
    },
    Operation {
        path: "/v1/models/{id:.+}",
        method: Method::GET,
        handler: || web::to(models::one),
        id: "retrieveModel",
        summary: "One of the names that can be asked for",
        body: None,
        answer: one::<models::ModelCard>,
        errors: ANY,
    },
    Operation {
        path: "/v1/routers",
        method: Method::GET,
        handler: || web::to(routers::list),
        id: "listRouters",
        summary: "The routing algorithms and the one in use",
        body: None,
        answer: one::<routers::RouterList>,
        errors: ANY,
    },
    Operation {
        path: "/admin/reload",
        method: Method::POST,
        handler: || web::to(admin::reload),
        id: "reload",
        summary: "Read the routing algorithm again; with the admin key, or from the server's machine if it has none",
        body: None,
        answer: |_| json!({"application/json": {"schema": {"type": "object", "required": ["status", "algorithm"]}}}),
        errors: &[400, 401, 403, 404, 500],
    },
    Operation {
        path: "/health",
        method: Method::GET,
        handler: || web::to(health::health),
        id: "health",
        summary: "Whether the server is alive and its work moves",
        body: None,
        answer: |_| json!({"application/json": {"schema": {"type": "object", "required": ["status", "live_requests"]}}}),
        errors: &[503],
    },
    Operation {
        path: "/ready",
        method: Method::GET,
        handler: || web::to(health::ready),
        id: "ready",
        summary: "Whether new requests are taken",
        body: None,
        answer: |_| json!({"application/json": {"schema": {"type": "object", "required": ["status"]}}}),
        errors: &[503],
    },
    Operation {
        path: "/metrics",
        method: Method::GET,
        handler: || web::to(health::metrics),
        id: "metrics",
        summary: "All series in Prometheus' text format",
        body: None,
        answer: |_| json!({"text/plain": {"schema": {"type": "string"}}}),
        errors: &[401, 500],
    },
    Operation {
        path: "/actors",
        method: Method::GET,
        handler: || web::to(dashboard::actors),
        id: "listActors",
        summary: "Every actor, what waits, runs and hops, and what the thresholds come to",
        body: None,
        answer: one::<dashboard::state::State>,
        errors: ANY,
    },
    Operation {
        path: "/version",
        method: Method::GET,
        handler: || web::to(version::version),
        id: "version",
        summary: "The version of the program",
        body: None,
        answer: one::<version::Version>,
        errors: ANY,
    },
    Operation {
        path: "/openapi.json",
        method: Method::GET,
        handler: || web::to(openapi::document),
        id: "openapi",
        summary: "This document",
        body: None,
        answer: |_| json!({"application/json": {"schema": {"type": "object", "required": ["openapi", "paths"]}}}),
        errors: ANY,
    },
];

/// One JSON value.
fn one<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    json!({"application/json": {"schema": generator.subschema_for::<T>()}})
}

/// A whole answer, or chunks of it as server-sent events: the data of each is a chunk, the error object, or `[DONE]`.
fn generated<W: JsonSchema, P: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    let chunk = generator.subschema_for::<Envelope<P>>();
    let payload = json!({"anyOf": [chunk, {"$ref": "#/components/schemas/Error"}]});
    let data = json!({
        "anyOf": [
            {"type": "string", "contentMediaType": "application/json", "contentSchema": payload},
            {"type": "string", "const": "[DONE]"},
        ],
        "description": "A chunk, or the error that ended the answer; the last event is [DONE].",
    });
    let event = json!({"type": "object", "required": ["data"], "properties": {"data": data}});
    json!({
        "application/json": {"schema": generator.subschema_for::<Envelope<W>>()},
        "text/event-stream": {"schema": event},
    })
}
