//! Text to tokens and tokens to bytes. Owner: the vocabulary that all models of a router share.
//!
//! Invariant: user text encoded [`SpecialTokens::AsText`] holds no control token; `token_bytes` are the true bytes of each
//! token, so that any split of a token sequence decodes to the same text.

use super::bytes::Spelling;
use super::description::{self, Adjusted, Kind, Row};
use super::grammar::Grammars;
use super::guard::{ControlGuard, MARK};
use super::tools::SHOWN_TOKENS;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use tokenrouter_core::constraint::{Constraint, ConstraintSpec};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::text::{SpecialTokens, TextCodec, TextError};
use tokenrouter_gpu::weights::{TokenDigest, TokenTable};

/// A vocabulary and the way it cuts text.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Real id of each id of `inner`.
    ids: Vec<TokenId>,
    guard: ControlGuard,
    tokens: TokenStore,
    table: TokenTable,
    prompt_start: Option<TokenId>,
    strips_leading_space: bool,
    /// Bytes that no token stands for, ascending; a text with one of them cannot be encoded.
    unspeakable: Vec<u8>,
    /// Made when the first answer is to have a form.
    grammars: OnceLock<Result<Grammars, String>>,
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
    pub fn from_description(description: Json, prompt_start: Option<TokenId>) -> Result<Self, String> {
        let spelling = description::spelling(&description)?;
        let rows = description::rows(&description)?;
        let control = rows.values().filter(|row| row.kind == Kind::Control).map(|row| row.text.clone());
        let guard = ControlGuard::new(control).map_err(|token| {
            format!("control token {token:?} is a single character, which cannot be told from text; make it longer")
        })?;
        let strips_leading_space = description::strips_leading_space(&description);
        let tokens = TokenStore::new(&rows, spelling)?;
        let Adjusted { description, ids } = description::adjust(description);
        description::check_merges(&description)?;
        Ok(Tokenizer {
            inner: serde_json::from_value(description).map_err(|error| error.to_string())?,
            ids,
            guard,
            table: TokenTable::of(rows.iter().map(|(&id, row)| (id, row.text.as_str()))),
            prompt_start: prompt_start.filter(|&id| tokens.bytes(id).is_some()),
            tokens,
            strips_leading_space,
            unspeakable: description::unspeakable(&rows, spelling),
            grammars: OnceLock::new(),
        })
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
        self.real_id(self.inner.token_to_id(text)?)
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
        let real =
            |&id: &TokenId| self.real_id(id).ok_or_else(|| TextError(format!("token {id} is not in the vocabulary")));
        encoding.get_ids().iter().map(real).collect()
    }

    fn real_id(&self, inner: TokenId) -> Option<TokenId> {
        self.ids.get(inner as usize).copied()
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
            && !SHOWN_TOKENS.iter().any(|shown| self.tokens.bytes(id) == Some(shown.as_bytes()))
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

    fn constraint(&self, spec: &ConstraintSpec, eos: &[TokenId]) -> Result<Box<dyn Constraint>, TextError> {
        let grammars = self.grammars.get_or_init(|| Grammars::new(self)).as_ref();
        grammars.map_err(String::clone).and_then(|grammars| grammars.begin(spec, eos)).map_err(TextError)
    }
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
