//! `GET /openapi.json`: what this server takes and gives, as an OpenAPI 3.1 document. Owner: the HTTP layer. Invariant: it
//! is made from the list of routes, the types of the answers and the schemas of the readers, for the models it serves.

use super::operations::{OPERATIONS, Operation};
use super::types::schema::Shape;
use super::{App, keys};
use actix_web::{HttpResponse, web};
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

/// The document.
pub async fn document(app: web::Data<App>) -> HttpResponse {
    let models = app.served.iter().map(|served| served.id.clone()).collect();
    let shape = Shape { models, vocab_size: app.codec.vocab_size(), guarded: app.keys.guard_api() };
    HttpResponse::Ok().json(write(&shape))
}

/// The document of a server of this shape.
pub fn write(shape: &Shape) -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for operation in OPERATIONS {
        let item = paths.entry(plain(operation.path)).or_insert_with(|| json!({}));
        item[operation.method.as_str().to_ascii_lowercase()] = described(operation, shape, &mut generator);
    }
    let mut schemas = generator.take_definitions(true);
    schemas.insert("Error".to_owned(), error());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "TokenRouter",
            "summary": "An OpenAI-compatible server in which several models write one answer, token by token.",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }},
    })
}

/// A path without the patterns of its parameters: `/v1/models/{id}`.
pub fn plain(path: &str) -> String {
    let mut parts = path.split('{');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (parameter, rest) = part.split_once('}').unwrap_or((part, ""));
        let name = parameter.split(':').next().unwrap_or_default();
        plain = format!("{plain}{{{name}}}{rest}");
    }
    plain
}

fn described(operation: &Operation, shape: &Shape, generator: &mut SchemaGenerator) -> Value {
    let mut responses = Map::new();
    responses.insert("200".to_owned(), json!({"description": "Done.", "content": (operation.answer)(generator)}));
    for status in operation.errors {
        let content = json!({"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}});
        responses.insert(status.to_string(), json!({"description": meaning(*status), "content": content}));
    }
    let mut described = json!({
        "operationId": operation.id,
        "summary": operation.summary,
        "responses": responses,
    });
    if operation.path.contains("{id") {
        let schema = json!({"type": "string", "enum": shape.models});
        described["parameters"] = json!([{"name": "id", "in": "path", "required": true, "schema": schema}]);
    }
    if shape.guarded && !keys::OPEN.contains(&operation.path) {
        described["security"] = json!([{"bearer": []}, {"key": []}]);
    }
    if let Some(body) = operation.body {
        described["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": body(shape)}}});
    }
    described
}

/// Why a request ends with this status.
fn meaning(status: u16) -> &'static str {
    match status {
        400 => "A field is wrong, unknown or not available, or the prompt is too long; nothing was generated.",
        401 => "The API key is missing or wrong.",
        403 => "Not for this client.",
        404 => "There is no such model or route.",
        405 => "The route does not answer to this method.",
        408 => "The body did not come in time.",
        413 => "The body is larger than the server takes.",
        415 => "The body is not declared as JSON.",
        429 => "Too many requests are running; see Retry-After.",
        500 => "The server failed; try again.",
        503 => "The server cannot serve now; see Retry-After.",
        504 => "The request took longer than the server allows.",
        _ => "An error.",
    }
}

