//! The example of a program of one's own: it compiles against the workspace as it is, from outside of it, and its
//! algorithm does what it says. Owner: api/examples.

use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../../api/examples/custom_router/src/main.rs"]
#[allow(dead_code)]
mod custom_router;

/// How long the check may take on a slow machine with nothing compiled yet.
const CHECK_MAX: Duration = Duration::from_secs(900);

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

#[test]
fn the_example_takes_turns() {
    use tokenrouter_core::routing::catalog::Catalog;
    use tokenrouter_tests::world::{assert_idle, assert_text, parse, play_with};

    static EXTRA: [&tokenrouter_core::routing::Entry; 1] = [&custom_router::ENTRY];
    let catalog = Catalog::with(&EXTRA);
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
