//! Text to tokens and tokens to bytes. Owner: the vocabulary that all models of a router share.
//!
//! Invariant: user text encoded [`SpecialTokens::AsText`] holds no control token; `token_bytes` are the true bytes of each
//! token, so that any split of a token sequence decodes to the same text. The description of the tokenizer, in the format
//! of `tokenizer.json`, is adjusted once at load: marks of the guard vanish after control tokens were looked for, and
//! nothing is added, cut or padded.

use super::bytes::Spelling;
use super::guard::{ControlGuard, MARK};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::text::{SpecialTokens, TextCodec, TextError};
use tokenrouter_gpu::weights::{TokenDigest, TokenTable};

/// A vocabulary and the way it cuts text.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    guard: ControlGuard,
    tokens: TokenStore,
    table: TokenTable,
    prompt_start: Option<TokenId>,
    strips_leading_space: bool,
    /// Bytes that no token stands for, ascending; a text with one of them cannot be encoded.
    unspeakable: Vec<u8>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("table", &self.table).field("prompt_start", &self.prompt_start).finish()
    }
}

impl Tokenizer {
    /// A tokenizer from the contents of a `tokenizer.json`; `prompt_start` is the token a raw prompt starts with.
    ///
    /// # Errors
    /// What of the description is wrong or not supported.
    pub fn from_description(mut description: Json, prompt_start: Option<TokenId>) -> Result<Self, String> {
        let spelling = spelling(&description)?;
        let rows = rows(&description)?;
        let table = TokenTable::of(rows.iter().map(|(&id, row)| (id, row.text.as_str())));
        let control = rows.values().filter(|row| row.kind == Kind::Control).map(|row| row.text.clone());
        let guard = ControlGuard::new(control).map_err(|token| {
            format!("control token {token:?} is a single character, which cannot be told from text; make it longer")
        })?;
        let strips_leading_space = strips_leading_space(&description["decoder"]);
        adjust(&mut description);
        let inner = serde_json::from_value(description).map_err(|error| error.to_string())?;
        let unspeakable = unspeakable(&rows, spelling);
        let tokens = TokenStore::new(&rows, spelling)?;
        let prompt_start = prompt_start.filter(|&id| tokens.bytes(id).is_some());
        Ok(Tokenizer { inner, guard, tokens, table, prompt_start, strips_leading_space, unspeakable })
    }

    /// The guard that keeps this vocabulary's control tokens out of user text.
    pub fn guard(&self) -> &ControlGuard {
        &self.guard
    }

    /// Fingerprint of the real tokens; two models can share a request if theirs are equal.
    pub fn digest(&self) -> TokenDigest {
        self.table.digest
    }

    /// Id of the token with this text in the vocabulary's spelling.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.inner.token_to_id(text)
    }

    /// Tokens of a raw prompt: the start token where the vocabulary wants one, once, then the text.
    ///
    /// # Errors
    /// As [`TextCodec::encode`].
    pub fn encode_prompt(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        let mut ids = self.encode(text, special)?;
        if let Some(start) = self.prompt_start.filter(|start| ids.first() != Some(start)) {
            ids.insert(0, start);
        }
        Ok(ids)
    }

    /// Tokens of a text whose user parts were escaped by [`Self::guard`]: control tokens outside of them are found.
    ///
    /// # Errors
    /// As [`TextCodec::encode`].
    pub fn encode_escaped(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        if let Some(character) = text.chars().find(|&character| self.is_unspeakable(character)) {
            return Err(TextError(format!("the vocabulary has no token for {character:?}; leave it out")));
        }
        let encoding = self.inner.encode_fast(text, false).map_err(|error| TextError(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn is_unspeakable(&self, character: char) -> bool {
        let missing = |byte: &u8| self.unspeakable.binary_search(byte).is_ok();
        !self.unspeakable.is_empty()
            && character != MARK
            && character.encode_utf8(&mut [0; 4]).as_bytes().iter().any(missing)
    }
}

impl TextCodec for Tokenizer {
    fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        match special {
            SpecialTokens::Parse => self.encode_escaped(&ControlGuard::without_marks(text)),
            SpecialTokens::AsText => self.encode_escaped(&self.guard.escape(text)),
        }
    }

    fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.tokens.bytes(id)
    }

    fn is_special(&self, id: TokenId) -> bool {
        self.tokens.kind(id) == Some(Kind::Control)
    }

    fn vocab_size(&self) -> u32 {
        self.table.len
    }

    fn bos(&self) -> Option<TokenId> {
        self.prompt_start
    }

    fn strips_leading_space(&self) -> bool {
        self.strips_leading_space
    }
}

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An id between real ones that stands for nothing.
    Hole,
    /// Text in the vocabulary's spelling.
    Ordinary,
    /// Text as it stands, found before words are split.
    Added,
    /// A control token.
    Control,
}

struct Row {
    text: String,
    kind: Kind,
}

/// Bytes of every token, back to back.
struct TokenStore {
    bytes: Vec<u8>,
    /// End of each token in `bytes`.
    ends: Vec<u32>,
    kinds: Vec<Kind>,
}

