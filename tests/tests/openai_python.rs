//! The official OpenAI client for Python against the real server: `openai_suite.py`, `limits_suite.py`, `forms_suite.py`,
//! `tools_suite.py` and `choice_suite.py` of `tests/clients`.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;
use tokenrouter::http::keys::Keys;
use tokenrouter::text::tools::ToolDialect;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_tests::clients::Venv;
use tokenrouter_tests::http_server::{Server, Setup};

fn suite(server: Server, prompt: &str) {
    Venv::of("requirements.txt").suite("openai_suite.py", server.address, &["--prompt", prompt]);
    server.stop();
}

#[test]
fn the_openai_client_agrees_with_the_server_over_simulated_models() {
    suite(Server::start(Setup::default()), "w1 w2 w3");
}

#[test]
fn the_openai_client_understands_keys_time_outs_and_bounds() {
    let key = "the-key-of-the-client";
    let whole = Some(Duration::from_secs(3));
    let bounds = Bounds { prompt_tokens_max: Some(50), whole, ..Bounds::default() };
    let setup = Setup { keys: Keys::new([key], None), bounds, step: Duration::from_millis(20), ..Setup::default() };
    let server = Server::start(setup);
    Venv::of("requirements.txt").suite("limits_suite.py", server.address, &["--key", key]);
    server.stop();
}

#[test]
fn the_openai_client_gets_calls_from_a_model_that_has_the_choice() {
    let server = Server::start(Setup { tools: ToolDialect::Tagged, ..Setup::parrots() });
    Venv::of("requirements.txt").suite("choice_suite.py", server.address, &["--prompt", "Nothing to call."]);
    server.stop();
}

fn demo() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../config/demo")
}

/// A question of the demo pair.
fn question() -> String {
    let problems = fs::read_to_string(demo().join("problems.jsonl")).expect("the problems are there");
    let first: serde_json::Value =
        serde_json::from_str(problems.lines().next().expect("a problem")).expect("a line of JSON");
    first["question"].as_str().expect("a question").to_owned()
}

#[test]
fn the_openai_client_gets_answers_in_a_form_from_the_demo_pair() {
    let server = Server::launch(demo().join("launch.toml"));
    Venv::of("requirements.txt").suite("forms_suite.py", server.address, &["--prompt", &question()]);
    server.stop();
}

#[test]
fn the_openai_client_gets_calls_from_the_demo_pair() {
    let server = Server::launch(demo().join("launch.toml"));
    Venv::of("requirements.txt").suite("tools_suite.py", server.address, &["--prompt", &question()]);
    server.stop();
}

#[test]
fn the_openai_client_agrees_with_the_server_over_the_demo_pair() {
    suite(Server::launch(demo().join("launch.toml")), &question());
}
