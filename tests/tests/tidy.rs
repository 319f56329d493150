//! The shape of the code base: folders, crate directions, sizes, lists, no machine paths.
//! Owner: everyone who adds a file. Invariant: each check names every offender, not just the first.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines of a file without its test module, blank lines and comments included.
const FILE_LINES_MAX: usize = 420;
/// Lines of a function from its name to its closing brace, without blank lines and comments.
const FUNCTION_LINES_MAX: usize = 75;

fn root() -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_folder.parent().expect("the crate lies in the workspace").to_owned()
}

/// Every file that git tracks, relative to the root, with its bytes. Deleted but not yet committed files are left out.
fn tracked_files() -> Vec<(String, Vec<u8>)> {
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output().expect("git is installed");
    assert!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).expect("file names are UTF-8");
    let names = names.split('\0').filter(|name| !name.is_empty());
    let files: Vec<_> =
        names.filter_map(|name| Some((name.to_owned(), std::fs::read(root().join(name)).ok()?))).collect();
    assert!(files.len() > 20, "git lists only {} files", files.len());
    files
}

/// Rust sources under the `src` folder of any crate.
fn sources() -> Vec<(String, String)> {
    tracked_files()
        .into_iter()
        .filter(|(name, _)| name.ends_with(".rs") && name.contains("src/"))
        .map(|(name, bytes)| (name, String::from_utf8(bytes).expect("Rust source is UTF-8")))
        .collect()
}

fn none(what: &str, offenders: &[String]) {
    assert!(offenders.is_empty(), "{what}:\n  {}", offenders.join("\n  "));
}

#[test]
fn crates_depend_only_downwards() {
    let allowed: BTreeMap<&str, Vec<&str>> = BTreeMap::from([
        ("tokenrouter-config", vec![]),
        ("tokenrouter-core", vec![]),
        ("tokenrouter-kernels", vec![]),
        ("tokenrouter-gpu", vec!["tokenrouter-core", "tokenrouter-kernels"]),
        ("tokenrouter-actors", vec!["tokenrouter-core"]),
        (
            "tokenrouter",
            vec![
                "tokenrouter-config",
                "tokenrouter-core",
                "tokenrouter-kernels",
                "tokenrouter-gpu",
                "tokenrouter-actors",
            ],
        ),
    ]);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    for package in metadata["packages"].as_array().expect("packages") {
        let name = package["name"].as_str().expect("a name");
        seen.insert(name.to_owned());
        let Some(allowed) = allowed.get(name) else {
            assert_eq!(name, "tokenrouter-tests", "a crate that this test does not know");
            continue;
        };
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let to = dependency["name"].as_str().expect("a name");
            // A crate's own tests may use what they like, except upwards.
            if to.starts_with("tokenrouter") && !allowed.contains(&to) {
                wrong.push(format!("{name} -> {to}"));
            }
        }
    }
    assert_eq!(seen.len(), allowed.len() + 1, "{seen:?}");
    none("forbidden dependencies between crates", &wrong);
}

#[test]
fn top_level_is_fixed() {
    let folders = ["actors", "gpu", "kernels", "api", "config", "tests", "docs", ".ci"];
    let wrong: BTreeSet<String> = tracked_files()
        .iter()
        .filter_map(|(name, _)| name.split_once('/').map(|(folder, _)| folder.to_owned()))
        .filter(|folder| !folders.contains(&folder.as_str()))
        .collect();
    none("top-level folders beside the fixed ones", &wrong.into_iter().collect::<Vec<_>>());
    for file in
        ["README.md", "ARCHITECTURE.md", "LICENSE", "Cargo.toml", "justfile", "clippy.toml", "deny.toml", ".ci/run"]
    {
        assert!(root().join(file).is_file(), "{file} is missing");
    }
}

/// The source before its `#[cfg(test)] mod …` (which rustfmt and habit put last).
fn without_tests(source: &str) -> &str {
    source.split("\n#[cfg(test)]\nmod ").next().unwrap_or(source)
}

/// Whether a file holds tests only.
fn is_test_file(name: &str) -> bool {
    name.ends_with("/tests.rs")
        || name.ends_with("/testing.rs")
        || name.contains("/tests/")
        || name.ends_with("_tests.rs")
}

#[test]
fn files_stay_readable() {
    let long: Vec<String> = sources()
        .iter()
        .filter(|(name, _)| !is_test_file(name))
        .map(|(name, source)| (name, without_tests(source).lines().count()))
        .filter(|(_, lines)| *lines > FILE_LINES_MAX)
        .map(|(name, lines)| format!("{name}: {lines} lines"))
        .collect();
    none(&format!("files of more than {FILE_LINES_MAX} lines without tests"), &long);
}

/// Functions of rustfmt-formatted source: name, and lines without blank lines and comments.
fn functions(source: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let Some(after) = [
            "fn ",
            "pub fn ",
            "pub(crate) fn ",
            "pub(super) fn ",
            "async fn ",
            "pub async fn ",
            "unsafe fn ",
            "pub unsafe fn ",
        ]
        .iter()
        .find_map(|start| code.strip_prefix(start)) else {
            continue;
        };
        let indent = &line[..line.len() - code.len()];
        let end = format!("{indent}}}");
        let body = lines[at..].iter().take_while(|line| **line != end && !line.ends_with("; // no body"));
        let counted = body.filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with("//")).count() + 1;
        let opens = lines[at..].iter().find(|line| line.ends_with('{') || line.ends_with(';') || line.ends_with('}'));
        if opens.is_some_and(|line| line.ends_with('{')) {
            let name = after.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(after);
            found.push((name.to_owned(), counted));
        }
    }
    found
}

