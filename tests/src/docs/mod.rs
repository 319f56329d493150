//! The documentation as something to test: its pages, the code in them, their links, and the pages that are made from the
//! program itself. Owner: `tests/tests/docs.rs`. Invariant: every page of docs/ and the Markdown files of the root count,
//! without a list of exceptions.

pub mod api;
pub mod links;
pub mod pages;
pub mod reference;
pub mod shell;

use std::path::{Path, PathBuf};

/// The root of the workspace.
///
/// # Panics
/// Never: the crate lies in it.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}
