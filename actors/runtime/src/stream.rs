//! One request as its user sees it: position, text, stop strings, totals. Owner: the Client. Invariant: tokens are shown
//! once and in position order, whichever model made them and however they overtook each other on the way. Nothing is
//! shown or counted after the token that ends the request, though models may have made more.

use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::{FinishReason, TokenReport, Usage};
use tokenrouter_core::request::Committed;
use tokenrouter_core::text::{StopMatcher, StopScan, TextCodec, Utf8Stream};

/// Text and totals of one stream.
#[derive(Debug)]
pub struct Transcript {
    next: u32,
    len_max: u32,
    /// Tokens whose turn has not come, by position: those of two models may come by two ways.
    early: BTreeMap<u32, Committed>,
    decoder: Utf8Stream,
    matcher: StopMatcher,
    stops: Vec<String>,
    keeps_stop_token: bool,
    trims_space: bool,
    usage: Usage,
    /// The last token was shown.
    ended: bool,
}

/// What one token adds.
#[derive(Debug, PartialEq)]
pub struct Added {
    /// Text that may be shown now.
    pub text: String,
    /// The token.
    pub token: TokenReport,
    /// Set when this was the last one.
    pub finish: Option<FinishReason>,
}

/// A token came twice, or beyond the end.
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
    /// Length at which generation ends, prompt included.
    pub len_max: u32,
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
            len_max: start.len_max,
            early: BTreeMap::new(),
            decoder: Utf8Stream::default(),
            matcher: StopMatcher::new(start.stops.clone(), start.include_stop),
            stops: start.stops,
            keeps_stop_token: start.include_stop,
            trims_space: start.trims_space,
            usage: Usage { prompt_tokens: start.prompt_tokens, by_model: vec![0; start.models], ..Usage::default() },
            ended: false,
        }
    }

    /// Totals so far.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Takes a token; returns what it and those that waited for it add, which is nothing if it comes early itself or
    /// after the end.
    ///
    /// # Errors
    /// [`OutOfOrder`] when its position is taken or beyond the end: a fault of the runtime, the request must fail.
    pub fn take(&mut self, codec: &dyn TextCodec, token: Committed) -> Result<SmallVec<[Added; 1]>, OutOfOrder> {
        let got = token.position;
        if self.ended {
            return Ok(SmallVec::new());
        }
        if got < self.next || got >= self.len_max || self.early.contains_key(&got) {
            return Err(OutOfOrder { expected: self.next, got });
        }
        if got > self.next {
            self.early.insert(got, token);
            return Ok(SmallVec::new());
        }
        let mut added = smallvec![self.add(codec, token)];
        while !self.ended
            && let Some(token) = self.early.remove(&self.next)
        {
            added.push(self.add(codec, token));
        }
        Ok(added)
    }

    fn add(&mut self, codec: &dyn TextCodec, token: Committed) -> Added {
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
        self.ended = finish.is_some();
        let report = TokenReport {
            id: token.token,
            model: token.model,
            entropy: token.entropy,
            dropped: token.dropped,
            logprobs: token.logprobs,
        };
        Added { text: shown, token: report, finish }
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
            StopScan::Open(text) => text + self.matcher.finish().as_str(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokenrouter_core::ids::{ModelIdx, RequestId};
    use tokenrouter_core::text::{SpecialTokens, TextError};

    /// Every token is its own letter.
    #[derive(Debug)]
    struct Letters;

    const LETTERS: &[u8; 26] = b"abcdefghijklmnopqrstuvwxyz";

    impl TextCodec for Letters {
        fn encode(&self, _text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
            Err(TextError("not needed".to_owned()))
        }

        fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
            LETTERS.get(id as usize..=id as usize)
        }

        fn is_special(&self, _id: TokenId) -> bool {
            false
        }

        fn vocab_size(&self) -> u32 {
            26
        }

        fn bos(&self) -> Option<TokenId> {
            None
        }

        fn strips_leading_space(&self) -> bool {
            false
        }
    }

    fn token(position: u32) -> Committed {
        Committed {
            request: RequestId(1),
            position,
            token: position - 5,
            model: ModelIdx((position % 2) as u8),
            entropy: None,
            dropped: None,
            logprobs: None,
            hops: 0,
            cached: 0,
            finish: (position == 14).then_some(FinishReason::Length),
        }
    }

    fn transcript() -> Transcript {
        stopping_at(Vec::new())
    }

    fn stopping_at(stops: Vec<String>) -> Transcript {
        Transcript::new(Start {
            prompt_tokens: 5,
            len_max: 15,
            models: 2,
            stops,
            include_stop: false,
            trims_space: false,
        })
    }

    proptest! {
        #[test]
        fn tokens_are_shown_in_order_however_they_come(order in Just((5..15).collect::<Vec<u32>>()).prop_shuffle()) {
            let mut transcript = transcript();
            let (mut text, mut came) = (String::new(), Vec::new());
            for position in order {
                let added = transcript.take(&Letters, token(position)).expect("a new token");
                came.push(position);
                for added in added {
                    prop_assert!(came.contains(&(5 + added.token.id)));
                    text.push_str(&added.text);
                    prop_assert_eq!(added.finish.is_some(), text.len() == 10);
                }
                let whole = (5..15).take_while(|due| came.contains(due)).count();
                prop_assert_eq!(text.len(), whole, "nothing is held back that could be shown");
            }
            prop_assert_eq!(text, "abcdefghij");
            prop_assert_eq!(&transcript.usage().by_model, &vec![5, 5]);
        }
    }

    #[test]
    fn tokens_come_once_and_not_beyond_the_end() {
        let mut transcript = transcript();
        transcript.take(&Letters, token(5)).expect("due");
        transcript.take(&Letters, token(8)).expect("early");
        for position in [5, 8, 15] {
            let outcome = transcript.take(&Letters, token(position));
            assert_eq!(outcome, Err(OutOfOrder { expected: 6, got: position }));
        }
    }

    proptest! {
        /// Tokens may come in one message or in many, early or late: the one that completes the stop string is the last.
        #[test]
        fn nothing_is_counted_after_a_stop_string(
            order in Just((5..15).collect::<Vec<u32>>()).prop_shuffle(),
            last in 0u32..9,
        ) {
            let letters = &LETTERS[last as usize..last as usize + 1];
            let mut transcript = stopping_at(vec![String::from_utf8_lossy(letters).into_owned()]);
            let mut added = Vec::new();
            for position in order {
                added.extend(transcript.take(&Letters, token(position)).expect("a new token"));
            }
            let ids: Vec<TokenId> = added.iter().map(|added| added.token.id).collect();
            prop_assert_eq!(ids, (0..=last).collect::<Vec<_>>());
            prop_assert!(added.last().is_some_and(|added| matches!(added.finish, Some(FinishReason::StopString(_)))));
            let usage = transcript.usage();
            prop_assert_eq!(usage.completion_tokens, last + 1);
            prop_assert_eq!(usage.by_model.iter().sum::<u32>(), last + 1);
        }
    }
}
