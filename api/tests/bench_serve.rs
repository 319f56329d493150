//! `tokenrouter bench serve` as a user runs it, against live servers. Nothing here depends on how fast anything is.

mod support;

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use support::{Folder, Serving, finish, program, root, run};

/// How long something is waited for that takes moments.
const WAIT: Duration = Duration::from_secs(120);

/// The number after a name of the block.
#[track_caller]
fn figure(block: &str, name: &str) -> f64 {
    let line = block.lines().find(|line| line.starts_with(&format!("{name}:")));
    let line = line.unwrap_or_else(|| panic!("no line {name}: in {block}"));
    let value = line.split_once(':').and_then(|(_, value)| value.split_whitespace().next());
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no number in {line}"))
}

/// The sum of a counter of /metrics over its labels.
fn counter(metrics: &str, name: &str) -> f64 {
    let values = metrics.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let rest = if let Some(labels) = rest.strip_prefix('{') { labels.split_once('}')?.1 } else { rest };
        rest.trim().parse::<f64>().ok()
    });
    values.sum()
}

fn metrics(serving: &Serving) -> String {
    let (status, text) = serving.ask("GET", "/metrics", "");
    assert_eq!(status, 200);
    text
}

fn bench(folder: &Folder, address: &str, more: &[&str]) -> (i32, String, String) {
    let url = format!("http://{address}");
    run(folder, &[&["bench", "serve", "--url", &url][..], more].concat())
}

/// Whether a value is what a JSON schema says: the part of JSON Schema that the documented one uses. Members that the
/// schema does not know are faults.
fn fits(root: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    if schema == &Value::Bool(true) {
        return Ok(());
    }
    if let Some(name) = schema["$ref"].as_str() {
        let known = root.pointer(name.trim_start_matches('#')).ok_or_else(|| format!("{name} is not defined"))?;
        return fits(root, known, value);
    }
    if let Some(any) = schema["anyOf"].as_array().or(schema["oneOf"].as_array()) {
        let fit = any.iter().any(|schema| fits(root, schema, value).is_ok());
        return if fit { Ok(()) } else { Err(format!("{value} is none of {any:?}")) };
    }
    if let Some(one) = schema.get("const") {
        return if one == value { Ok(()) } else { Err(format!("{value} is not {one}")) };
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_u64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        other => return Err(format!("a schema without a type: {other}")),
    };
    if !(kinds.contains(&kind) || kind == "integer" && kinds.contains(&"number")) {
        return Err(format!("{value} is no {kinds:?}"));
    }
    for item in value.as_array().into_iter().flatten() {
        fits(root, &schema["items"], item)?;
    }
    let Some(members) = value.as_object() else { return Ok(()) };
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        members.get(name).ok_or_else(|| format!("{name} is missing"))?;
    }
    for (name, member) in members {
        let schema = schema["properties"].get(name).or(schema.get("additionalProperties"));
        let schema = schema.ok_or_else(|| format!("{name} is not in the schema"))?;
        fits(root, schema, member).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}

#[track_caller]
fn documented(text: &str) -> Value {
    let value: Value = serde_json::from_str(text).expect("JSON");
    let schema = std::fs::read_to_string(root().join("docs/bench-serve.schema.json")).expect("the schema");
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    fits(&schema, &schema, &value).expect("the document is as documented");
    let mut wrong = value.clone();
    wrong["servers"][0]["summary"]["completed"] = "many".into();
    assert!(fits(&schema, &schema, &wrong).is_err(), "the check can fail");
    value
}

