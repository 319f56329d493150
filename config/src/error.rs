//! Errors of a launch file: one line, `path:line:column: what is wrong; how to put it right`.
//! Owner: the reader. Invariant: every error names the file, and the line whenever there is one.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// A position in a text file, both parts counted from 1; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
}

impl Place {
    /// Where byte `offset` of `text` lies.
    pub(crate) fn of(text: &str, offset: usize) -> Place {
        let mut end = offset.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let before = &text[..end];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Place { line: before.matches('\n').count() + 1, column: before[line_start..].chars().count() + 1 }
    }
}

/// Something is wrong with a launch file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The file.
    pub path: PathBuf,
    /// Where in the file, unless the file as a whole is the matter.
    pub place: Option<Place>,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(place) = self.place {
            write!(f, ":{}:{}", place.line, place.column)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for ConfigError {}

/// Where each key of a file stands, by dotted path (`models[1].threads`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places {
    pub(crate) path: PathBuf,
    pub(crate) by_key: BTreeMap<String, Place>,
}

impl Places {
    /// An error at `key`; a key the file does not contain (a default) is reported at the table it would stand in.
    pub(crate) fn error(&self, key: &str, message: impl fmt::Display) -> ConfigError {
        let mut at = key;
        let place = loop {
            if let Some(place) = self.by_key.get(at) {
                break Some(*place);
            }
            match at.rfind(['.', '[']) {
                Some(cut) => at = &at[..cut],
                None => break None,
            }
        };
        ConfigError { path: self.path.clone(), place, message: one_line(&message.to_string()) }
    }
}

/// An error about the file as a whole.
pub(crate) fn file_error(path: &Path, message: impl fmt::Display) -> ConfigError {
    ConfigError { path: path.to_owned(), place: None, message: one_line(&message.to_string()) }
}

/// Line breaks turned into spaces: an error is one line, whoever worded it.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
