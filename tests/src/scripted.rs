//! A model that says what a test wants, over a vocabulary of bytes. Owner: the test that starts a server with it.
//! Invariant: what it says is a function of the tokens before, read back from the pages it is given: the same in any batch,
//! after any hop, and on any model.

use std::sync::OnceLock;
use tokenrouter::text::Grammars;
use tokenrouter_core::constraint::{Constraint, ConstraintSpec};
use tokenrouter_core::executor::{
    Executor, ExecutorError, ExecutorLimits, PAGE_TOKENS, Row, RowOutput, Step, StepOutput, TokenLogprobs,
};
use tokenrouter_core::faults::FaultPlan;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::mix;
use tokenrouter_core::sim::{Language, SimExecutor, Skill};
use tokenrouter_core::text::{SpecialTokens, TextCodec, TextError};

/// The token after these.
pub type Voice = fn(&[TokenId]) -> TokenId;

/// End-of-text: the only token that is no byte.
pub const EOS: TokenId = 256;
/// Tokens of the vocabulary.
pub const VOCAB: u32 = 257;
/// Ends what [`parrot`] repeats.
const END: TokenId = 0;

/// Repeats its prompt up to the first zero byte and ends.
pub fn parrot(prefix: &[TokenId]) -> TokenId {
    let length = prefix.iter().position(|&token| token == END).unwrap_or(prefix.len());
    let said = prefix.len().saturating_sub(length + 1);
    if said < length && length < prefix.len() { prefix[said] } else { EOS }
}

/// The prompt that makes [`parrot`] say these bytes, none of which is zero.
pub fn script(bytes: impl AsRef<[u8]>) -> Vec<TokenId> {
    bytes.as_ref().iter().copied().map(TokenId::from).chain([END]).collect()
}

/// What is said instead of what was wanted where only some tokens may come: one of them by chance, which follows from the
/// tokens before, and rather one that ends something.
pub fn instead(wanted: TokenId, prefix: &[TokenId], may: impl Fn(TokenId) -> bool) -> Option<TokenId> {
    if may(wanted) {
        return Some(wanted);
    }
    let allowed: Vec<TokenId> = (0..VOCAB).filter(|&id| may(id)).collect();
    let ends = |&id: &TokenId| id == EOS || [b'"', b']', b'}'].map(TokenId::from).contains(&id);
    let chance = prefix.iter().fold(0x5eed, |hash, &token| mix(hash ^ u64::from(token)));
    let end = allowed.iter().copied().rev().find(ends).filter(|_| !chance.is_multiple_of(3));
    end.or_else(|| allowed.get((chance / 3) as usize % allowed.len().max(1)).copied())
}

/// A token is a byte, and [`EOS`].
#[derive(Debug)]
pub struct Bytes {
    bytes: [u8; 256],
    grammars: OnceLock<Grammars>,
}

impl Default for Bytes {
    fn default() -> Self {
        Bytes { bytes: std::array::from_fn(|byte| byte as u8), grammars: OnceLock::new() }
    }
}

impl TextCodec for Bytes {
    fn encode(&self, text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        Ok(text.bytes().map(TokenId::from).collect())
    }

    fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        let at = id as usize;
        if id == EOS { Some(b"<eos>") } else { self.bytes.get(at..=at) }
    }

    fn is_special(&self, id: TokenId) -> bool {
        id == EOS
    }

    fn vocab_size(&self) -> u32 {
        VOCAB
    }

    fn bos(&self) -> Option<TokenId> {
        None
    }

    fn strips_leading_space(&self) -> bool {
        false
    }

    fn constraint(&self, spec: &ConstraintSpec, eos: &[TokenId]) -> Result<Box<dyn Constraint>, TextError> {
        let grammars = self.grammars.get_or_init(|| Grammars::new(self).expect("bytes are a vocabulary"));
        grammars.begin(spec, eos).map_err(TextError)
    }
}

/// The executor. Everything but the words is a simulated model's, which checks the pages too.
pub struct Scripted {
    inner: SimExecutor,
    voice: Voice,
    memory: Vec<[TokenId; PAGE_TOKENS]>,
}

impl Scripted {
    /// A model with empty memory.
    pub fn new(limits: ExecutorLimits, voice: Voice) -> Self {
        Scripted::failing(limits, voice, FaultPlan::default())
    }

    /// A model with empty memory and faults.
    pub fn failing(limits: ExecutorLimits, voice: Voice, faults: FaultPlan) -> Self {
        let language = Language { vocab: VOCAB, hard: 0.0, eos: None };
        let inner = SimExecutor::new(limits, language, Skill::Large, faults);
        Scripted { inner, voice, memory: vec![[END; PAGE_TOKENS]; limits.pages as usize] }
    }

    fn remember(&mut self, row: &Row) {
        for (position, &token) in (row.start as usize..).zip(&row.tokens) {
            self.memory[row.pages[position / PAGE_TOKENS] as usize][position % PAGE_TOKENS] = token;
        }
    }

    fn prefix(&self, row: &Row) -> Vec<TokenId> {
        let read = |position: usize| self.memory[row.pages[position / PAGE_TOKENS] as usize][position % PAGE_TOKENS];
        (0..row.start as usize + row.tokens.len()).map(read).collect()
    }
}

impl Executor for Scripted {
    fn limits(&self) -> ExecutorLimits {
        self.inner.limits()
    }

    /// It is sure of what it says: every other token is impossible.
    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        let mut output = self.inner.step(step)?;
        for (row, output) in step.rows.iter().zip(&mut output.rows) {
            self.remember(row);
            let (RowOutput::Drawn(drawn), Some(draw)) = (output, &row.draw) else { continue };
            let prefix = self.prefix(row);
            let wanted = (self.voice)(&prefix);
            drawn.token = match &draw.mask {
                None if draw.banned.contains(&wanted) => TokenId::from(b'.'),
                None => wanted,
                // What the simulated model behind it drew obeys, or the row has failed.
                Some(mask) => {
                    instead(wanted, &prefix, |id| mask.allows(id) && !draw.banned.contains(&id)).unwrap_or(drawn.token)
                }
            };
            drawn.logprobs = draw.logprobs.map(|alternatives| TokenLogprobs {
                chosen: 0.0,
                top: (0..u32::from(alternatives))
                    .map(|place| ((drawn.token + place) % VOCAB, if place == 0 { 0.0 } else { f32::NEG_INFINITY }))
                    .collect(),
            });
        }
        Ok(output)
    }
}