#[test]
fn the_block_is_complete_and_agrees_with_the_servers_counters() {
    let folder = Folder::new();
    let serving = Serving::start(program(&folder, &[]));
    let load = ["-n", "24", "--concurrency", "4", "--warmup", "0", "--input-tokens", "40", "--output-tokens", "15-25"];
    let more = ["--ignore-eos", "--seed", "5", "--goodput", "ttft:100000", "e2el:100000", "--percentiles", "50,99"];
    let files = ["--json", "found.json", "--html", "found.html"];
    let (code, block, err) = bench(&folder, &serving.address, &[&load[..], &more, &files].concat());
    assert_eq!((code, err.as_str()), (0, ""), "{block}");
    assert_eq!((figure(&block, "Successful requests"), figure(&block, "Failed requests")), (24.0, 0.0));
    assert_eq!(figure(&block, "Total input tokens"), 24.0 * 40.0, "prompts have the wanted length");
    let (input, output) = (figure(&block, "Total input tokens"), figure(&block, "Total generated tokens"));
    assert!((24.0 * 15.0..=24.0 * 25.0).contains(&output), "{output}");
    let counted = metrics(&serving);
    assert_eq!(counter(&counted, "vllm:generation_tokens_total"), output);
    assert_eq!(counter(&counted, "vllm:prompt_tokens_total"), input);
    assert_eq!(counter(&counted, "vllm:request_success_total"), 24.0);
    assert_eq!(figure(&block, "Tokens by small") + figure(&block, "Tokens by large"), output);
    assert!(figure(&block, "Hops between models") >= 1.0);
    assert_eq!(figure(&block, "Maximum request concurrency"), 4.0);
    assert_eq!(figure(&block, "Peak concurrent requests"), 4.0);
    let duration = figure(&block, "Benchmark duration (s)");
    let close = |name: &str, expected: f64| {
        let found = figure(&block, name);
        assert!((found - expected).abs() <= 0.01 + expected * 0.006 / duration, "{name}: {found}, {expected}");
    };
    close("Request throughput (req/s)", 24.0 / duration);
    close("Request goodput (req/s)", 24.0 / duration);
    close("Output token throughput (tok/s)", output / duration);
    close("Total token throughput (tok/s)", (input + output) / duration);
    for name in ["TTFT", "TPOT", "ITL", "E2EL"] {
        let of = |what: &str| figure(&block, &format!("{what} {name} (ms)"));
        assert!(of("Mean") > 0.0 && of("Std") >= 0.0 && of("P99") >= of("Median"), "{block}");
        assert_eq!(of("P50"), of("Median"));
    }
    assert!(figure(&block, "Mean E2EL (ms)") >= figure(&block, "Mean TTFT (ms)"));

    let read = |name: &str| std::fs::read_to_string(folder.path.join(name)).expect(name);
    let found = documented(&read("found.json"));
    let server = &found["servers"][0];
    let requests = server["requests"].as_array().expect("requests");
    let sum: u64 = requests.iter().filter_map(|request| request["completion_tokens"].as_u64()).sum();
    assert_eq!((requests.len(), sum as f64), (24, output));
    assert_eq!(server["summary"]["total_output_tokens"].as_f64(), Some(output));
    let page = read("found.html");
    assert_eq!(page.matches("<svg").count(), 5);
    assert!(
        page.contains("Mean TTFT (ms)") && !page.contains("<script") && !page.contains("src="),
        "nothing from outside"
    );
    assert!(
        page.matches("http").count()
            <= page.matches("http://127.0.0.1").count() + page.matches("http://www.w3.org").count()
    );
    let names: Vec<_> =
        std::fs::read_dir(&folder.path).expect("read").flatten().map(|entry| entry.file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().ends_with(".part")), "{names:?}");
}

