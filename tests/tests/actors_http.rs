//! `GET /actors` and the stream of it over HTTP: what it says of actors, hops and requests is what happened, whoever reads it
//! slowly holds nothing up, and it ends with the server. Owner: the dashboard.

use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokenrouter::http::keys::Keys;
use tokenrouter_core::faults::{Fault, FaultPlan};
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{Connection, TEXT, get, post, request};

/// Time for what happens within a second or two, on a busy machine.
const SOON: Duration = Duration::from_secs(30);

const ROLES: [&str; 6] = ["subserver", "client", "batcher", "decode", "inter_model", "executor"];

fn body(more: &Value) -> Value {
    let mut body = json!({"model": "pair", "prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "seed": 1});
    body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    body
}

fn actors(server: &Server) -> Value {
    let answer = get(server.address, "/actors");
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()
}

/// Sum of the counts of the buckets.
fn in_buckets(durations: &Value) -> u64 {
    let buckets = durations["buckets"].as_array().expect("buckets");
    buckets.iter().map(|bucket| bucket[1].as_u64().expect("a count")).sum()
}

/// A reader of the stream.
struct Stream(Connection);

impl Stream {
    fn open(server: &Server) -> Stream {
        let mut connection = Connection::open(server.address);
        connection.send(&request("GET", "/dashboard/events", ""));
        Stream(connection)
    }

    /// Data of the next event of this name.
    fn next(&mut self, name: &str) -> Value {
        let begin = format!("event: {name}\ndata: ");
        let seen = self.0.read_until(&begin);
        let data = seen.split(&begin).last().unwrap_or_default();
        serde_json::from_str(data.trim()).unwrap_or_else(|error| panic!("{error}: {data}"))
    }

    /// Data of events of this name until one holds.
    fn until(&mut self, name: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let begin = Instant::now();
        loop {
            let data = self.next(name);
            if holds(&data) {
                return data;
            }
            assert!(begin.elapsed() < SOON, "never, but {data}");
        }
    }
}

#[actix_rt::test]
async fn the_document_says_what_happened() {
    let server = Server::start(Setup::default());
    for seed in 0..4 {
        assert_eq!(post(server.address, TEXT, &body(&json!({"seed": seed}))).status, 200);
    }
    server.idle_within(SOON, "after four requests").await;
    let state = actors(&server);
    assert_eq!((&state["open"], &state["live"], &state["live_max"]), (&json!(true), &json!(0), &json!(64)));
    assert_eq!(state["router"]["policy"], "eager");
    let models = state["models"].as_array().expect("models");
    let mut tokens = 0;
    for (model, name) in models.iter().zip(["small", "large"]) {
        assert_eq!(model["name"], name);
        let committed = model["tokens"]["committed"].as_u64().expect("a count");
        tokens += committed;
        let counted = server.metric(&format!("tokenrouter:committed_tokens_total{{model_name=\"{name}\"}}")).await;
        assert_eq!(counted, committed as f64, "{name}: as in /metrics");
        let roles: Vec<&str> =
            model["actors"].as_array().expect("actors").iter().filter_map(|actor| actor["role"].as_str()).collect();
        assert_eq!(roles, ROLES);
        for actor in model["actors"].as_array().expect("actors") {
            let (mailbox, role) = (&actor["mailbox"], &actor["role"]);
            assert_eq!((&mailbox["depth"], &actor["lives"], &actor["state"]), (&json!(0), &json!(1), &json!("idle")));
            assert_eq!(in_buckets(&mailbox["wait"]), mailbox["messages"].as_u64().expect("a count"), "{role}");
            // Nobody streams from a model where no request enters.
            let is_quiet = role == "client" && name == "large";
            assert_eq!(mailbox["messages"] == 0, is_quiet, "{name} {role}: {mailbox}");
        }
        let sizes = model["steps"]["sizes"].as_array().expect("sizes").iter().filter_map(Value::as_u64).zip(1..);
        let (batches, rows) = sizes.fold((0, 0), |(all, rows), (count, size)| (all + count, rows + count * size));
        let steps = &model["steps"]["count"];
        assert_eq!((&json!(batches), &json!(rows)), (steps, &model["batching"]["rows"]), "{name}: batches");
        assert_eq!(model["steps"]["time"]["count"], *steps, "{name}: every step is timed");
        assert_eq!(model["batching"]["wait"]["count"], json!(rows), "{name}: every wait is counted");
        let decode = &model["actors"][3]["snapshot"];
        assert_eq!(decode["busy_seconds"], model["steps"]["busy_seconds"], "{name}: {decode}");
        assert!(decode["began_ms"].as_f64() <= decode["last_step_ms"].as_f64(), "{name}: {decode}");
    }
    assert_eq!(tokens, 160);
    for (from, to) in [(0, 1), (1, 0)] {
        let hop = &models[from]["hops"][to];
        assert!(hop["count"].as_u64().is_some_and(|count| count > 0), "{hop}");
        assert_eq!(hop["latency"]["count"], hop["count"], "each hop within a process is timed");
        let p: f64 = models[from]["hops"].as_array().expect("hops").iter().filter_map(|hop| hop["p"].as_f64()).sum();
        assert!((p - 1.0).abs() < 1e-9, "{p}");
    }
    let served = &state["latency"][0];
    assert_eq!((&served["model_name"], &served["ttft"]["count"]), (&json!("pair"), &json!(4)));
    assert_eq!((&served["finished"], &served["generation_tokens"]), (&json!({"length": 4}), &json!(160)));
    server.stop();
}

#[actix_rt::test]
async fn requests_are_told_with_where_they_were() {
    let server = Server::start(Setup::default());
    let mut stream = Stream::open(&server);
    assert_eq!(post(server.address, TEXT, &body(&json!({}))).status, 200);
    let mut gone = Connection::open(server.address);
    gone.send(&request(
        "POST",
        TEXT,
        &body(&json!({"stream": true, "max_tokens": 1900, "model": "large"})).to_string(),
    ));
    gone.read_until("data: ");
    let is_live = |request: &Value| request["ended_ms"].is_null();
    let told = stream.until("requests", |told| told["requests"].as_array().is_some_and(|all| all.len() == 2));
    assert!(!is_live(&told["requests"][1]), "{told}");
    drop(gone);
    let told = stream.until("requests", |told| !told["requests"].as_array().into_iter().flatten().any(is_live));
    let [second, first] = told["requests"].as_array().expect("requests").as_slice() else { panic!("{told}") };
    assert_eq!(
        (&first["outcome"], &first["routed"], &first["entry"]),
        (&json!("length"), &json!(true), &json!("small"))
    );
    assert_eq!((&first["tokens"], &first["prompt_tokens"]), (&json!(40), &json!(3)));
    let by_model = first["by_model"].as_object().expect("by model");
    assert_eq!(by_model.values().filter_map(Value::as_u64).sum::<u64>(), 40);
    let spans = first["spans"].as_array().expect("spans");
    for (model, kind) in [("small", "running"), ("small", "pending"), ("large", "running"), ("large", "pending")] {
        assert!(spans.iter().any(|span| span["model"] == model && span["kind"] == kind), "{model} {kind}: {first}");
    }
    let ended = first["ended_ms"].as_f64().expect("an end");
    for span in spans {
        let (from, to) = (span["from_ms"].as_f64().expect("a time"), span["to_ms"].as_f64().expect("an end"));
        assert!(first["arrived_ms"].as_f64() <= Some(from) && from <= to && to <= ended, "{span} of {first}");
    }
    // One model has control at any time.
    let mut running: Vec<(f64, f64)> = spans
        .iter()
        .filter(|span| span["kind"] == "running")
        .filter_map(|span| Some((span["from_ms"].as_f64()?, span["to_ms"].as_f64()?)))
        .collect();
    running.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert!(running.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{running:?}");
    assert_eq!(
        (&second["outcome"], &second["routed"], &second["entry"]),
        (&json!("abort"), &json!(false), &json!("large"))
    );
    server.stop();
}

#[actix_rt::test]
async fn a_lost_executor_is_seen_in_the_log() {
    let faults = [FaultPlan::new(vec![(4, Fault::Panic)]), FaultPlan::default()];
    let server = Server::start(Setup { faults, ..Setup::default() });
    assert_eq!(post(server.address, TEXT, &body(&json!({}))).status, 200, "the request goes on with another executor");
    let state = actors(&server);
    let executor = &state["models"][0]["actors"][5];
    assert_eq!((&executor["role"], &executor["lives"]), (&json!("executor"), &json!(2)));
    let [entry] = state["log"].as_array().expect("a log").as_slice() else { panic!("{state}") };
    assert_eq!((&entry["model"], &entry["actor"]), (&json!("small"), &json!("executor")));
    assert!(entry["what"].as_str().is_some_and(|what| what.starts_with("lost and rebuilt: panicked")), "{entry}");
    assert_eq!(executor["last_error"], entry["what"]);
    assert_eq!(state["models"][0]["actors"][1]["lives"], 1, "the others were not touched");
    server.stop();
}

/// One reader reads, one never does, one goes away.
#[actix_rt::test]
async fn readers_hold_nothing_up_and_end_with_the_server() {
    let server = Server::start(Setup::default());
    let (mut reads, unread, gone) = (Stream::open(&server), Stream::open(&server), Stream::open(&server));
    let first = reads.next("state");
    drop(gone);
    assert_eq!(post(server.address, TEXT, &body(&json!({}))).status, 200);
    let later = reads.until("state", |state| state["models"][0]["steps"]["count"].as_u64() > Some(0));
    assert!(later["now_ms"].as_f64() > first["now_ms"].as_f64());
    let begin = Instant::now();
    server.stop();
    assert!(begin.elapsed() < SOON, "the server waits for readers");
    reads.0.read_to_end();
    drop(unread);
}

#[actix_rt::test]
async fn it_needs_a_key_where_metrics_do() {
    let server = Server::start(Setup { keys: Keys::new(["one-key"], None), ..Setup::default() });
    for path in ["/metrics", "/actors", "/dashboard/events"] {
        assert_eq!(get(server.address, path).status, 401, "{path}");
    }
    let mut connection = Connection::open(server.address);
    connection.send(b"GET /dashboard/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one-key\r\n\r\n");
    assert_eq!(Stream(connection).next("state")["live"], 0);
    server.stop();
}
