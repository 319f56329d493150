//! The official OpenAI client for Python against the real server: `tests/clients/openai_suite.py`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use tokenrouter_tests::http_server::{Server, Setup};

fn clients() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("clients")
}

/// Runs a command to its end; a failure is told with its output and the remedy.
fn run(command: &mut Command, remedy: &str) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} cannot run: {error}; {remedy}"));
    assert!(
        output.status.success(),
        "{command:?} failed; {remedy}\n{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// A Python with the pinned clients, made once and kept in the target folder until the pins change.
fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let pins = clients().join("requirements.txt");
        let wanted = fs::read_to_string(&pins).expect("the pins are there");
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("python-clients");
        let (python, done) = (folder.join("bin/python"), folder.join("installed.txt"));
        if fs::read_to_string(&done).is_ok_and(|installed| installed == wanted) {
            return python;
        }
        let remedy = "install python3 with its venv module (Debian: apt-get install python3-venv)";
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder), remedy);
        let remedy = "pip must reach a package index (see PIP_INDEX_URL)";
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(&pins), remedy);
        fs::write(&done, wanted).expect("the target folder can be written");
        python
    })
}

fn suite(address: std::net::SocketAddr, prompt: &str) {
    let mut command = Command::new(python());
    command.arg(clients().join("openai_suite.py")).args(["--url", &format!("http://{address}"), "--prompt", prompt]);
    let output = run(&mut command, "see the checks above that failed");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(said.contains("checks passed"), "the suite ended without a count");
}

#[test]
fn the_openai_client_agrees_with_the_server_over_simulated_models() {
    let server = Server::start(Setup::default());
    suite(server.address, "w1 w2 w3");
    server.stop();
}

#[test]
fn the_openai_client_agrees_with_the_server_over_the_demo_pair() {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../config/demo");
    let problems = fs::read_to_string(demo.join("problems.jsonl")).expect("the problems are there");
    let first: serde_json::Value =
        serde_json::from_str(problems.lines().next().expect("a problem")).expect("a line of JSON");
    let server = Server::launch(demo.join("launch.toml"));
    suite(server.address, first["question"].as_str().expect("a question"));
    server.stop();
}
