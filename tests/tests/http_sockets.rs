//! What clients do with sockets: leave at any moment, send bytes one by one, several requests at once, heads without end,
//! read slowly or not at all. Owner: the HTTP layer. Invariant: whoever is not at fault is served, and two seconds later
//! nothing is left behind.

use serde_json::{Value, json};
use std::time::Duration;
use tokenrouter_core::rng::mix;
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{CHAT, Connection, PATIENCE, TEXT, get, post, request};
use tokenrouter_tests::scripted::script;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

fn wish(model: &str, said: &str, stream: bool) -> Value {
    json!({"model": model, "prompt": script(said), "max_tokens": 400, "temperature": 0, "stream": stream})
}

/// Leaves a connection by close, by reset or by half-close; in the last case it stays open on this side.
async fn leave(mut socket: TcpStream, how: u64) -> Option<TcpStream> {
    match how {
        0 => None,
        1 => {
            socket.set_zero_linger().expect("the option exists");
            None
        }
        _ => {
            socket.shutdown().await.ok();
            Some(socket)
        }
    }
}

/// In the middle of the head or the body, in a prefill of many chunks, while tokens flow, before a whole answer, after it.
#[actix_rt::test]
async fn two_hundred_random_cuts_leave_nothing_behind() {
    let server = Server::start(Setup { step: Duration::from_millis(1), ..Setup::parrots() });
    let mut seed = u64::from(std::process::id()) ^ 0x5eed_0002;
    println!("seed {seed}");
    let mut random = move |below: u64| {
        seed = mix(seed);
        seed % below
    };
    let mut open = Vec::new();
    for cut in 0..200 {
        let said = match random(3) {
            0 => format!("cut {cut} "),
            1 => format!("cut {cut} ").repeat(30),
            _ => format!("cut {cut} ").repeat(150),
        };
        let model = ["pair", "small", "large"][random(3) as usize];
        let bytes = request("POST", TEXT, &wish(model, &said, random(2) == 0).to_string());
        let sent = if random(4) == 0 { random(bytes.len() as u64) as usize } else { bytes.len() };
        let mut socket = TcpStream::connect(server.address).await.expect("the server listens");
        socket.write_all(&bytes[..sent]).await.expect("the bytes are sent");
        let (wait, how) = (random(25), random(3));
        tokio::time::sleep(Duration::from_millis(wait)).await;
        open.extend(leave(socket, how).await);
    }
    server.idle_within(Duration::from_secs(2), "after 200 cuts").await;
    for model in ["small", "large"] {
        for gauge in ["vllm:num_requests_running", "vllm:num_requests_waiting", "tokenrouter:kv_pages_used"] {
            assert_eq!(server.metric(&format!("{gauge}{{model_name=\"{model}\"}}")).await, 0.0, "{gauge} of {model}");
        }
    }
    assert_eq!(post(server.address, TEXT, &wish("pair", "still here", false)).said().text, "still here");
    drop(open);
    server.stop();
}

#[test]
fn a_request_may_come_byte_by_byte() {
    let server = Server::start(Setup::parrots());
    let mut connection = Connection::open(server.address);
    for path in [TEXT, CHAT] {
        let body = match path {
            TEXT => wish("pair", "slow and steady", true),
            _ => json!({"model": "pair", "messages": [{"role": "user", "content": "slow and steady\0"}]}),
        };
        for byte in request("POST", path, &body.to_string()) {
            connection.send(&[byte]);
        }
        assert_eq!(connection.answer().said().text, "slow and steady");
    }
    server.stop();
}

#[test]
fn requests_sent_together_are_answered_in_their_order() {
    let server = Server::start(Setup::parrots());
    let mut connection = Connection::open(server.address);
    let post = |said: &str, stream: bool| request("POST", TEXT, &wish("pair", said, stream).to_string());
    let all = [
        post("one", true),
        request("GET", "/v1/models", ""),
        post("two", false),
        request("GET", "/nowhere", ""),
        post("three", true),
    ];
    connection.send(&all.concat());
    assert_eq!(connection.answer().said().text, "one");
    assert_eq!(connection.answer().json()["object"], "list");
    assert_eq!(connection.answer().said().text, "two");
    assert_eq!(connection.answer().status, 404);
    assert_eq!(connection.answer().said().text, "three");
    server.stop();
}

/// Its answer waits for it, bounded by the answer's own length; nobody else does.
#[actix_rt::test]
async fn a_slow_reader_holds_up_nobody() {
    let server = Server::start(Setup::parrots());
    let body = json!({"model": "pair", "prompt": script("slow ".repeat(80)), "max_tokens": 1000, "temperature": 0,
        "stream": true, "logprobs": 20});
    let mut readers = Vec::new();
    for _ in 0..4 {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(4096).expect("the option exists");
        let mut socket = socket.connect(server.address).await.expect("the server listens");
        socket.write_all(&request("POST", TEXT, &body.to_string())).await.expect("the request is sent");
        readers.push(socket);
    }
    for round in 0..20 {
        let said = format!("quick {round}");
        assert_eq!(post(server.address, TEXT, &wish("pair", &said, round % 2 == 0)).said().text, said);
    }
    for mut socket in readers {
        let mut seen = Vec::new();
        let mut buffer = [0; 2048];
        while !seen.windows(12).any(|window| window == b"data: [DONE]") {
            // Only the end is looked at.
            seen.drain(..seen.len().saturating_sub(4096));
            let read = tokio::time::timeout(PATIENCE, socket.read(&mut buffer)).await;
            let count = read.expect("bytes in time").expect("an open connection");
            assert!(count > 0, "the stream was cut: {}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&buffer[..count]);
        }
        assert!(String::from_utf8_lossy(&seen).contains("\"finish_reason\":\"stop\""));
    }
    server.idle_within(Duration::from_secs(2), "after slow readers").await;
    server.stop();
}

/// Heads that are no HTTP, too long, or never come are answered without a body by the HTTP library itself, the only answers
/// that are not the error object, and the connection is closed.
#[test]
fn bad_heads_are_answered_and_their_connections_closed() {
    let server = Server::start(Setup::parrots());
    let long = format!("GET /health HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n", "x".repeat(200_000));
    let many = format!("GET /health HTTP/1.1\r\nhost: x\r\n{}\r\n", "a: b\r\n".repeat(200));
    for (head, statuses) in [
        ("\u{1}\u{2} nonsense\r\n\r\n", [400, 400]),
        ("GET /health HTTP/1.1\r\nno colon\r\n\r\n", [400, 400]),
        ("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", [400, 400]),
        (&long, [400, 431]),
        (&many, [400, 431]),
        // Its end never comes.
        ("GET /health HTTP/1.1\r\nhost: x\r\n", [408, 408]),
    ] {
        let mut connection = Connection::open(server.address);
        connection.send(head.as_bytes());
        // What is sent after the limit may reset the connection before the answer is read.
        if let Ok(answer) = connection.try_answer() {
            assert!(statuses.contains(&answer.status), "{} for {:?}", answer.status, &head[..head.len().min(60)]);
            connection.expect_closed();
        } else {
            assert!(head.len() > 100_000, "no answer to {head:?}");
        }
        assert_eq!(get(server.address, "/health").status, 200);
    }
    server.stop();
}
