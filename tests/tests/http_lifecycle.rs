//! The life of a request over HTTP where something takes too long or is too much: a model, the queue, a body, a reader.
//! Other requests go on, what the late one held becomes free, and the client is told in the form it can read then.

use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokenrouter::http::Limits;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{CHAT, Connection, TEXT, get, post, request};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpSocket;

/// Time for what happens at once, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// A bound that is passed quickly.
const SHORT: Duration = Duration::from_millis(400);

fn text(model: &str, more: &Value) -> Value {
    let mut body = json!({"model": model, "prompt": [1, 2, 3], "max_tokens": 1000, "temperature": 0, "seed": 1});
    body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    body
}

#[actix_rt::test]
async fn a_request_without_a_token_in_time_is_refused_and_frees_everything() {
    let bounds = Bounds { first_token: Some(SHORT), ..Bounds::default() };
    let server = Server::start(Setup { bounds, ..Setup::default() });
    server.hold(0);
    for stream in [false, true] {
        let answer = post(server.address, TEXT, &text("small", &json!({"stream": stream})));
        assert_eq!((answer.status, &answer.error()["code"]), (503, &json!("queue_timeout")), "{}", answer.text);
        assert_eq!(answer.header("retry-after"), Some("1"));
    }
    server.until("both are gone", |snapshot| snapshot.live == 0).await;
    server.release(0);
    server.idle_within(SOON, "after two that waited in vain").await;
    let answer = post(server.address, TEXT, &text("small", &json!({"max_tokens": 3})));
    assert_eq!(answer.said().completion_tokens(), 3);
    assert_eq!(server.metric(r#"vllm:request_success_total{finished_reason="error",model_name="small"}"#).await, 2.0);
    server.stop();
}

#[actix_rt::test]
async fn a_request_that_does_not_end_in_time_gets_a_status_or_an_error_event() {
    let bounds = Bounds { whole: Some(SHORT * 3), ..Bounds::default() };
    let server = Server::start(Setup { bounds, step: Duration::from_millis(20), ..Setup::default() });
    // A thousand tokens of 20 ms do not fit.
    let whole = post(server.address, TEXT, &text("pair", &json!({})));
    assert_eq!((whole.status, &whole.error()["code"]), (504, &json!("request_timeout")), "{}", whole.text);
    let events = post(server.address, TEXT, &text("pair", &json!({"stream": true}))).events();
    let (last, before) = events.split_last().expect("events");
    assert_eq!(last["error"]["code"], "request_timeout", "{last}");
    assert!(!before.is_empty(), "tokens came before");
    assert!(
        before.iter().all(|event| event["choices"][0]["finish_reason"].is_null()),
        "a failed choice never finishes"
    );
    server.idle_within(SOON, "after two that took too long").await;
    server.stop();
}

#[actix_rt::test]
async fn prompts_over_the_bound_are_refused_until_others_end() {
    let bounds = Bounds { prompt_tokens_max: Some(100), ..Bounds::default() };
    let server = Server::start(Setup { bounds, ..Setup::default() });
    server.hold(0);
    let mut first = Connection::open(server.address);
    let ids: Vec<u32> = (0..60).map(|at| at % 30).collect();
    first.send(&request("POST", TEXT, &text("small", &json!({"prompt": ids, "stream": true})).to_string()));
    server.until("it runs", |snapshot| snapshot.models[0].decode.running == 1).await;
    let refused = post(server.address, TEXT, &text("large", &json!({"prompt": ids})));
    assert_eq!((refused.status, &refused.error()["code"]), (429, &json!("overloaded")), "{}", refused.text);
    assert_eq!(refused.header("retry-after"), Some("1"));
    let series = r#"tokenrouter:requests_refused_total{model_name="large",reason="prompt_tokens"}"#;
    assert_eq!(server.metric(series).await, 1.0);
    assert_eq!(server.metric("tokenrouter:live_prompt_tokens").await, 60.0);
    let beside = post(server.address, TEXT, &text("large", &json!({"prompt": ids[..40], "max_tokens": 1})));
    assert_eq!(beside.status, 200, "{}", beside.text);
    drop(first);
    server.until("it is gone", |snapshot| snapshot.live == 0 && snapshot.prompt_tokens == 0).await;
    let again = post(server.address, TEXT, &text("large", &json!({"prompt": ids, "max_tokens": 1})));
    assert_eq!(again.status, 200, "{}", again.text);
    server.release(0);
    server.idle_within(SOON, "at the end").await;
    server.stop();
}

#[actix_rt::test]
async fn a_body_that_does_not_come_in_time_is_given_up() {
    let http = Limits { client: SHORT, ..Limits::default() };
    let server = Server::start(Setup { http, ..Setup::default() });
    let whole = request("POST", TEXT, &text("pair", &json!({})).to_string());
    let mut slow = Connection::open(server.address);
    slow.send(&whole[..whole.len() - 20]);
    let answer = slow.answer();
    assert_eq!((answer.status, &answer.error()["code"]), (408, &json!("client_timeout")), "{}", answer.text);
    slow.expect_closed();
    assert_eq!(post(server.address, TEXT, &text("pair", &json!({"max_tokens": 2}))).status, 200);
    server.stop();
}

/// Choices that fill the buffers of a connection.
const CHOICES: u32 = 3;

/// The answer is larger than what a connection holds, so the server is left with bytes that nobody takes.
#[actix_rt::test]
async fn a_stream_that_nobody_reads_is_given_up() {
    let http = Limits { client: SHORT, ..Limits::default() };
    let server = Server::start(Setup { http, ..Setup::default() });
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(4096).expect("the option exists");
    let mut unread = socket.connect(server.address).await.expect("the server listens");
    let messages = json!([{"role": "user", "content": "w1 w2"}]);
    let body = json!({"model": "pair", "messages": messages, "max_tokens": 1900, "n": CHOICES, "stream": true,
                      "logprobs": true, "top_logprobs": 20});
    unread.write_all(&request("POST", CHAT, &body.to_string())).await.expect("sent");
    server.until("it runs", |snapshot| snapshot.live == CHOICES).await;
    // Whether or not the models have said all by then: what waits for this reader is dropped.
    let begin = Instant::now();
    let aborted = r#"vllm:request_success_total{finished_reason="abort",model_name="pair"}"#;
    while server.metric(aborted).await < f64::from(CHOICES) {
        assert!(begin.elapsed() < SOON, "nobody gave the reader up");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.idle_within(SOON, "after a reader that does not read").await;
    assert_eq!(post(server.address, TEXT, &text("pair", &json!({"max_tokens": 2}))).status, 200);
    drop(unread);
    server.stop();
}

/// Whether `/health` comes to answer so.
async fn health_becomes(server: &Server, status: u16) -> String {
    let begin = Instant::now();
    loop {
        let answer = get(server.address, "/health");
        if answer.status == status {
            return answer.text;
        }
        assert!(begin.elapsed() < SOON, "still {}: {}", answer.status, answer.text);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[actix_rt::test]
async fn health_turns_red_while_work_does_not_move_and_green_when_it_does() {
    let http = Limits { stall: SHORT, ..Limits::default() };
    let server = Server::start(Setup { http, ..Setup::default() });
    // Idle for longer than the bound is no fault.
    tokio::time::sleep(SHORT + SHORT / 2).await;
    assert_eq!(get(server.address, "/health").status, 200);
    for (model, name) in [(0, "small"), (1, "large")] {
        server.hold(model);
        let mut stuck = Connection::open(server.address);
        stuck.send(&request("POST", TEXT, &text("pair", &json!({"stream": true})).to_string()));
        let said = health_becomes(&server, 503).await;
        assert!(said.contains("made no step"), "{said}");
        let names: Vec<&str> = ["small", "large"].into_iter().filter(|name| said.contains(name)).collect();
        assert!(names == [name] || names == ["small"], "{said}");
        assert_eq!(get(server.address, "/ready").status, 200, "it still takes requests");
        server.release(model);
        health_becomes(&server, 200).await;
        drop(stuck);
        server.idle_within(SOON, name).await;
    }
    server.stop();
}

#[actix_rt::test]
async fn choices_of_one_request_are_let_in_together_or_not_at_all() {
    let server = Server::start(Setup { live_max: 4, ..Setup::default() });
    server.hold(0);
    let few = |n: u32| text("small", &json!({"max_tokens": 3, "n": n})).to_string();
    let mut connections: Vec<Connection> = (0..3).map(|_| Connection::open(server.address)).collect();
    connections.iter_mut().for_each(|connection| connection.send(&request("POST", TEXT, &few(1))));
    server.until("three are live", |snapshot| snapshot.live == 3).await;
    let refused = post(server.address, TEXT, &text("small", &json!({"max_tokens": 3, "n": 2})));
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{}", refused.text);
    server.until("neither choice was accepted", |snapshot| snapshot.models[0].client.accepted == 3).await;
    let rejections = r#"vllm:admission_rejections_total{model_name="small",reason="max_num_queued_reqs"}"#;
    assert_eq!((server.live(), server.metric(rejections).await), (3, 2.0));
    let mut last = Connection::open(server.address);
    last.send(&request("POST", TEXT, &few(1)));
    server.until("one more has room", |snapshot| snapshot.live == 4).await;
    server.release(0);
    connections.push(last);
    for mut connection in connections {
        assert_eq!(connection.answer().said().completion_tokens(), 3);
    }
    server.idle_within(SOON, "after all").await;
    let both = post(server.address, TEXT, &text("small", &json!({"max_tokens": 3, "n": 4})));
    assert_eq!(both.json()["choices"].as_array().map(Vec::len), Some(4), "{}", both.text);
    server.stop();
}
