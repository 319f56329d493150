//! Reads the description of a tokenizer, in the format of `tokenizer.json`, and adjusts it to what this server needs.
//! Owner: the tokenizer under construction.
//!
//! Invariant of an adjusted description: control tokens are looked for before a text is normalised, and marks of the guard
//! vanish after that; no merge makes a control token; nothing is added to a text, cut or padded. Ids inside are dense, as
//! the `tokenizers` crate numbers added tokens on its own; [`Adjusted::ids`] leads back to the declared ones.

use super::bytes::Spelling;
use super::guard::MARK;
use serde_json::{Map, Value as Json, json};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use tokenrouter_core::ids::TokenId;

/// Highest token id that is believed.
const MAX_TOKEN_ID: u64 = 1 << 22;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An id between real ones that stands for nothing.
    Hole,
    /// Text in the vocabulary's spelling.
    Ordinary,
    /// Text as it stands, found before words are split.
    Added,
    /// A control token.
    Control,
}

/// A token as declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its text in the vocabulary.
    pub text: String,
    /// What it is.
    pub kind: Kind,
}

/// Every token of a description by its declared id.
///
/// # Errors
/// The token or key that is wrong.
pub fn rows(description: &Json) -> Result<BTreeMap<TokenId, Row>, String> {
    let mut rows = BTreeMap::new();
    let mut add = |id: Option<u64>, text: &str, kind: Kind| match id.filter(|&id| id < MAX_TOKEN_ID) {
        Some(id) => {
            rows.insert(id as TokenId, Row { text: text.to_owned(), kind });
            Ok(())
        }
        None => Err(format!("token {text:?} has no id below {MAX_TOKEN_ID}")),
    };
    let vocab = description["model"]["vocab"].as_object().ok_or("key \"model.vocab\" is missing or no object")?;
    vocab.iter().try_for_each(|(text, id)| add(id.as_u64(), text, Kind::Ordinary))?;
    for token in added_tokens(description) {
        let text = token["content"].as_str().ok_or("an added token has no \"content\"")?;
        let kind = if is_control(token) { Kind::Control } else { Kind::Added };
        add(token["id"].as_u64(), text, kind)?;
    }
    Ok(rows)
}

fn added_tokens(description: &Json) -> impl Iterator<Item = &Json> {
    description["added_tokens"].as_array().into_iter().flatten()
}

fn is_control(added_token: &Json) -> bool {
    added_token["special"] == true
}

/// Bytes of UTF-8 that a byte-level vocabulary has no token for, ascending; tokenizers drop them without a word.
pub fn unspeakable(rows: &BTreeMap<TokenId, Row>, spelling: Spelling) -> Vec<u8> {
    if spelling != Spelling::ByteLevel {
        return Vec::new();
    }
    let mut missing: BTreeSet<u8> = (0..=0xf4).filter(|byte| !matches!(byte, 0xc0 | 0xc1)).collect();
    for row in rows.values().filter(|row| row.kind == Kind::Ordinary) {
        if let [byte] = spelling.bytes(&row.text)[..] {
            missing.remove(&byte);
        }
    }
    missing.into_iter().collect()
}

/// How a description spells bytes.
///
/// # Errors
/// A kind of tokenizer whose tokens have no exact bytes.
pub fn spelling(description: &Json) -> Result<Spelling, String> {
    let kind = description["model"]["type"].as_str().unwrap_or("BPE");
    if kind != "BPE" {
        return Err(format!("a tokenizer of type {kind:?} is not supported; BPE is"));
    }
    let prefix = &description["model"]["continuing_subword_prefix"];
    if prefix.as_str().is_some_and(|prefix| !prefix.is_empty()) {
        return Err(format!("model.continuing_subword_prefix is {prefix}; only tokenizers without one are supported"));
    }
    let parts = [&description["decoder"], &description["pre_tokenizer"], &description["normalizer"]];
    let has = |name: &str| parts.into_iter().any(|part| steps(part).iter().any(|step| step["type"] == name));
    let writes_metaspace =
        steps(&description["normalizer"]).iter().any(|step| step["content"] == "▁" || step["prepend"] == "▁");
    if has("ByteLevel") {
        Ok(Spelling::ByteLevel)
    } else if has("Metaspace") || has("ByteFallback") || writes_metaspace {
        Ok(Spelling::Metaspace)
    } else {
        Err("the tokenizer is neither byte-level nor metaspace, so its tokens have no exact bytes".into())
    }
}

/// The steps of a part of a description, whether it is a sequence, a single step or absent.
fn steps(part: &Json) -> Vec<&Json> {
    let nested = ["decoders", "pretokenizers", "normalizers", "processors"];
    match nested.iter().find_map(|key| part[*key].as_array()) {
        Some(list) => list.iter().flat_map(steps).collect(),
        None if part.is_null() => Vec::new(),
        None => vec![part],
    }
}

/// Whether decoding drops the first space of a text.
pub fn strips_leading_space(description: &Json) -> bool {
    steps(&description["decoder"]).iter().any(|step| match step["type"].as_str() {
        Some("Strip") => step["content"] == " " && step["start"].as_u64() > Some(0),
        Some("Metaspace") => step["prepend_scheme"] != "never" && step["add_prefix_space"] != false,
        _ => false,
    })
}

