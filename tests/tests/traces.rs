//! OpenTelemetry traces of a running server, as a collector gets them: what is sent is read by the protocol's own Python
//! package (`otlp_collector.py`).

use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};
use tokenrouter::telemetry::Settings;
use tokenrouter_tests::clients::{Venv, folder};
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{CHAT, Connection, PATIENCE, TEXT, get, post, request};
use tokenrouter_tests::series::value;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

/// Waits until so many spans are counted.
#[allow(clippy::disallowed_methods, reason = "a thread of the server is waited for, which sends no message")]
fn counted(address: SocketAddr, outcome: &str, spans: u32) {
    let (series, began) = (format!("tokenrouter:trace_spans_total{{outcome=\"{outcome}\"}}"), Instant::now());
    while value(&get(address, "/metrics").text, &series) != f64::from(spans) {
        assert!(began.elapsed() < PATIENCE, "{series} is not {spans}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A collector in a process of its own; it ends with its owner.
struct Collector {
    child: Child,
    address: SocketAddr,
    lines: Receiver<String>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It ends by itself; there is nothing to be done if not.
        let _ = self.child.wait();
    }
}

impl Collector {
    fn start(refuse: u32) -> Collector {
        let mut command = Venv::of("requirements-otlp.txt").python();
        command.arg("-u").arg(folder().join("otlp_collector.py")).args(["--refuse", &refuse.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the collector starts");
        let (sender, lines) = sync_channel(1000);
        let said = BufReader::new(child.stdout.take().expect("it is piped"));
        std::thread::spawn(move || said.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let address = lines.recv_timeout(PATIENCE).expect("an address").parse().expect("an address");
        Collector { child, address, lines }
    }

    fn settings(&self) -> Settings {
        let variable = |name: &str| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some(format!("http://{}", self.address)),
            "OTEL_EXPORTER_OTLP_HEADERS" => Some("authorization=Bearer%20secret".to_owned()),
            "OTEL_SERVICE_NAME" => Some("of the test".to_owned()),
            _ => None,
        };
        Settings::read(variable).expect("they are fine").expect("a collector is named")
    }

    fn server(&self, setup: Setup) -> Server {
        Server::start(Setup { telemetry: Some(self.settings()), ..setup })
    }

    /// The next message.
    fn message(&self) -> Value {
        let line = self.lines.recv_timeout(PATIENCE).expect("traces come");
        let told: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(told["path"], "/v1/traces");
        let headers = &told["headers"];
        assert_eq!(
            (&headers["content-type"], &headers["authorization"]),
            (&json!("application/x-protobuf"), &json!("Bearer secret"))
        );
        let group = &told["message"]["resourceSpans"][0];
        let resource = json!({"service.name": "of the test", "service.version": env!("CARGO_PKG_VERSION")});
        assert_eq!(group["resource"], resource);
        assert_eq!(group["scopeSpans"][0]["scope"]["name"], "tokenrouter");
        group["scopeSpans"][0]["spans"].clone()
    }

    /// The next spans, in the order in which they began.
    fn spans(&self, count: usize) -> Vec<Value> {
        let mut spans = Vec::new();
        while spans.len() < count {
            spans.extend(self.message().as_array().expect("spans").clone());
        }
        spans.sort_by_key(|span| span["startTimeUnixNano"].as_u64());
        assert_eq!(spans.len(), count, "{spans:#?}");
        spans
    }
}

fn with_headers(address: SocketAddr, body: &Value, headers: &str) {
    let sent = String::from_utf8(request("POST", TEXT, &body.to_string())).expect("text");
    let mut connection = Connection::open(address);
    connection.send(sent.replacen("host: x\r\n", &format!("host: x\r\n{headers}"), 1).as_bytes());
    assert_eq!(connection.answer().status, 200);
}

/// Tokens by model, and hops as they are seen in the answer: from, to, position, tokens in a row before.
fn way(makers: &[&str]) -> Vec<Value> {
    let (mut hops, mut since) = (Vec::new(), 0);
    for at in 1..makers.len() {
        if makers[at] != makers[at - 1] {
            let (from, to) = (makers[at - 1], makers[at]);
            hops.push(json!({"tokenrouter.from": from, "tokenrouter.to": to, "tokenrouter.position": at,
                "tokenrouter.tokens": at - since, "tokenrouter.choice": 0}));
            since = at;
        }
    }
    hops
}

#[test]
fn a_request_has_one_span_with_its_hops() {
    let collector = Collector::start(0);
    let server = collector.server(Setup::default());
    let body = json!({"model": "pair", "prompt": "w1 w2 w3", "max_tokens": 12, "temperature": 0.5, "seed": 7,
        "return_token_models": true});
    let parent = format!("traceparent: 00-{TRACE}-{SPAN}-01\r\ntracestate: vendor=1\r\nx-request-id: mine\r\n");
    with_headers(server.address, &body, &parent);
    let span = collector.spans(1).remove(0);
    assert_eq!((&span["traceId"], &span["parentSpanId"]), (&json!(TRACE), &json!(SPAN)));
    assert_eq!((&span["traceState"], &span["kind"]), (&json!("vendor=1"), &json!("SPAN_KIND_SERVER")));
    assert_eq!((&span["name"], span["status"]["code"].is_null()), (&json!("text_completion pair"), true));
    let attributes = &span["attributes"];
    for (key, value) in [
        ("http.request.method", json!("POST")),
        ("http.route", json!(TEXT)),
        ("http.response.status_code", json!(200)),
        ("tokenrouter.request.id", json!("mine")),
        ("gen_ai.operation.name", json!("text_completion")),
        ("gen_ai.request.model", json!("pair")),
        ("gen_ai.request.max_tokens", json!(12)),
        ("gen_ai.request.temperature", json!(0.5)),
        ("gen_ai.request.seed", json!(7)),
        ("gen_ai.request.choice.count", json!(1)),
        ("gen_ai.response.finish_reasons", json!(["length"])),
        ("gen_ai.usage.input_tokens", json!(3)),
        ("gen_ai.usage.output_tokens", json!(12)),
    ] {
        assert_eq!(attributes[key], value, "{key} in {attributes}");
    }

    // The same request again says who made which token; it has no parent.
    let answer = post(server.address, TEXT, &body).json();
    let again = collector.spans(1).remove(0);
    assert_eq!(again["parentSpanId"], "");
    assert!(again["traceId"] != span["traceId"] && again["spanId"] != span["spanId"]);
    assert_eq!(again["attributes"]["gen_ai.response.id"], answer["id"]);
    let makers: Vec<&str> =
        answer["choices"][0]["token_models"].as_array().expect("names").iter().filter_map(Value::as_str).collect();
    let by_model = |name: &str| makers.iter().filter(|maker| **maker == name).count();
    for name in ["small", "large"] {
        assert_eq!(again["attributes"][format!("tokenrouter.tokens.{name}")], by_model(name), "{again}");
    }
    let details = &answer["usage"]["completion_tokens_details"];
    assert_eq!(again["attributes"]["tokenrouter.hops"], details["hops"]);
    let (first, hops) = again["events"].as_array().expect("events").split_first().expect("an event");
    assert_eq!((&first["name"], &first["attributes"]["tokenrouter.to"]), (&json!("first token"), &json!(makers[0])));
    assert!(hops.iter().all(|event| event["name"] == "hop"));
    let told: Vec<Value> = hops.iter().map(|event| event["attributes"].clone()).collect();
    assert_eq!(told, way(&makers));
    assert!(!told.is_empty(), "requests of this pair hop");
    let mut moment = again["startTimeUnixNano"].as_u64();
    for event in
        again["events"].as_array().into_iter().flatten().chain([&json!({"timeUnixNano": again["endTimeUnixNano"]})])
    {
        assert!(event["timeUnixNano"].as_u64() >= moment, "in order: {again}");
        moment = event["timeUnixNano"].as_u64();
    }
    counted(server.address, "sent", 2);
    server.stop();
}

#[test]
fn every_request_to_generate_has_its_span_and_no_other_has() {
    let collector = Collector::start(0);
    let server = collector.server(Setup::default());
    let address = server.address;
    let ask = |path: &str, extra: Value| {
        let mut body = json!({"model": "pair", "max_tokens": 6});
        body[if path == CHAT { "messages" } else { "prompt" }] =
            if path == CHAT { json!([{"role": "user", "content": "w1"}]) } else { json!("w1 w2") };
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        post(address, path, &body).status
    };
    get(address, "/health");
    assert_eq!(ask(CHAT, json!({"n": 2})), 200);
    assert_eq!(ask(CHAT, json!({"stream": true})), 200);
    assert_eq!(ask(TEXT, json!({"temperature": 9})), 400);
    assert_eq!(ask(TEXT, json!({"model": "small"})), 200);
    with_headers(
        address,
        &json!({"model": "pair", "prompt": "w1", "max_tokens": 2}),
        &format!("traceparent: 00-{TRACE}-{SPAN}-00\r\n"),
    );
    let mut connection = Connection::open(address);
    let long = json!({"model": "pair", "prompt": "w1", "max_tokens": 1500, "ignore_eos": true, "stream": true});
    connection.send(&request("POST", TEXT, &long.to_string()));
    connection.read_until("data: {");
    drop(connection);
    let spans = collector.spans(5);
    let told = |at: usize, key: &str| spans[at]["attributes"][key].clone();
    let names: Vec<&str> = spans.iter().filter_map(|span| span["name"].as_str()).collect();
    assert_eq!(
        names,
        ["chat pair", "chat pair", "POST /v1/completions", "text_completion small", "text_completion pair"]
    );
    assert_eq!(told(0, "gen_ai.usage.output_tokens"), 12, "of both choices");
    assert_eq!(told(0, "gen_ai.response.finish_reasons"), json!(["length", "length"]));
    let choices: Vec<&Value> = spans[0]["events"]
        .as_array()
        .expect("events")
        .iter()
        .map(|event| &event["attributes"]["tokenrouter.choice"])
        .collect();
    assert!(choices.contains(&&json!(0)) && choices.contains(&&json!(1)));
    assert_eq!((told(2, "http.response.status_code"), told(2, "gen_ai.request.model")), (json!(400), Value::Null));
    assert!(spans[2]["status"]["code"].is_null(), "the client's fault");
    assert_eq!((told(3, "tokenrouter.tokens.small"), told(3, "tokenrouter.hops")), (json!(6), json!(0)));
    assert_eq!(told(4, "gen_ai.response.finish_reasons"), json!(["abort"]));
    let events = spans[4]["events"].as_array().expect("events").len();
    assert!(events <= 128, "{events}");
    server.stop();
}

#[test]
fn a_collector_that_comes_late_gets_everything() {
    let collector = Collector::start(2);
    let server = collector.server(Setup::default());
    assert_eq!(post(server.address, TEXT, &json!({"model": "small", "prompt": "w1", "max_tokens": 2})).status, 200);
    assert_eq!(collector.spans(1)[0]["name"], "text_completion small");
    server.stop();
}

#[test]
fn a_collector_that_is_away_holds_nothing_up() {
    // Nobody listens at the port of a protocol that is long out of use.
    let settings =
        Settings { url: "http://127.0.0.1:9/v1/traces".to_owned(), headers: Vec::new(), resource: Vec::new() };
    let server = Server::start(Setup { telemetry: Some(settings), ..Setup::default() });
    let body = json!({"model": "pair", "prompt": "w1 w2", "max_tokens": 4});
    let began = Instant::now();
    (0..20).for_each(|_| assert_eq!(post(server.address, TEXT, &body).status, 200));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    counted(server.address, "lost", 20);
    server.stop();
}
