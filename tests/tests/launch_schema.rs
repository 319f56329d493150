//! The JSON Schema of launch files, judged by a validator of others: it takes every file that is read, and refuses what is
//! wrong with one key by itself. Owner: config/src/schema.

use serde_json::Value;
use std::fs;
use std::path::Path;
use tokenrouter_config::{LaunchFile, schema};
use tokenrouter_tests::clients::{Venv, folder, run, scratch};
use tokenrouter_tests::docs::pages::all;
use tokenrouter_tests::docs::root;

const PAIR: &str = r#"
[server]
port = 9000
[[models]]
name = "large"
path = "large"
threads = 2
kv_memory = "64 MiB"
[[models]]
name = "small"
path = "hf:owner/small"
cores = [0, 1]
kv_tokens = 4096
[router]
name = "pair"
algorithm = "r_stitch"
models = ["small", "large"]
[router.params]
threshold = 0.02
[batching]
policy = "fixed"
thresholds = { large = 4 }
max_wait_ms = 20
"#;

/// What is wrong with one key by itself, or between keys as far as the schema can say it: text, and what stands there instead.
const WRONG: &[(&str, &str)] = &[
    ("[server]", "[sever]"),
    ("port", "prot"),
    ("port = 9000", "tls = { crt = \"c\" }"),
    ("port = 9000", "tls = { cert = \"c\" }"),
    ("port = 9000", "tls = true"),
    ("threads", "thread"),
    ("algorithm", "algoritm"),
    ("max_wait_ms", "max_wait"),
    ("9000", "\"9000\""),
    ("9000", "90000"),
    ("9000", "-1"),
    ("9000", "9000.5"),
    ("port = 9000", "host = \" \""),
    ("port = 9000", "api_keys_file = 7"),
    ("port = 9000", "insecure = 1"),
    ("port = 9000", "log_format = \"xml\""),
    ("port = 9000", "body_bytes_max = 1000"),
    ("port = 9000", "body_bytes_max = \"8 parsecs\""),
    ("port = 9000", "request_timeout_ms = 90000000"),
    ("port = 9000", "client_timeout_ms = 0"),
    ("port = 9000", "step_timeout_ms = 99"),
    ("port = 9000", "live_max = 0"),
    ("threads = 2", "threads = 2.5"),
    ("threads = 2", "threads = 0"),
    ("threads = 2", "kv_format = \"fp8\""),
    ("threads = 2", "device = \"cuda\""),
    ("threads = 2", "device = \"cuda:64\""),
    ("kv_tokens = 4096", "device = \"cuda:0\"\ncuda = { graph_rows = [\"a\"] }"),
    ("kv_tokens = 4096", "device = \"cuda:0\"\ncuda = { graph_row = [1] }"),
    ("max_wait_ms = 20", "[cuda]\nmemory_percent = 101"),
    ("threads = 2", "rows_max = 5000"),
    ("threads = 2", "kv_tokens = 64"),
    ("\"64 MiB\"", "true"),
    ("\"64 MiB\"", "\"64 mops\""),
    ("\"64 MiB\"", "0"),
    ("[0, 1]", "[\"a\"]"),
    ("[0, 1]", "[]"),
    ("[0, 1]", "[1, 1]"),
    ("4096", "7"),
    ("name = \"small\"", "name = \"sm all\""),
    ("name = \"small\"\n", ""),
    ("path = \"large\"\n", ""),
    ("path = \"large\"", "path = \"\""),
    ("hf:owner/small", "hf:small"),
    ("hf:owner/small", "hf:owner/small:x.bin"),
    ("algorithm = \"r_stitch\"\n", ""),
    ("[\"small\", \"large\"]", "[\"large\", \"large\"]"),
    ("[router.params]\nthreshold = 0.02", "params = 1"),
    ("\"fixed\"", "\"fixd\""),
    ("\"fixed\"", "\"eager\""),
    ("max_wait_ms = 20", "profile = \"p.json\""),
    ("max_wait_ms = 20", "execution = \"sync\""),
    ("max_wait_ms = 20", "max_wait_ms = 60001"),
    ("large = 4", "large = 0"),
    ("max_wait_ms = 20", "[[faults.steps]]\nmodel = \"large\"\nkind = \"lost\""),
    ("max_wait_ms = 20", "[[faults.steps]]\nmodel = \"large\"\nkind = \"lost\"\nat = 1\nevery = 2"),
    ("max_wait_ms = 20", "[[faults.messages]]\nkind = \"lost\"\nevery = 1"),
];

