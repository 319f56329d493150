//! Clients for Node against the real server over the demo pair: the official one and the AI SDK.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use tokenrouter_tests::clients::{folder, run, scratch};
use tokenrouter_tests::http_server::Server;

const PROMPT: &str = "Emma has 43 roses. Emma buys 26 more. How many roses does Emma have?";

/// The suites beside the packages of their lock file, which are installed once and again when it changes.
fn suites() -> &'static Path {
    static SUITES: OnceLock<PathBuf> = OnceLock::new();
    SUITES.get_or_init(|| {
        let (sources, place) = (folder().join("node"), scratch("node"));
        let guard = File::create(place.with_extension("lock")).expect("the target folder can be written");
        guard.lock().expect("the target folder can be locked");
        let wanted = fs::read_to_string(sources.join("package-lock.json")).expect("the lock file is there");
        for entry in fs::read_dir(&sources).expect("the suites are there") {
            let file = entry.expect("an entry").path();
            let copied = fs::copy(&file, place.join(file.file_name().expect("a name")));
            copied.expect("the target folder can be written");
        }
        let done = place.join("installed.json");
        if !fs::read_to_string(&done).is_ok_and(|installed| installed == wanted) {
            let remedy = "install node 20 or newer with npm; npm must reach a registry (see npm config get registry)";
            let quiet = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"];
            run(Command::new("npm").args(quiet).current_dir(&place), remedy);
            fs::write(&done, wanted).expect("the target folder can be written");
        }
        place
    })
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
