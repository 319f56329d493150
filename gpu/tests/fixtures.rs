//! The CPU executor against logits that other programs computed: NumPy in float64 and llama.cpp (tests/fixtures).

mod common;

use common::*;
use serde::Deserialize;
use std::path::PathBuf;
use tokenrouter_core::executor::{Needs, RowOutput};
use tokenrouter_core::ids::TokenId;
use tokenrouter_gpu::load::{AnyRunner, LoadOptions, load};
use tokenrouter_gpu::ops::KvFormat;

/// Real tokens of every tiny model's vocabulary of 320.
const REAL_VOCAB: u32 = 300;

#[derive(Deserialize)]
struct Tiny {
    token_ids: Vec<TokenId>,
    greedy_ids: Vec<TokenId>,
    logits: Vec<Vec<f64>>,
}

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

fn read<T: serde::de::DeserializeOwned>(path: PathBuf) -> T {
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn runner(path: PathBuf, kv: KvFormat) -> AnyRunner {
    let options = LoadOptions { real_vocab: Some(REAL_VOCAB), ..options(2, kv) };
    load(&path, &options, &mut |_| ()).unwrap_or_else(|error| panic!("{}: {error}", path.display())).executor().unwrap()
}

fn worst(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(&a, &b)| (f64::from(a) - b).abs()).fold(0.0, f64::max)
}

/// Tolerances: float32 arithmetic is within 1.4e-5 of the exact logits, an F16 cache within 1.1e-2 (fixtures README).
#[test]
fn tiny_models_give_the_reference_logits_and_tokens() {
    let mut names: Vec<_> =
        std::fs::read_dir(fixtures().join("tiny")).unwrap().map(|dir| dir.unwrap().path()).collect();
    names.sort();
    assert!(names.len() >= 10, "{names:?}");
    for dir in names {
        let expected: Tiny = read(dir.join("expected.json"));
        let prompt = &expected.token_ids;
        let table = pages(1, 64);
        for (kv, tolerance) in [(KvFormat::F32, 5e-5), (KvFormat::F16, 3e-2)] {
            let mut runner = runner(dir.clone(), kv);
            for (position, logits) in expected.logits.iter().enumerate() {
                run(&mut runner, vec![row(1, position, &prompt[position..=position], &table)]);
                let off = worst(runner.last_logits(0).unwrap(), logits);
                assert!(off < tolerance, "{} {kv:?} position {position}: off by {off}", dir.display());
            }
            let mut tokens = prompt.clone();
            for fed in 0..expected.greedy_ids.len() {
                let start = if fed == 0 { 0 } else { tokens.len() - 1 };
                let outputs = run(&mut runner, vec![row(1, start, &tokens[start..], &table)]);
                let RowOutput::Drawn(drawn) = &outputs[0] else { panic!("{outputs:?}") };
                tokens.push(drawn.token);
            }
            assert_eq!(tokens[prompt.len()..], expected.greedy_ids, "{} {kv:?}", dir.display());
        }
    }
}

#[derive(Deserialize)]
struct Logits {
    fixed_ids: Vec<usize>,
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    name: String,
    token_ids: Vec<TokenId>,
    llama_cpp: Answer,
}

#[derive(Deserialize)]
struct Answer {
    top: Vec<(TokenId, f64)>,
    logsumexp: f64,
    entropy_nats: f64,
    fixed_logits: Vec<f64>,
}

/// An F32 GGUF file of architecture llama: interleaved rotary pairs, llama.cpp's own logits.
#[test]
fn a_gguf_llama_gives_the_logits_of_llama_cpp() {
    let expected: Logits = read(fixtures().join("logits-tiny-spm.json"));
    let options = options(2, KvFormat::F32);
    let model = load(&fixtures().join("tiny-spm.gguf"), &options, &mut |_| ()).unwrap();
    let mut runner = model.executor().unwrap();
    for prompt in &expected.prompts {
        let mut row = row(1, 0, &prompt.token_ids, &pages(1, prompt.token_ids.len()));
        let draw = row.draw.as_mut().unwrap();
        draw.needs = Needs { entropy: true, top_k: 20, hidden: false, score: false };
        draw.logprobs = Some(1);
        let outputs = run(&mut runner, vec![row]);
        let RowOutput::Drawn(drawn) = &outputs[0] else { panic!("{outputs:?}") };
        let (name, answer) = (&prompt.name, &prompt.llama_cpp);
        for (found, expected) in drawn.signals.top.iter().zip(&answer.top) {
            assert_eq!(found.0, expected.0, "{name}");
            assert!((f64::from(found.1) - expected.1).abs() < 5e-5, "{name}: {found:?} {expected:?}");
        }
        assert_eq!(drawn.token, answer.top[0].0, "{name}");
        let nats = f64::from(drawn.signals.entropy.unwrap().nats);
        assert!((nats - answer.entropy_nats).abs() < 5e-5, "{name}: {nats} {}", answer.entropy_nats);
        let chosen = f64::from(drawn.logprobs.as_ref().unwrap().chosen);
        assert!((chosen - (answer.top[0].1 - answer.logsumexp)).abs() < 5e-5, "{name}: {chosen}");
        let logits = runner.last_logits(0).unwrap();
        for (&id, expected) in expected.fixed_ids.iter().zip(&answer.fixed_logits) {
            assert!((f64::from(logits[id]) - expected).abs() < 5e-5, "{name} {id}: {} {expected}", logits[id]);
        }
    }
}
