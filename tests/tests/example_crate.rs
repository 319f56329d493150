//! The example of a program of one's own: it compiles against the workspace as it is, from outside of it, serves, and its
//! algorithm does what it says. Owner: api/examples.

use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tokenrouter_core::routing::catalog::Catalog;

#[path = "../../api/examples/custom_router/src/main.rs"]
#[allow(dead_code)]
mod custom_router;

/// How long the check may take on a slow machine with nothing compiled yet.
const CHECK_MAX: Duration = Duration::from_secs(900);

/// How long the server may take to listen.
const SERVE_MAX: Duration = Duration::from_secs(120);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

/// The example in a folder of its own, with the versions and the profiles of the workspace, so that what is compiled
/// already need not be compiled again.
fn copy_to(folder: &Path) {
    let example = root().join("api/examples/custom_router");
    std::fs::create_dir_all(folder.join("src")).expect("a folder for the copy");
    std::fs::copy(example.join("src/main.rs"), folder.join("src/main.rs")).expect("the source is copied");
    std::fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")).expect("the versions are copied");
    let read = |path: PathBuf| -> toml::Table {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let mut manifest = read(example.join("Cargo.toml"));
    manifest.insert("profile".to_owned(), read(root().join("Cargo.toml"))["profile"].clone());
    for (_, dependency) in manifest["dependencies"].as_table_mut().expect("dependencies") {
        if let Some(path) = dependency.get_mut("path") {
            let inside = example.join(path.as_str().expect("a path"));
            let inside = inside.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", inside.display()));
            *path = inside.display().to_string().into();
        }
    }
    std::fs::write(folder.join("Cargo.toml"), manifest.to_string()).expect("the manifest is written");
}

#[test]
#[allow(clippy::disallowed_methods, reason = "another process is waited for, which sends no message")]
fn the_example_compiles_outside_the_workspace() {
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = temporary.join("custom_router");
    copy_to(&folder);
    let mut check = Command::new(env!("CARGO"))
        .args(["check", "--offline", "--quiet", "--target-dir"])
        .arg(temporary.parent().expect("the target folder"))
        .current_dir(&folder)
        .stdin(Stdio::null())
        .spawn()
        .expect("cargo runs");
    let started = Instant::now();
    let status = loop {
        match check.try_wait().expect("cargo can be waited for") {
            Some(status) => break status,
            None if started.elapsed() > CHECK_MAX => {
                check.kill().expect("cargo can be stopped");
                panic!("no result after {CHECK_MAX:?}");
            }
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    };
    assert!(status.success(), "the example does not compile");
}

/// The algorithms of the example's `main`.
fn catalog() -> Catalog {
    static EXTRA: [&tokenrouter_core::routing::Entry; 1] = [&custom_router::ENTRY];
    Catalog::with(&EXTRA)
}

/// Asks a server that may not listen yet.
#[allow(clippy::disallowed_methods, reason = "a server on its way up sends no message")]
fn ask(address: SocketAddr, head: &str, body: &str) -> Value {
    let started = Instant::now();
    let mut socket = loop {
        match TcpStream::connect(address) {
            Ok(socket) => break socket,
            Err(error) => assert!(started.elapsed() < SERVE_MAX, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let fields = "host: x\r\nconnection: close\r\ncontent-type: application/json";
    write!(socket, "{head} HTTP/1.1\r\n{fields}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).expect("it is sent");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("an answer");
    let body = text.split_once("\r\n\r\n").expect("a body").1;
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// What its `main` does, with the arguments of a user and the example's own launch file.
#[test]
fn the_example_serves_with_its_algorithm() {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    let config = root().join("api/examples/custom_router/launch.toml").display().to_string();
    let port = free.port().to_string();
    // It serves until this process ends.
    std::thread::spawn(move || {
        let arguments = ["custom-router", "--quiet", "--config", &config, "serve", "--port", &port];
        tokenrouter::cli::run_with(arguments.map(Into::into), catalog())
    });
    let body = json!({ "model": "demo", "prompt": "Question: 2 + 3\nAnswer:", "max_tokens": 32, "ignore_eos": true,
        "return_token_models": true });
    let answer = ask(free, "POST /v1/completions", &body.to_string());
    let makers = answer["choices"][0]["token_models"].as_array().unwrap_or_else(|| panic!("{answer}"));
    let turns = ["small", "large", "small", "large"].iter().flat_map(|name| std::iter::repeat_n(json!(name), 8));
    assert_eq!(*makers, turns.collect::<Vec<_>>());
    let cards = ask(free, "GET /v1/routers", "");
    let cards = cards["data"].as_array().expect("a list");
    assert_eq!(cards.len(), tokenrouter_core::routing::list().count() + 1);
    let own = cards.iter().find(|card| card["active"] == true).expect("an active algorithm");
    assert_eq!((&own["name"], &own["params"][0]["name"]), (&json!("alternate"), &json!("span")));
}

#[test]
fn the_example_takes_turns() {
    use tokenrouter_tests::world::{assert_idle, assert_text, parse, play_with};

    let catalog = catalog();
    for span in [1u32, 3, 8] {
        let algorithm = catalog.build("alternate", &json!({ "span": span }), 3).expect("the parameters are right");
        let models = "model a step=6ms\nmodel b step=9ms\nmodel c step=28ms\nlanguage hard=0.4\n";
        let script = parse(&format!("{models}at 0ms submit x prompt=5 max=20\nat 3ms submit y prompt=2 max=31\n"));
        let script = script.unwrap_or_else(|error| panic!("{error:?}"));
        let end = play_with(&script, algorithm.clone());
        assert_idle(&end);
        assert_text(&script, &*algorithm, &end);
        let makers: Vec<u32> = end.told["x"].iter().map(|&(_, model)| model as u32).collect();
        let expected: Vec<u32> = (0..20).map(|token| token / span % 3).collect();
        assert_eq!(makers, expected, "turns of {span}");
    }
    let refused = catalog.build("alternate", &json!({ "span": 0 }), 2).map(drop).unwrap_err().to_string();
    assert!(refused.contains("span must be 1 or more"), "{refused}");
}
