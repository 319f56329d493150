//! A short soak of `tokenrouter serve` in a process of its own, and readers that read nothing: afterwards no page is held,
//! every request is in one counter, and memory is what it was. `just soak` is the long one (docs/soak.md).
//! Owner: tests/src/soak.

use serde_json::json;
use std::time::{Duration, Instant};
use tokenrouter_tests::clients::scratch;
use tokenrouter_tests::raw_client::{CHAT, Connection, request};
use tokenrouter_tests::soak::Soak;
use tokenrouter_tests::soak::server::Server;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpSocket;

/// This is no place to find a leak of bytes: few requests, and arenas that still grow. `just soak` allows 1 %.
const GROWTH_MAX: f64 = 0.5;

fn program() -> Vec<String> {
    vec![env!("CARGO_BIN_EXE_soak").to_owned()]
}

#[test]
fn a_short_soak_leaves_everything_as_it_was() {
    let soak = Soak { requests: 250, warm_up: 150, clients: 8, ..Soak::new(program(), scratch("soak-short")) };
    let report = soak.run();
    println!("{}", report.page("cargo test"));
    let faults = report.faults(GROWTH_MAX);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(report.ledger.cut > 10 && report.ledger.statuses.len() > 2, "{:?}", report.ledger);
}

/// Readers that read nothing while their answers are made.
const READERS: usize = 12;
/// Tokens of each choice; the context holds 512.
const TOKENS: u32 = 400;
/// Choices of each.
const CHOICES: u32 = 4;
/// Enough KV memory for all of them.
const KV_TOKENS: u32 = 24_000;
/// Memory that a token may take while nobody reads it, with 20 alternatives: far less than its 2 KiB of JSON.
const TOKEN_BYTES_MAX: u64 = 1024;

#[actix_rt::test]
async fn answers_that_nobody_reads_take_bounded_memory() {
    let folder = scratch("soak-unread");
    let server = Server::start(&program(), &folder, KV_TOKENS);
    let wish = |max: u32| {
        let messages = json!([{"role": "user", "content": "Emma has 43 roses."}]);
        let body = json!({"model": "demo", "messages": messages, "max_tokens": max, "n": CHOICES, "stream": true,
            "logprobs": true, "top_logprobs": 20, "ignore_eos": true, "temperature": 1.0, "seed": 3});
        request("POST", CHAT, &body.to_string())
    };
    let connect = async |bytes: Vec<u8>| {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(4096).expect("the option exists");
        let mut socket = socket.connect(server.address).await.expect("the server listens");
        socket.write_all(&bytes).await.expect("the request is sent");
        socket
    };
    // KV memory is taken when it is first written to, so all of it is in use before the first look.
    for _ in 0..KV_TOKENS.div_ceil(TOKENS * CHOICES) {
        let mut read = Connection::open(server.address);
        read.send(&wish(TOKENS));
        assert_eq!(read.answer().status, 200);
    }
    server.rest(Duration::from_millis(500));
    let (before, tokens_before) =
        (server.status("VmRSS:"), server.counters().sum("tokenrouter:committed_tokens_total"));
    let mut unread = Vec::new();
    for _ in 0..READERS {
        unread.push(connect(wish(TOKENS)).await);
    }
    let wanted = f64::from(TOKENS * CHOICES) * READERS as f64;
    let began = Instant::now();
    loop {
        let made = server.counters().sum("tokenrouter:committed_tokens_total") - tokens_before;
        if made >= wanted {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(240), "{made} of {wanted} tokens");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let during = server.status("VmRSS:");
    let grown = during.saturating_sub(before) * 1024;
    println!("{before} KiB before, {during} KiB with {wanted} tokens unread: {} bytes a token", grown / wanted as u64);
    assert!(grown <= TOKEN_BYTES_MAX * wanted as u64, "{before} KiB before, {during} KiB with {wanted} tokens unread");
    drop(unread);
    server.rest(Duration::from_millis(200));
}
