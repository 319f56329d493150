//! Random damage to what strangers send or write: tokenizers, chat templates and request bodies, where `fuzz.rs` looks
//! longer. Owner: the readers. Invariant: the same seed gives the same damage; nothing panics, and an error has one line.

use serde_json::{Value, json};
use std::path::Path;
use tokenrouter::http::types::chat::ChatRequest;
use tokenrouter::http::types::completions::CompletionRequest;
use tokenrouter::http::types::tokens::{DetokenizeRequest, TokenizeRequest};
use tokenrouter::text::{ChatInput, ChatTemplate, ControlGuard, NamedTokens, Tokenizer};
use tokenrouter_core::rng::mix;
use tokenrouter_core::text::{SpecialTokens, TextCodec};

const VOCAB: u32 = 100;

/// Damage that a seed decides.
struct Noise(u64);

impl Noise {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % bound.max(1) as u64) as usize
    }

    /// A text with a few of its characters gone, doubled, or replaced by ones that mean something to a reader.
    fn text(&mut self, good: &str) -> String {
        let mut chars: Vec<char> = good.chars().collect();
        for _ in 0..1 + self.below(4) {
            if chars.is_empty() {
                break;
            }
            let at = self.below(chars.len());
            let odd = ['"', '{', '}', '[', ']', '%', '\\', '\n', '\0', '9', '-', 'e', '\u{e9}', '\u{1f600}', ' ', ','];
            match self.below(4) {
                0 => drop(chars.drain(at..(at + 1 + self.below(8)).min(chars.len()))),
                1 => chars.insert(at, odd[self.below(odd.len())]),
                2 => chars[at] = odd[self.below(odd.len())],
                _ => {
                    let piece: Vec<char> = chars[at..(at + 1 + self.below(12)).min(chars.len())].to_vec();
                    let to = self.below(chars.len());
                    chars.splice(to..to, piece);
                }
            }
        }
        chars.into_iter().collect()
    }

    /// A value with one of its parts replaced by something else that is JSON.
    fn value(&mut self, value: &mut Value) {
        let goes_on = self.below(4) > 0;
        match value {
            Value::Object(map) if goes_on && !map.is_empty() => {
                let at = self.below(map.len());
                let part = map.values_mut().nth(at).expect("it has so many");
                self.value(part);
            }
            Value::Array(list) if goes_on && !list.is_empty() => {
                let at = self.below(list.len());
                self.value(&mut list[at]);
            }
            Value::String(text) if goes_on && !text.is_empty() => *text = self.text(text),
            _ => {
                let others = [
                    json!(null),
                    json!(true),
                    json!(-1),
                    json!(0.5),
                    json!(1e300),
                    json!(u64::MAX),
                    json!(""),
                    json!("auto"),
                    json!([]),
                    json!([null]),
                    json!({}),
                    json!({"type": "text"}),
                    json!([[1, 2], "a", {"a": []}]),
                ];
                *value = others[self.below(others.len())].clone();
            }
        }
    }
}

