//! Policies `optimal` and `adaptive` as a launch file asks for them, on the embedded pair.

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use support::{Folder, Serving, program, run};
use tokenrouter_core::theory::latency::Point;
use tokenrouter_core::theory::profile::{ModelProfile, Profile, VERSION, Way};

/// The embedded pair's launch file with these lines instead of its policy.
fn launch(folder: &Folder, policy: &str) -> PathBuf {
    let (code, config, err) = run(folder, &["check"]);
    assert_eq!(code, 0, "{err}");
    assert!(config.contains("policy = \"eager\""), "{config}");
    folder.write("launch.toml", &config.replace("policy = \"eager\"", policy))
}

/// A profile of two models: steps of 1 and 10 ms, a third of the small one's tokens routed.
fn profile(names: [&str; 2]) -> String {
    let model = |at: usize, ms: f64, ways: [(f64, f64); 2]| {
        let points = |factor: f64| {
            let point = |rows| Point { rows, tokens: 1, seconds: ms * factor / 1e3, spread: 0.0 };
            [1, 8].map(point).to_vec()
        };
        let way = |(index, (share, tokens)): (usize, (f64, f64))| (names[index].to_owned(), Way { share, tokens });
        ModelProfile {
            name: names[at].to_owned(),
            rows_max: 8,
            alone: points(1.0),
            beside: points(1.0),
            ways: ways.into_iter().enumerate().map(way).collect::<BTreeMap<_, _>>(),
            observations: 1_000,
        }
    };
    let models = vec![model(0, 1.0, [(0.65, 1.0), (0.35, 0.0)]), model(1, 10.0, [(1.0, 1.0), (0.0, 0.0)])];
    serde_json::to_string(&Profile { version: VERSION, models }).expect("plain numbers and names")
}

/// The server says where its thresholds come from, and answers.
#[track_caller]
fn answers(folder: &Folder, config: &Path, from: &str) -> String {
    let config = config.display().to_string();
    let serving = Serving::start(program(folder, &["--config", &config]));
    let line = serving.logged("thresholds planned");
    assert!(line.contains(from), "{line}");
    let body = r#"{"model": "demo", "prompt": "Max has 4 apples.", "max_tokens": 8, "temperature": 0}"#;
    let (status, answer) = serving.ask("POST", "/v1/completions", body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(serving.stop(), 0);
    line
}

#[test]
fn adaptive_starts_from_what_the_algorithm_expects() {
    let folder = Folder::new();
    let config = launch(&folder, "policy = \"adaptive\"");
    answers(&folder, &config, "for want of a profile");
}

#[test]
fn optimal_goes_by_its_profile() {
    let folder = Folder::new();
    folder.write("profile.json", &profile(["small", "large"]));
    let config = launch(&folder, "policy = \"optimal\"\nprofile = \"profile.json\"");
    let line = answers(&folder, &config, "the profile");
    assert!(!line.contains("[1, 1]"), "at this ratio waiting pays: {line}");
}

#[test]
fn a_profile_of_other_models_is_refused_before_anything_is_loaded() {
    let folder = Folder::new();
    folder.write("profile.json", &profile(["tiny", "large"]));
    let config = launch(&folder, "policy = \"optimal\"\nprofile = \"profile.json\"");
    let config = config.display().to_string();
    let (code, out, err) = run(&folder, &["serve", "--config", &config]);
    assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
    assert!(err.contains("launch.toml:") && err.contains("tiny, large"), "{err}");
    let gone = launch(&folder, "policy = \"optimal\"\nprofile = \"gone.json\"").display().to_string();
    let (code, _, err) = run(&folder, &["serve", "--config", &gone]);
    assert_eq!((code, err.lines().count()), (2, 1), "{err}");
    assert!(err.contains("gone.json"), "{err}");
}
