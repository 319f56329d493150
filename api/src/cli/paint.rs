//! Text coloured by the model that wrote it. Owner: one answer. Invariant: the text is passed through unchanged, byte for
//! byte; colours only stand between its characters.

use std::collections::VecDeque;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::TokenReport;
use tokenrouter_core::text::TextCodec;

/// A colour per model after the entry model, which stays plain so that what others wrote stands out. The numbers are those
/// of the 256 colours that every terminal has in common: unlike the first 16, which follow the user's theme and are made for
/// one background, these have enough contrast with white and with black (a test computes it).
const COLORS: [u8; 5] = [163, 130, 29, 63, 30];

fn color_of(model: ModelIdx) -> Option<u8> {
    let others = model.index().checked_sub(1)?;
    // With more models than colours the entry model's plainness is not used again.
    Some(COLORS[others % COLORS.len()])
}

/// Red, green and blue of a model's colour; none for the entry model.
pub fn rgb(model: ModelIdx) -> Option<(u8, u8, u8)> {
    // Colours 16 to 231 are a cube of six steps a side.
    let place = color_of(model)?.checked_sub(16)?;
    let level = |step: u8| if step == 0 { 0 } else { 55 + 40 * step };
    Some((level(place / 36), level(place / 6 % 6), level(place % 6)))
}

/// A word in a model's colour.
pub fn painted(text: &str, model: ModelIdx, color: bool) -> String {
    match color_of(model).filter(|_| color && !text.is_empty()) {
        None => text.to_owned(),
        Some(number) => format!("\x1b[1;38;5;{number}m{text}\x1b[0m"),
    }
}

/// Follows an answer and says who wrote its text.
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
        self.runs(text, tokens, codec).iter().map(|(model, run)| painted(run, *model, true)).collect()
    }

    /// The text of an event, cut where the writer changes.
    pub fn runs(&mut self, text: &str, tokens: &[TokenReport], codec: &dyn TextCodec) -> Vec<(ModelIdx, String)> {
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
        let mut runs: Vec<(ModelIdx, String)> = Vec::new();
        for character in text.chars() {
            let model = self.take(character.len_utf8());
            match runs.last_mut() {
                Some((last, run)) if *last == model => run.push(character),
                _ => runs.push((model, character.to_string())),
            }
        }
        runs
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
        TokenReport { id, model: ModelIdx(model), entropy: None, dropped: None, logprobs: None }
    }

    #[test]
    fn colours_follow_the_writer_of_each_character() {
        // A character of three bytes written by two models belongs to the one that completed it.
        let codec = Pieces(&[b"<end>", b" one", b" 4", &[0xe2, 0x82], &[0xac], b"!"]);
        let mut painter = Painter::new(true);
        assert_eq!(painter.paint("one", &[report(1, 0)], &codec), "one");
        assert_eq!(painter.paint("", &[report(2, 1), report(3, 0)], &codec), "");
        let rest = painter.paint(" 4€!", &[report(4, 1), report(5, 0), report(0, 1)], &codec);
        assert_eq!(rest, "\x1b[1;38;5;163m 4€\x1b[0m!");
    }

    #[test]
    fn without_colours_nothing_is_added() {
        let codec = Pieces(&[b"<end>", b"a"]);
        assert_eq!(Painter::new(false).paint("a", &[report(1, 1)], &codec), "a");
        assert_eq!(painted("large", ModelIdx(1), false), "large");
        assert_eq!(painted("large", ModelIdx(1), true), "\x1b[1;38;5;163mlarge\x1b[0m");
        assert_eq!(painted("small", ModelIdx(0), true), "small");
    }
    /// Contrast as WCAG 2 defines it; 4.5 is asked of small text, 3 of bold text.
    #[test]
    fn colours_are_legible_on_white_and_on_black() {
        let linear = |value: u8| match f64::from(value) / 255.0 {
            small if small <= 0.04045 => small / 12.92,
            value => ((value + 0.055) / 1.055).powf(2.4),
        };
        let mut seen = Vec::new();
        for index in 1..=COLORS.len() {
            let (r, g, b) = rgb(ModelIdx(index as u8)).expect("a colour");
            let luminance = 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
            let (on_white, on_black) = (1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05);
            assert!(on_white >= 4.3 && on_black >= 4.3, "{index}: {on_white:.2} and {on_black:.2}");
            assert!(!seen.contains(&(r, g, b)), "models can be told apart");
            seen.push((r, g, b));
        }
        assert_eq!((rgb(ModelIdx(0)), rgb(ModelIdx(1))), (None, Some((215, 0, 175))));
    }
}
