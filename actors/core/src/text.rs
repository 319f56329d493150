//! Text on the way in and out: the codec port, byte-exact incremental decoding, stop strings.
//! Owner: the request's Client. Invariant: the concatenated deltas are exactly the text a one-shot decode gives, and
//! nothing that could still become part of a stop string is handed out.

use crate::constraint::{Constraint, ConstraintSpec};
use crate::ids::TokenId;

/// How special-token look-alikes in a text are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// `<|im_start|>` in the text is the control token.
    Parse,
    /// Everything is ordinary text; no control token can come out.
    AsText,
}

/// A text could not be turned into tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot tokenise: {0}")]
pub struct TextError(pub String);

/// The vocabulary shared by the models of a router.
pub trait TextCodec: Send + Sync {
    /// Token ids of a text, without any added special tokens.
    ///
    /// # Errors
    /// [`TextError`] when the tokenizer refuses the text.
    fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, TextError>;

    /// Token ids of a raw prompt: the token it starts with, if this vocabulary wants one, then the text. A text that
    /// spells the start token itself gets no second one.
    ///
    /// # Errors
    /// As [`Self::encode`].
    fn encode_prompt(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        let mut ids = self.encode(text, special)?;
        if let Some(start) = self.bos().filter(|start| ids.first() != Some(start)) {
            ids.insert(0, start);
        }
        Ok(ids)
    }

    /// The exact bytes a token stands for; `None` when there is no such token.
    fn token_bytes(&self, id: TokenId) -> Option<&[u8]>;

    /// Whether a token is a control token, which does not show in text.
    fn is_special(&self, id: TokenId) -> bool;

    /// Number of real tokens (padding of the logits row excluded); ids at and above it are never valid.
    fn vocab_size(&self) -> u32;

    /// The token a raw prompt starts with, if this vocabulary wants one.
    fn bos(&self) -> Option<TokenId>;

    /// Whether decoding drops one leading space of a text (SentencePiece's dummy prefix).
    fn strips_leading_space(&self) -> bool;

    /// What keeps an answer in form, at its start; `eos` are the tokens that may end it when it is complete. Takes long
    /// (up to seconds) when the form is new here.
    ///
    /// # Errors
    /// [`TextError`] when the form is wrong, too large, or this vocabulary knows no forms.
    fn constraint(&self, _spec: &ConstraintSpec, _eos: &[TokenId]) -> Result<Box<dyn Constraint>, TextError> {
        Err(TextError("this vocabulary cannot keep answers in a form; leave response_format and tools out".into()))
    }
}

/// Turns token bytes into text as they come, never splitting a character.
///
/// An incomplete character waits for its rest; bytes that can no longer become one turn into U+FFFD at once,
/// one per maximal invalid part as `String::from_utf8_lossy` does.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    tail: Vec<u8>,
}

impl Utf8Stream {
    /// Adds bytes and returns the text that is complete now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.tail.extend_from_slice(bytes);
        let mut out = String::new();
        let mut at = 0;
        loop {
            match std::str::from_utf8(&self.tail[at..]) {
                Ok(text) => {
                    out.push_str(text);
                    at = self.tail.len();
                    break;
                }
                Err(error) => {
                    let good = at + error.valid_up_to();
                    out.push_str(&String::from_utf8_lossy(&self.tail[at..good]));
                    match error.error_len() {
                        Some(bad) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            at = good + bad;
                        }
                        None => {
                            at = good;
                            break;
                        }
                    }
                }
            }
        }
        self.tail.drain(..at);
        out
    }

    /// Ends the text: an unfinished character becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.tail)).into_owned()
    }
}

/// Finds stop strings in a growing text and holds back only what could still become one.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    include: bool,
    held: String,
}

/// What a [`StopMatcher`] says of new text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopScan {
    /// No stop string yet; this much may be shown.
    Open(String),
    /// A stop string is complete: this is the last text to show; what came after it is dropped.
    Hit {
        /// Text to show (with the stop string itself when the request asked for it).
        text: String,
        /// Which stop string it was, as an index into the request's list.
        stop: usize,
    },
}

