//! The table as a JSON Schema, for editors. Pure. Invariant: it accepts whatever the reader accepts; it refuses what one key
//! alone is wrong about, and the few rules between keys that JSON Schema can say.

use super::{Default, Key, Kind, TOP, Table};
use serde_json::{Map, Value, json};

/// No white space and no control characters.
const NAME: &str = "^[^\\s\\u0000-\\u001f\\u007f-\\u009f]{1,128}$";
/// As `Source` reads it.
const SOURCE: &str = "^(?!hf:)[\\s\\S]*\\S[\\s\\S]*$|^hf:[A-Za-z0-9._-]+/[A-Za-z0-9._-]+(@[A-Za-z0-9._/-]+)?(:[A-Za-z0-9._/-]+\\.[gG][gG][uU][fF])?$";
/// As `Device` reads it.
const DEVICE: &str = "^(cpu|cuda:\\+?0*([0-9]|[1-5][0-9]|6[0-3]))$";
/// As `Bytes` reads it.
const AMOUNT: &str =
    "^([0-9_]*[0-9][0-9_]*(\\.[0-9_]*)?|\\.[0-9_]*[0-9][0-9_]*)\\s*([bB]|[kKmMgGtT][iI][bB]|[kKmMgG][bB])?\\s*$";

/// The JSON Schema of a launch file.
pub fn json() -> Value {
    let mut schema = table(&TOP);
    let head = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "TokenRouter launch file",
    });
    let mut whole = head.as_object().cloned().unwrap_or_default();
    whole.extend(std::mem::take(&mut schema));
    // Several models need somebody who decides.
    whole.insert("if".to_owned(), json!({"properties": {"models": {"minItems": 2}}}));
    whole.insert(
        "then".to_owned(),
        json!({"required": ["router"], "properties": {"router": {"required": ["algorithm"]}}}),
    );
    Value::Object(whole)
}

fn table(table: &Table) -> Map<String, Value> {
    let properties: Map<String, Value> = table.keys.iter().map(|key| (key.name.to_owned(), one(key))).collect();
    let required: Vec<&str> =
        table.keys.iter().filter(|key| key.default == Default::Required).map(|key| key.name).collect();
    let mut schema = Map::new();
    schema.insert("description".to_owned(), json!(plain(table.about)));
    schema.insert("type".to_owned(), json!("object"));
    schema.insert("properties".to_owned(), Value::Object(properties));
    schema.insert("required".to_owned(), json!(required));
    schema.insert("additionalProperties".to_owned(), json!(false));
    match table.title {
        "[[models]]" => schema.insert("not".to_owned(), json!({"required": ["kv_memory", "kv_tokens"]})),
        "[[faults.steps]]" => schema.insert("oneOf".to_owned(), json!([{"required": ["at"]}, {"required": ["every"]}])),
        "[batching]" => {
            let fixed = json!({"properties": {"policy": {"const": "fixed"}}, "required": ["policy"]});
            let planned = json!({"properties": {"policy": {"enum": ["optimal", "adaptive"]}}, "required": ["policy"]});
            schema.insert("dependentSchemas".to_owned(), json!({"profile": planned}));
            schema.insert("if".to_owned(), fixed);
            schema.insert("else".to_owned(), json!({"properties": {"thresholds": {"maxProperties": 0}}}))
        }
        _ => None,
    };
    schema
}

fn one(key: &Key) -> Value {
    let mut schema = match &key.kind {
        Kind::Text => json!({"type": "string", "pattern": "\\S"}),
        Kind::File => json!({"type": "string"}),
        Kind::Name => json!({"type": "string", "pattern": NAME}),
        Kind::Source => json!({"type": "string", "pattern": SOURCE}),
        Kind::Device => json!({"type": "string", "pattern": DEVICE}),
        Kind::Flag => json!({"type": "boolean"}),
        Kind::Whole { least, most } => whole(*least, *most),
        Kind::ZeroOr { least, most } => json!({"anyOf": [{"const": 0}, whole(*least, *most)]}),
        Kind::Amount { least, most } => json!({"anyOf": [{"type": "string", "pattern": AMOUNT}, whole(*least, *most)]}),
        Kind::Word(words) => json!({"enum": words.iter().map(|(word, _)| word).collect::<Vec<_>>()}),
        Kind::Wholes => {
            json!({"type": "array", "items": whole(0, u64::from(u32::MAX)), "minItems": 1, "uniqueItems": true})
        }
        Kind::Texts => json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true}),
        Kind::PerModel { most } => json!({"type": "object", "additionalProperties": whole(1, *most)}),
        Kind::Open => json!({"type": "object"}),
        Kind::Table(inner) => Value::Object(table(inner)),
        Kind::Tables(inner) => {
            let least = usize::from(key.default == Default::Required);
            json!({"type": "array", "items": table(inner), "minItems": least})
        }
    };
    if let Kind::Word(words) = &key.kind {
        let words: Vec<String> = words.iter().map(|(word, meaning)| format!("{word}: {}", plain(meaning))).collect();
        schema["description"] = json!(format!("{} {}.", plain(key.about), words.join("; ")));
    } else {
        schema["description"] = json!(plain(key.about));
    }
    match key.default {
        Default::Required | Default::Words(_) => {}
        Default::Text(text) | Default::Amount(text) => schema["default"] = json!(text),
        Default::Whole(number) => schema["default"] = json!(number),
        Default::Flag(flag) => schema["default"] = json!(flag),
    }
    schema
}

fn whole(least: u64, most: u64) -> Value {
    match most {
        u64::MAX => json!({"type": "integer", "minimum": least}),
        _ => json!({"type": "integer", "minimum": least, "maximum": most}),
    }
}

/// Markdown without its links and marks.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('[') {
        let Some((words, target)) = after.split_once("](") else { break };
        plain.push_str(before);
        plain.push_str(words);
        rest = target.split_once(')').map_or("", |(_, rest)| rest);
    }
    (plain + rest).replace('`', "")
}
