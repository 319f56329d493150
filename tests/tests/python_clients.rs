//! Python libraries that people put between their programs and a server, against ours over the demo pair: LiteLLM and
//! LangChain. The official client has `openai_python.rs`.

use std::path::PathBuf;
use tokenrouter_tests::clients::Venv;
use tokenrouter_tests::http_server::Server;

const PROMPT: &str = "Emma has 43 roses. Emma buys 26 more. How many roses does Emma have?";

fn suite(file: &str) {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../config/demo");
    let server = Server::launch(demo.join("launch.toml"));
    Venv::of("requirements-frameworks.txt").suite(file, server.address, &["--prompt", PROMPT]);
    server.stop();
}

#[test]
fn litellm_agrees_with_the_server() {
    suite("litellm_suite.py");
}

#[test]
fn langchain_agrees_with_the_server() {
    suite("langchain_suite.py");
}
