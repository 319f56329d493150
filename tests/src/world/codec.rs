//! A vocabulary of words `w0 w1 ...` separated by spaces. Owner: the World.

use tokenrouter_core::ids::TokenId;
use tokenrouter_core::text::{SpecialTokens, TextCodec, TextError};

/// The codec of simulated models.
#[derive(Debug)]
pub struct Words(Vec<Vec<u8>>);

impl Words {
    /// `size` words.
    pub fn new(size: u32) -> Self {
        Words((0..size).map(|id| format!(" w{id}").into_bytes()).collect())
    }
}

impl TextCodec for Words {
    fn encode(&self, text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        let word = |word: &str| {
            word.strip_prefix('w').and_then(|id| id.parse().ok()).filter(|&id: &u32| id < self.vocab_size())
        };
        text.split_whitespace().map(|text| word(text).ok_or_else(|| TextError(format!("no word {text:?}")))).collect()
    }

    fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.0.get(id as usize).map(Vec::as_slice)
    }

    fn is_special(&self, _id: TokenId) -> bool {
        false
    }

    fn vocab_size(&self) -> u32 {
        self.0.len() as u32
    }

    fn bos(&self) -> Option<TokenId> {
        None
    }

    fn strips_leading_space(&self) -> bool {
        false
    }
}