impl TokenStore {
    fn new(rows: &BTreeMap<TokenId, Row>, spelling: Spelling) -> Result<Self, String> {
        let mut store = TokenStore { bytes: Vec::new(), ends: Vec::new(), kinds: Vec::new() };
        for (&id, row) in rows {
            store.fill_holes(id);
            match row.kind {
                Kind::Hole => {}
                Kind::Ordinary => store.bytes.extend(spelling.bytes(&row.text)),
                Kind::Added | Kind::Control => store.bytes.extend(row.text.as_bytes()),
            }
            let end = u32::try_from(store.bytes.len()).map_err(|_| "the vocabulary exceeds 4 GiB".to_owned())?;
            store.ends.push(end);
            store.kinds.push(row.kind);
        }
        Ok(store)
    }

    fn fill_holes(&mut self, next: TokenId) {
        let end = self.ends.last().copied().unwrap_or(0);
        self.ends.resize(next as usize, end);
        self.kinds.resize(next as usize, Kind::Hole);
    }

    fn kind(&self, id: TokenId) -> Option<Kind> {
        self.kinds.get(id as usize).copied().filter(|&kind| kind != Kind::Hole)
    }

    fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.kind(id)?;
        let index = id as usize;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.bytes[start as usize..self.ends[index] as usize])
    }
}

/// Highest token id that is believed.
const MAX_TOKEN_ID: u64 = 1 << 24;

/// Every token of a description by id.
fn rows(description: &Json) -> Result<BTreeMap<TokenId, Row>, String> {
    let mut rows = BTreeMap::new();
    let mut add = |id: Option<u64>, text: &str, kind: Kind| match id.filter(|&id| id < MAX_TOKEN_ID) {
        Some(id) => {
            rows.insert(id as TokenId, Row { text: text.to_owned(), kind });
            Ok(())
        }
        None => Err(format!("token {text:?} has no id below {MAX_TOKEN_ID}")),
    };
    match &description["model"]["vocab"] {
        Json::Object(vocab) => vocab.iter().try_for_each(|(text, id)| add(id.as_u64(), text, Kind::Ordinary))?,
        Json::Array(pieces) => (0..).zip(pieces).try_for_each(|(id, piece)| match piece[0].as_str() {
            Some(text) => add(Some(id), text, Kind::Ordinary),
            None => Err(format!("piece {id} of the vocabulary has no text")),
        })?,
        _ => return Err("key \"model.vocab\" is missing".into()),
    }
    for token in description["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().ok_or("an added token has no \"content\"")?;
        let kind = if token["special"].as_bool() == Some(true) { Kind::Control } else { Kind::Added };
        add(token["id"].as_u64(), text, kind)?;
    }
    Ok(rows)
}

/// Bytes of UTF-8 that a byte-level vocabulary has no token for; tokenizers drop them without a word.
fn unspeakable(rows: &BTreeMap<TokenId, Row>, spelling: Spelling) -> Vec<u8> {
    if spelling != Spelling::ByteLevel {
        return Vec::new();
    }
    let mut missing: std::collections::BTreeSet<u8> = (0..=0xf4).filter(|byte| !matches!(byte, 0xc0 | 0xc1)).collect();
    for row in rows.values().filter(|row| row.kind == Kind::Ordinary) {
        if let [byte] = spelling.bytes(&row.text)[..] {
            missing.remove(&byte);
        }
    }
    missing.into_iter().collect()
}

/// How a description spells bytes.
fn spelling(description: &Json) -> Result<Spelling, String> {
    let kind = description["model"]["type"].as_str().unwrap_or("BPE");
    if !matches!(kind, "BPE" | "Unigram") {
        return Err(format!("a tokenizer of type {kind:?} is not supported; BPE and Unigram are"));
    }
    let parts = [&description["decoder"], &description["pre_tokenizer"], &description["normalizer"]];
    let has = |name: &str| parts.into_iter().any(|part| steps(part).iter().any(|step| step["type"] == name));
    if has("ByteLevel") {
        Ok(Spelling::ByteLevel)
    } else if has("Metaspace") || has("ByteFallback") || writes_metaspace(&description["normalizer"]) {
        Ok(Spelling::Metaspace)
    } else {
        Err("the tokenizer is neither byte-level nor metaspace, so its tokens have no exact bytes".into())
    }
}

fn writes_metaspace(normalizer: &Json) -> bool {
    steps(normalizer).iter().any(|step| step["content"] == "▁" || step["prepend"] == "▁")
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
fn strips_leading_space(decoder: &Json) -> bool {
    steps(decoder).iter().any(|step| match step["type"].as_str() {
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

/// Adjusts a description as the head of this file says.
fn adjust(description: &mut Json) {
    let drop_marks = json!({ "type": "Replace", "pattern": { "String": MARK.to_string() }, "content": "" });
    let normalizer = match description["normalizer"].take() {
        Json::Null => drop_marks,
        own => json!({ "type": "Sequence", "normalizers": [drop_marks, own] }),
    };
    description["normalizer"] = normalizer;
    for part in ["truncation", "padding", "post_processor", "decoder"] {
        description[part] = Json::Null;
    }
    // A control token that is looked for only after normalising would be found where the guard's marks are gone already.
    for token in description["added_tokens"].as_array_mut().into_iter().flatten() {
        if token["special"] == true {
            token["normalized"] = false.into();
        }
    }
}