#[test]
fn damaged_request_bodies_are_read_or_refused() {
    let chat = json!({"model": "m", "messages": [{"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "1"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "n": 2, "stop": ["a"], "temperature": 0.5, "top_p": 0.5, "logit_bias": {"3": 5},
        "logprobs": true, "top_logprobs": 3, "stream": true, "stream_options": {"include_usage": true},
        "max_completion_tokens": 4, "min_tokens": 1, "chat_template_kwargs": {"enable_thinking": false}});
    let text = json!({"model": "m", "prompt": ["a", [1, 2]], "max_tokens": 3, "echo": true, "logprobs": 2, "n": 2,
        "stop_token_ids": [1], "ignore_eos": true, "seed": 5});
    let tokens = json!({"model": "m", "prompt": "hi", "add_special_tokens": true});
    let ids = json!({"model": "m", "tokens": [1, 2, 3]});
    let read = |route: usize, body: Value| match route {
        0 => ChatRequest::read(body, VOCAB).map(|_| ()),
        1 => CompletionRequest::read(body, VOCAB).map(|_| ()),
        2 => TokenizeRequest::read(body).map(|_| ()),
        _ => DetokenizeRequest::read(body, VOCAB).map(|_| ()),
    };
    let mut refused = 0;
    for (route, good) in [chat, text, tokens, ids].into_iter().enumerate() {
        read(route, good.clone()).unwrap_or_else(|error| panic!("{good}: {error}"));
        for seed in 0..3000 {
            let (mut noise, mut body) = (Noise(mix(seed)), good.clone());
            noise.value(&mut body);
            if let Err(error) = read(route, body.clone()) {
                assert_eq!(error.status().as_u16(), 400, "{body}: {error}");
                assert!(!error.to_string().is_empty() && error.to_string().len() < 2000, "{body}: {error}");
                refused += 1;
            }
        }
    }
    assert!((2000..11_000).contains(&refused), "damage that is always or never refused tests little: {refused}");
}

#[test]
fn damaged_templates_are_refused_or_write_something() {
    let good = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim }}\
        {% if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function | tojson(indent=2) }}{% endfor %}\
        {% endif %}{{ '<|im_end|>\\n' }}{% endfor %}{% set ns = namespace(x=1) %}{% if tools %}{{ tools[0]['type'] }}\
        {% endif %}{% if add_generation_prompt %}{{ bos_token ~ messages[-1]['content'][:3] }}{% endif %}";
    let control = ["<|im_start|>", "<|im_end|>"].map(str::to_owned);
    let guard = ControlGuard::new(control).expect("control tokens of several characters");
    let messages =
        [json!({"role": "user", "content": "hello <|im_end|>"}), json!({"role": "assistant", "content": ""})];
    let input = ChatInput::of(&messages, 1_700_000_000);
    let tokens = NamedTokens { bos: Some("<s>".to_owned()), eos: None };
    let sound = ChatTemplate::new(good, tokens.clone()).and_then(|template| template.render(&input, &guard));
    assert!(sound.as_ref().is_ok_and(|text| text.contains("<|im_start|>user")), "{sound:?}");
    let (mut written, mut refused) = (0, 0);
    for seed in 0..1500 {
        let source = Noise(mix(seed)).text(good);
        match ChatTemplate::new(&source, tokens.clone()).and_then(|template| template.render(&input, &guard)) {
            Ok(_) => written += 1,
            Err(error) => {
                assert!(!error.to_string().is_empty(), "{source}");
                refused += 1;
            }
        }
    }
    assert!(written > 50 && refused > 50, "{written} written, {refused} refused");
}

#[test]
fn damaged_tokenizers_are_refused_or_encode() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny/qwen3-f16/tokenizer.json");
    let good = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let whole: Value = serde_json::from_str(&good).expect("the fixture is JSON");
    let (mut read, mut refused) = (0, 0);
    for seed in 0..1000 {
        let mut noise = Noise(mix(seed));
        let description = if seed % 2 == 0 {
            let Ok(description) = serde_json::from_str(&noise.text(&good)) else { continue };
            description
        } else {
            let mut description = whole.clone();
            noise.value(&mut description);
            description
        };
        match Tokenizer::from_description(description, Some(1)) {
            Ok(tokenizer) => {
                read += 1;
                for special in [SpecialTokens::Parse, SpecialTokens::AsText] {
                    // A text may hold what a damaged vocabulary cannot spell.
                    let ids = tokenizer.encode("It's 12 <|im_start|> \u{1f600}\r\n", special).unwrap_or_default();
                    assert!(ids.iter().all(|&id| tokenizer.token_bytes(id).is_some()), "seed {seed}: {ids:?}");
                }
            }
            Err(error) => {
                assert!(!error.is_empty(), "seed {seed}");
                refused += 1;
            }
        }
    }
    assert!(read > 50 && refused > 50, "{read} read, {refused} refused");
}

/// What the library that reads tokenizers takes for granted is looked at before it is asked.
#[test]
fn merges_that_make_no_token_are_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny/qwen3-f16/tokenizer.json");
    let good = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let good: Value = serde_json::from_str(&good).expect("the fixture is JSON");
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut description = good.clone();
        change(&mut description["model"]);
        Tokenizer::from_description(description, None).expect_err("a tokenizer that is wrong")
    };
    let longest = |model: &Value| {
        let vocab = model["vocab"].as_object().expect("a vocabulary");
        vocab.keys().filter(|key| !key.starts_with('<')).max_by_key(|key| key.len()).expect("tokens").clone()
    };
    for merge in [json!([longest(&good["model"]), longest(&good["model"])]), json!(["a"]), json!(7)] {
        let said = refused(&|model| model["merges"].as_array_mut().expect("merges").push(merge.clone()));
        assert!(said.contains("merge"), "{said}");
    }
    let said = refused(&|model| model["continuing_subword_prefix"] = json!("##"));
    assert!(said.contains("continuing_subword_prefix"), "{said}");
    Tokenizer::from_description(good.clone(), None).expect("the good one is read");
}
