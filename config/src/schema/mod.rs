//! The one table of what a launch file may say: every key with its type, range, default and meaning. Owner: this crate.
//! Invariant: the reader opens tables with these keys and validation takes ranges from here, so nothing can be read that is
//! not listed; the tests hold defaults and words to what the reader does. The JSON Schema and the reference are made of it.

mod json;
mod keys;
#[cfg(test)]
mod tests;

pub use json::json;
pub use keys::TOP;
pub(crate) use keys::{BATCHING, CUDA, FAULTS, MESSAGE_FAULT, MODEL, MODEL_CUDA, ROUTER, SERVER, STEP_FAULT, TLS};

/// A table of a launch file.
#[derive(Debug)]
pub struct Table {
    /// As a launch file writes it, `[[models]]`; of the whole file `the launch file`.
    pub title: &'static str,
    /// What it is about.
    pub about: &'static str,
    /// What may stand in it, and nothing else.
    pub keys: &'static [Key],
}

impl Table {
    /// The names of its keys.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.keys.iter().map(|key| key.name).collect()
    }
}

/// A key of a table.
#[derive(Debug)]
pub struct Key {
    /// As a launch file writes it.
    pub name: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// What it is when it is not given.
    pub default: Default,
    /// What it means, in Markdown.
    pub about: &'static str,
}

/// Which values a key takes.
#[derive(Debug)]
pub enum Kind {
    /// A text with something in it.
    Text,
    /// A name in the API: 1 to 128 characters, no white space.
    Name,
    /// A file; a relative path starts at the launch file.
    File,
    /// Where a model is: folder, `.gguf` file, or `hf:owner/name[@revision][:file.gguf]`.
    Source,
    /// What runs a model: `cpu`, `cuda:0` to `cuda:63`.
    Device,
    /// `true` or `false`.
    Flag,
    /// A whole number, both bounds included; `most` is `u64::MAX` where only the width of the number bounds it.
    Whole {
        /// Lowest.
        least: u64,
        /// Highest.
        most: u64,
    },
    /// 0, which stands for no bound, or a whole number as above.
    ZeroOr {
        /// Lowest but for 0.
        least: u64,
        /// Highest.
        most: u64,
    },
    /// A number of bytes, or a text such as `"512 MiB"`.
    Amount {
        /// Fewest bytes.
        least: u64,
        /// Most bytes.
        most: u64,
    },
    /// One of these words, each with its meaning.
    Word(&'static [(&'static str, &'static str)]),
    /// A list of different whole numbers, not empty.
    Wholes,
    /// A list of texts.
    Texts,
    /// A table from the name of a model to a whole number from 1 on.
    PerModel {
        /// Highest.
        most: u64,
    },
    /// A table that somebody else checks.
    Open,
    /// A table.
    Table(&'static Table),
    /// An array of tables.
    Tables(&'static Table),
}

/// What a key is when it is not given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Default {
    /// It must be given.
    Required,
    /// As these words say.
    Words(&'static str),
    /// This text.
    Text(&'static str),
    /// This number.
    Whole(u64),
    /// This one.
    Flag(bool),
    /// These bytes, written with a unit.
    Amount(&'static str),
}

/// The range of a whole number or an amount by its dotted key, such as `models[2].threads`.
pub(crate) fn range(path: &str) -> Option<(u64, u64)> {
    let mut table = &TOP;
    let mut found = None;
    for part in path.split('.') {
        let name = part.split('[').next().unwrap_or(part);
        match &table.keys.iter().find(|key| key.name == name)?.kind {
            Kind::Table(inner) | Kind::Tables(inner) => table = inner,
            Kind::Whole { least, most } | Kind::ZeroOr { least, most } | Kind::Amount { least, most } => {
                found = Some((*least, *most));
            }
            _ => return None,
        }
    }
    found
}