/// What only the reader sees: other names, other files, sums.
const SEEN_BY_THE_READER: &[(&str, &str)] = &[
    ("{ large", "{ larg"),
    ("name = \"small\"", "name = \"large\""),
    ("[\"small\", \"large\"]", "[\"smal\", \"large\"]"),
    ("name = \"pair\"", "name = \"small\""),
    ("port = 9000", "request_timeout_ms = 10\nqueue_timeout_ms = 11"),
    ("threads = 2", "step_tokens_max = 8"),
    ("port = 9000", "live_max = 3"),
];

/// The same file as JSON.
fn json(text: &str) -> Value {
    let table: toml::Table = text.parse().unwrap_or_else(|error| panic!("{error}: {text}"));
    serde_json::to_value(table).expect("TOML fits into JSON")
}

fn changed((from, to): &(&str, &str)) -> String {
    assert!(PAIR.contains(from), "{from}");
    let text = PAIR.replacen(from, to, 1);
    let error = LaunchFile::parse(&text, Path::new("launch.toml")).expect_err(to);
    assert!(error.to_string().starts_with("launch.toml:"), "{error}");
    text
}

/// Every launch file of the repository: presets, examples, and those that pages tell the reader to save.
fn good() -> Vec<String> {
    let mut files: Vec<_> =
        fs::read_dir(root().join("config/presets")).expect("presets").flatten().map(|e| e.path()).collect();
    files.extend(["config/demo/launch.toml", "api/examples/custom_router/launch.toml"].map(|name| root().join(name)));
    let mut good: Vec<String> = files.iter().map(|file| fs::read_to_string(file).expect("it is text")).collect();
    assert!(good.len() >= 9, "{files:?}");
    for page in all() {
        let blocks = page.blocks().into_iter().filter(|block| block.language == "toml");
        good.extend(blocks.map(|block| block.text).filter(|text| text.contains("[[models]]")));
    }
    good.push(PAIR.to_owned());
    good.push(
        "[[models]]\nname = \"m\"\npath = \"m.gguf\"\nkv_memory = \"1.5 gib\"\n[server]\nstep_timeout_ms = 0"
            .to_owned(),
    );
    let filled = good.iter().map(|text| {
        let file = LaunchFile::parse(text, Path::new("launch.toml")).unwrap_or_else(|error| panic!("{error}\n{text}"));
        file.to_toml()
    });
    let filled: Vec<String> = filled.collect();
    good.extend(filled);
    good
}

#[test]
fn the_schema_takes_what_is_read_and_refuses_what_is_not() {
    let texts: [Vec<String>; 3] =
        [good(), WRONG.iter().map(changed).collect(), SEEN_BY_THE_READER.iter().map(changed).collect()];
    let work = scratch("launch-schema");
    let write = |name: &str, value: &Value| {
        let file = work.join(name);
        fs::write(&file, value.to_string()).expect("the target folder can be written");
        file
    };
    let instances: Vec<Value> = texts.iter().flatten().map(|text| json(text)).collect();
    let (schema, files) = (write("schema.json", &schema::json()), write("files.json", &Value::Array(instances)));
    let mut python = Venv::of("requirements-openapi.txt").python();
    let output = run(python.arg(folder().join("launch_schema.py")).arg(schema).arg(files), "see what is wrong");
    let faults: Vec<Option<String>> = serde_json::from_slice(&output.stdout).expect("a list");
    let [good, wrong, rest] = &texts;
    assert_eq!(faults.len(), good.len() + wrong.len() + rest.len());
    let said = good.iter().chain(wrong).chain(rest).zip(&faults);
    for (at, (text, fault)) in said.enumerate() {
        let refused = (good.len()..good.len() + wrong.len()).contains(&at);
        assert_eq!(fault.is_some(), refused, "{fault:?}\n{text}");
    }
}
