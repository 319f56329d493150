//! Clients for Node against the real server over the demo pair: the official one and the AI SDK.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use tokenrouter_tests::clients::{folder, node_packages, run};
use tokenrouter_tests::http_server::Server;

const PROMPT: &str = "Emma has 43 roses. Emma buys 26 more. How many roses does Emma have?";

fn suites() -> &'static Path {
    static SUITES: OnceLock<PathBuf> = OnceLock::new();
    SUITES.get_or_init(|| node_packages(&folder().join("node"), "node"))
}

fn suite(file: &str) {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../config/demo");
    let server = Server::launch(demo.join("launch.toml"));
    let mut command = Command::new("node");
    command.arg(suites().join(file)).args(["--url", &format!("http://{}", server.address), "--prompt", PROMPT]);
    let output = run(&mut command, "see the checks that failed");
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(said.contains("checks passed"), "{file} ended without a count");
    server.stop();
}

#[test]
fn the_openai_client_for_node_agrees_with_the_server() {
    suite("openai_suite.mjs");
}

#[test]
fn the_ai_sdk_agrees_with_the_server() {
    suite("ai_sdk_suite.mjs");
}
