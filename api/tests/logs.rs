//! The log of a served program: every line about a request says whose it is. Owner: the HTTP layer.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use support::{Folder, Serving, program};

#[test]
fn the_end_of_a_stream_is_logged_with_the_id_of_its_request() {
    for format in ["human", "json"] {
        let folder = Folder::new();
        let serving = Serving::start(program(&folder, &["--log-format", format, "--log-level", "info"]));
        let body = r#"{"model":"demo","prompt":"1 + 1 =","max_tokens":5,"ignore_eos":true,"stream":true}"#;
        let mut socket = TcpStream::connect(&serving.address).expect("the server listens");
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: my-own-id";
        let length = body.len();
        write!(socket, "{head}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
            .expect("sent");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        assert!(answer.contains("data: [DONE]"), "{answer}");
        let line = serving.logged("choice ended");
        for part in ["my-own-id", "length", "demo"] {
            assert!(line.contains(part), "`{line}` lacks `{part}`");
        }
        assert_eq!(serving.stop(), 0);
    }
}
