//! The table of keys against what the reader does with files.

use super::{Default, Key, Kind, MODEL, SERVER, TOP, Table, json};
use crate::{Bytes, LaunchFile};
use serde_json::Value;
use std::path::Path;

/// Two models and room around every bound, so that a value is refused for itself only.
const ROOMY: &str = r#"
[server]
live_max = 65536
request_timeout_ms = 0
stall_ms = 3600000
[[models]]
name = "a"
path = "a.gguf"
rows_max = 1
step_tokens_max = 65536
[[models]]
name = "b"
path = "b.gguf"
[router]
algorithm = "r_stitch"
[batching]
policy = "fixed"
[[faults.steps]]
model = "a"
kind = "slow"
every = 5
[[faults.messages]]
kind = "lost"
every = 5
"#;

fn read(text: &str) -> Result<LaunchFile, String> {
    LaunchFile::parse(text, Path::new("launch.toml")).map_err(|error| error.to_string())
}

/// The roomy file with one value of the first table of this title.
fn with(title: &str, key: &str, value: &str) -> String {
    let mut file: toml::Table = ROOMY.parse().expect("TOML");
    let value = format!("v = {value}").parse::<toml::Table>().expect("a value").remove("v").expect("it is there");
    if title.contains("cuda") {
        file["models"][0].as_table_mut().expect("a table").insert("device".into(), "cuda:0".into());
    }
    let mut table = &mut file;
    for part in title.trim_matches(['[', ']']).split('.') {
        let inner = table.entry(part).or_insert_with(|| toml::Table::new().into());
        table = match inner {
            toml::Value::Array(items) => items[0].as_table_mut().expect("a table"),
            inner => inner.as_table_mut().expect("a table"),
        };
    }
    table.insert(key.to_owned(), value);
    file.to_string()
}

/// Every table with every key of it.
fn all() -> Vec<(&'static Table, &'static Key)> {
    let mut tables: Vec<&'static Table> = vec![&TOP];
    let mut at = 0;
    while let Some(table) = tables.get(at) {
        let inner = table.keys.iter().filter_map(|key| match key.kind {
            Kind::Table(inner) | Kind::Tables(inner) => Some(inner),
            _ => None,
        });
        tables.extend(inner.collect::<Vec<_>>());
        at += 1;
    }
    tables.iter().flat_map(|table| table.keys.iter().map(|key| (*table, key))).collect()
}

#[test]
fn bounds_are_those_of_the_reader() {
    let mut tried = 0;
    for (table, key) in all() {
        let (least, most, zero) = match key.kind {
            Kind::Whole { least, most } | Kind::Amount { least, most } => (least, most, false),
            Kind::ZeroOr { least, most } => (least, most, true),
            _ => continue,
        };
        let accepts = |value: u64| {
            let text = with(table.title, key.name, &value.to_string());
            match (key.name, table.title) {
                // Only one of them may stand there.
                ("at", "[[faults.steps]]") => read(&text.replace("every = 5\n", "").replacen(
                    "[[faults.messages]]",
                    "[[faults.messages]]\nevery = 5",
                    1,
                )),
                _ => read(&text),
            }
        };
        assert!(accepts(least).is_ok(), "{} {} = {least}: {:?}", table.title, key.name, accepts(least));
        if most < i64::MAX as u64 {
            assert!(accepts(most).is_ok(), "{} {} = {most}: {:?}", table.title, key.name, accepts(most));
            let error = accepts(most + 1).expect_err(key.name);
            assert!(error.contains(key.name), "{error}");
        }
        if least > 0 {
            let error = if zero { accepts(least - 1) } else { accepts(0) }.expect_err(key.name);
            let says = error.contains("out of range") || error.contains("holds no") || error.contains("leaves nothing");
            assert!(says || error.contains("must say when"), "{error}");
            assert_eq!(accepts(0).is_ok(), zero, "{} {} = 0", table.title, key.name);
        }
        tried += 1;
    }
    assert!(tried >= 20, "{tried}");
}

