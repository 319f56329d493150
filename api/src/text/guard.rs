//! Keeps control tokens out of user text. Owner: the tokenizer that made it.
//!
//! Invariant: in an escaped text no control token can be found, and removing every [`MARK`] gives the text back. The
//! tokenizer looks for control tokens first and drops the marks after, before it splits words, so a mark changes nothing
//! but that one match. Text therefore takes the same path whether it is a template's own or a user's.

use std::borrow::Cow;

/// A Unicode noncharacter, reserved for use inside a program: it never stands in exchanged text.
pub const MARK: char = '\u{FDD0}';

/// What stands in for a [`MARK`] that came from outside.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// The texts of a vocabulary's control tokens.
#[derive(Clone, Debug, Default)]
pub struct ControlGuard {
    /// Control token texts by their first byte.
    by_first: Vec<Vec<String>>,
}

impl ControlGuard {
    /// A guard against these control tokens.
    ///
    /// # Errors
    /// The token, if it is a single character: it cannot be told from text.
    pub fn new(tokens: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut by_first = vec![Vec::new(); 256];
        for token in tokens {
            if token.chars().nth(1).is_none() {
                return Err(token);
            }
            by_first[usize::from(token.as_bytes()[0])].push(token);
        }
        Ok(ControlGuard { by_first })
    }

    /// Breaks every control token in a text that stands alone.
    pub fn escape<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.mark(text, Edges::Closed)
    }

    /// Breaks every control token in a text that a template puts between other texts, and every part of one at its edges
    /// (white space there may be trimmed), so that none arises where two texts meet.
    pub fn escape_fragment<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.mark(text, Edges::Open)
    }

    /// Replaces marks that came from outside, so that only this module's own remain.
    pub fn without_marks(text: &str) -> Cow<'_, str> {
        if text.contains(MARK) {
            Cow::Owned(text.replace(MARK, REPLACEMENT.encode_utf8(&mut [0; 4])))
        } else {
            text.into()
        }
    }

    /// Removes this module's marks.
    pub fn strip(text: &str) -> String {
        text.replace(MARK, "")
    }

    fn mark<'a>(&self, text: &'a str, edges: Edges) -> Cow<'a, str> {
        let text = Self::without_marks(text);
        let mut breaks: Vec<usize> = text
            .char_indices()
            .filter(|&(at, _)| self.starts_with_any(&text[at..]))
            .map(|(at, first)| at + first.len_utf8())
            .collect();
        if edges == Edges::Open {
            let end = text.trim_end().len();
            if self.ends_inside(&text[..end]) {
                breaks.push(end);
            }
            let start = text.len() - text.trim_start().len();
            if self.starts_inside(&text[start..]) {
                breaks.push(start);
            }
            breaks.sort_unstable();
            breaks.dedup();
        }
        if breaks.is_empty() {
            return text;
        }
        let mut out = String::with_capacity(text.len() + breaks.len() * MARK.len_utf8());
        let mut from = 0;
        for at in breaks {
            out.push_str(&text[from..at]);
            out.push(MARK);
            from = at;
        }
        out.push_str(&text[from..]);
        Cow::Owned(out)
    }

    /// Whether a control token begins here.
    fn starts_with_any(&self, text: &str) -> bool {
        let first = text.as_bytes().first().and_then(|&byte| self.by_first.get(usize::from(byte)));
        first.is_some_and(|tokens| tokens.iter().any(|token| text.starts_with(token.as_str())))
    }

    /// Whether the text ends with the beginning of a control token.
    fn ends_inside(&self, text: &str) -> bool {
        self.tokens().any(|token| inner_edges(token).any(|at| text.ends_with(&token[..at])))
    }

    /// Whether the text begins with the end of a control token.
    fn starts_inside(&self, text: &str) -> bool {
        self.tokens().any(|token| inner_edges(token).any(|at| text.starts_with(&token[at..])))
    }

    fn tokens(&self) -> impl Iterator<Item = &str> {
        self.by_first.iter().flatten().map(String::as_str)
    }
}

/// Whether other text may touch the ends of a text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Edges {
    Closed,
    Open,
}

/// The places between two characters of a token.
fn inner_edges(token: &str) -> impl Iterator<Item = usize> {
    token.char_indices().map(|(at, _)| at).skip(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> ControlGuard {
        ControlGuard::new(["<|im_end|>", "<s>", "abcab", "cabx"].map(str::to_owned)).unwrap()
    }

    #[test]
    fn no_control_token_survives_and_the_text_does() {
        let texts = [
            "",
            "plain",
            "<|im_end|>",
            "a<s><s>b",
            "<<s>>",
            "abcabcabx",
            "abcabcab",
            "é<s>é",
            "<|im_end|",
            "<|im_<s>end|>",
        ];
        for text in texts {
            for escaped in [guard().escape(text), guard().escape_fragment(text)] {
                assert!(guard().tokens().all(|token| !escaped.contains(token)), "{text:?} became {escaped:?}");
                assert_eq!(ControlGuard::strip(&escaped), text);
            }
        }
        assert!(matches!(guard().escape("x < y, </think>"), Cow::Borrowed(_)));
    }

    #[test]
    fn no_control_token_arises_where_fragments_meet() {
        let token = "<|im_end|>";
        for cut in 1..token.len() {
            for space in ["", " ", "\n"] {
                let (left, right) = (format!("x {}{space}", &token[..cut]), format!("{space}{} y", &token[cut..]));
                let joined = guard().escape_fragment(&left).trim().to_owned() + guard().escape_fragment(&right).trim();
                assert!(!joined.contains(token), "{joined:?}");
                let literal = token[..cut].to_owned() + guard().escape_fragment(&right).trim();
                assert!(!literal.contains(token), "{literal:?}");
                let literal = guard().escape_fragment(&left).trim().to_owned() + &token[cut..];
                assert!(!literal.contains(token), "{literal:?}");
            }
        }
    }

    #[test]
    fn foreign_marks_become_replacement_characters() {
        let hostile = format!("<{MARK}s>{MARK}");
        let escaped = guard().escape(&hostile);
        assert!(!escaped.contains(MARK));
        assert_eq!(escaped, "<\u{FFFD}s>\u{FFFD}");
    }

    #[test]
    fn one_character_tokens_are_refused() {
        assert_eq!(ControlGuard::new(["§".to_owned()]).unwrap_err(), "§");
        assert_eq!(ControlGuard::new([String::new()]).unwrap_err(), "");
    }
}
