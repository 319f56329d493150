//! `response_format`: what an answer must be. Owner: the HTTP layer. Invariant: an answer that has a form ends when it is
//! complete, so what would keep it from ending, or end it by other means than its form, is refused by name.

use super::fields::{Fields, wrong_type};
use super::tools::check_name;
use crate::http::errors::ApiError;
use serde_json::{Value, json};
use tokenrouter_core::constraint::{CONSTRAINT_BYTES_MAX, ConstraintSpec};
use tokenrouter_core::job::StopRules;

/// Name of the field, for whoever refuses a form.
pub const RESPONSE_FORMAT: &str = "response_format";
/// Where a request has its schema.
pub const SCHEMA: &str = "response_format.json_schema.schema";

/// Takes `response_format`: `None` when the answer is free text.
///
/// # Errors
/// 400 naming the field that is wrong.
pub fn read(fields: &mut Fields) -> Result<Option<ConstraintSpec>, ApiError> {
    let path = fields.path(RESPONSE_FORMAT);
    let Some(format) = fields.take(RESPONSE_FORMAT) else { return Ok(None) };
    let mut format = Fields::of(format, path)?;
    let kind = format.required_text("type")?;
    let spec = match kind.as_str() {
        "text" => None,
        "json_object" => Some(any_object()),
        "json_schema" => Some(read_schema(&mut format)?),
        other => {
            let shown: String = other.chars().take(32).collect();
            let message = format!("type {shown:?} is not supported; use text, json_object or json_schema");
            return Err(ApiError::unsupported(format.path("type"), message));
        }
    };
    format.finish()?;
    Ok(spec)
}

fn any_object() -> ConstraintSpec {
    ConstraintSpec::Json(json!({"type": "object"}).to_string())
}

fn read_schema(format: &mut Fields) -> Result<ConstraintSpec, ApiError> {
    let path = format.path("json_schema");
    let Some(named) = format.take("json_schema") else {
        return Err(ApiError::field(path, "json_schema is missing; send an object with name and schema"));
    };
    let mut named = Fields::of(named, path)?;
    let name = named.required_text("name")?;
    check_name(&named.path("name"), &name)?;
    named.text("description")?;
    // Answers always follow the schema.
    named.flag("strict")?;
    let path = named.path("schema");
    let spec = match named.take("schema") {
        None => any_object(),
        Some(schema @ Value::Object(_)) => ConstraintSpec::Json(schema.to_string()),
        Some(other) => return Err(wrong_type(&path, "a JSON schema", &other)),
    };
    named.finish()?;
    match spec.text().len() {
        bytes if bytes > CONSTRAINT_BYTES_MAX => Err(ApiError::field(
            path,
            format!("the schema has {bytes} bytes; at most {CONSTRAINT_BYTES_MAX} are allowed"),
        )),
        _ => Ok(spec),
    }
}

/// Refuses what does not go with an answer that has a form, be it by `field` "response_format" or "tools".
///
/// # Errors
/// 400 naming both fields.
pub fn check_ends(field: &str, stop: &StopRules) -> Result<(), ApiError> {
    let refused = |own: &str| {
        let message =
            format!("{own} does not go with {field}: such an answer ends when it is complete; leave one of them out");
        Err(ApiError::field(own, message))
    };
    match stop {
        StopRules { ignore_eos: true, .. } => refused("ignore_eos"),
        StopRules { min_tokens: 1.., .. } => refused("min_tokens"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(format: Value) -> Result<Option<ConstraintSpec>, ApiError> {
        let mut fields = Fields::of(json!({"response_format": format}), "")?;
        let spec = read(&mut fields)?;
        fields.finish()?;
        Ok(spec)
    }

    #[test]
    fn an_answer_has_three_formats() {
        let object = Some(any_object());
        assert_eq!(taken(json!(null)).unwrap(), None);
        assert_eq!(taken(json!({"type": "text"})).unwrap(), None);
        assert_eq!(taken(json!({"type": "json_object"})).unwrap(), object);
        assert_eq!(taken(json!({"type": "json_schema", "json_schema": {"name": "x"}})).unwrap(), object);
        let schema = json!({"type": "array", "items": {"const": 1}});
        let named = json!({"name": "a-1", "description": "d", "strict": true, "schema": schema});
        let spec = taken(json!({"type": "json_schema", "json_schema": named})).unwrap();
        assert_eq!(spec, Some(ConstraintSpec::Json(schema.to_string())));
    }

    #[test]
    fn what_a_format_cannot_be_is_refused_by_path() {
        let named = |named: Value| json!({"type": "json_schema", "json_schema": named});
        let long = "x".repeat(CONSTRAINT_BYTES_MAX);
        for (path, format) in [
            ("response_format", json!("json")),
            ("response_format.type", json!({})),
            ("response_format.type", json!({"type": "xml"})),
            ("response_format.type", json!({"type": 1})),
            ("response_format.schema", json!({"type": "json_object", "schema": {}})),
            ("response_format.json_schema", json!({"type": "text", "json_schema": {"name": "x"}})),
            ("response_format.json_schema", json!({"type": "json_schema"})),
            ("response_format.json_schema", named(json!([]))),
            ("response_format.json_schema.name", named(json!({"schema": {}}))),
            ("response_format.json_schema.name", named(json!({"name": "a b"}))),
            ("response_format.json_schema.strict", named(json!({"name": "x", "strict": 1}))),
            ("response_format.json_schema.description", named(json!({"name": "x", "description": 1}))),
            ("response_format.json_schema.scheme", named(json!({"name": "x", "scheme": {}}))),
            (SCHEMA, named(json!({"name": "x", "schema": []}))),
            (SCHEMA, named(json!({"name": "x", "schema": {"const": long}}))),
        ] {
            let error = taken(format).unwrap_err();
            assert_eq!((error.status().as_u16(), error.param()), (400, Some(path)), "{error}");
        }
    }

    #[test]
    fn what_keeps_an_answer_from_ending_is_refused() {
        let error = |stop: StopRules| check_ends("tools", &stop).unwrap_err();
        let eager = error(StopRules { ignore_eos: true, ..StopRules::default() });
        assert_eq!(eager.param(), Some("ignore_eos"));
        let long = error(StopRules { min_tokens: 2, ..StopRules::default() });
        assert_eq!(long.param(), Some("min_tokens"));
        assert!(long.to_string().contains("tools"), "{long}");
        let free = StopRules { stop: vec!["x".into()], stop_ids: vec![3], max_tokens: Some(4), ..StopRules::default() };
        assert_eq!(check_ends("tools", &free), Ok(()));
    }
}
