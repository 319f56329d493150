//! What clients do with their connections does not keep a stopped server: requests end within `drain_ms`, sockets shortly
//! after. Owner: the serve command.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use support::{Folder, Serving, program, root};

/// Far above what a stop needs on a busy machine, far below what a connection could hold it for.
const SOON: Duration = Duration::from_secs(15);

const TEXT: &str = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json";

/// A server over a small model that lets requests end for so long.
fn serving(folder: &Folder, drain_ms: u64) -> Serving {
    let model = root().join("config/demo/large");
    let text = format!("[[models]]\nname = \"m\"\npath = \"{}\"\n[server]\ndrain_ms = {drain_ms}\n", model.display());
    let config = folder.write("launch.toml", &text).display().to_string();
    Serving::start(program(folder, &["--config", &config]))
}

fn connect(serving: &Serving) -> TcpStream {
    let socket = TcpStream::connect(&serving.address).expect("the server listens");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("the option exists");
    socket
}

/// A stream of `tokens` tokens, read up to its first event.
fn streaming(serving: &Serving, tokens: u32) -> TcpStream {
    let body = format!(
        r#"{{"model":"m","prompt":[1,2,3],"max_tokens":{tokens},"ignore_eos":true,"stream":true,"temperature":0}}"#
    );
    let mut socket = connect(serving);
    write!(socket, "{TEXT}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).expect("sent");
    let mut first = [0; 16];
    socket.read_exact(&mut first).expect("an answer");
    assert!(first.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&first));
    socket
}

fn rest(mut socket: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A connection that is cut ends with an error; what came before counts.
    let _ = socket.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn open_connections_do_not_hold_a_stopped_server() {
    let folder = Folder::new();
    let serving = serving(&folder, 60_000);
    let mut half = connect(&serving);
    half.write_all(format!("{TEXT}\r\ncontent-length: 100\r\n\r\n{{\"model\"").as_bytes()).expect("sent");
    let mut idle = connect(&serving);
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").expect("sent");
    idle.read_exact(&mut [0; 12]).expect("an answer");
    let stream = streaming(&serving, 100);
    let begin = Instant::now();
    serving.signal("TERM");
    let said = rest(stream);
    assert!(said.contains("\"finish_reason\":\"length\"") && said.contains("data: [DONE]"), "{said}");
    assert_eq!(serving.wait(), 0);
    assert!(begin.elapsed() < SOON, "it took {:?}", begin.elapsed());
}

#[test]
fn streams_that_outlast_the_drain_end_with_an_error_event() {
    let folder = Folder::new();
    let serving = serving(&folder, 1);
    let open: Vec<TcpStream> = (0..8).map(|_| streaming(&serving, 500)).collect();
    assert_eq!(serving.stop(), 0);
    for stream in open {
        let said = rest(stream);
        let failed = said.contains("data: {\"error\":{") && !said.contains("finish_reason\":\"");
        let complete = said.contains("\"finish_reason\":\"length\"");
        assert!((failed || complete) && said.contains("data: [DONE]"), "{said}");
    }
}

#[test]
fn a_second_signal_ends_everything() {
    let folder = Folder::new();
    let serving = serving(&folder, 600_000);
    let mut open: Vec<TcpStream> = (0..16).map(|_| streaming(&serving, 500)).collect();
    let begin = Instant::now();
    serving.signal("TERM");
    serving.logged("a second signal stops at once");
    serving.signal("INT");
    assert_eq!(serving.wait(), 0);
    assert!(begin.elapsed() < SOON, "it took {:?}", begin.elapsed());
    let said: Vec<String> = open.drain(..).map(rest).collect();
    assert!(said.iter().all(|said| said.contains("data: [DONE]")), "{said:#?}");
}
