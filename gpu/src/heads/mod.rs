//! Learned heads: small networks, or one row of the output layer, that score the step of a model on its device.
//! Owner: the loaded model holds the weights, each runner a seat with scratch. Invariant: the score of a row depends on
//! that row alone, bit for bit, whatever else is in the step.
//!
//! A converted head is a folder with `head.json` ([`HeadConfig`]) and `head.safetensors` (tensors under the names that
//! the authors' code gives them). `tokenrouter convert-router` writes such a folder from a published checkpoint.

mod config;
mod convert;
pub mod math;
mod network;
mod seat;

pub use config::{Class, FORMAT, Family, HeadConfig, Inputs, R2R_CLASSES};
pub use convert::{Conversion, HeadTensor, convert, write};
pub use network::{Network, NetworkInput, Scratch};
pub use seat::{Seat, Source};

use crate::load::LoadError;
use crate::weights::{self, ModelConfig, Weights, WeightsError};
use std::path::{Path, PathBuf};
use tokenrouter_core::ids::TokenId;

/// File names in the folder of a converted head.
pub const CONFIG_FILE: &str = "head.json";
/// The tensors.
pub const WEIGHTS_FILE: &str = "head.safetensors";
/// Longest description, bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The head that a model is loaded with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadSource {
    /// A converted checkpoint.
    Checkpoint {
        /// Its folder.
        path: PathBuf,
        /// What it must be.
        family: Family,
    },
    /// The row of the output layer of this token: its raw logit is taken out of every row before anything else looks at
    /// the logits, so it is never drawn and has no part in entropy, highest logits or log-probabilities. (Co-LLM.)
    Row {
        /// The token.
        token: TokenId,
    },
}

/// A converted head whose files are open and checked.
#[derive(Debug)]
pub struct HeadFiles {
    /// Its folder.
    pub path: PathBuf,
    /// Its description.
    pub config: HeadConfig,
    /// Its tensors: exactly those of [`HeadConfig::tensors`].
    pub weights: Weights,
}

/// Reads the description of a converted head.
///
/// # Errors
/// [`WeightsError`] naming the file and the key.
pub fn describe(folder: &Path) -> Result<HeadConfig, WeightsError> {
    let path = folder.join(CONFIG_FILE);
    let len = std::fs::metadata(&path).map_err(|reason| WeightsError::io(&path, reason))?.len();
    if len > CONFIG_BYTES_MAX {
        return Err(WeightsError::invalid(&path, "file", format!("has {len} bytes, the limit is {CONFIG_BYTES_MAX}")));
    }
    let bytes = std::fs::read(&path).map_err(|reason| WeightsError::io(&path, reason))?;
    let config: HeadConfig =
        serde_json::from_slice(&bytes).map_err(|error| WeightsError::invalid(&path, "json", error.to_string()))?;
    config.check().map_err(|reason| WeightsError::invalid(&path, "key", reason))?;
    Ok(config)
}

/// Opens a converted head.
///
/// # Errors
/// [`WeightsError`] naming the file and the key or tensor: one that is missing, of another shape, or not of this network.
pub fn open(folder: &Path) -> Result<HeadFiles, WeightsError> {
    let config = describe(folder)?;
    let file = folder.join(WEIGHTS_FILE);
    let weights = weights::open_safetensors(&file)?;
    let expected = config.tensors();
    for (name, shape) in &expected {
        weights.expect(name, *shape)?;
    }
    if let Some(extra) = weights.names().find(|name| !expected.iter().any(|(known, _)| known == name)) {
        let reason =
            format!("is not a tensor of {} with these sizes; convert the checkpoint again", config.class.name());
        return Err(WeightsError::invalid(&file, format!("tensor {extra:?}"), reason));
    }
    Ok(HeadFiles { path: folder.to_owned(), config, weights })
}

/// Opens the network of a head and checks that it fits the model; nothing for a row of the output layer.
///
/// # Errors
/// [`LoadError::HeadWidth`] with both widths, [`LoadError::Head`] for everything else.
pub fn open_for(config: &ModelConfig, source: Option<&HeadSource>) -> Result<Option<HeadFiles>, LoadError> {
    let (folder, family) = match source {
        None => return Ok(None),
        Some(HeadSource::Row { token }) if (*token as usize) < config.vocab => return Ok(None),
        Some(HeadSource::Row { token }) => {
            let reason = format!("is row {token} of the output layer, which has {}; name a token it has", config.vocab);
            return Err(LoadError::Head { reason });
        }
        Some(HeadSource::Checkpoint { path, family }) => (path, *family),
    };
    let files = open(folder).map_err(|error| LoadError::Head { reason: error.to_string() })?;
    let head = &files.config;
    if head.family != family {
        let (found, wanted) = (head.family.name(), family.name());
        let reason = format!("{}: is of family {found}, the algorithm needs {wanted}", folder.display());
        return Err(LoadError::Head { reason });
    }
    let inputs = head.class.inputs();
    let widths = [
        ("hidden rows", inputs.hidden, head.hidden_size, config.hidden),
        ("token embeddings", inputs.token, head.embedding_size, config.hidden),
    ];
    if let Some(&(what, _, head, model)) = widths.iter().find(|(_, read, head, model)| *read && head != model) {
        return Err(LoadError::HeadWidth { folder: folder.clone(), what, head, model });
    }
    if head.logits_size > config.vocab {
        let (top, vocab) = (head.logits_size, config.vocab);
        let reason = format!("{}: reads the {top} highest logits of a model with {vocab}", folder.display());
        return Err(LoadError::Head { reason });
    }
    Ok(Some(files))
}

#[cfg(test)]
mod tests;