/// With the number of tokens on every chunk each token but an answer's first has its time.
#[test]
fn tokens_that_are_counted_on_chunks_all_have_their_time() {
    let folder = Folder::new();
    let serving = Serving::start(program(&folder, &[]));
    let text =
        ["--endpoint", "completions", "--model", "small", "--input-tokens", "12", "--extra", "{\"temperature\": 0}"];
    let more = ["-n", "6", "--output-tokens", "20", "--ignore-eos", "--count-chunks", "--json", "-"];
    let (code, out, err) = bench(&folder, &serving.address, &[&text[..], &more].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    let found = documented(&out);
    let summary = &found["servers"][0]["summary"];
    assert_eq!(summary["total_output_tokens"], 6 * 20);
    assert_eq!(summary["itl_ms"]["count"], 6 * 19);
    assert_eq!(summary["by_model"], serde_json::json!({ "small": 6 * 20 }));
}

#[test]
fn an_open_loop_keeps_its_rate() {
    let folder = Folder::new();
    let serving = Serving::start(program(&folder, &[]));
    folder.write(
        "asked.jsonl",
        "{\"prompt\": \"What is 2 + 3?\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}\n",
    );
    let asked = ["--prompts", "asked.jsonl", "--output-tokens", "5", "--json", "-"];
    for more in [&["--rate", "20", "-n", "30"][..], &["--rate", "20", "--burstiness", "0.3", "-n", "30"]] {
        let (code, out, err) = bench(&folder, &serving.address, &[&asked[..], more].concat());
        assert_eq!((code, err.as_str()), (0, ""));
        let found = documented(&out);
        let starts: Vec<f64> = found["servers"][0]["requests"]
            .as_array()
            .expect("requests")
            .iter()
            .filter_map(|request| request["start_s"].as_f64())
            .collect();
        assert!(starts.len() == 30 && starts.is_sorted());
        // The last one is due at 30 / 20 s. None is sent before its time; how late one is, is told.
        let late = found["servers"][0]["summary"]["max_late_ms"].as_f64().expect("a number") / 1e3;
        assert!(starts[29] >= 1.499 && starts[29] <= 1.5 + late + 1e-3, "{} {late}", starts[29]);
    }
    let timed = ["--rate", "30", "--seconds", "1", "--concurrency", "3"];
    let (code, out, _) = bench(&folder, &serving.address, &[&asked[..], &timed].concat());
    assert_eq!(code, 0);
    let found = documented(&out);
    let requests = found["servers"][0]["requests"].as_array().expect("requests");
    assert!(requests.iter().all(|request| request["start_s"].as_f64() < Some(1.0)));
    let most = found["servers"][0]["summary"]["max_concurrent_requests"].as_u64();
    assert!(requests.len() >= 5 && most <= Some(3), "{} {most:?}", requests.len());
}

/// On a connection that is kept, the system may hold a small write back until the one before it is acknowledged, which takes
/// 40 ms and more. The server must not let it: otherwise next to no answer is quicker than that.
#[test]
fn tokens_do_not_wait_for_acknowledgements() {
    let folder = Folder::new();
    let serving = Serving::start(program(&folder, &[]));
    let asked = ["--model", "small", "--concurrency", "1", "-n", "60", "--input-tokens", "10", "--output-tokens", "12"];
    let (code, out, err) = bench(&folder, &serving.address, &[&asked[..], &["--ignore-eos", "--json", "-"]].concat());
    assert_eq!((code, err.as_str()), (0, ""));
    let found = documented(&out);
    let requests = found["servers"][0]["requests"].as_array().expect("requests");
    let after_first =
        |request: &Value| request["e2el_ms"].as_f64().zip(request["ttft_ms"].as_f64()).map(|(end, first)| end - first);
    let quick = requests.iter().filter_map(after_first).filter(|ms| *ms < 35.0).count();
    assert!(quick >= 15, "{quick} of 60 answers came without a break of 40 ms");
}

/// A server that treats every fifth request well.
fn moody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().flatten().enumerate() {
            let mut reader = BufReader::new(stream);
            let mut length = 0;
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) <= 2 {
                    break;
                }
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap_or(0);
                }
            }
            let mut body = vec![0; length];
            let _ = reader.read_exact(&mut body);
            let asked: Value = serde_json::from_slice(&body).expect("JSON");
            assert_eq!(asked["stream_options"]["include_usage"], true);
            let text = r#"data: {"choices":[{"index":0,"delta":{"content":"a"}}]}"#;
            let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}"#;
            let error = r#"data: {"error":{"message":"the model fell over"}}"#;
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
            let answer = match number % 5 {
                0 => format!("{head}{text}\n\n{usage}\n\ndata: [DONE]\n\n"),
                1 => {
                    let body = r#"{"error":{"message":"come back later"}}"#;
                    format!("HTTP/1.1 503 No\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
                }
                2 => format!("{head}{text}\n\n"),
                3 => format!("{head}{text}\n\ndata: [DONE]\n\n"),
                _ => format!("{head}{text}\n\n{error}\n\ndata: [DONE]\n\n"),
            };
            // A client that went away is its own affair.
            let _ = reader.into_inner().write_all(answer.as_bytes());
        }
    });
    address
}

