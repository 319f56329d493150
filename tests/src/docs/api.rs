//! docs/reference/api.md, made from the OpenAPI document of a server. Pure. Invariant: every operation, every field with its
//! bounds and every object of the document is in it.

use super::reference::cell;
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Objects within objects are told apart up to here.
const DEPTH_MAX: usize = 6;

/// A row of a table of fields.
struct Row {
    path: String,
    kinds: Vec<String>,
    required: bool,
    about: String,
}

/// Appends a line.
macro_rules! line {
    ($page:expr, $($part:tt)*) => {{
        // Writing to a text does not fail.
        let _ = writeln!($page, $($part)*);
    }};
}

/// The page of a document.
pub fn page(document: &Value) -> String {
    let mut page =
        String::from("<!-- Made by `just docs` from /openapi.json; a test holds it to it. -->\n\n# HTTP API\n\n");
    line!(
        page,
        "Of a server with the embedded pair; `/openapi.json` of yours has its models and vocabulary. A field that is `null` counts"
    );
    line!(
        page,
        "as absent; a field that is not listed is refused. Errors are OpenAI's object, with the name of the field in `param`."
    );
    let none = Map::new();
    for (path, item) in document["paths"].as_object().unwrap_or(&none) {
        for (method, operation) in item.as_object().unwrap_or(&none) {
            describe(&mut page, (&method.to_uppercase(), path), operation);
        }
    }
    line!(page, "\n## Objects");
    for (name, schema) in document["components"]["schemas"].as_object().unwrap_or(&none) {
        line!(page, "\n### {name}\n");
        if let Some(about) = schema["description"].as_str() {
            line!(page, "{}\n", about.trim());
        }
        let rows = rows(schema);
        if rows.is_empty() {
            line!(page, "{}", summary(schema));
        } else {
            fields(&mut page, rows);
        }
    }
    page
}

fn describe(page: &mut String, (method, path): (&str, &str), operation: &Value) {
    line!(page, "\n## `{method} {path}`\n");
    line!(page, "{}.", operation["summary"].as_str().unwrap_or_default().trim_end_matches('.'));
    let body = &operation["requestBody"]["content"]["application/json"]["schema"];
    if !body.is_null() {
        line!(page, "");
        fields(page, rows(body));
    }
    let none = Map::new();
    let responses = operation["responses"].as_object().unwrap_or(&none);
    let mut errors = Vec::new();
    line!(page, "");
    for (status, response) in responses {
        let content = response["content"].as_object().unwrap_or(&none);
        if status == "200" {
            for (media, content) in content {
                line!(page, "- 200 `{media}`: {}", summary(&content["schema"]));
            }
        } else {
            errors.push(format!(
                "{status} ({})",
                response["description"].as_str().unwrap_or_default().trim_end_matches('.')
            ));
        }
    }
    if !errors.is_empty() {
        line!(page, "- Errors: {}", errors.join("; "));
    }
}

fn fields(page: &mut String, rows: Vec<Row>) {
    line!(page, "| field | type | meaning |");
    line!(page, "|---|---|---|");
    for row in rows {
        let required = if row.required { ", **required**" } else { "" };
        line!(page, "| `{}` | {}{required} | {} |", row.path, cell(&row.kinds.join(" or ")), cell(&row.about));
    }
}

/// The fields of an object and of the objects in it, one row a path; those that must be there come first.
fn rows(schema: &Value) -> Vec<Row> {
    let rows = walk(schema, ("", 0));
    let top = |row: &Row| row.path.split(['.', '[']).next().unwrap_or_default().to_owned();
    let required: Vec<String> = rows.iter().filter(|row| row.required).map(|row| row.path.clone()).collect();
    let (mut first, rest): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|row| required.contains(&top(row)));
    first.extend(rest);
    first
}

fn walk(schema: &Value, (path, depth): (&str, usize)) -> Vec<Row> {
    let mut rows = Vec::new();
    for form in ["anyOf", "oneOf"] {
        // Of several forms of an object a field is required if all of them require it.
        let forms = schema[form].as_array().into_iter().flatten().map(|one| walk(one, (path, depth)));
        forms.filter(|form| !form.is_empty()).for_each(|form| merge(&mut rows, form));
    }
    if depth < DEPTH_MAX && schema["items"].is_object() {
        rows.extend(walk(&schema["items"], (&format!("{path}[]"), depth + 1)));
    }
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let about = inner["description"].as_str().unwrap_or_default().trim().to_owned();
        let required = required.contains(&name.as_str());
        rows.push(Row { path: path.clone(), kinds: vec![summary(inner)], required, about });
        if depth < DEPTH_MAX {
            rows.extend(walk(inner, (&path, depth + 1)));
        }
    }
    rows
}

/// Adds the rows of another form.
fn merge(rows: &mut Vec<Row>, form: Vec<Row>) {
    if rows.is_empty() {
        *rows = form;
        return;
    }
    for row in rows.iter_mut() {
        row.required &= form.iter().any(|other| other.path == row.path);
    }
    for mut other in form {
        match rows.iter_mut().find(|row| row.path == other.path) {
            Some(row) => {
                row.required &= other.required;
                other.kinds.retain(|kind| !row.kinds.contains(kind));
                row.kinds.extend(other.kinds);
                if row.about.is_empty() {
                    row.about = other.about;
                }
            }
            None => {
                other.required = false;
                rows.push(other);
            }
        }
    }
}

/// A type in a few words.
fn summary(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(words) = schema["enum"].as_array() {
        let words: Vec<String> = words.iter().filter(|word| !word.is_null()).map(|word| format!("`{word}`")).collect();
        return words.join(", ");
    }
    if !schema["const"].is_null() {
        return format!("`{}`", schema["const"]);
    }
    for form in ["anyOf", "oneOf"] {
        if let Some(forms) = schema[form].as_array() {
            let mut kinds: Vec<String> = Vec::new();
            for kind in forms.iter().filter(|form| form["type"] != "null").map(summary) {
                if !kinds.contains(&kind) {
                    kinds.push(kind);
                }
            }
            return kinds.join(" or ");
        }
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).filter(|kind| *kind != "null").collect(),
        _ => Vec::new(),
    };
    let kind = kinds.join(" or ");
    match kind.as_str() {
        "array" if schema["maxItems"] == 0 => "empty array".to_owned(),
        "array" if schema["items"].is_object() => format!("array of {}{}", summary(&schema["items"]), bounds(schema)),
        "" => "any".to_owned(),
        _ => format!("{kind}{}", bounds(schema)),
    }
}

fn bounds(schema: &Value) -> String {
    let bound = |low: &str, high: &str| match (&schema[low], &schema[high]) {
        (Value::Null, Value::Null) => None,
        (low, Value::Null) => Some(format!(", from {low}")),
        (Value::Null, high) => Some(format!(", up to {high}")),
        (low, high) => Some(format!(", {low} to {high}")),
    };
    let numbers = bound("minimum", "maximum").unwrap_or_default();
    let items = bound("minItems", "maxItems").map(|text| format!("{text} items")).unwrap_or_default();
    let letters = bound("minLength", "maxLength").map(|text| format!("{text} characters")).unwrap_or_default();
    format!("{numbers}{items}{letters}")
}
