//! The table of real tokens and its digest. Owner: the loaded model. Invariant: the digest depends on ids and token texts
//! alone, so that the same vocabulary gives the same digest from `tokenizer.json` and from GGUF, padded or not.

use super::error::{Result, WeightsError};
use super::json;
use super::metadata::{Metadata, Value};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// `tokenizer.ggml.token_type` of an id that pads the vocabulary.
const UNUSED: u64 = 5;

/// Fingerprint of a table of real tokens (FNV-1a, 128 bits). It tells vocabularies apart; it is no defence against forgery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenDigest(u128);

impl fmt::Display for TokenDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// How many real tokens a model has, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenTable {
    /// One more than the highest real id.
    pub len: u32,
    /// Fingerprint of all ids and texts.
    pub digest: TokenDigest,
}

impl TokenTable {
    /// The table of these ids and texts (texts as the vocabulary spells them), in ascending order of id.
    pub fn of<'a>(tokens: impl IntoIterator<Item = (u32, &'a str)>) -> Self {
        const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
        let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        let mut len = 0;
        for (id, text) in tokens {
            let text_len = text.len() as u64;
            for &byte in id.to_le_bytes().iter().chain(&text_len.to_le_bytes()).chain(text.as_bytes()) {
                hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
            }
            len = len.max(id.saturating_add(1));
        }
        TokenTable { len, digest: TokenDigest(hash) }
    }

    /// The table in GGUF metadata, less the token of the text `without`.
    pub(super) fn of_gguf(path: &Path, metadata: &Metadata, without: Option<&str>) -> Result<Self> {
        let tokens = gguf_tokens(metadata)
            .map_err(|(key, reason)| WeightsError::invalid(path, format!("key {key:?}"), reason))?;
        let real = tokens.iter().filter(|token| token.kind != UNUSED && without != Some(token.text));
        Ok(Self::of(real.map(|token| (token.id, token.text))))
    }

    /// The table in a `tokenizer.json`, less the token of the text `without`.
    pub(super) fn of_hf(path: &Path, without: Option<&str>) -> Result<Self> {
        let file: HfTokenizer = json::read_as(path)?;
        let mut table: BTreeMap<u32, &str> = match &file.model.vocab {
            HfVocab::Ids(ids) => ids.iter().map(|(text, &id)| (id, text.as_str())).collect(),
            HfVocab::Scores(list) => (0..).zip(list).map(|(id, (text, _))| (id, text.as_str())).collect(),
        };
        table.extend(file.added_tokens.iter().map(|token| (token.id, token.content.as_str())));
        table.retain(|_, text| without != Some(*text));
        Ok(Self::of(table))
    }
}

/// One row of a GGUF vocabulary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GgufToken<'a> {
    /// Its id.
    pub id: u32,
    /// Its text as the vocabulary spells it.
    pub text: &'a str,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub kind: u64,
    /// Its score (0 where the file has none).
    pub score: f64,
}

impl GgufToken<'_> {
    /// Whether this id pads the vocabulary and stands for no token.
    pub fn is_padding(&self) -> bool {
        self.kind == UNUSED
    }
}

/// The vocabulary of a GGUF file in order of id.
///
/// # Errors
/// The key that is missing or wrong, and why.
pub fn gguf_tokens(metadata: &Metadata) -> std::result::Result<Vec<GgufToken<'_>>, (&'static str, String)> {
    const TOKENS: &str = "tokenizer.ggml.tokens";
    const TYPES: &str = "tokenizer.ggml.token_type";
    const SCORES: &str = "tokenizer.ggml.scores";
    let Some(texts) = metadata.get(TOKENS) else {
        return Err((TOKENS, "is missing; the file has no tokenizer".into()));
    };
    let texts = texts.as_array().ok_or((TOKENS, "is not an array".to_owned()))?;
    let parallel = |key: &'static str| match metadata.get(key) {
        None => Ok(None),
        Some(value) => match value.as_array() {
            Some(values) if values.len() == texts.len() => Ok(Some(values)),
            _ => Err((key, format!("is {value}; it must be an array of {}, one for each token", texts.len()))),
        },
    };
    let (types, scores) = (parallel(TYPES)?, parallel(SCORES)?);
    let row = |id: usize, text: &'_ Value| -> Option<(u32, u64, f64)> {
        text.as_str()?;
        let kind = types.map_or(Some(1), |types| types[id].as_u64())?;
        let score = scores.map_or(Some(0.0), |scores| scores[id].as_f64())?;
        Some((u32::try_from(id).ok()?, kind, score))
    };
    texts
        .iter()
        .enumerate()
        .map(|(index, text)| match (text.as_str(), row(index, text)) {
            (Some(text), Some((id, kind, score))) => Ok(GgufToken { id, text, kind, score }),
            _ => Err((TOKENS, format!("token {index} has no valid text, type and score"))),
        })
        .collect()
}

#[derive(Deserialize)]
struct HfTokenizer {
    #[serde(default)]
    added_tokens: Vec<HfAddedToken>,
    model: HfTokenizerModel,
}

#[derive(Deserialize)]
struct HfAddedToken {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct HfTokenizerModel {
    vocab: HfVocab,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum HfVocab {
    Ids(BTreeMap<String, u32>),
    Scores(Vec<(String, f64)>),
}
