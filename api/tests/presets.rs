//! Every preset starts: the pair that ships with the source as it is, the others with tiny models of the same
//! architecture in place of their downloads. Those for CUDA devices start in `tests/tests/cuda_serve.rs`, on a device in
//! software.

mod support;

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use support::{FakeHub, Files, Folder, Serving, program, root, run};

/// A tiny model whose configuration claims a long context, by file name.
fn tiny(name: &str) -> Vec<(String, Vec<u8>)> {
    let folder = root().join("tests/fixtures/tiny").join(name);
    let names =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];
    names
        .iter()
        .map(|name| {
            let bytes = std::fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
            let bytes = if *name == "config.json" {
                let mut config: Value = serde_json::from_slice(&bytes).expect("config.json is JSON");
                config["max_position_embeddings"] = json!(40960);
                config.to_string().into_bytes()
            } else {
                bytes
            };
            ((*name).to_owned(), bytes)
        })
        .collect()
}

/// Files of a hub that offers a tiny model under each of these names.
fn hub(models: &[(&str, &str)]) -> FakeHub {
    let mut files = Files::new();
    for (repo, model) in models {
        let tiny = tiny(model);
        let siblings: Vec<Value> = tiny.iter().map(|(name, _)| json!({ "rfilename": name })).collect();
        let info = json!({ "sha": "abc123", "siblings": siblings });
        files.insert(format!("/api/models/{repo}/revision/main"), info.to_string().into_bytes());
        files.extend(tiny.into_iter().map(|(name, bytes)| (format!("/{repo}/resolve/main/{name}"), bytes)));
    }
    FakeHub::start(files)
}

/// Serves a preset, asks it for its models and for a few tokens, and stops it.
fn check(folder: &Folder, config: &Path, environment: &[(&str, &str)], models: &[&str]) {
    let mut command = program(folder, &["--config", &config.display().to_string()]);
    command.envs(environment.iter().copied());
    let serving = Serving::start(command);
    let (status, body) = serving.ask("GET", "/v1/models", "");
    assert_eq!(status, 200, "{body}");
    let list: Value = serde_json::from_str(&body).expect("JSON");
    let names: Vec<&str> =
        list["data"].as_array().expect("a list").iter().filter_map(|card| card["id"].as_str()).collect();
    assert_eq!(names, models, "{}", serving.banner);
    for name in &models[1..] {
        assert!(serving.banner.contains(name), "{}", serving.banner);
    }
    let request = json!({"model": models[0], "prompt": "a", "max_tokens": 4, "ignore_eos": true, "temperature": 0});
    let (status, body) = serving.ask("POST", "/v1/completions", &request.to_string());
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{body}");
    assert_eq!(serving.stop(), 0);
}

fn preset(name: &str) -> std::path::PathBuf {
    root().join("config/presets").join(name)
}

#[test]
fn every_preset_has_a_test() {
    let presets = std::fs::read_dir(root().join("config/presets")).expect("the presets");
    let found: BTreeSet<String> =
        presets.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    let tested = [
        "demo-citer.toml",
        "demo-cuda.toml",
        "demo-pair.toml",
        "demo-r2r.toml",
        "qwen2.5-coder-pair.toml",
        "qwen3-0.6b-32b-cuda.toml",
        "qwen3-0.6b-8b.toml",
        "scripted.toml",
        "single-model.toml",
    ];
    assert_eq!(found, tested.iter().map(|name| (*name).to_owned()).collect());
}

#[test]
fn demo_pair_starts() {
    check(&Folder::new(), &preset("demo-pair.toml"), &[], &["demo", "small", "large"]);
}

/// The trained heads are good for something: the pair gets problems right that the small model alone does not.
#[test]
fn demo_pair_starts_with_its_trained_heads() {
    for (name, head) in [("demo-r2r.toml", "heads/r2r"), ("demo-citer.toml", "heads/citer")] {
        check(&Folder::new(), &preset(name), &[], &["demo", "small", "large"]);
        let bytes = std::fs::metadata(root().join("config/demo").join(head).join("head.safetensors")).expect("a head");
        assert!(bytes.len() < 300_000, "{name}: {} bytes", bytes.len());
        let (config, problems) = (preset(name), root().join("config/demo/problems.jsonl"));
        let [config, problems] = [config, problems].map(|path| path.display().to_string());
        let arguments = ["eval", &problems, "--config", &config, "--limit", "40", "--json"];
        let (code, out, err) = run(&Folder::new(), &arguments);
        assert_eq!((code, err.as_str()), (0, ""));
        let object: Value = serde_json::from_str(&out).expect("one JSON object");
        let rows = object["rows"].as_array().expect("rows");
        let row =
            rows.iter().find(|row| row["share"]["small"].as_f64().is_some_and(|share| 0.5 < share && share < 1.0));
        let row = row.unwrap_or_else(|| panic!("{name}: no routed row: {out}"));
        assert!(row["right"].as_u64().is_some_and(|right| right >= 37), "{name}: {row}");
    }
}

#[test]
fn scripted_pair_starts() {
    check(&Folder::new(), &preset("scripted.toml"), &[], &["demo", "small", "large"]);
}

#[test]
fn qwen3_pair_starts() {
    let fake = hub(&[("Qwen/Qwen3-0.6B", "qwen3-f16"), ("Qwen/Qwen3-8B", "qwen3-bf16-untied")]);
    let names = ["qwen3-0.6b-8b", "qwen3-0.6b", "qwen3-8b"];
    check(&Folder::new(), &preset("qwen3-0.6b-8b.toml"), &[("HF_ENDPOINT", &fake.endpoint)], &names);
    assert!(fake.requests() > 10, "the models came from the hub");
}

#[test]
fn single_model_starts() {
    let fake = hub(&[("HuggingFaceTB/SmolLM2-135M-Instruct", "llama-f32")]);
    let environment = [("HF_ENDPOINT", fake.endpoint.as_str())];
    check(&Folder::new(), &preset("single-model.toml"), &environment, &["tokenrouter", "smollm2"]);
}

#[test]
fn coder_pair_starts_beside_its_files() {
    let folder = Folder::new();
    let text = std::fs::read_to_string(preset("qwen2.5-coder-pair.toml")).expect("the preset");
    let config = folder.write("qwen2.5-coder-pair.toml", &text);
    // A model's path is taken for what it is, file or folder, whatever it is called.
    for (name, model) in [
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2-f32"),
        ("qwen2.5-coder-1.5b-instruct.gguf", "qwen2-bf16-untied"),
    ] {
        std::fs::create_dir(folder.path.join(name)).expect("a folder");
        for (file, bytes) in tiny(model) {
            std::fs::write(folder.path.join(name).join(file), bytes).expect("written");
        }
    }
    check(&folder, &config, &[], &["qwen2.5-coder", "coder-0.5b", "coder-1.5b"]);
}
