//! `profile`, then `plan` with what it wrote, on the embedded pair; and the errors of both and of `synth-model`.

mod support;

use serde_json::Value;
use support::{Folder, run};

/// A profile of the embedded pair under random routing, in the folder.
fn profiled(folder: &Folder) -> (String, String) {
    let prompts: String = (0..12).map(|n| format!("{{\"question\": \"Max has {n} apples.\"}}\n")).collect();
    let prompts = folder.write("prompts.jsonl", &prompts).display().to_string();
    let (code, config, err) = run(folder, &["check"]);
    assert_eq!(code, 0, "{err}");
    let config = config.replace("\"r_stitch\"", "\"bernoulli\"").replace("threshold = ", "p = 0.3 # ");
    let config = folder.write("bernoulli.toml", &config).display().to_string();
    let out = folder.path.join("profile.json").display().to_string();
    let arguments =
        ["profile", &prompts, "--config", &config, "--out", &out, "--repeat", "3", "--rows", "4", "--ignore-eos"];
    let (code, text, err) = run(folder, &arguments);
    assert_eq!(code, 0, "{err}");
    for part in ["small: to large", "large: to small 1.000 (1.00 tokens)", "beside others", "+- 0."] {
        assert!(text.contains(part), "{text}");
    }
    (config, out)
}

#[test]
fn what_profile_writes_plan_reads() {
    let folder = Folder::new();
    let (config, profile) = profiled(&folder);
    let text = std::fs::read_to_string(&profile).expect("the profile");
    let written: Value = serde_json::from_str(&text).expect("JSON");
    let small = &written["models"][0];
    let share = small["ways"]["large"]["share"].as_f64().expect("share");
    let rows = small["observations"].as_f64().expect("observations");
    assert!((share - 0.3).abs() < 4.0 * (0.21 / rows).sqrt(), "{share} of {rows}");
    let extends = |point: &Value| point["tokens"].as_u64() >= Some(8);
    let large = written["models"][1]["alone"].as_array().expect("points");
    assert!(large.iter().any(extends), "a return brings what the other wrote: {large:?}");
    for model in written["models"].as_array().expect("models") {
        assert!(model["alone"].as_array().map_or(0, Vec::len) >= 3, "rows 1, 2 and 4: {model}");
        assert_eq!(model["alone"].as_array().map(Vec::len), model["beside"].as_array().map(Vec::len));
    }
    let (code, out, err) = run(&folder, &["plan", "--config", &config, "--profile", &profile, "--up-to", "3"]);
    assert_eq!((code, out.lines().filter(|line| line.contains("small ")).count()), (0, 3), "{out}{err}");
    let measured = ["plan", "--config", &config, "--profile", &profile, "--requests", "3", "--measure", "90", "--json"];
    let (code, out, err) = run(&folder, &measured);
    assert_eq!(code, 0, "{err}");
    let object: Value = serde_json::from_str(&out).expect("JSON");
    let eager = &object["checks"][0];
    assert_eq!(eager["predicted"]["B"], serde_json::json!([1, 1]));
    let runs = eager["runs"].as_array().expect("runs");
    let positive = |run: &Value| ["measured", "with_ways", "with_steps"].iter().all(|at| run[at].as_f64() > Some(0.0));
    assert!(runs.len() == 3 && runs.iter().all(positive), "{runs:?}");

    let renamed = folder.write("renamed.json", &text.replace("\"small\"", "\"tiny\"")).display().to_string();
    let (code, _, err) = run(&folder, &["plan", "--config", &config, "--profile", &renamed]);
    assert_eq!((code, err.lines().count()), (2, 1), "{err}");
    assert!(err.contains("tiny, large") && err.contains("small, large") && err.contains("measure again"), "{err}");
}

#[test]
fn wrong_files_and_options_end_in_one_line() {
    let folder = Folder::new();
    let there = folder.write("there.gguf", "mine").display().to_string();
    let broken = folder.write("broken.json", "{\"version\": 1}").display().to_string();
    let empty = folder.write("empty.jsonl", "\n").display().to_string();
    for (arguments, parts) in [
        (vec!["synth-model", "--size", "0.6b", "--out", &there], ["there.gguf", "exists"]),
        (vec!["plan", "--profile", &broken], ["broken.json", "missing field `models`"]),
        (vec!["plan", "--profile", "absent.json"], ["absent.json", "No such file"]),
        (vec!["profile", &empty, "--out", "p.json"], ["empty.jsonl", "holds no prompt"]),
    ] {
        let (code, out, err) = run(&folder, &arguments);
        assert_eq!((code, out.as_str(), err.lines().count()), (2, "", 1), "{err}");
        assert!(parts.iter().all(|part| err.contains(part)), "{err}");
    }
    assert_eq!(std::fs::read_to_string(&there).expect("there"), "mine");
}