/// The error object, in every body with a status of 400 and above and in the last event of a stream that failed.
fn error() -> Value {
    json!({
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string", "description": "What is wrong and what to do."},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"], "description": "Path of the field at fault."},
                    "code": {"type": ["string", "null"]},
                    "n_prompt_tokens": {"type": "integer", "description": "With context_length_exceeded."},
                    "n_ctx": {"type": "integer", "description": "With context_length_exceeded."},
                },
            },
        },
        "additionalProperties": false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::errors::ApiError;
    use crate::http::testing::{ScriptedEngine, app};
    use actix_web::http::Method;
    use actix_web::test::{TestRequest, call_service, init_service, read_body_json};
    use std::collections::BTreeSet;

    async fn ask(method: Method, path: &str) -> (u16, Value) {
        let app = actix_web::App::new().app_data(web::Data::new(app(ScriptedEngine::new([]))));
        let service = init_service(app.configure(crate::http::routes)).await;
        let peer = "127.0.0.1:9".parse().unwrap();
        let request = TestRequest::with_uri(path).method(method).peer_addr(peer).to_request();
        let response = call_service(&service, request).await;
        let status = response.status().as_u16();
        let json = response.headers().get("content-type").is_some_and(|kind| kind == "application/json");
        (status, if json { read_body_json(response).await } else { Value::Null })
    }

    #[actix_web::test]
    async fn every_route_is_there_once_and_answers_to_its_method_alone() {
        let (status, document) = ask(Method::GET, "/openapi.json").await;
        assert_eq!((status, &document["openapi"]), (200, &json!("3.1.0")));
        let mut ids = BTreeSet::new();
        for operation in OPERATIONS {
            let path = plain(operation.path);
            let item = document["paths"][&path].as_object().unwrap();
            assert_eq!(item.len(), 1, "{path} is there twice");
            let method = operation.method.as_str();
            assert_eq!(item[&method.to_ascii_lowercase()]["operationId"], operation.id);
            assert!(ids.insert(operation.id), "{} is there twice", operation.id);
            let path = path.replace("{id}", "pair");
            let (status, body) = ask(operation.method.clone(), &path).await;
            let unrouted =
                ["unknown_url", "method_not_allowed"].contains(&body["error"]["code"].as_str().unwrap_or(""));
            // Without files to read there is nothing to reload.
            assert!(!unrouted || path == "/admin/reload", "{method} {path}: {status} {body}");
            let (status, body) = ask(Method::PUT, &path).await;
            assert_eq!((status, &body["error"]["code"]), (405, &json!("method_not_allowed")), "{path}");
        }
    }

    fn shape() -> Shape {
        Shape { models: vec!["m".to_owned()], vocab_size: 9, guarded: true }
    }

    #[test]
    fn a_guarded_server_says_which_routes_ask_for_a_key() {
        let document = write(&shape());
        assert!(document["paths"]["/v1/completions"]["post"]["security"].is_array());
        assert!(document["paths"]["/health"]["get"]["security"].is_null());
        let open = write(&Shape { guarded: false, ..shape() });
        assert!(open["paths"]["/v1/completions"]["post"]["security"].is_null());
    }

    /// All references of a document.
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(members) => {
                found.extend(members.get("$ref").and_then(Value::as_str).map(str::to_owned));
                members.values().for_each(|member| references(member, found));
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }

    #[test]
    fn references_lead_somewhere() {
        let document = write(&shape());
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        assert!(found.len() > 10, "{found:?}");
        for reference in found {
            let place = reference.strip_prefix('#').and_then(|pointer| document.pointer(pointer));
            assert!(place.is_some_and(Value::is_object), "{reference} leads nowhere");
        }
    }

    #[test]
    fn every_status_that_an_error_can_have_is_described() {
        // The statuses that the constructors of errors name.
        let source = include_str!("errors.rs").split("#[cfg(test)]").next().unwrap();
        let named = source
            .split("StatusCode::")
            .skip(1)
            .map(|rest| rest.chars().take_while(|c| c.is_ascii_uppercase() || *c == '_').collect::<String>());
        let statuses: BTreeSet<u16> = named
            .filter(|name| !name.is_empty())
            .map(|name| {
                let all = (400..600).filter_map(|code| actix_web::http::StatusCode::from_u16(code).ok());
                let constant = |status: &actix_web::http::StatusCode| {
                    status
                        .canonical_reason()
                        .is_some_and(|reason| reason.to_ascii_uppercase().replace([' ', '-'], "_") == name)
                };
                all.into_iter().find(constant).unwrap_or_else(|| panic!("{name} is no status")).as_u16()
            })
            .collect();
        assert!(statuses.len() >= 8, "{statuses:?}");
        // Only methods that the document does not list are answered with 405.
        let described: BTreeSet<u16> = OPERATIONS.iter().flat_map(|operation| operation.errors).copied().collect();
        let missing: Vec<&u16> =
            statuses.iter().filter(|status| **status != 405 && !described.contains(status)).collect();
        assert!(missing.is_empty(), "no operation lists {missing:?}");
        assert!(described.iter().all(|status| meaning(*status) != meaning(0)), "a status has no meaning");
        assert_eq!(error()["required"], json!(["error"]));
        let object = ApiError::request("x").body();
        let documented = error()["properties"]["error"]["required"].clone();
        let members: Vec<&String> = object["error"].as_object().unwrap().keys().collect();
        assert_eq!(json!(members), documented);
    }
}
