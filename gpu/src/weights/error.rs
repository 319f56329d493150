//! What can be wrong with a model's files. Owner: the loaders. Invariant: every error names the file and, where there
//! is one, the tensor or key, and says what to do.

use std::path::{Path, PathBuf};

/// Result of a loader.
pub type Result<T> = std::result::Result<T, WeightsError>;

/// A model's files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The operating system refused.
    #[error("{}: {reason}", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// The system's own words.
        reason: std::io::Error,
    },
    /// A part of the file lies beyond its end.
    #[error("{}: truncated: {what} ends at byte {end} but the file has {len}; download the file again", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The key, tensor or structure that does not fit.
        what: String,
        /// First byte behind it.
        end: u64,
        /// Length of the file in bytes.
        len: u64,
    },
    /// The file is sound as far as it was read, but no model here runs it.
    #[error("{}: unknown architecture {name:?}; supported are {supported}", file.display())]
    UnknownArchitecture {
        /// The file that names it.
        file: PathBuf,
        /// The architecture as the file spells it.
        name: String,
        /// The architectures that can be loaded.
        supported: String,
    },
    /// A tensor is stored in a format that cannot be multiplied.
    #[error("{}: tensor {tensor:?}: format {format} is not supported; use one of {supported}", file.display())]
    UnsupportedFormat {
        /// The file.
        file: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The format, by name where it is known.
        format: String,
        /// The formats that can be loaded.
        supported: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error("{}: tensor {tensor:?} is missing; {remedy}", file.display())]
    MissingTensor {
        /// The file or directory.
        file: PathBuf,
        /// Neutral name of the tensor.
        tensor: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{}: tensor {tensor:?} has shape {found:?} but the configuration needs {expected:?}", file.display())]
    Shape {
        /// The file or directory.
        file: PathBuf,
        /// Name of the tensor in the file.
        tensor: String,
        /// Shape in the file, outermost dimension first.
        found: Vec<u64>,
        /// Shape the configuration implies, outermost dimension first.
        expected: Vec<u64>,
    },
    /// A required key is absent.
    #[error("{}: key {key:?} is missing; the file is incomplete or of another kind", file.display())]
    MissingKey {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
    },
    /// Something is there and wrong.
    #[error("{}: {what}: {reason}", file.display())]
    Invalid {
        /// The file.
        file: PathBuf,
        /// The key, tensor or structure.
        what: String,
        /// What is wrong and what to do.
        reason: String,
    },
}

impl WeightsError {
    /// Something in `file` that is there and wrong.
    pub(crate) fn invalid(file: &Path, what: impl Into<String>, reason: impl Into<String>) -> Self {
        WeightsError::Invalid { file: file.to_owned(), what: what.into(), reason: reason.into() }
    }

    /// A failed system call on `file`.
    pub(crate) fn io(file: &Path, reason: std::io::Error) -> Self {
        WeightsError::Io { file: file.to_owned(), reason }
    }
}