impl StopMatcher {
    /// A matcher for non-empty stop strings; `include` keeps the stop string in the text.
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        StopMatcher { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), include, held: String::new() }
    }

    /// Adds text; the stop string that completes first wins, ties go to the earlier in the list.
    pub fn push(&mut self, text: &str) -> StopScan {
        if self.stops.is_empty() {
            return StopScan::Open(text.to_owned());
        }
        self.held.push_str(text);
        let hit = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(index, stop)| self.held.find(stop.as_str()).map(|at| (at + stop.len(), index, at)))
            .min();
        if let Some((end, index, at)) = hit {
            let keep = if self.include { end } else { at };
            let mut shown = std::mem::take(&mut self.held);
            shown.truncate(keep);
            return StopScan::Hit { text: shown, stop: index };
        }
        let hold = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - hold);
        StopScan::Open(std::mem::replace(&mut self.held, rest))
    }

    /// Ends the text and returns what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest suffix of `text` that is a proper prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = stop.len().saturating_sub(1).min(text.len());
    (1..=longest)
        .rev()
        .find(|&len| {
            text.is_char_boundary(text.len() - len)
                && stop.is_char_boundary(len)
                && stop.as_bytes()[..len] == text.as_bytes()[text.len() - len..]
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cuts `whole` after each of the lengths, in order.
    fn pieces<'a, T>(whole: &'a [T], cuts: &[usize]) -> Vec<&'a [T]> {
        let mut rest = whole;
        let mut out = Vec::new();
        for &cut in cuts {
            let (piece, tail) = rest.split_at(cut.min(rest.len()));
            out.push(piece);
            rest = tail;
        }
        out.push(rest);
        out
    }

    /// The definition: the stop string that completes first, the earlier in the list among equals.
    fn first_stop(text: &str, stops: &[String]) -> Option<(usize, usize)> {
        (0..=text.len()).find_map(|end| {
            stops.iter().position(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes())).map(|index| (end, index))
        })
    }

    proptest! {
        #[test]
        fn utf8_pieces_join_to_the_lossy_text(bytes in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select("aé€😀".as_bytes().to_vec())], 0..60), cuts in prop::collection::vec(0usize..5, 0..40)) {
            let mut stream = Utf8Stream::default();
            let mut text: String = pieces(&bytes, &cuts).into_iter().map(|piece| stream.push(piece)).collect();
            text.push_str(&stream.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn stop_strings_cut_where_the_definition_says(text in "[ab€]{0,24}", stops in prop::collection::vec("[ab€]{1,4}", 1..4), cuts in prop::collection::vec(0usize..4, 0..24), include in any::<bool>()) {
            let chars: Vec<char> = text.chars().collect();
            let mut matcher = StopMatcher::new(stops.clone(), include);
            let (mut shown, mut fed, mut hit) = (String::new(), String::new(), None);
            for piece in pieces(&chars, &cuts) {
                let piece: String = piece.iter().collect();
                fed.push_str(&piece);
                match matcher.push(&piece) {
                    StopScan::Open(text) => shown.push_str(&text),
                    StopScan::Hit { text, stop } => {
                        shown.push_str(&text);
                        hit = Some(stop);
                        break;
                    }
                }
                let held = &fed[shown.len()..];
                let due = stops.iter().map(|stop| overlap(&fed, stop)).max().unwrap_or(0);
                prop_assert_eq!(held.len(), due, "holds back {:?} of {:?}", held, fed);
            }
            match first_stop(&text, &stops) {
                None => {
                    shown.push_str(&matcher.finish());
                    prop_assert_eq!((shown, hit), (text, None));
                }
                Some((end, index)) => {
                    let keep = if include { end } else { end - stops[index].len() };
                    prop_assert_eq!((shown.as_str(), hit), (&text[..keep], Some(index)));
                }
            }
        }
    }

    #[test]
    fn a_character_split_over_tokens_comes_out_whole() {
        let mut stream = Utf8Stream::default();
        let parts: Vec<String> = "😀".as_bytes().chunks(1).map(|byte| stream.push(byte)).collect();
        assert_eq!(parts, ["", "", "", "😀"]);
    }

    #[test]
    fn parts_of_a_stop_string_are_not_shown() {
        let mut matcher = StopMatcher::new(vec!["DEFG".into()], false);
        let scans: Vec<StopScan> = ["abc", "D", "EF", "G tail"].into_iter().map(|text| matcher.push(text)).collect();
        let open = |text: &str| StopScan::Open(text.into());
        assert_eq!(scans, [open("abc"), open(""), open(""), StopScan::Hit { text: String::new(), stop: 0 }]);
    }

    /// A token is a byte; 0 starts a prompt.
    struct Bytes;

    impl TextCodec for Bytes {
        fn encode(&self, text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
            Ok(text.bytes().map(TokenId::from).collect())
        }

        fn token_bytes(&self, _id: TokenId) -> Option<&[u8]> {
            None
        }

        fn is_special(&self, id: TokenId) -> bool {
            id == 0
        }

        fn vocab_size(&self) -> u32 {
            256
        }

        fn bos(&self) -> Option<TokenId> {
            Some(0)
        }

        fn strips_leading_space(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_raw_prompt_starts_with_one_start_token() {
        for (text, ids) in [("", vec![0]), ("a", vec![0, 97]), ("\0a", vec![0, 97]), ("a\0", vec![0, 97, 0])] {
            assert_eq!(Bytes.encode_prompt(text, SpecialTokens::Parse), Ok(ids), "{text:?}");
        }
    }
}
