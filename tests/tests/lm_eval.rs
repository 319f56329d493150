//! lm-evaluation-harness against the live server (`local-completions`: echo with log-probabilities): its log-likelihoods
//! are those computed offline from the same weights, token by token, with a tokenizer and a runner driven by hand.
//! Owner: the HTTP layer. Invariant: what the harness is told of a text is what the model thinks of it.

use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tokenrouter::text::ModelText;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::text::{SpecialTokens, TextCodec};
use tokenrouter_gpu::load::{KvMemory, LoadOptions};
use tokenrouter_tests::clients::{Venv, folder, run, scratch};
use tokenrouter_tests::conformance::{Walker, demo, load, open};
use tokenrouter_tests::http_server::Server;

const PROBLEMS: usize = 12;

/// Held-out problems, each with its worked solution and one that ends in a wrong number.
fn problems() -> Vec<Value> {
    let text = fs::read_to_string(demo("problems.jsonl")).expect("the problems are there");
    let problem = |(number, line): (usize, &str)| {
        let problem: Value = serde_json::from_str(line).expect("a line of JSON");
        let field = |name: &str| problem[name].as_str().expect("a text").to_owned();
        let (answer, worked) = (field("answer"), field("worked"));
        let other = (answer.parse::<u32>().expect("a number") + 1).to_string();
        let mut choices = vec![worked.clone(), worked.replace(&answer, &other)];
        let right = number % 2;
        choices.rotate_left(right);
        json!({"question": field("question"), "choices": choices, "right": right})
    };
    text.lines().take(PROBLEMS).enumerate().map(problem).collect()
}

/// What the harness found for each choice of each problem: log-likelihood, and whether every token is the most probable.
fn harness(work: &Path, address: SocketAddr, model: &str) -> (Vec<Vec<(f64, bool)>>, f64) {
    let out = work.join(model);
    if out.exists() {
        fs::remove_dir_all(&out).expect("the folder can be removed");
    }
    let tokenizer = demo("small").canonicalize().expect("the model is there");
    let arguments = format!(
        "model={model},base_url=http://{address}/v1/completions,tokenizer={},tokenizer_backend=huggingface,max_length=512,num_concurrent=3",
        tokenizer.display()
    );
    let mut command = Venv::of("requirements-lm-eval.txt").program("lm_eval");
    command.args(["--model", "local-completions", "--model_args", &arguments]).args(["--tasks", "worked_problems"]);
    command.arg("--include_path").arg(folder().join("lm_eval")).arg("--output_path").arg(&out);
    command.args(["--log_samples", "--batch_size", "4"]).current_dir(work).env("HF_HOME", work.join("hub"));
    for offline in ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"] {
        command.env(offline, "1");
    }
    run(&mut command, "see what it says above");
    let results: Value = serde_json::from_str(&read(&out, "results_")).expect("results as JSON");
    let accuracy = results["results"]["worked_problems"]["acc,none"].as_f64().expect("an accuracy");
    let mut samples: Vec<Value> =
        read(&out, "samples_").lines().map(|line| serde_json::from_str(line).expect("a sample as JSON")).collect();
    samples.sort_by_key(|sample| sample["doc_id"].as_u64());
    let choices = |sample: &Value| sample["filtered_resps"].as_array().expect("choices").iter().map(found).collect();
    (samples.iter().map(choices).collect(), accuracy)
}

/// The one file below `folder` whose name starts so.
fn read(folder: &Path, start: &str) -> String {
    let mut folders = vec![folder.to_owned()];
    let mut found: Vec<PathBuf> = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the harness wrote its results").flatten() {
            match entry.file_name().to_string_lossy().starts_with(start) {
                _ if entry.path().is_dir() => folders.push(entry.path()),
                true => found.push(entry.path()),
                false => {}
            }
        }
    }
    assert_eq!(found.len(), 1, "{found:?}");
    fs::read_to_string(&found[0]).expect("a text")
}

/// A pair of log-likelihood and greediness; the harness writes both as texts.
fn found(pair: &Value) -> (f64, bool) {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let likelihood = text(&pair[0]).parse().unwrap_or_else(|error| panic!("{error}: {pair}"));
    (likelihood, text(&pair[1]).eq_ignore_ascii_case("true"))
}

/// The same from the weights: the logits after every prefix, as probabilities in `f64`.
fn offline(walker: &mut Walker, codec: &dyn TextCodec, (context, continuation): (&str, &str)) -> (f64, bool) {
    let ids = |text: &str| -> Vec<TokenId> { codec.encode(text, SpecialTokens::AsText).expect("it is text") };
    let (before, whole) = (ids(context).len(), ids(&format!("{context}{continuation}")));
    walker.forget(0);
    let (mut likelihood, mut is_greedy) = (0.0, true);
    for at in before..whole.len() {
        let logits = walker.feed(0, &whole[..at]).logits;
        let own = logits[whole[at] as usize];
        likelihood += f64::from(own) - logits.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        is_greedy &= logits.iter().all(|&logit| logit <= own);
    }
    (likelihood, is_greedy)
}

#[test]
fn its_log_likelihoods_are_those_of_the_weights() {
    let (problems, work) = (problems(), scratch("lm-eval"));
    let lines: Vec<String> = problems.iter().map(Value::to_string).collect();
    fs::write(work.join("problems.jsonl"), lines.join("\n")).expect("the folder can be written");
    let server = Server::launch(demo("launch.toml"));
    let codec = ModelText::load(&open(&demo("small"))).expect("the demo has a tokenizer").tokenizer;
    // A routed request is scored where it enters: by the small model.
    for (served, weights) in [("demo", "small"), ("large", "large")] {
        let (likelihoods, accuracy) = harness(&work, server.address, served);
        let options =
            LoadOptions { threads: 1, kv: KvMemory::Pages(64), step_tokens_max: 512, ..LoadOptions::default() };
        let mut walker = Walker::new(&load(&open(&demo(weights)), options), 1);
        assert_eq!(likelihoods.len(), PROBLEMS);
        let (mut right, mut greedy) = (0, 0);
        for (problem, found) in problems.iter().zip(&likelihoods) {
            let context = format!("Question: {}\nAnswer:", problem["question"].as_str().expect("a text"));
            assert_eq!(found.len(), 2);
            let mut expected = Vec::new();
            for (choice, &(likelihood, is_greedy)) in problem["choices"].as_array().expect("choices").iter().zip(found)
            {
                let continuation = format!(" {}", choice.as_str().expect("a text"));
                let truth = offline(&mut walker, &*codec, (&context, &continuation));
                assert!((truth.0 - likelihood).abs() < 1e-3, "{served}: {likelihood}, offline {truth:?}: {choice}");
                assert_eq!(truth.1, is_greedy, "{served}: {choice}");
                assert!(truth.0 < 0.0);
                greedy += usize::from(is_greedy);
                expected.push(truth.0);
            }
            let best = usize::from(expected[1] > expected[0]);
            right += usize::from(problem["right"] == best);
        }
        assert!((accuracy - right as f64 / PROBLEMS as f64).abs() < 1e-9, "{served}: {accuracy}, offline {right}");
        println!("{served}: {right} of {PROBLEMS} right, {greedy} solutions are what greedy decoding writes");
        assert!(served == "demo" || (right >= PROBLEMS / 2 && greedy > 0), "the large model knows such problems");
    }
    server.stop();
}
