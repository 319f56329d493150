//! Learned heads from the checkpoint to the answer: `convert-router`, the launch file, and both ends of each threshold.

mod support;

use serde_json::{Value, json};
use std::path::Path;
use support::{Folder, Serving, program, root, run};

/// A launch file over two tiny models of one tokenizer.
fn launch(folder: &Folder, small: &Path, router: &str) -> String {
    let tiny = root().join("tests/fixtures/tiny");
    let model = |name: &str, path: &Path| {
        format!("[[models]]\nname = \"{name}\"\npath = \"{}\"\nkv_tokens = 1024\nthreads = 2\n", path.display())
    };
    let large = tiny.join("qwen2-f32");
    let text = format!("{}{}[router]\n{router}\n", model("small", small), model("large", &large));
    folder.write("launch.toml", &text).display().to_string()
}

fn tiny_small() -> std::path::PathBuf {
    root().join("tests/fixtures/tiny/llama-f32")
}

/// Converts a fixture into `heads/NAME` of the folder.
fn converted(folder: &Folder, checkpoint: &str, name: &str) -> String {
    let input = root().join("tests/fixtures/heads").join(checkpoint);
    let output = folder.path.join("heads").join(name);
    let (code, out, err) =
        run(folder, &["convert-router", &input.display().to_string(), &output.display().to_string()]);
    assert_eq!(code, 0, "{err}");
    out
}

fn tokens(folder: &Folder, config: &str, more: &[&str]) -> Value {
    let fixed = ["generate", "some words", "--json", "-n", "24", "--temperature", "0", "--config", config];
    let (code, out, err) = run(folder, &[&fixed[..], more].concat());
    assert_eq!(code, 0, "{more:?}: {err}");
    let object: Value = serde_json::from_str(&out).expect("one JSON object");
    object["token_ids"].clone()
}

/// With these thresholds the answer is that of one model, token for token.
fn ends_are_single_models(folder: &Folder, config: &str, ends: [(&str, &str); 2]) {
    for (threshold, model) in ends {
        let (routed, alone) =
            (tokens(folder, config, &["--params", threshold]), tokens(folder, config, &["--model", model]));
        assert!(alone.as_array().is_some_and(|tokens| !tokens.is_empty()));
        assert_eq!(routed, alone, "{threshold}");
    }
}

#[test]
fn a_converted_r2r_head_routes() {
    let folder = Folder::new();
    let out = converted(&folder, "r2r-logits.pt", "small");
    assert!(out.contains("network: LogitsClassifier") && out.contains("threshold: 0.25"), "{out}");
    let config = launch(&folder, &tiny_small(), "algorithm = \"r2r\"\nparams = { head = \"heads/small\" }");
    let (code, out, err) = run(&folder, &["check", "--config", &config]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("threshold = 0.25"), "the threshold of the checkpoint: {out}");
    ends_are_single_models(&folder, &config, [("threshold=0", "large"), ("threshold=1.5", "small")]);
    tokens(&folder, &config, &[]);
}

#[test]
fn a_head_that_cannot_be_used_is_an_error_at_its_key() {
    let folder = Folder::new();
    converted(&folder, "citer.pth", "citer");
    for (router, words) in [
        ("algorithm = \"citer\"\nparams = { head = \"heads/citer\" }", ["hidden rows of 32", "has 64"]),
        ("algorithm = \"r2r\"\nparams = { head = \"heads/citer\", threshold = 0.5 }", ["family citer", "needs r2r"]),
        ("algorithm = \"r2r\"\nparams = { head = \"heads/none\" }", ["heads/none", "head.json"]),
        ("algorithm = \"co_llm\"", ["<|defer|>", "router.params.token"]),
    ] {
        let config = launch(&folder, &tiny_small(), router);
        let (code, _, err) = run(&folder, &["check", "--config", &config]);
        assert_eq!(code, 2, "{err}");
        assert!(words.iter().all(|word| err.contains(word)) && err.contains("launch.toml"), "{err}");
    }
}

#[test]
fn hostile_checkpoints_are_refused_by_the_command() {
    let folder = Folder::new();
    let input = root().join("tests/fixtures/heads/evil-reduce.pt").display().to_string();
    let output = folder.path.join("out");
    let (code, out, err) = run(&folder, &["convert-router", &input, &output.display().to_string()]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("posix.system") && err.contains("not run"), "{err}");
    assert!(!output.exists() && !Path::new("pickle-was-run").exists());
}

/// The small model has one token more than the large one, as a Co-LLM model does.
#[test]
fn an_extra_row_routes_and_is_never_a_token() {
    let folder = Folder::new();
    let small = folder.path.join("small");
    std::fs::create_dir_all(&small).expect("a folder");
    for file in std::fs::read_dir(tiny_small()).expect("the tiny model").flatten() {
        std::fs::copy(file.path(), small.join(file.file_name())).expect("copied");
    }
    let path = small.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).expect("a tokenizer")).expect("JSON");
    let added = tokenizer["added_tokens"].as_array_mut().expect("added tokens");
    let mut defer = added[0].clone();
    (defer["id"], defer["content"]) = (json!(300), json!("<|defer|>"));
    added.push(defer);
    std::fs::write(&path, tokenizer.to_string()).expect("written");
    let config = launch(&folder, &small, "algorithm = \"co_llm\"");
    ends_are_single_models(&folder, &config, [("threshold=-0.5", "large"), ("threshold=1", "small")]);
    let routed = tokens(&folder, &config, &["--params", "threshold=0.5"]);
    assert!(routed.as_array().is_some_and(|tokens| tokens.iter().all(|token| *token != 300)));
    // Nor may a client write it: the large model has no such token.
    let server = Serving::start(program(&folder, &["--config", &config, "--log-level", "info"]));
    assert!(server.logged("loaded").contains("vocab_width"), "the width that entropies are normalised by");
    let ask = |prompt: Value| {
        let body = json!({ "model": "tokenrouter", "prompt": prompt, "max_tokens": 8, "temperature": 0,
            "logprobs": 5, "routing": { "threshold": 0.5 } });
        let (status, answer) = server.ask("POST", "/v1/completions", &body.to_string());
        (status, serde_json::from_str::<Value>(&answer).expect("JSON"))
    };
    let (status, answer) = ask(json!([5, 300, 6]));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("prompt")), "{answer}");
    let (status, answer) = ask(json!("some <|defer|> words"));
    assert_eq!(status, 200, "the text of the token is text: {answer}");
    assert!(!answer["choices"][0]["logprobs"].to_string().contains("defer"), "{answer}");
    // Without the algorithm that owns the row, the vocabularies differ.
    let config = launch(&folder, &small, "algorithm = \"r_stitch\"");
    let (code, _, err) = run(&folder, &["check", "--config", &config]);
    assert_eq!(code, 2);
    assert!(err.contains("301 and 300 tokens") || err.contains("300 and 301 tokens"), "{err}");
}