#[test]
fn words_are_those_of_the_reader() {
    let mut tried = 0;
    for (table, key) in all() {
        let Kind::Word(words) = key.kind else { continue };
        for (word, _) in words {
            let mut text = with(table.title, key.name, &format!("\"{word}\""));
            if *word == "optimal" {
                text = text.replace("policy = \"optimal\"", "policy = \"optimal\"\nprofile = \"p.json\"");
            }
            assert!(read(&text).is_ok(), "{} {} = {word}: {:?}", table.title, key.name, read(&text));
            tried += 1;
        }
        let error = read(&with(table.title, key.name, "\"qqqqqqqqqq\"")).expect_err(key.name);
        let listed: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        assert!(error.ends_with(&format!("valid: {}", listed.join(", "))), "{error}");
    }
    assert!(tried >= 25, "{tried}");
}

/// What a key is when a file leaves it out, from the file as it is read; null when the file has nothing for it.
fn unsaid() -> Value {
    let text = "[[models]]\nname = \"m\"\npath = \"m.gguf\"\n[[models]]\nname = \"g\"\npath = \"g.gguf\"\n\
                device = \"cuda:0\"\n[router]\nalgorithm = \"r_stitch\"\n[[faults.steps]]\nmodel = \"m\"\nkind = \"lost\"\nat = 1\n\
                [[faults.messages]]\nkind = \"lost\"\nevery = 2\n";
    serde_json::to_value(read(text).expect("a good file")).expect("JSON")
}

#[test]
fn defaults_are_those_of_the_reader() {
    let file = unsaid();
    let mut tried = 0;
    for (table, key) in all() {
        let place = match table.title.trim_matches(['[', ']']) {
            "the launch file" | "server.tls" => continue,
            "models" => "/models/0".to_owned(),
            "models.cuda" => "/models/1/cuda".to_owned(),
            "faults.steps" => "/faults/steps/0".to_owned(),
            "faults.messages" => "/faults/messages/0".to_owned(),
            plain => format!("/{}", plain.replace('.', "/")),
        };
        let found = file.pointer(&format!("{place}/{}", key.name)).cloned().unwrap_or(Value::Null);
        match key.default {
            Default::Text(text) => assert_eq!(found, text, "{place} {}", key.name),
            Default::Whole(number) => assert_eq!(found, number, "{place} {}", key.name),
            Default::Flag(flag) => assert_eq!(found, flag, "{place} {}", key.name),
            Default::Amount(text) => {
                let bytes = found.as_str().expect("an amount").parse::<Bytes>();
                assert_eq!(bytes, text.parse::<Bytes>(), "{place} {}", key.name);
            }
            Default::Words(_) => {
                let nothing =
                    found.is_null() || ["algorithm", "models", "params", "thresholds", "at"].contains(&key.name);
                let nothing = nothing || ["steps", "messages", "graph_rows", "graph_tokens"].contains(&key.name);
                assert!(nothing, "{place} {} is {found} without being given", key.name);
                continue;
            }
            Default::Required => continue,
        }
        tried += 1;
    }
    assert!(tried >= 20, "{tried}");
}

#[test]
fn what_is_required_is_missed() {
    for (table, key, text) in [
        (&MODEL, "name", "[[models]]\npath = \"m\""),
        (&MODEL, "path", "[[models]]\nname = \"m\""),
        (&TOP, "models", "[server]\nport = 1"),
    ] {
        assert!(table.keys.iter().any(|found| found.name == key && found.default == Default::Required), "{key}");
        assert!(read(text).is_err(), "{text}");
    }
    assert_eq!(super::range("server.live_max"), Some((1, 65_536)));
    assert_eq!(super::range("models[7].threads"), Some((1, 1024)));
    assert_eq!((super::range("server.host"), super::range("server.nothing")), (None, None));
}

#[test]
fn the_schema_has_every_key_with_its_default() {
    let schema = json();
    assert_eq!(schema["properties"]["server"]["properties"]["port"]["default"], 8080);
    assert_eq!(schema["properties"]["models"]["items"]["required"], serde_json::json!(["name", "path"]));
    let keys = schema["properties"]["server"]["properties"].as_object().expect("an object");
    assert_eq!(keys.len(), SERVER.keys.len());
    let text = schema["properties"]["batching"]["description"].as_str().expect("a text");
    assert_eq!(text, "When waiting requests start together.");
    let format = &schema["properties"]["models"]["items"]["properties"]["kv_format"]["description"];
    assert!(format.as_str().is_some_and(|text| text.contains("what each costs") && !text.contains("](")), "{format}");
}