/// The token that the description's post-processor puts before a text, if any.
pub fn prompt_start(description: &Json) -> Option<TokenId> {
    steps(&description["post_processor"]).into_iter().find_map(|step| {
        let first = &step["single"][0]["SpecialToken"]["id"];
        let id = &step["special_tokens"][first.as_str()?]["ids"][0];
        TokenId::try_from(id.as_u64()?).ok()
    })
}

/// A description that keeps the invariant of this file.
#[derive(Debug)]
pub struct Adjusted {
    /// The description, with dense ids.
    pub description: Json,
    /// Declared id of each dense one.
    pub ids: Vec<TokenId>,
}

/// Adjusts a description; it must have passed [`rows`].
pub fn adjust(mut description: Json) -> Adjusted {
    let drop_marks = json!({ "type": "Replace", "pattern": { "String": MARK.to_string() }, "content": "" });
    description["normalizer"] = match description["normalizer"].take() {
        Json::Null => drop_marks,
        own => json!({ "type": "Sequence", "normalizers": [drop_marks, own] }),
    };
    for part in ["truncation", "padding", "post_processor", "decoder"] {
        description[part] = Json::Null;
    }
    let control: HashSet<String> = added_tokens(&description)
        .filter(|token| is_control(token))
        .filter_map(|token| token["content"].as_str().map(str::to_owned))
        .collect();
    let model = &mut description["model"];
    if let Some(merges) = model["merges"].as_array_mut() {
        merges.retain(|merge| !touches(merge, &control));
    }
    let unknown = model["unk_token"].as_str().map(str::to_owned);
    let keep = |text: &String| !control.contains(text) || Some(text) == unknown.as_ref();
    let mut ids = Vec::new();
    if let Some(vocab) = model["vocab"].as_object_mut() {
        ids = renumber(vocab, keep);
    }
    let in_vocab: HashSet<String> =
        description["model"]["vocab"].as_object().into_iter().flatten().map(|(text, _)| text.clone()).collect();
    let added = description["added_tokens"].as_array_mut().map(std::mem::take).unwrap_or_default();
    description["added_tokens"] = dense_added_tokens(added, &in_vocab, &mut ids).into();
    Adjusted { description, ids }
}

/// Every merge makes a token of the vocabulary; the crate takes that for granted.
///
/// # Errors
/// The merge that does not.
pub fn check_merges(description: &Json) -> Result<(), String> {
    let model = &description["model"];
    let (Some(vocab), Some(merges)) = (model["vocab"].as_object(), model["merges"].as_array()) else { return Ok(()) };
    let mut made = String::new();
    for merge in merges {
        let Some((left, right)) = parts(merge) else { return Err(format!("{merge} is no merge of two tokens")) };
        made.clear();
        made.push_str(left);
        made.push_str(right);
        if !vocab.contains_key(&made) {
            return Err(format!(
                "the merge of {left:?} and {right:?} makes {made:?}, which is no token of the vocabulary"
            ));
        }
    }
    Ok(())
}

/// The two tokens of a merge, spelt as a pair or with a space.
fn parts(merge: &Json) -> Option<(&str, &str)> {
    match merge {
        Json::String(merge) => merge.split_once(' '),
        pair => pair[0].as_str().zip(pair[1].as_str()),
    }
}

/// Whether a merge has a control token as part or outcome.
fn touches(merge: &Json, control: &HashSet<String>) -> bool {
    parts(merge).is_some_and(|(left, right)| {
        control.contains(left) || control.contains(right) || control.contains(&format!("{left}{right}"))
    })
}

/// Numbers the kept tokens of a vocabulary densely in order of their ids, which are returned in that order.
fn renumber(vocab: &mut Map<String, Json>, keep: impl Fn(&String) -> bool) -> Vec<TokenId> {
    let mut kept: Vec<(TokenId, String)> = std::mem::take(vocab)
        .into_iter()
        .filter(|(text, _)| keep(text))
        .filter_map(|(text, id)| Some((TokenId::try_from(id.as_u64()?).ok()?, text)))
        .collect();
    kept.sort();
    let ids = kept.iter().map(|&(id, _)| id).collect();
    vocab.extend((0u32..).zip(kept).map(|(dense, (_, text))| (text, dense.into())));
    ids
}

/// Added tokens in the order in which the crate numbers the ones that are not in the vocabulary; their declared ids are
/// appended to `ids`.
fn dense_added_tokens(mut added: Vec<Json>, in_vocab: &HashSet<String>, ids: &mut Vec<TokenId>) -> Vec<Json> {
    added.sort_by_key(|token| token["id"].as_u64());
    let mut seen: HashSet<String> = HashSet::new();
    added
        .retain(|token| token["content"].as_str().is_some_and(|text| !text.is_empty() && seen.insert(text.to_owned())));
    for token in &mut added {
        // What is looked for only after normalising is looked for in a text whose marks are gone already.
        if is_control(token) {
            token["normalized"] = false.into();
        }
        let outside = token["content"].as_str().is_some_and(|text| !in_vocab.contains(text));
        if outside {
            let declared = token["id"].as_u64().and_then(|id| TokenId::try_from(id).ok()).unwrap_or(TokenId::MAX);
            token["id"] = ids.len().into();
            ids.push(declared);
        }
    }
    added
}