#[test]
fn failed_requests_are_counted_by_reason() {
    let folder = Folder::new();
    folder.write("asked.jsonl", "{\"prompt\": \"a\"}\n");
    let asked = ["--prompts", "asked.jsonl", "--model", "m", "--warmup", "0", "--concurrency", "1"];
    let (code, block, err) = bench(&folder, &moody(), &[&asked[..], &["-n", "20"]].concat());
    assert_eq!((code, err.as_str()), (0, ""), "{block}");
    assert_eq!((figure(&block, "Successful requests"), figure(&block, "Failed requests")), (4.0, 16.0));
    for reason in ["HTTP 503", "broke off", "no usage", "error event"] {
        assert_eq!(figure(&block, reason), 4.0, "{block}");
    }
    assert!(block.contains("come back later") && block.contains("the model fell over"), "{block}");
    // What nobody answers is no result.
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("an address");
    let (code, block, err) = bench(&folder, &free.to_string(), &[&asked[..], &["-n", "3"]].concat());
    assert_eq!((code, figure(&block, "cannot connect")), (1, 3.0));
    assert!(err.contains("answered no request"), "{err}");
    let (code, block, err) = bench(&folder, &free.to_string(), &["--prompts", "asked.jsonl", "--model", "m"]);
    assert_eq!((code, block.as_str()), (1, ""));
    assert!(err.contains("before the measured ones") && err.contains("cannot connect"), "{err}");
    let (code, _, err) = bench(&folder, &free.to_string(), &[]);
    assert!(code == 1 && err.contains("check that the server runs"), "{err}");
    // Nor is it asked as fast as it can refuse: at most ten times a second.
    let (_, block, _) = bench(&folder, &free.to_string(), &[&asked[..], &["--seconds", "0.5"]].concat());
    assert!((1.0..=6.0).contains(&figure(&block, "cannot connect")), "{block}");
}

#[test]
fn two_servers_are_compared_in_turns() {
    let folder = Folder::new();
    let serving = Serving::start(program(&folder, &[]));
    let second = format!("http://{}/v1", serving.address);
    let asked = ["--input-tokens", "20-30", "--output-tokens", "8", "--concurrency", "2", "--warmup", "0"];
    let more = ["--compare", &second, "--blocks", "4", "-n", "10", "--json", "both.json"];
    let (code, out, err) = bench(&folder, &serving.address, &[&asked[..], &more].concat());
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(out.matches("Successful requests:                     10").count(), 2, "{out}");
    for name in ["request throughput", "output token throughput", "mean TTFT", "mean TPOT", "mean ITL", "mean E2EL"] {
        assert!(figure(&out, name) > 0.0, "{out}");
    }
    let found = documented(&std::fs::read_to_string(folder.path.join("both.json")).expect("both.json"));
    for ratio in found["ratios"].as_array().expect("ratios") {
        assert_eq!(ratio["ratio"]["rounds"].as_array().map(Vec::len), Some(4), "{ratio}");
        assert!(ratio["ratio"]["ci95"].as_f64() >= Some(0.0), "{ratio}");
    }
    // Both were asked the same.
    let lengths = |server: usize| {
        let requests = found["servers"][server]["requests"].as_array().expect("requests");
        requests.iter().map(|request| request["prompt_tokens"].as_u64()).collect::<Vec<_>>()
    };
    assert_eq!(lengths(0), lengths(1));
    assert_eq!(counter(&metrics(&serving), "vllm:request_success_total"), 20.0);
}

