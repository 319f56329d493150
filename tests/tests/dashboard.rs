//! The dashboard in a real browser, against `tokenrouter serve` in a process of its own; and its files, which must be what
//! their sources make. Owner: the suites in `tests/browser`. Screenshots are left in `target/dashboard-screenshots`.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenrouter_tests::assets::target_folder;
use tokenrouter_tests::clients::{node_packages, run, scratch};
use tokenrouter_tests::soak::server::Server;

/// Far above what a stop needs on a busy machine, far below what an open tab could hold it for.
const SOON: Duration = Duration::from_secs(15);
const KEY: &str = "the-key-of-the-dashboard-test";
const REMEDY: &str = "see what the browser found; it needs chromium (Debian: apt-get install chromium)";

/// One browser at a time: two on a small machine only wait for each other.
static BROWSER: Mutex<()> = Mutex::new(());

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

/// The demo pair with more in its launch file.
fn serve(name: &str, more: &str, variables: &[(&str, &str)]) -> Server {
    let demo = root().join("config/demo");
    let text = std::fs::read_to_string(demo.join("launch.toml")).expect("the launch file of the demo pair");
    let text = text.replace("path = \"", &format!("path = \"{}/", demo.display()));
    let program = [env!("CARGO_BIN_EXE_soak").to_owned()];
    Server::launch(&program, &scratch(name), &format!("{text}\n{more}"), variables)
}

/// A suite against a server.
fn suite(file: &str, server: &Server) -> Command {
    let screenshots = target_folder().expect("the target folder is known").join("dashboard-screenshots");
    let mut command = Command::new("node");
    command.arg(node_packages(&root().join("tests/browser"), "browser").join(file));
    command.args(["--url", &format!("http://{}", server.address)]).arg("--out").arg(screenshots);
    command
}

#[test]
fn every_view_shows_what_the_server_does() {
    let _one = BROWSER.lock().unwrap_or_else(PoisonError::into_inner);
    let server = serve("dashboard", "", &[]);
    let output = run(&mut suite("dashboard_suite.mjs", &server), REMEDY);
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(said.contains("checks passed"), "it ended without a count");
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_lost_executor_is_seen_on_the_map_and_in_the_log() {
    let _one = BROWSER.lock().unwrap_or_else(PoisonError::into_inner);
    let fault = "[[faults.steps]]\nmodel = \"large\"\nkind = \"panic\"\nat = 40\n";
    let server = serve("dashboard-restart", fault, &[("TOKENROUTER_FAULTS", "1")]);
    let output = run(&mut suite("restart_suite.mjs", &server), REMEDY);
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(said.contains("checks passed"), "it ended without a count");
    assert_eq!(server.stop(), 0);
}

#[test]
fn the_page_asks_for_a_key_and_an_open_tab_does_not_hold_a_stop() {
    let _one = BROWSER.lock().unwrap_or_else(PoisonError::into_inner);
    let server = serve("dashboard-doors", "", &[("TOKENROUTER_API_KEYS", KEY)]);
    let mut command = suite("doors_suite.mjs", &server);
    command.args(["--key", KEY]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut browser = command.spawn().expect("node runs");
    let mut said = BufReader::new(browser.stdout.take().expect("stdout is piped")).lines();
    let is_open = said.any(|line| line.is_ok_and(|line| line == "open"));
    if is_open {
        let begin = Instant::now();
        assert_eq!(server.stop(), 0);
        assert!(begin.elapsed() < SOON, "an open tab held the server for {:?}", begin.elapsed());
        browser.stdin.take().expect("stdin is piped").write_all(b"stopped\n").expect("it listens");
    }
    let rest: Vec<String> = said.map_while(Result::ok).collect();
    let mut errors = String::new();
    browser.stderr.take().expect("stderr is piped").read_to_string(&mut errors).expect("stderr is UTF-8");
    let status = browser.wait().expect("it ends");
    assert!(is_open && status.success(), "{status}: {REMEDY}\n{errors}");
    assert!(rest.iter().any(|line| line.contains("checks passed")), "it ended without a count: {rest:?}");
}

/// Every file below a folder, by its path there.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap_or_else(|error| panic!("{}: {error}", next.display())) {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let bytes = std::fs::read(&path).expect("the file can be read");
                found.push((path.strip_prefix(folder).expect("it lies there").to_owned(), bytes));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn the_files_of_the_page_are_what_their_sources_make() {
    let sources = root().join("api/dashboard");
    let place = node_packages(&sources, "dashboard-sources");
    let remedy = "see what npm run build says";
    run(Command::new("npm").args(["run", "build"]).current_dir(&place), remedy);
    let output = run(Command::new("npm").arg("test").current_dir(&place), "see the tests that failed");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("# fail 0") && !said.contains("# pass 0"), "{said}");
    let (made, kept) = (files(&place.join("dist")), files(&sources.join("dist")));
    let names = |files: &[(PathBuf, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    let remedy = "cd api/dashboard && npm ci && npm run build, and commit dist";
    assert_eq!(names(&made), names(&kept), "{remedy}");
    for ((name, made), (_, kept)) in made.iter().zip(&kept) {
        assert!(made == kept, "dist/{} is not what its sources make; {remedy}", name.display());
    }
}
