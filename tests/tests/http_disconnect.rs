//! Clients that go away: by close, by reset, by half-close, while tokens flow, while none is due, while a batch or a peer
//! holds the request. Each time the request must end everywhere and its KV memory become free.

use std::time::Duration;
use tokenrouter_core::rng::mix;
use tokenrouter_tests::http_server::{Server, Setup};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// How a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leave {
    /// FIN for both directions.
    Close,
    /// RST.
    Reset,
    /// FIN for the sending direction only; the server takes it for a close (see `tokenrouter::http`).
    HalfClose,
}

const ALL: [Leave; 3] = [Leave::Close, Leave::Reset, Leave::HalfClose];

/// A connection with one request sent.
struct Client(TcpStream);

impl Client {
    async fn post(server: &Server, model: &str, stream: bool) -> Client {
        let body = format!(
            r#"{{"model":"{model}","prompt":[1,2,3],"max_tokens":1000,"temperature":0,"seed":1,"stream":{stream}}}"#
        );
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json";
        let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let mut socket = TcpStream::connect(server.address).await.expect("the server listens");
        socket.write_all(request.as_bytes()).await.expect("the request is sent");
        Client(socket)
    }

    /// Reads until the text has come; the answer so far.
    async fn read_until(&mut self, text: &str) -> String {
        let mut seen = String::new();
        let mut buffer = [0; 1024];
        while !seen.contains(text) {
            let read = tokio::time::timeout(Duration::from_secs(20), self.0.read(&mut buffer)).await;
            let count = read.expect("an answer in time").expect("an open connection");
            assert!(count > 0, "the server closed after {seen:?}");
            seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
        seen
    }

    /// Leaves; a half-closed socket is returned and must stay open.
    async fn leave(mut self, how: Leave) -> Option<TcpStream> {
        match how {
            Leave::Close => None,
            Leave::Reset => {
                self.0.set_zero_linger().expect("the option exists");
                None
            }
            Leave::HalfClose => {
                self.0.shutdown().await.expect("the sending side closes");
                Some(self.0)
            }
        }
    }
}

#[actix_rt::test]
async fn a_client_that_leaves_a_running_stream_frees_everything() {
    let server = Server::start(Setup::default());
    for how in ALL {
        let mut client = Client::post(&server, "pair", true).await;
        client.read_until("data: {").await;
        assert_eq!(server.live(), 1);
        let _open = client.leave(how).await;
        server.idle_within(Duration::from_secs(1), &format!("{how:?}")).await;
    }
    assert_eq!(server.metric(r#"vllm:request_success_total{finished_reason="abort",model_name="pair"}"#).await, 3.0);
    server.stop();
}

#[actix_rt::test]
async fn a_client_that_leaves_before_a_whole_answer_frees_everything() {
    let server = Server::start(Setup::default());
    for how in ALL {
        let client = Client::post(&server, "small", false).await;
        server.until("the request runs", |snapshot| snapshot.models[0].decode.running > 0).await;
        let _open = client.leave(how).await;
        server.idle_within(Duration::from_secs(1), &format!("{how:?}")).await;
    }
    server.stop();
}

#[actix_rt::test]
async fn a_client_that_leaves_while_no_token_is_due_is_noticed_at_once() {
    let server = Server::start(Setup::default());
    for how in ALL {
        for stream in [true, false] {
            server.hold(0);
            let running = Client::post(&server, "small", stream).await;
            server.until("one runs", |snapshot| snapshot.models[0].decode.running == 1).await;
            let queued = Client::post(&server, "small", stream).await;
            server.until("one is queued", |snapshot| snapshot.models[0].batcher.waiting == 1).await;
            let _first = queued.leave(how).await;
            server.until("the queued one is gone", |snapshot| snapshot.live == 1).await;
            let _second = running.leave(how).await;
            server.until("the running one is gone", |snapshot| snapshot.live == 0).await;
            server.release(0);
            server.idle_within(Duration::from_secs(1), &format!("{how:?}, stream {stream}")).await;
        }
    }
    server.stop();
}

#[actix_rt::test]
async fn a_client_that_leaves_a_batch_or_a_peer_frees_both_models() {
    let server = Server::start(Setup { thresholds: Some(vec![2, 1]), ..Setup::default() });
    for how in ALL {
        server.hold(1);
        let running = Client::post(&server, "pair", true).await;
        server.until("one runs at the peer", |s| s.models[1].decode.running == 1).await;
        // Two are needed at the first model, as long as two are live: they go to the peer together.
        let queued = Client::post(&server, "pair", true).await;
        server.until("one waits for another", |s| s.models[0].batcher.waiting == 1).await;
        let beside = Client::post(&server, "pair", true).await;
        server.until("two are queued at the peer", |s| s.models[1].batcher.waiting == 2).await;
        let held = Client::post(&server, "pair", true).await;
        // The others could come back, so this one waits for one of them: no token is due for a minute.
        server.until("one waits for a batch", |s| s.models[0].batcher.waiting == 1).await;
        let _first = held.leave(how).await;
        server.until("it is gone", |s| s.live == 3 && s.models[0].batcher.waiting == 0).await;
        let _second = queued.leave(how).await;
        server.until("a queued one is gone", |s| s.live == 2 && s.models[1].batcher.waiting == 1).await;
        let _third = beside.leave(how).await;
        server.until("the other is gone", |s| s.live == 1 && s.models[1].batcher.waiting == 0).await;
        let _fourth = running.leave(how).await;
        server.until("the running one is gone", |s| s.live == 0 && s.models[0].inter_model.pending == 0).await;
        server.release(1);
        server.idle_within(Duration::from_secs(1), &format!("{how:?}")).await;
    }
    server.stop();
}

#[actix_rt::test]
async fn forty_random_cuts_leave_nothing_behind() {
    let server = Server::start(Setup::default());
    let mut seed = u64::from(std::process::id()) ^ 0x5eed_0001;
    println!("seed {seed}");
    let mut random = move |below: u64| {
        seed = mix(seed);
        seed % below
    };
    let mut open = Vec::new();
    for _ in 0..40 {
        let how = ALL[random(3) as usize];
        let client = Client::post(&server, ["pair", "small", "large"][random(3) as usize], random(2) == 0).await;
        tokio::time::sleep(Duration::from_millis(random(30))).await;
        open.extend(client.leave(how).await);
    }
    server.idle_within(Duration::from_secs(2), "after 40 cuts").await;
    server.stop();
}

#[actix_rt::test]
async fn a_client_that_stays_gets_its_whole_answer() {
    let server = Server::start(Setup::default());
    let mut client = Client::post(&server, "pair", true).await;
    let answer = client.read_until("data: [DONE]").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains(r#""finish_reason":"length""#), "{answer}");
    server.idle_within(Duration::from_secs(1), "a whole answer").await;
    server.stop();
}