#[test]
fn keys_and_certificates_of_ones_own_are_shown_and_trusted() {
    let folder = Folder::new();
    let [model, certificate, key] =
        ["config/demo/small", "api/tests/tls/first.cert.pem", "api/tests/tls/first.key.pem"]
            .map(|path| root().join(path).display().to_string());
    folder.write("keys", "the-key-of-this-test\n");
    let launch = format!(
        "[[models]]\nname = \"m\"\npath = \"{model}\"\n[server]\napi_keys_file = \"keys\"\n\
         [server.tls]\ncert = \"{certificate}\"\nkey = \"{key}\"\n"
    );
    let config = folder.write("launch.toml", &launch).display().to_string();
    let serving = Serving::start(program(&folder, &["--config", &config]));
    let url = format!("https://{}", serving.address);
    let load = ["bench", "serve", "--url", &url, "-n", "4", "--input-tokens", "12", "--output-tokens", "4"];
    let asked = |more: &[&str], key: Option<&str>| {
        let mut command = program(&folder, &[&load[..], more].concat());
        command.env_remove("OPENAI_API_KEY").envs(key.map(|key| ("OPENAI_API_KEY", key)));
        finish(command.output().expect("it starts"))
    };
    let (code, block, err) = asked(&["--ca", &certificate], Some("the-key-of-this-test"));
    assert_eq!((code, err.as_str()), (0, ""), "{block}");
    assert_eq!(figure(&block, "Successful requests"), 4.0);
    let (code, _, err) = asked(&["--ca", &certificate, "--api-key", "wrong"], Some("the-key-of-this-test"));
    assert!(code == 1 && err.contains("401") && err.contains("--api-key"), "the option comes first: {err}");
    let (code, _, err) = asked(&[], Some("the-key-of-this-test"));
    assert!(code == 1 && err.contains("cannot connect") && err.contains("certificate"), "{err}");
    let (code, _, err) = asked(&["--ca", "keys"], None);
    assert!(code == 2 && err.contains("--ca keys: holds no certificate"), "{err}");
}

fn until(what: &str, mut true_now: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !true_now() {
        assert!(begin.elapsed() < WAIT, "{what}");
        std::thread::yield_now();
    }
}

fn interrupt(child: &Child) {
    let line = format!("kill -INT {}", child.id());
    assert!(std::process::Command::new("sh").args(["-c", &line]).status().expect("a shell").success());
}

#[test]
fn an_interrupted_run_tells_what_it_measured() {
    let folder = Folder::new();
    let serving = Serving::start(program(&folder, &[]));
    let url = format!("http://{}", serving.address);
    let arguments =
        ["bench", "serve", "--url", &url, "--seconds", "600", "--concurrency", "3", "--output-tokens", "10"];
    let arguments = [&arguments[..], &["--input-tokens", "10", "--json", "found.json"]].concat();
    let child = program(&folder, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    until("some requests end", || counter(&metrics(&serving), "vllm:request_success_total") >= 8.0);
    interrupt(&child);
    let (code, block, err) = finish(child.wait_with_output().expect("it ends"));
    assert_eq!((code, err.as_str()), (130, ""), "{block}");
    assert!(figure(&block, "Successful requests") >= 1.0 && figure(&block, "Failed requests") == 0.0, "{block}");
    let found = documented(&std::fs::read_to_string(folder.path.join("found.json")).expect("found.json"));
    assert_eq!(found["stopped"], true);
    // What was cut is given up at the server too.
    until("nothing runs", || counter(&metrics(&serving), "tokenrouter:live_requests") == 0.0);
}

#[test]
fn wrong_options_end_with_code_2_and_one_line() {
    let folder = Folder::new();
    folder.write("asked.jsonl", "{\"prompt\": 3}\n");
    let cases: [(&[&str], &str); 8] = [
        (&["--url", "localhost:80"], "http://HOST:PORT"),
        (&["--url", "http://localhost:1", "--config", "x.toml"], "--config"),
        (&["--url", "http://localhost:1", "--model", "m", "--prompts", "asked.jsonl"], "asked.jsonl:1:"),
        (&["--url", "http://localhost:1", "--goodput", "itl:3"], "ttft:MS"),
        (&["--url", "http://localhost:1", "--burstiness", "2"], "--rate"),
        (&["--url", "http://localhost:1", "--extra", "[1]"], "JSON object"),
        (&["--url", "http://localhost:1", "--percentiles", "100"], "below 100"),
        (&["--url", "http://localhost:1", "--input-tokens", "9-3"], "50-200"),
    ];
    for (arguments, expected) in cases {
        let (code, out, err) = run(&folder, &[&["bench", "serve"], arguments].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}
