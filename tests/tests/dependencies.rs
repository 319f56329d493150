//! What is linked in: the licences, bans and sources of deny.toml, checked against `cargo metadata`.
//! Owner: deny.toml. Invariant: this test and `cargo deny` read the same lists.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

/// All packages of the workspace's graph on Linux.
fn packages() -> Vec<Value> {
    let packages = packages_of("Cargo.toml");
    assert!(packages.len() > 100, "only {} packages", packages.len());
    packages
}

/// All packages of a manifest's graph on Linux.
fn packages_of(manifest: &str) -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET])
        .args(["--manifest-path", manifest])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    metadata["packages"].as_array().expect("packages").clone()
}

fn deny() -> toml::Table {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml is there");
    text.parse().expect("deny.toml is TOML")
}

fn strings(table: &toml::Table, section: &str, key: &str) -> Vec<String> {
    let items = table[section][key].as_array().unwrap_or_else(|| panic!("[{section}] {key} is an array"));
    items.iter().map(|item| item.as_str().expect("a string").to_owned()).collect()
}

fn text<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

/// Whether an SPDX expression can be satisfied with the allowed licences. `/` is the old spelling of OR.
fn satisfied(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let value = any_of(&words, &mut at, allowed);
    value && at == words.len()
}

fn any_of(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut value = all_of(words, at, allowed);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        value |= all_of(words, at, allowed);
    }
    value
}

fn all_of(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let mut value = one(words, at, allowed);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        value &= one(words, at, allowed);
    }
    value
}

fn one(words: &[&str], at: &mut usize, allowed: &[String]) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let value = any_of(words, at, allowed);
        let closed = words.get(*at) == Some(&")");
        *at += 1;
        return value && closed;
    }
    let mut name = (*word).to_owned();
    if words.get(*at) == Some(&"WITH") {
        name = format!("{name} WITH {}", words.get(*at + 1).copied().unwrap_or_default());
        *at += 2;
    }
    // `MPL-2.0+`: that version or a later one, so the allowed one will do.
    allowed.iter().any(|allowed| allowed == name.strip_suffix('+').unwrap_or(&name))
}

#[test]
fn expressions_are_understood() {
    let allowed: Vec<String> = ["MIT", "Zlib", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned).to_vec();
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("Zlib+", true),
        ("GPL-3.0+", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("GPL-3.0 AND MIT", false),
        ("(GPL-3.0 OR MIT) AND Zlib", true),
        ("GPL-3.0 OR MIT AND ISC", false),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
        ("(MIT", false),
        ("", false),
    ] {
        assert_eq!(satisfied(expression, &allowed), expected, "{expression}");
    }
}

#[test]
fn licences_are_allowed() {
    let allowed = strings(&deny(), "licenses", "allow");
    let wrong: Vec<String> = packages()
        .iter()
        .chain(&packages_of("kernels/lab/Cargo.toml"))
        .filter(|package| !satisfied(text(package, "license"), &allowed))
        .map(|package| {
            format!("{} {}: `{}`", text(package, "name"), text(package, "version"), text(package, "license"))
        })
        .collect();
    assert!(wrong.is_empty(), "licences that deny.toml does not allow:\n  {}", wrong.join("\n  "));
}

fn version(text: &str) -> (u64, u64, u64) {
    let core = text.split(['-', '+']).next().unwrap_or_default();
    let mut parts = core.split('.').map(|part| part.parse().unwrap_or_else(|_| panic!("version `{text}`")));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

/// Whether a ban such as `h2:<0.4.16` or `awc` meets this package.
fn banned(ban: &str, name: &str, found: &str) -> bool {
    let (banned_name, range) = ban.split_once(':').unwrap_or((ban, ">=0"));
    let meets = match (range.strip_prefix(">="), range.strip_prefix('<')) {
        (Some(least), _) => version(found) >= version(least),
        (_, Some(below)) => version(found) < version(below),
        _ => panic!("ban `{ban}`: write `crate:>=VERSION` or `crate:<VERSION`"),
    };
    banned_name == name && meets
}

#[test]
fn bans_hold() {
    assert!(banned("bincode:>=3", "bincode", "3.0.0") && !banned("bincode:>=3", "bincode", "2.0.1"));
    assert!(banned("h2:<0.4.16", "h2", "0.3.27") && !banned("h2:<0.4.16", "h2", "0.4.20"));
    let deny = deny();
    let bans = deny["bans"]["deny"].as_array().expect("[bans] deny is an array");
    let mut wrong = Vec::new();
    for package in packages() {
        for ban in bans {
            let (name, found) = (text(&package, "name"), text(&package, "version"));
            if banned(ban["crate"].as_str().expect("crate"), name, found) {
                wrong.push(format!("{name} {found}: {}", ban["reason"].as_str().expect("every ban has a reason")));
            }
        }
    }
    assert!(wrong.is_empty(), "banned packages:\n  {}", wrong.join("\n  "));
}

/// A program that links `cust` does not start where there is no driver: the workbench may, the server and its tests not.
#[test]
fn only_the_workbench_links_a_driver() {
    let links = |packages: Vec<Value>| packages.iter().any(|package| text(package, "name") == "cust_raw");
    assert!(!links(packages()), "the workspace depends on cust");
    assert!(links(packages_of("kernels/lab/Cargo.toml")), "the workbench is no longer one over cust");
    let bans = deny()["bans"]["deny"].as_array().expect("[bans] deny is an array").clone();
    for name in ["cust", "cust_raw"] {
        assert!(bans.iter().any(|ban| ban["crate"].as_str() == Some(name)), "{name} is not banned from the workspace");
    }
    let manifest: toml::Table =
        std::fs::read_to_string(root().join("Cargo.toml")).expect("it is there").parse().expect("TOML");
    let excluded = strings(&manifest, "workspace", "exclude");
    assert!(excluded.iter().any(|folder| folder == "kernels/lab"), "{excluded:?}");
}

#[test]
fn sources_are_known() {
    let registries = strings(&deny(), "sources", "allow-registry");
    let wrong: Vec<String> = packages()
        .iter()
        .chain(&packages_of("kernels/lab/Cargo.toml"))
        .filter_map(|package| Some((text(package, "name").to_owned(), package["source"].as_str()?.to_owned())))
        .filter(|(_, source)| !registries.iter().any(|registry| source == &format!("registry+{registry}")))
        .map(|(name, source)| format!("{name} from {source}"))
        .collect();
    assert!(wrong.is_empty(), "packages from other sources than deny.toml allows:\n  {}", wrong.join("\n  "));
}
