//! Token ids of the awkward strings, beside those of the published tokenizers and of llama.cpp (layout:
//! fixtures/README.md). Owner: the tokenizer tests. Invariant: where two references differ, the choice stands in
//! [`Reference`] with its reason.

use super::{open, read_fixture};
use serde_json::Value as Json;
use std::path::Path;
use tokenrouter::text::ModelText;
use tokenrouter_core::text::{SpecialTokens, TextCodec};

/// Whose ids count where the references differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// The published tokenizer, which the model was trained with: Qwen2's composes its text (NFC), and `</s>` is no
    /// control token of it.
    Published,
    /// llama.cpp, which GGUF files with a SentencePiece vocabulary are made for: it puts the space prefix behind
    /// user-defined tokens too.
    LlamaCpp,
}

/// Compares every case of a fixture with the tokenizer of a model file, control tokens recognised and not, and decodes
/// what came out.
///
/// # Panics
/// When ids differ or the bytes of the tokens are not the text: a failed test.
pub fn check_tokens(model: &Path, fixture_name: &str, reference: Reference) {
    let text = ModelText::load(&open(model)).unwrap_or_else(|error| panic!("{error}"));
    let fixture: Json = read_fixture(fixture_name);
    let cases = fixture["cases"].as_array().map(Vec::as_slice).unwrap_or_default();
    assert_eq!(cases.len(), 200, "{fixture_name}");
    let mut wrong = Vec::new();
    let mut published_cases = 0;
    for case in cases {
        for (key, special) in [("ids", SpecialTokens::AsText), ("ids_parse_special", SpecialTokens::Parse)] {
            let published = case.get(format!("tokenizers_{key}")).filter(|_| reference == Reference::Published);
            published_cases += usize::from(published.is_some());
            let expected: Vec<u32> = ids(published.unwrap_or(&case[key]));
            let input = case["text"].as_str().unwrap_or_else(|| panic!("{fixture_name}: a case has no text"));
            let found = text.tokenizer.encode(input, special).unwrap_or_else(|error| panic!("{input:?}: {error}"));
            if found != expected {
                wrong.push(format!("{input:?} ({key}): {found:?} instead of {expected:?}"));
            }
            if special == SpecialTokens::AsText {
                let control = found.iter().find(|&&id| text.tokenizer.is_special(id));
                assert_eq!(control, None, "{input:?} as text holds a control token");
            }
        }
    }
    println!(
        "{fixture_name}: {} ids lists, {published_cases} where only the published tokenizer counts",
        2 * cases.len()
    );
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), 2 * cases.len(), wrong.join("\n"));
}

fn ids(list: &Json) -> Vec<u32> {
    let list = list.as_array().unwrap_or_else(|| panic!("not a list of ids: {list}"));
    list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).unwrap_or(u32::MAX)).collect()
}
