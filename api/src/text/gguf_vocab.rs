//! From the vocabulary of a GGUF file to the tokenizer it describes. Owner: the tokenizer under construction.
//! Invariant: the outcome is the same description that a `tokenizer.json` holds, so both kinds of model share one path.
//! Facts: llama.cpp's `llama-vocab.cpp` (which splits, which defaults) and SentencePiece (merge order by score).

use super::pre_tokenizers::PreTokenizer;
use serde_json::{Map, Value as Json, json};
use std::collections::HashMap;
use tokenrouter_gpu::weights::{GgufToken, Metadata, Value, gguf_tokens};

/// Token types of GGUF.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// A vocabulary as `tokenizer.json` would describe it, and what that format cannot say.
#[derive(Debug)]
pub struct GgufVocab {
    /// Contents of a `tokenizer.json`.
    pub tokenizer: Json,
    /// The token a raw prompt starts with.
    pub prompt_start: Option<u32>,
}

/// Reads the vocabulary out of GGUF metadata.
///
/// # Errors
/// The key that is missing, wrong or unknown, and the remedy.
pub fn read(metadata: &Metadata) -> Result<GgufVocab, String> {
    let tokens: Vec<GgufToken> = gguf_tokens(metadata)
        .map_err(|(key, reason)| format!("key {key:?}: {reason}"))?
        .into_iter()
        .filter(|token| !token.is_padding())
        .collect();
    let mut seen = HashMap::new();
    for token in &tokens {
        if let Some(other) = seen.insert(token.text, token.id) {
            return Err(format!("key \"tokenizer.ggml.tokens\": {other} and {} are both {:?}", token.id, token.text));
        }
    }
    let kind = text(metadata, "tokenizer.ggml.model")?.ok_or("key \"tokenizer.ggml.model\" is missing")?;
    let (tokenizer, adds_bos) = match kind {
        "gpt2" => byte_level(metadata, &tokens)?,
        "llama" => sentence_piece(metadata, &tokens)?,
        other => return Err(format!("key \"tokenizer.ggml.model\": {other:?} is not supported; gpt2 and llama are")),
    };
    let adds_bos = flag(metadata, "tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let bos = metadata.get("tokenizer.ggml.bos_token_id").and_then(Value::as_u64);
    let bos = bos.and_then(|id| u32::try_from(id).ok()).filter(|id| tokens.iter().any(|token| token.id == *id));
    Ok(GgufVocab { tokenizer, prompt_start: bos.filter(|_| adds_bos) })
}

/// GPT-2 style: a named word split, bytes as printable characters, merges in order.
fn byte_level(metadata: &Metadata, tokens: &[GgufToken]) -> Result<(Json, bool), String> {
    let name = text(metadata, "tokenizer.ggml.pre")?.unwrap_or("default");
    let split = PreTokenizer::named(name).ok_or_else(|| {
        format!("key \"tokenizer.ggml.pre\": word split {name:?} is not known; known are {}", PreTokenizer::names())
    })?;
    let key = "tokenizer.ggml.merges";
    let merges = metadata.get(key).and_then(Value::as_array).ok_or_else(|| format!("key {key:?} is not a list"))?;
    let merges = merges
        .iter()
        .map(|merge| {
            // A part is never empty, so that the separating space is not its first character.
            let parts = merge.as_str().and_then(|merge| {
                let space = merge.char_indices().skip(1).find(|&(_, character)| character == ' ')?.0;
                Some(json!([merge[..space], merge[space + 1..]]))
            });
            parts.ok_or_else(|| format!("key {key:?}: {merge} is not two parts and a space"))
        })
        .collect::<Result<Vec<Json>, String>>()?;
    let mut steps: Vec<Json> = split
        .patterns
        .iter()
        .map(|pattern| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false }))
        .collect();
    steps.push(json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false }));
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added_tokens(tokens),
        "normalizer": if split.nfc { json!({ "type": "NFC" }) } else { Json::Null },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": steps },
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false },
        "model": { "type": "BPE", "ignore_merges": split.ignore_merges, "vocab": vocab(tokens), "merges": merges },
    });
    Ok((tokenizer, split.adds_bos))
}

/// SentencePiece style: spaces as `▁`, pieces merged by score, bytes for what the vocabulary lacks.
fn sentence_piece(metadata: &Metadata, tokens: &[GgufToken]) -> Result<(Json, bool), String> {
    let prefix = flag(metadata, "tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let mut normalizers = vec![spaces];
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    let unknown = tokens.iter().find(|token| token.kind == UNKNOWN).map(|token| token.text);
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": added_tokens(tokens),
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "unk_token": unknown, "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab(tokens), "merges": merges_by_score(tokens),
        },
    });
    Ok((tokenizer, true))
}

/// Every way to build a piece from two others, best score first.
///
/// SentencePiece merges the neighbours whose union scores highest, whatever the halves; as an ordered list of pairs that
/// is: all splits of a piece into two pieces, ordered by the score of the union.
fn merges_by_score(tokens: &[GgufToken]) -> Vec<Json> {
    let mergeable = |token: &&GgufToken| !matches!(token.kind, UNKNOWN | CONTROL | USER_DEFINED);
    let pieces: HashMap<&str, &GgufToken> = tokens.iter().filter(mergeable).map(|token| (token.text, token)).collect();
    let mut merges = Vec::new();
    for token in tokens.iter().filter(mergeable) {
        for (at, _) in token.text.char_indices().skip(1) {
            let (left, right) = token.text.split_at(at);
            if pieces.contains_key(left) && pieces.contains_key(right) {
                merges.push((token.score, token.id, left, right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    merges.into_iter().map(|(_, _, left, right)| json!([left, right])).collect()
}

fn vocab(tokens: &[GgufToken]) -> Map<String, Json> {
    tokens.iter().map(|token| (token.text.to_owned(), token.id.into())).collect()
}

/// Tokens that are found in the text before words are split: control tokens, and what the makers added.
fn added_tokens(tokens: &[GgufToken]) -> Vec<Json> {
    tokens
        .iter()
        .filter(|token| matches!(token.kind, UNKNOWN | CONTROL | USER_DEFINED) && !token.text.is_empty())
        .map(|token| {
            let special = token.kind != USER_DEFINED;
            json!({
                "id": token.id, "content": token.text, "special": special,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect()
}

/// A text of the metadata, if it is there.
pub fn text<'a>(metadata: &'a Metadata, key: &str) -> Result<Option<&'a str>, String> {
    match metadata.get(key) {
        None => Ok(None),
        Some(value) => value.as_str().map(Some).ok_or_else(|| format!("key {key:?} is {value}, not a text")),
    }
}

fn flag(metadata: &Metadata, key: &str) -> Result<Option<bool>, String> {
    match metadata.get(key) {
        None => Ok(None),
        Some(value) => value.as_bool().map(Some).ok_or_else(|| format!("key {key:?} is {value}, not true or false")),
    }
}
