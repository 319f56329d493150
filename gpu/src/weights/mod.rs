//! Weights and configuration of a model, from a GGUF file or an HF directory, behind one neutral view.
//!
//! Owner: whoever opened the model; the executor borrows tensors from it. Invariant: opening reads headers and tables only
//! (tensor data stays in mapped files), and what opens is complete: every tensor of the configuration exists, inside its
//! file, with its shape. A file is never trusted: counts, lengths and offsets are checked before use.

mod architectures;
mod error;

mod gguf;
mod gguf_model;
mod hf;
mod json;
mod metadata;
mod model_config;
mod names;
mod rope;
mod safetensors;
pub mod synth;
mod tensor;
mod tokens;
pub mod torch;

pub use architectures::{ARCHITECTURES, Architecture};
pub use error::{Result, WeightsError};

pub use gguf::Gguf;
pub use hf::HfText;
pub use metadata::{Metadata, Value};
pub use model_config::{GenerationDefaults, ModelConfig};
pub use rope::{Rope, RopeFrequencies, RopeLayout, RopeScaling};
pub use tensor::{MappedFile, Tensor, Weights};
pub use tokens::{GgufToken, TokenDigest, TokenTable, gguf_tokens};

use std::path::Path;
use std::sync::Arc;
use tokenrouter_kernels::quant::Format;

/// A model's files, opened and checked; tensor data is not read yet.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    /// Shape and constants.
    pub config: ModelConfig,
    /// Stop tokens and sampling defaults.
    pub generation: GenerationDefaults,
    /// Where vocabulary and chat template come from.
    pub text: TextSource,
    /// The tensors.
    pub weights: Weights,
}

/// Where vocabulary and chat template come from.
#[derive(Clone, Debug)]
pub enum TextSource {
    /// Files of an HF directory.
    Hf(HfText),
    /// Metadata of a GGUF file.
    Gguf(Arc<Gguf>),
}

/// What can be known of a model without loading it.
#[derive(Clone, Debug, PartialEq)]
pub struct Inspection {
    /// Shape and constants.
    pub config: ModelConfig,
    /// Bytes of all tensors as stored.
    pub weight_bytes: u64,
    /// Bytes per storage format, largest first.
    pub formats: Vec<(Format, u64)>,
    /// Real tokens.
    pub tokens: TokenTable,
}

/// Opens a GGUF file, or a directory with `config.json`, `tokenizer.json` and safetensors.
///
/// # Errors
/// Any [`WeightsError`]; it names the file and the key or tensor.
pub fn open(path: &Path) -> Result<ModelFiles> {
    let kind = std::fs::metadata(path).map_err(|reason| WeightsError::io(path, reason))?;
    if kind.is_dir() {
        let hf::HfModel { config, generation, text, weights } = hf::open(path)?;
        return Ok(ModelFiles { config, generation, text: TextSource::Hf(text), weights });
    }
    let gguf = Arc::new(Gguf::open(path)?);
    let (config, generation, weights) = gguf_model::read(&gguf)?;
    Ok(ModelFiles { config, generation, text: TextSource::Gguf(gguf), weights })
}

/// Everything a check needs, without touching tensor data: all faults that [`open`] finds are found here too.
///
/// # Errors
/// As [`open`], and a vocabulary that cannot be read or does not fit the embedding.
pub fn inspect(path: &Path) -> Result<Inspection> {
    open(path)?.inspect()
}

impl ModelFiles {
    /// Summary of the opened files; reads the vocabulary but no tensor data.
    ///
    /// # Errors
    /// A vocabulary that cannot be read, or that has more tokens than the embedding has rows.
    pub fn inspect(&self) -> Result<Inspection> {
        let tokens = self.tokens(None)?;
        let file = match &self.text {
            TextSource::Hf(text) => text.tokenizer.as_path(),
            TextSource::Gguf(gguf) => gguf.path(),
        };
        if tokens.len as usize > self.config.vocab {
            let reason = format!("has {} tokens for {} rows of the embedding", tokens.len, self.config.vocab);
            return Err(WeightsError::invalid(file, "vocabulary", reason));
        }
        Ok(Inspection {
            config: self.config.clone(),
            weight_bytes: self.weights.total_bytes(),
            formats: self.weights.formats(),
            tokens,
        })
    }

    /// The real tokens as they would be without the token of this text (the extra row of a Co-LLM model).
    ///
    /// # Errors
    /// A vocabulary that cannot be read.
    pub fn tokens_without(&self, text: &str) -> Result<TokenTable> {
        self.tokens(Some(text))
    }

    fn tokens(&self, without: Option<&str>) -> Result<TokenTable> {
        match &self.text {
            TextSource::Hf(text) => TokenTable::of_hf(&text.tokenizer, without),
            TextSource::Gguf(gguf) => TokenTable::of_gguf(gguf.path(), gguf.metadata(), without),
        }
    }
}

/// Maps one safetensors file and lists its tensors under the names they have there.
///
/// # Errors
/// As [`open`].
pub fn open_safetensors(path: &Path) -> Result<Weights> {
    let file = MappedFile::open(path)?;
    let entries = safetensors::entries(&file, 0)?;
    Weights::new(path, vec![file], entries, |name| Some(name.to_owned()))
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