#[test]
fn functions_are_measured() {
    let source = "impl A {\n    fn one(&self) -> u32 { 1 }\n\n    pub fn two(\n        x: u32,\n    ) -> u32 {\n        // note\n\n        x\n    }\n}\nfn three() {\n    g();\n}\n";
    let expected = [("two".to_owned(), 5), ("three".to_owned(), 3)];
    assert_eq!(functions(source), expected);
}

#[test]
fn functions_stay_readable() {
    let mut long = Vec::new();
    for (name, source) in sources().iter().filter(|(name, _)| !is_test_file(name)) {
        for (function, lines) in functions(without_tests(source)) {
            if lines > FUNCTION_LINES_MAX {
                long.push(format!("{name}: {function}: {lines} lines"));
            }
        }
    }
    none(&format!("functions of more than {FUNCTION_LINES_MAX} lines"), &long);
}

#[test]
fn sources_say_what_they_are_for() {
    let silent: Vec<String> = sources()
        .into_iter()
        .filter(|(_, source)| !source.trim_start().starts_with("//!") && !source.trim().is_empty())
        .map(|(name, _)| name)
        .collect();
    none("files without a `//!` head (purpose, owner, invariant)", &silent);
}

/// Extension by adding a file: each file of these folders that is not shared by the others stands in the one list of its
/// `mod.rs`, as `module::ENTRY` or `module::build`.
#[test]
fn every_algorithm_and_architecture_is_listed() {
    let folders: [(&str, &[&str]); 2] =
        [("actors/core/src/routing", &["catalog", "detour", "reload"]), ("gpu/src/models", &["blocks", "parts"])];
    for (folder, shared) in folders {
        let mod_rs = std::fs::read_to_string(root().join(folder).join("mod.rs"))
            .unwrap_or_else(|error| panic!("{folder}/mod.rs: {error}"));
        let files: BTreeSet<String> = std::fs::read_dir(root().join(folder))
            .expect("the folder is there")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .filter_map(|name| name.strip_suffix(".rs").map(str::to_owned))
            .filter(|name| name != "mod" && !name.ends_with("tests") && !shared.contains(&name.as_str()))
            .collect();
        assert!(!files.is_empty(), "{folder} is empty");
        let missing: Vec<String> = files
            .into_iter()
            .filter(|module| !["ENTRY", "build"].iter().any(|item| mod_rs.contains(&format!("{module}::{item}"))))
            .collect();
        none(&format!("{folder}: files that the list in mod.rs lacks"), &missing);
    }
}

/// A promise is worth what its test is worth: every file and test that ARCHITECTURE.md names is there.
#[test]
fn promises_name_tests_that_exist() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md is there");
    let quoted: Vec<&str> = text.split('`').skip(1).step_by(2).collect();
    let tests: Vec<&str> = quoted.into_iter().filter(|word| word.contains('/') && word.contains('.')).collect();
    assert!(tests.len() > 20, "only {} files are named", tests.len());
    let missing: Vec<String> = tests
        .iter()
        .filter(|place| {
            let (file, name) = place.split_once("::").unwrap_or((place, ""));
            let source = std::fs::read_to_string(root().join(file)).unwrap_or_default();
            source.is_empty() || !(name.is_empty() || source.contains(&format!("fn {name}(")))
        })
        .map(|place| (*place).to_owned())
        .collect();
    none("files and tests that ARCHITECTURE.md names but that do not exist", &missing);
    for promise in 1..=8 {
        assert!(text.contains(&format!("\n{promise}. **")), "promise {promise} is missing");
    }
}

#[test]
fn no_machine_paths() {
    // Spelt in pieces so that this file does not contain them.
    let marks: Vec<String> =
        ["home/", "root/", "work/main", "work/shared", "Users/"].iter().map(|folder| format!("/{folder}")).collect();
    let mut wrong = Vec::new();
    for (name, bytes) in tracked_files() {
        let Ok(text) = String::from_utf8(bytes) else { continue };
        for (number, line) in text.lines().enumerate() {
            // A path starts the line or follows something that cannot be part of one (so that `x/root/y` is none), and
            // a one-letter folder is a placeholder.
            let hit = marks.iter().any(|mark| {
                line.match_indices(mark.as_str()).any(|(at, _)| {
                    let inside = line[..at].ends_with(|c: char| c.is_alphanumeric() || "-_./~}$".contains(c));
                    let placeholder = line[at + mark.len()..].chars().nth(1).is_some_and(|c| c == '/');
                    !inside && !placeholder
                })
            });
            if hit {
                wrong.push(format!("{name}:{}", number + 1));
            }
        }
    }
    none("paths of one machine", &wrong);
}

/// Promise 8: only the launcher and the command line above it read the environment.
#[test]
fn only_the_launcher_reads_the_environment() {
    let readers =
        ["api/src/launch.rs", "api/src/launch/", "api/src/main.rs", "api/src/cli/", "api/src/hub.rs", "api/examples/"];
    let calls = ["env::var", "env::vars", "env::set_var", "env::args"];
    let wrong: Vec<String> = sources()
        .iter()
        .filter(|(name, _)| !is_test_file(name) && !readers.iter().any(|reader| name.starts_with(reader)))
        .filter(|(name, source)| {
            let source = without_tests(source);
            !name.starts_with("tests/") && calls.iter().any(|call| source.contains(call))
        })
        .map(|(name, _)| name.clone())
        .collect();
    none("files that read the environment", &wrong);
}
