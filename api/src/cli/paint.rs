//! Text coloured by the model that wrote it. Owner: one answer. Invariant: the text is passed through unchanged, byte for
//! byte; colours only stand between its characters.

use std::collections::VecDeque;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::TokenReport;
use tokenrouter_core::text::TextCodec;

/// One ANSI style per model: the entry model plain, so that what others wrote stands out.
const STYLES: [&str; 6] = ["", "1;35", "1;33", "1;36", "1;32", "1;34"];

fn style(model: ModelIdx) -> &'static str {
    STYLES[model.index() % STYLES.len()]
}

/// A word in a model's colour.
pub fn painted(text: &str, model: ModelIdx, color: bool) -> String {
    match style(model) {
        "" => text.to_owned(),
        _ if !color => text.to_owned(),
        style => format!("\x1b[{style}m{text}\x1b[0m"),
    }
}

/// Follows an answer and colours its text.
#[derive(Debug)]
pub struct Painter {
    color: bool,
    /// Bytes of tokens whose text has not been shown yet, oldest first.
    ahead: VecDeque<(ModelIdx, usize)>,
    first: bool,
}

impl Painter {
    /// A painter for one answer.
    pub fn new(color: bool) -> Painter {
        Painter { color, ahead: VecDeque::new(), first: true }
    }

    /// The text of an event, coloured. Text lags its tokens, so what a token's bytes are is remembered until they show.
    pub fn paint(&mut self, text: &str, tokens: &[TokenReport], codec: &dyn TextCodec) -> String {
        if !self.color {
            return text.to_owned();
        }
        for token in tokens {
            let shown = if codec.is_special(token.id) { None } else { codec.token_bytes(token.id) };
            let mut length = shown.map_or(0, <[u8]>::len);
            if self.first && length > 0 {
                let stripped = codec.strips_leading_space() && shown.is_some_and(|bytes| bytes.starts_with(b" "));
                length -= usize::from(stripped);
                self.first = false;
            }
            self.ahead.push_back((token.model, length));
        }
        let mut out = String::new();
        let mut last = None;
        for character in text.chars() {
            let model = self.take(character.len_utf8());
            if last != Some(model) {
                out.push_str(if last.is_some_and(|last| !style(last).is_empty()) { "\x1b[0m" } else { "" });
                if !style(model).is_empty() {
                    out.push_str(&format!("\x1b[{}m", style(model)));
                }
                last = Some(model);
            }
            out.push(character);
        }
        out.push_str(if last.is_some_and(|last| !style(last).is_empty()) { "\x1b[0m" } else { "" });
        out
    }

    /// Who wrote the next character of so many bytes: whoever wrote its last byte.
    fn take(&mut self, mut bytes: usize) -> ModelIdx {
        let mut model = ModelIdx(0);
        while bytes > 0 {
            let Some((writer, left)) = self.ahead.front_mut() else { break };
            model = *writer;
            let taken = bytes.min(*left);
            (*left, bytes) = (*left - taken, bytes - taken);
            if *left == 0 {
                self.ahead.pop_front();
            }
        }
        model
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::ids::TokenId;
    use tokenrouter_core::text::{SpecialTokens, TextError};

    /// Token i stands for the i-th of a few pieces.
    struct Pieces(&'static [&'static [u8]]);

    impl TextCodec for Pieces {
        fn encode(&self, _: &str, _: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
            Err(TextError("not needed".into()))
        }
        fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
            self.0.get(id as usize).copied()
        }
        fn is_special(&self, id: TokenId) -> bool {
            id == 0
        }
        fn vocab_size(&self) -> u32 {
            self.0.len() as u32
        }
        fn bos(&self) -> Option<TokenId> {
            None
        }
        fn strips_leading_space(&self) -> bool {
            true
        }
    }

    fn report(id: TokenId, model: u8) -> TokenReport {
        TokenReport { id, model: ModelIdx(model), entropy: None, logprobs: None }
    }

    #[test]
    fn colours_follow_the_writer_of_each_character() {
        // A character of three bytes written by two models belongs to the one that completed it.
        let codec = Pieces(&[b"<end>", b" one", b" 4", &[0xe2, 0x82], &[0xac], b"!"]);
        let mut painter = Painter::new(true);
        assert_eq!(painter.paint("one", &[report(1, 0)], &codec), "one");
        assert_eq!(painter.paint("", &[report(2, 1), report(3, 0)], &codec), "");
        let rest = painter.paint(" 4€!", &[report(4, 1), report(5, 0), report(0, 1)], &codec);
        assert_eq!(rest, "\x1b[1;35m 4€\x1b[0m!");
    }

    #[test]
    fn without_colours_nothing_is_added() {
        let codec = Pieces(&[b"<end>", b"a"]);
        assert_eq!(Painter::new(false).paint("a", &[report(1, 1)], &codec), "a");
        assert_eq!(painted("large", ModelIdx(1), false), "large");
        assert_eq!(painted("large", ModelIdx(1), true), "\x1b[1;35mlarge\x1b[0m");
        assert_eq!(painted("small", ModelIdx(0), true), "small");
    }
}
