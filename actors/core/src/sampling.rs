//! How a token is drawn: parameters and the counts that penalties read. Owner: the request. Invariant: the same
//! request, seed and position give the same draw, whatever the batch, the model's load or the time.

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Sampling parameters of one request. `temperature == 0` is greedy: the highest logit, the lowest id among equals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 = greedy.
    pub temperature: f32,
    /// Keep the k highest logits; 0 = all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches p; 1 = all.
    pub top_p: f32,
    /// Drop tokens below `min_p` times the highest probability; 0 = none.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL paper); 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens seen in the output; 0 = off.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence in the output; 0 = off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Seed of every draw of this request.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Whether drawing needs to know which tokens occurred before.
    pub fn reads_history(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// How often a token occurred in the prompt and in the committed output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occurrences {
    /// Seen in the prompt.
    pub in_prompt: bool,
    /// Times committed as output.
    pub in_output: u32,
}

/// Occurrences per token; kept only for requests whose parameters read history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts(HashMap<TokenId, Occurrences>);

impl TokenCounts {
    /// Counts of a sequence whose first `prompt_len` tokens are the prompt.
    pub fn of(tokens: &[TokenId], prompt_len: usize) -> Self {
        let mut counts = TokenCounts::default();
        for &token in &tokens[..prompt_len.min(tokens.len())] {
            counts.0.entry(token).or_default().in_prompt = true;
        }
        for &token in &tokens[prompt_len.min(tokens.len())..] {
            counts.commit(token);
        }
        counts
    }

    /// One more committed output token.
    pub fn commit(&mut self, token: TokenId) {
        self.0.entry(token).or_default().in_output += 1;
    }

    /// All tokens that occurred, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (TokenId, Occurrences)> + '_ {
        self.0.iter().map(|(&token, &seen)| (token, seen))
    }
}
