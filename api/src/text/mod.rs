//! Text of a model: vocabulary, chat template, and the way both are found in its files.
//!
//! Owner: whoever serves the model; the actors see it as [`tokenrouter_core::text::TextCodec`]. Invariant: nothing a user
//! writes becomes a control token unless the caller asks for it; a rendered chat is encoded without added tokens, so that
//! a start token stands once.

mod bytes;
mod description;
mod gguf_vocab;
mod grammar;
mod guard;
mod pre_tokenizers;
mod python;
mod template;
mod template_tools;
mod tokenizer;
pub mod tools;

pub use grammar::Grammars;
pub use guard::ControlGuard;
pub use template::{ChatInput, ChatTemplate, NamedTokens, TemplateError};
pub use template_tools::ToolSupport;
pub use tokenizer::Tokenizer;

use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::text::{TextCodec, TextError};
use tokenrouter_gpu::weights::{Gguf, HfText, ModelFiles, TextSource};

/// A tokenizer or chat template cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", file.display())]
pub struct TextLoadError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong and what to do.
    pub reason: String,
}

/// A chat cannot become a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The model has no chat template.
    #[error("the model has no chat template; use /v1/completions, or add chat_template.jinja to its directory")]
    NoTemplate,
    /// The template refused or failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer refused.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// Vocabulary and chat template of a model.
#[derive(Clone, Debug)]
pub struct ModelText {
    /// The vocabulary.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template, if the model has one.
    pub template: Option<Arc<ChatTemplate>>,
}

impl ModelText {
    /// Reads vocabulary and chat template of an opened model.
    ///
    /// # Errors
    /// The file and what is wrong with it.
    pub fn load(files: &ModelFiles) -> Result<Self, TextLoadError> {
        let eos = files.generation.eos.first().copied();
        match &files.text {
            TextSource::Hf(text) => from_hf(text, files.generation.bos, eos),
            TextSource::Gguf(gguf) => from_gguf(gguf, files.generation.bos, eos),
        }
    }

    /// The prompt of a chat: rendered, and encoded without added tokens.
    ///
    /// # Errors
    /// [`ChatError`]; its text is fit for the user.
    pub fn chat(&self, input: &ChatInput) -> Result<Vec<TokenId>, ChatError> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        let escaped = template.render(input, self.tokenizer.guard())?;
        Ok(self.tokenizer.encode_escaped(&escaped)?)
    }
}

fn from_hf(text: &HfText, bos: Option<TokenId>, eos: Option<TokenId>) -> Result<ModelText, TextLoadError> {
    let description = read_json(&text.tokenizer)?;
    let config = text.tokenizer_config.as_deref().map(read_json).transpose()?.unwrap_or(Json::Null);
    let asked = bos.filter(|_| config["add_bos_token"].as_bool() == Some(true));
    let start = if config["add_bos_token"].as_bool() == Some(false) {
        None
    } else {
        description::prompt_start(&description).or(asked)
    };
    let tokenizer = Tokenizer::from_description(description, start).map_err(|reason| fault(&text.tokenizer, reason))?;
    let named = |key: &str| config[key].as_str().or(config[key]["content"].as_str()).map(str::to_owned);
    let tokens = NamedTokens {
        bos: named("bos_token").or_else(|| token_text(&tokenizer, bos)),
        eos: named("eos_token").or_else(|| token_text(&tokenizer, eos)),
    };
    let (file, source) = match (&text.chat_template, &text.tokenizer_config) {
        (Some(path), _) => (path, Some(read_text(path)?)),
        (None, Some(path)) => (path, config_template(&config)),
        (None, None) => (&text.tokenizer, None),
    };
    finish(file, tokenizer, source, tokens)
}

fn from_gguf(gguf: &Gguf, bos: Option<TokenId>, eos: Option<TokenId>) -> Result<ModelText, TextLoadError> {
    let path = gguf.path();
    let vocab = gguf_vocab::read(gguf.metadata()).map_err(|reason| fault(path, reason))?;
    let tokenizer =
        Tokenizer::from_description(vocab.tokenizer, vocab.prompt_start).map_err(|reason| fault(path, reason))?;
    let tokens = NamedTokens { bos: token_text(&tokenizer, bos), eos: token_text(&tokenizer, eos) };
    let source = gguf_vocab::text(gguf.metadata(), "tokenizer.chat_template").map_err(|reason| fault(path, reason))?;
    finish(path, tokenizer, source.map(str::to_owned), tokens)
}

fn finish(
    file: &Path,
    tokenizer: Tokenizer,
    source: Option<String>,
    tokens: NamedTokens,
) -> Result<ModelText, TextLoadError> {
    let template = source.map(|source| ChatTemplate::new(&source, tokens)).transpose();
    let template = template.map_err(|error| fault(file, error.to_string()))?;
    Ok(ModelText { tokenizer: Arc::new(tokenizer), template: template.map(Arc::new) })
}

/// The template inside `tokenizer_config.json`: a text, or a list of named ones of which `default` counts.
fn config_template(config: &Json) -> Option<String> {
    match &config["chat_template"] {
        Json::String(source) => Some(source.clone()),
        Json::Array(list) => {
            let default = list.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

/// Text of a token that templates name.
fn token_text(tokenizer: &Tokenizer, id: Option<TokenId>) -> Option<String> {
    Some(String::from_utf8_lossy(tokenizer.token_bytes(id?)?).into_owned())
}

fn fault(file: &Path, reason: impl Into<String>) -> TextLoadError {
    TextLoadError { file: file.to_owned(), reason: reason.into() }
}

fn read_text(path: &Path) -> Result<String, TextLoadError> {
    std::fs::read_to_string(path).map_err(|error| fault(path, error.to_string()))
}

fn read_json(path: &Path) -> Result<Json, TextLoadError> {
    serde_json::from_str(&read_text(path)?).map_err(|error| fault(path, error.to_string()))
}

#[cfg(test)]
mod tests;
