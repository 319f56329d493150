//! One request as its user sees it: position, text, stop strings, totals. Owner: the Client. Invariant: tokens arrive
//! once and in position order, whichever model made them.

use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::{FinishReason, TokenReport, Usage};
use tokenrouter_core::request::Committed;
use tokenrouter_core::text::{StopMatcher, StopScan, TextCodec, Utf8Stream};

/// Text and totals of one stream.
#[derive(Debug)]
pub struct Transcript {
    next: u32,
    decoder: Utf8Stream,
    matcher: StopMatcher,
    stops: Vec<String>,
    keeps_stop_token: bool,
    trims_space: bool,
    usage: Usage,
}

/// What one token adds.
#[derive(Debug, Default, PartialEq)]
pub struct Added {
    /// Text that may be shown now.
    pub text: String,
    /// The token; `None` when it came after the end.
    pub token: Option<TokenReport>,
    /// Set when this was the last one.
    pub finish: Option<FinishReason>,
}

/// A token came out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("token for position {got} came when {expected} was due")]
pub struct OutOfOrder {
    /// Position due.
    pub expected: u32,
    /// Position that came.
    pub got: u32,
}

/// What a transcript starts from.
#[derive(Debug)]
pub struct Start {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Models of the router.
    pub models: usize,
    /// Stop strings.
    pub stops: Vec<String>,
    /// Keep stop string and stop token in the text.
    pub include_stop: bool,
    /// Drop one leading space of the text.
    pub trims_space: bool,
}

impl Transcript {
    /// An empty transcript.
    pub fn new(start: Start) -> Self {
        Transcript {
            next: start.prompt_tokens,
            decoder: Utf8Stream::default(),
            matcher: StopMatcher::new(start.stops.clone(), start.include_stop),
            stops: start.stops,
            keeps_stop_token: start.include_stop,
            trims_space: start.trims_space,
            usage: Usage { prompt_tokens: start.prompt_tokens, by_model: vec![0; start.models], ..Usage::default() },
        }
    }

    /// Totals so far.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Takes the next token.
    ///
    /// # Errors
    /// [`OutOfOrder`] when it is not the next: a fault of the runtime, the request must fail.
    pub fn take(&mut self, codec: &dyn TextCodec, token: Committed) -> Result<Added, OutOfOrder> {
        if token.position != self.next {
            return Err(OutOfOrder { expected: self.next, got: token.position });
        }
        self.next += 1;
        self.usage.completion_tokens += 1;
        self.usage.hops = token.hops;
        self.usage.cached_tokens = self.usage.cached_tokens.max(token.cached);
        if let Some(count) = self.usage.by_model.get_mut(token.model.index()) {
            *count += 1;
        }
        let text = self.text_of(codec, token.token, token.finish.as_ref());
        let (mut shown, stop) = match self.matcher.push(&text) {
            StopScan::Open(text) => (text, None),
            StopScan::Hit { text, stop } => (text, self.stops.get(stop).cloned()),
        };
        let finish = stop.map(FinishReason::StopString).or(token.finish);
        if finish.is_some() && !matches!(finish, Some(FinishReason::StopString(_))) {
            shown.push_str(&self.flush());
        }
        let report =
            TokenReport { id: token.token, model: token.model, entropy: token.entropy, logprobs: token.logprobs };
        Ok(Added { text: shown, token: Some(report), finish })
    }

    fn text_of(&mut self, codec: &dyn TextCodec, token: TokenId, finish: Option<&FinishReason>) -> String {
        let hidden = match finish {
            Some(FinishReason::EndOfText) => true,
            Some(FinishReason::StopToken(_)) => !self.keeps_stop_token,
            _ => false,
        };
        if hidden || codec.is_special(token) {
            return String::new();
        }
        let mut text = self.decoder.push(codec.token_bytes(token).unwrap_or_default());
        if !text.is_empty() && std::mem::take(&mut self.trims_space) && text.starts_with(' ') {
            text.remove(0);
        }
        text
    }

    /// What is left at the end: an unfinished character, and text held back as a possible stop string.
    fn flush(&mut self) -> String {
        let tail = self.decoder.finish();
        match self.matcher.push(&tail) {
            StopScan::Hit { text, .. } => text,
            StopScan::Open(text) => text + &self.matcher.finish(),
        }
    }
}
