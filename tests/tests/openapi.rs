//! The OpenAPI document of a running server: valid, and true. Schemathesis makes requests that fit it and requests that
//! do not, and compares the answers with it. `SCHEMATHESIS_CASES` asks for more of them (`just schemathesis`).

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;
use tokenrouter_tests::clients::{Venv, folder, run, scratch};
use tokenrouter_tests::http_server::Server;

const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,\
                      negative_data_rejection,unsupported_method";

/// Operations that take so many different requests that asking for more makes sense.
const OPERATIONS: u32 = 5;

fn demo() -> Server {
    Server::launch(folder().join("openapi_launch.toml"))
}

/// The body of one request.
fn ask(server: &Server, request: &str) -> String {
    let mut socket = TcpStream::connect(server.address).expect("the server listens");
    socket.write_all(request.as_bytes()).expect("the request is sent");
    let mut answer = String::new();
    socket.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    body.to_owned()
}

#[test]
fn the_document_is_valid() {
    let server = demo();
    let document = ask(&server, "GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    let file = scratch("openapi").join("openapi.json");
    fs::write(&file, document).expect("the target folder can be written");
    let venv = Venv::of("requirements-openapi.txt");
    let output = run(venv.program("openapi-spec-validator").arg(&file), "see what is wrong with the document");
    assert!(String::from_utf8_lossy(&output.stdout).contains("OK"), "{output:?}");
    server.stop();
}

/// Test cases that a report counts: `1234 generated`.
fn counted(report: &str) -> u32 {
    let words: Vec<&str> = report.split_whitespace().collect();
    let mut pairs = words.windows(2).filter(|pair| pair[1].starts_with("generated"));
    pairs.find_map(|pair| pair[0].parse().ok()).expect("a count")
}

#[tokio::test]
async fn the_document_is_true() {
    let wanted: u32 = std::env::var("SCHEMATHESIS_CASES").map_or(2_000, |cases| cases.parse().expect("a number"));
    let server = demo();
    let venv = Venv::of("requirements-openapi.txt");
    let mut command = venv.program("schemathesis");
    command.arg("--no-color").arg("--config-file").arg(folder().join("schemathesis.toml"));
    command.args(["run", &format!("http://{}/openapi.json", server.address)]);
    command.args(["--checks", CHECKS, "--max-examples", &(wanted / OPERATIONS + 1).to_string()]);
    command.args(["--workers", "2", "--generation-deterministic", "--continue-on-failure"]);
    command.args(["--phases", "examples,coverage,fuzzing", "--mode", "all", "--max-response-time", "20"]);
    command.current_dir(scratch("schemathesis"));
    let output = run(&mut command, "see the requests above whose answers do not fit the document");
    let report = String::from_utf8_lossy(&output.stdout);
    println!("{report}");
    assert!(counted(&report) >= wanted, "only {} cases", counted(&report));
    server.idle_within(Duration::from_secs(5), "after all requests").await;
    for route in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"] {
        let answered = |status: u16| {
            format!("tokenrouter:http_requests_total{{method=\"POST\",route=\"{route}\",status=\"{status}\"}}")
        };
        let (taken, refused) = (server.metric(&answered(200)).await, server.metric(&answered(400)).await);
        println!("{route}: {taken} answers, {refused} refusals");
        assert!(taken >= 20.0 && refused >= 20.0, "{route}: {taken} answers and {refused} refusals say little");
    }
    let body = r#"{"model": "demo", "prompt": "12 + 30", "max_tokens": 4}"#;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json";
    let answer = ask(&server, &format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()));
    assert!(answer.contains("text_completion"), "{answer}");
    server.stop();
}
