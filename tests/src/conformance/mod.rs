//! What the conformance tests share: fixtures, a model driven step by step, token ids, a whole runtime over real models.
//! Owner: the tests in `tests/tests/`. Invariant: expected values come from fixtures that other programs computed, or from
//! a slower way through the engine itself; nothing here decides what is right.

mod dequantised;
mod logits;
mod serving;
mod tokens;
mod walker;

pub use dequantised::{dequantised, rounded};
pub use logits::{Answer, Distance, LogitsFixture, Prompt, Tolerance, check_logits};
pub use serving::{Answered, Setup, ask, ask_all, assert_idle, serve};
pub use tokens::{Reference, check_tokens};
pub use walker::{Fed, Walker};

use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use tokenrouter_gpu::load::{LoadOptions, LoadedModel, load_files};
use tokenrouter_gpu::weights::{self, ModelFiles};

/// A file under `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// A model of the embedded demo pair: `small` or `large`.
pub fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/demo").join(name)
}

/// Reads a JSON fixture.
///
/// # Panics
/// When it is missing or not of this layout: a failed test.
pub fn read_fixture<T: DeserializeOwned>(name: &str) -> T {
    let path = fixture(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Opens a model's files.
///
/// # Panics
/// When they cannot be used: a failed test.
pub fn open(path: &Path) -> ModelFiles {
    weights::open(path).unwrap_or_else(|error| panic!("{error}"))
}

/// Loads a model, ids beyond its vocabulary never drawn.
///
/// # Panics
/// When it cannot be loaded: a failed test.
pub fn load(files: &ModelFiles, options: LoadOptions) -> LoadedModel {
    let inspection = files.inspect().unwrap_or_else(|error| panic!("{error}"));
    let options = LoadOptions { real_vocab: Some(inspection.tokens.len), ..options };
    load_files(files, &options, &mut |_| ()).unwrap_or_else(|error| panic!("{error}"))
}
