//! OpenTelemetry's standard variables and the whole program: what cannot be done is refused before anything is loaded, and a
//! server that stops sends its last traces first. Owner: the serve command.

mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use support::{Folder, Serving, finish, program, root};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn variables_that_ask_for_what_cannot_be_done_are_refused() {
    for (name, value, remedy) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "127.0.0.1:4317", "http://"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"),
    ] {
        let folder = Folder::new();
        let mut command = program(&folder, &["serve", "--port", "0"]);
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9").env(name, value);
        let (code, _, said) = finish(command.output().expect("the program runs"));
        assert_eq!(code, 2, "{said}");
        assert!(said.lines().count() == 1 && said.contains(name) && said.contains(remedy), "{said}");
    }
}

#[test]
fn a_server_that_stops_sends_its_last_traces_first() {
    let collector = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = format!("http://{}", collector.local_addr().expect("an address"));
    let (sender, received) = sync_channel(1);
    std::thread::spawn(move || {
        let (mut socket, _) = collector.accept().expect("a connection");
        let mut bytes = Vec::new();
        let mut more = [0; 4096];
        // The name of the span lies in the body.
        while !String::from_utf8_lossy(&bytes).contains("text_completion m") {
            let count = socket.read(&mut more).expect("bytes");
            assert!(count > 0, "it ended early");
            bytes.extend_from_slice(&more[..count]);
        }
        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").expect("answered");
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    let folder = Folder::new();
    let model = root().join("config/demo/large");
    let config = folder.write("launch.toml", &format!("[[models]]\nname = \"m\"\npath = \"{}\"\n", model.display()));
    let mut command = program(&folder, &["--config", &config.display().to_string()]);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint).env("OTEL_SERVICE_NAME", "the service");
    // OpenTelemetry's crates would take these from the environment; only what is documented counts.
    command.env("OTEL_TRACES_SAMPLER", "always_off").env("OTEL_EXPORTER_OTLP_COMPRESSION", "none");
    let serving = Serving::start(command);
    let body = r#"{"model":"m","prompt":[1,2,3],"max_tokens":2}"#;
    assert_eq!(serving.ask("POST", "/v1/completions", body).0, 200);
    assert_eq!(serving.stop(), 0);
    let sent = received.recv_timeout(PATIENCE).expect("the traces came");
    assert!(sent.starts_with("POST /v1/traces HTTP/1.1\r\n") && sent.contains("the service"), "{sent}");
}
