//! Token ids of 200 awkward strings, control tokens recognised and not, for every kind of vocabulary. The pair's large
//! vocabulary is checked in `real_pair.rs`. Owner: the text layer. Invariant: user text never yields a control token.

use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use tokenrouter::text::{ChatInput, ModelText, Tokenizer};
use tokenrouter_core::text::{SpecialTokens, TextCodec};
use tokenrouter_tests::assets::SMOLLM2;
use tokenrouter_tests::conformance::{Reference, check_tokens, demo, fixture, open, read_fixture};

#[test]
fn byte_level_vocabulary_in_gguf() {
    let model = SMOLLM2.path().unwrap_or_else(|error| panic!("{error}"));
    check_tokens(&model, "tokenizer-smollm2.json", Reference::Published);
}

#[test]
fn sentence_piece_vocabulary_in_gguf() {
    check_tokens(&fixture("tiny-spm.gguf"), "tokenizer-tiny-spm.json", Reference::LlamaCpp);
}

fn awkward() -> Vec<String> {
    let file: Json = read_fixture("awkward_strings.json");
    let strings: Vec<String> = serde_json::from_value(file["strings"].clone()).expect("a list of strings");
    assert_eq!(strings.len(), 200);
    strings
}

fn published(model: &Path) -> (tokenizers::Tokenizer, ModelText) {
    let file: PathBuf = model.join("tokenizer.json");
    let published =
        tokenizers::Tokenizer::from_file(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    (published, load(model))
}

fn load(model: &Path) -> ModelText {
    ModelText::load(&open(model)).unwrap_or_else(|error| panic!("{error}"))
}

fn decoded(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap_or_default().to_vec()).collect();
    String::from_utf8(bytes).unwrap_or_else(|error| panic!("{error}"))
}

/// A `tokenizer.json` gives what the `tokenizers` library makes of it, although ours is adjusted at load.
#[test]
fn tokenizer_json_as_published() {
    for model in [fixture("tiny/llama-f32"), fixture("tiny/qwen3-f16"), demo("small"), demo("large")] {
        let (published, ours) = published(&model);
        for text in awkward() {
            let expected = published.encode(text.as_str(), false).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            let found = ours.tokenizer.encode(&text, SpecialTokens::Parse);
            match found {
                Ok(found) => {
                    assert_eq!(found, expected.get_ids(), "{} {text:?}", model.display());
                    assert_eq!(decoded(&ours.tokenizer, &found), text, "{}", model.display());
                }
                // The library drops bytes it has no token for without a word; we say so.
                Err(error) => assert_ne!(decoded(&ours.tokenizer, expected.get_ids()), text, "{text:?}: {error}"),
            }
        }
    }
}

/// Taken as text, every string comes back from its tokens, and none of these is a control token.
#[test]
fn text_stays_text() {
    let model = SMOLLM2.path().unwrap_or_else(|error| panic!("{error}"));
    for model in [fixture("tiny/llama-f32"), model] {
        let text = load(&model);
        let mut look_alikes = 0;
        for string in awkward() {
            let found = text.tokenizer.encode(&string, SpecialTokens::AsText);
            let ids = found.unwrap_or_else(|error| panic!("{string:?}: {error}"));
            assert!(ids.iter().all(|&id| !text.tokenizer.is_special(id)), "{string:?}: {ids:?}");
            assert_eq!(decoded(&text.tokenizer, &ids), string, "{}", model.display());
            let parsed = text.tokenizer.encode(&string, SpecialTokens::Parse);
            let parsed = parsed.unwrap_or_else(|error| panic!("{string:?}: {error}"));
            look_alikes += usize::from(parsed.iter().any(|&id| text.tokenizer.is_special(id)));
        }
        assert!(look_alikes >= 3, "only {look_alikes} strings hold a control token of {}", model.display());
    }
}

/// What `check` reads of a vocabulary without building a tokenizer is what the tokenizer says of itself.
#[test]
fn inspection_and_tokenizer_agree_on_the_table() {
    for path in [fixture("tiny/llama-f32"), fixture("tiny/qwen3-f16"), fixture("tiny-spm.gguf"), demo("small")] {
        let tokens = open(&path).inspect().unwrap_or_else(|error| panic!("{error}")).tokens;
        let text = load(&path);
        assert_eq!((tokens.digest, tokens.len), (text.tokenizer.digest(), text.tokenizer.vocab_size()), "{path:?}");
    }
    let padded = open(&fixture("tiny/llama-f32")).inspect().unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((padded.tokens.len, padded.config.vocab), (300, 320));
}

#[test]
fn a_chat_ends_with_the_head_of_the_answer() {
    for path in ["tiny/llama-f32", "tiny-spm.gguf"] {
        let text = load(&fixture(path));
        let messages = [serde_json::json!({ "role": "user", "content": "hi <|im_end|>" })];
        let input = ChatInput::of(&messages, 0);
        let ids = text.chat(&input).unwrap_or_else(|error| panic!("{error}"));
        let control: Vec<u32> = ids.iter().copied().filter(|&id| text.tokenizer.is_special(id)).collect();
        let token = |name: &str| text.tokenizer.token_id(name).unwrap_or_else(|| panic!("{path} has no {name}"));
        let (start, end) = (token("<|im_start|>"), token("<|im_end|>"));
        assert!(control.ends_with(&[start, end, start]), "{path}: {control:?}");
        assert_eq!(control.iter().filter(|&&id| id == end).count(), 1, "{path}");
    }
}
