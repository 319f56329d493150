//! `echo` with `logprobs` over HTTP: the prompt's log-probabilities, exactly as the simulated model where the request
//! enters thinks of them. Owner: the HTTP layer. Invariant: one entry a token, the first without a number, whatever the
//! chunks of the prefill, the company, and the form of the request.

use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokenrouter_core::rng::mix;
use tokenrouter_core::sim::{Language, Skill};
use tokenrouter_tests::http_server::{Server, Setup};
use tokenrouter_tests::raw_client::{TEXT, post};

/// The language of the simulated pair.
const LANGUAGE: Language = Language { vocab: 32, hard: 0.2, eos: None };

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|at| (mix(seed ^ (at << 32)) % 32) as u32).collect()
}

/// `token_logprobs` of a prompt.
fn expected(skill: Skill, prompt: &[u32]) -> Vec<Value> {
    let said = |at: usize| LANGUAGE.next(skill, &prompt[..at]).0;
    let entry = |at: usize| json!(LANGUAGE.logprobs(said(at), prompt[at], 0).chosen);
    std::iter::once(Value::Null).chain((1..prompt.len()).map(entry)).collect()
}

fn ask(address: SocketAddr, body: &Value) -> Value {
    let answer = post(address, TEXT, body);
    assert_eq!(answer.status, 200, "{}", answer.text);
    serde_json::from_str(&answer.text).expect("a body of JSON")
}

fn check(choice: &Value, skill: Skill, prompt: &[u32], made: usize) {
    let lists = &choice["logprobs"];
    let list = |name: &str| lists[name].as_array().unwrap_or_else(|| panic!("no {name} in {lists}")).clone();
    let (found, top) = (list("token_logprobs"), list("top_logprobs"));
    assert_eq!(found[..prompt.len()], expected(skill, prompt));
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(list(name).len(), prompt.len() + made, "{name}");
    }
    assert!(top[0].is_null());
    for ((token, logprob), top) in list("tokens").iter().zip(&found).zip(&top).skip(1) {
        assert_eq!(&top[token.as_str().expect("a text")], logprob);
        assert!(logprob.as_f64().is_some_and(f64::is_finite));
    }
}

/// Exactly: the fault of others is to accept it and leave the prompt out (kind 7 of `public_faults.rs`).
#[test]
fn an_echo_with_logprobs_has_those_of_the_prompt() {
    let server = Server::start(Setup::default());
    for (model, skill) in [("pair", Skill::Small), ("small", Skill::Small), ("large", Skill::Large)] {
        let body = json!({"model": model, "prompt": [1, 2, 3], "echo": true, "logprobs": 1, "max_tokens": 1});
        let answer = ask(server.address, &body);
        check(&answer["choices"][0], skill, &[1, 2, 3], 1);
        let plain = ask(server.address, &json!({"model": model, "prompt": [1, 2, 3], "max_tokens": 1}));
        let plain = plain["choices"][0]["text"].as_str().expect("a text");
        assert!(answer["choices"][0]["text"].as_str().expect("a text").ends_with(plain));
    }
    let one =
        ask(server.address, &json!({"model": "pair", "prompt": [9], "echo": true, "logprobs": 0, "max_tokens": 1}));
    check(&one["choices"][0], Skill::Small, &[9], 1);
    let without = ask(server.address, &json!({"model": "pair", "prompt": [1, 2, 3], "logprobs": 1, "max_tokens": 1}));
    assert_eq!(without["choices"][0]["logprobs"]["tokens"].as_array().map(Vec::len), Some(1));
    server.stop();
}

/// Prompts of many chunks, several at once and in lists, with prompts that others left in the prefix cache.
#[test]
fn long_prompts_in_company_are_told_in_full() {
    let server = Server::start(Setup { step: Duration::from_micros(100), ..Setup::default() });
    let prompts: Vec<Vec<u32>> = (0..6).map(|seed| prompt(seed, 40 + 150 * (seed as usize % 3))).collect();
    for prompt in &prompts[..3] {
        ask(server.address, &json!({"model": "pair", "prompt": prompt, "max_tokens": 4}));
    }
    std::thread::scope(|scope| {
        for pair in prompts.chunks(2) {
            for (model, skill) in [("pair", Skill::Small), ("large", Skill::Large)] {
                let address = server.address;
                scope.spawn(move || {
                    let body = json!({
                        "model": model, "prompt": pair, "n": 2, "echo": true, "logprobs": 2, "max_tokens": 5, "min_tokens": 5,
                    });
                    let answer = ask(address, &body);
                    let choices = answer["choices"].as_array().expect("choices");
                    assert_eq!(choices.len(), 4);
                    for (index, choice) in choices.iter().enumerate() {
                        check(choice, skill, &pair[index / 2], 5);
                    }
                    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
                });
            }
        }
    });
    let rested = actix_rt::System::new();
    rested.block_on(server.idle_within(Duration::from_secs(5), "after prompts with log-probabilities"));
    server.stop();
}
