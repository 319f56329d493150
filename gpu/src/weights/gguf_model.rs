//! From GGUF metadata to a model's configuration. Owner: the loaded model. Invariant: as for HF directories, a setting
//! that changes the computation is carried over or refused by name.

use super::architectures::{ARCHITECTURES, Architecture, supported};
use super::error::{Result, WeightsError};
use super::gguf::Gguf;
use super::metadata::{Metadata, Value};
use super::model_config::{GenerationDefaults, ModelConfig};
use super::names::{self, GGUF_ROPE_DIVISORS};
use super::rope::{Rope, RopeScaling};
use super::tensor::Weights;
use std::path::Path;
use tokenrouter_kernels::quant::Format;

/// Control tokens that end an answer in the chat formats of the supported families.
const END_OF_TURN: [&str; 7] =
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"];
/// `tokenizer.ggml.token_type` of a control token.
const CONTROL: u64 = 3;

/// Reads configuration and tensor table of an open file.
pub(super) fn read(gguf: &Gguf) -> Result<(ModelConfig, GenerationDefaults, Weights)> {
    let architecture = architecture(gguf)?;
    let weights = Weights::new(gguf.path(), vec![gguf.file().clone()], gguf.entries().to_vec(), names::from_gguf)?;
    let keys = Keys { path: gguf.path(), metadata: gguf.metadata(), architecture: architecture.name };
    let heads = keys.size("attention.head_count")?;
    let hidden = keys.size("embedding_length")?;
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(width) => width,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    keys.refuse_unsupported(head_dim)?;
    let has = |name: &str| weights.contains(name);
    let config = ModelConfig {
        architecture: architecture.name.to_owned(),
        hidden,
        layers: keys.size("block_count")?,
        heads,
        kv_heads: keys.optional_size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        ffn: keys.size("feed_forward_length")?,
        vocab: vocab(gguf, &weights)?,
        context: keys.size("context_length")?,
        norm_eps: keys.float("attention.layer_norm_rms_epsilon")?,
        rope: keys.rope(architecture, head_dim, divisors(gguf)?)?,
        tied_head: !has("head.weight"),
        qkv_bias: has("layers.0.attn_q.bias"),
        attn_o_bias: has("layers.0.attn_o.bias"),
        ffn_bias: has("layers.0.ffn_up.bias"),
        qk_norm: architecture.qk_norm,
    };
    config.check(gguf.path())?;
    config.check_tensors(&weights)?;
    Ok((config, generation(gguf.metadata()), weights))
}

fn architecture(gguf: &Gguf) -> Result<Architecture> {
    let key = "general.architecture";
    let Some(value) = gguf.metadata().get(key) else {
        return Err(WeightsError::MissingKey { file: gguf.path().to_owned(), key: key.into() });
    };
    let Some(name) = value.as_str() else {
        return Err(WeightsError::invalid(gguf.path(), format!("key {key:?}"), format!("is {value}, not a text")));
    };
    ARCHITECTURES.into_iter().find(|known| known.name == name).ok_or_else(|| WeightsError::UnknownArchitecture {
        file: gguf.path().to_owned(),
        name: name.to_owned(),
        supported: supported(),
    })
}

/// Rows of the embedding.
fn vocab(gguf: &Gguf, weights: &Weights) -> Result<usize> {
    match weights.dims("embed.weight") {
        Some(&[rows, _]) => Ok(usize::try_from(rows).unwrap_or(usize::MAX)),
        _ => Err(WeightsError::MissingTensor {
            file: gguf.path().to_owned(),
            tensor: "token_embd.weight".into(),
            remedy: "the file holds no embedding matrix; it is not a whole model",
        }),
    }
}

/// Frequency divisors stored as a tensor, if the file has them.
fn divisors(gguf: &Gguf) -> Result<Option<Vec<f32>>> {
    let Some(entry) = gguf.entries().iter().find(|entry| entry.source == GGUF_ROPE_DIVISORS) else {
        return Ok(None);
    };
    if entry.format != Format::F32 {
        let what = format!("tensor {GGUF_ROPE_DIVISORS:?}");
        return Err(WeightsError::invalid(gguf.path(), what, "must be F32"));
    }
    let bytes = &gguf.file().bytes()[entry.range.clone()];
    Ok(Some(bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()))
}

/// Stop tokens: the ones the metadata names, then every control token that is known to end a turn.
fn generation(metadata: &Metadata) -> GenerationDefaults {
    let id = |name: &str| {
        let id = metadata.get(&format!("tokenizer.ggml.{name}_token_id")).and_then(Value::as_u64);
        id.and_then(|id| u32::try_from(id).ok())
    };
    let mut defaults = GenerationDefaults { bos: id("bos"), ..GenerationDefaults::default() };
    ["eos", "eot"].into_iter().filter_map(id).for_each(|id| defaults.add_eos(id));
    let list = |name: &str| metadata.get(name).and_then(Value::as_array).unwrap_or_default();
    let types = list("tokenizer.ggml.token_type");
    for (id, (token, kind)) in list("tokenizer.ggml.tokens").iter().zip(types).enumerate() {
        let ends_turn = token.as_str().is_some_and(|token| END_OF_TURN.contains(&token));
        if ends_turn && kind.as_u64() == Some(CONTROL) {
            defaults.add_eos(id as u32);
        }
    }
    defaults
}

/// Typed access to the keys of one architecture.
struct Keys<'a> {
    path: &'a Path,
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    /// The value of `ARCHITECTURE.name` through `read`; an error names the key and what it must be.
    fn optional<'v, T>(&'v self, name: &str, kind: &str, read: impl Fn(&'v Value) -> Option<T>) -> Result<Option<T>> {
        let key = format!("{}.{name}", self.architecture);
        match self.metadata.get(&key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => {
                    Err(WeightsError::invalid(self.path, format!("key {key:?}"), format!("is {value}, not {kind}")))
                }
            },
        }
    }

    fn missing(&self, name: &str) -> WeightsError {
        WeightsError::MissingKey { file: self.path.to_owned(), key: format!("{}.{name}", self.architecture) }
    }

    fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        self.optional(name, "a whole number", |value| usize::try_from(value.as_u64()?).ok())
    }

    fn size(&self, name: &str) -> Result<usize> {
        self.optional_size(name)?.ok_or_else(|| self.missing(name))
    }

    fn optional_float(&self, name: &str) -> Result<Option<f32>> {
        self.optional(name, "a number", |value| value.as_f64().map(|value| value as f32))
    }

    fn float(&self, name: &str) -> Result<f32> {
        self.optional_float(name)?.ok_or_else(|| self.missing(name))
    }

    fn refuse_unsupported(&self, head_dim: usize) -> Result<()> {
        let refuse = |name: &str, reason: &str| {
            let key = format!("key \"{}.{name}\"", self.architecture);
            Err(WeightsError::invalid(self.path, key, reason))
        };
        if self.optional_size("attention.sliding_window")?.is_some_and(|window| window > 0) {
            return refuse("attention.sliding_window", "attention windows are not supported");
        }
        if self.optional_size("expert_count")?.is_some_and(|experts| experts > 0) {
            return refuse("expert_count", "mixtures of experts are not supported");
        }
        if self.optional_size("attention.value_length")?.is_some_and(|width| width != head_dim) {
            return refuse("attention.value_length", "value heads of another width than key heads are not supported");
        }
        Ok(())
    }

    fn rope(&self, architecture: Architecture, head_dim: usize, divisors: Option<Vec<f32>>) -> Result<Rope> {
        let kind = self.optional("rope.scaling.type", "a text", |value| value.as_str())?.unwrap_or("none");
        let scaling = match (kind, divisors) {
            ("none", None) => match self.optional_float("rope.scale_linear")? {
                Some(factor) if factor != 1.0 => RopeScaling::Linear { factor },
                _ => RopeScaling::None,
            },
            ("none" | "llama3", Some(divisors)) => RopeScaling::Divisors(divisors),
            ("linear", None) => RopeScaling::Linear { factor: self.float("rope.scaling.factor")? },
            ("yarn", None) => RopeScaling::Yarn {
                factor: self.float("rope.scaling.factor")?,
                original_context: match self.optional_size("rope.scaling.original_context_length")? {
                    Some(context) => context,
                    None => self.size("context_length")?,
                },
                beta_fast: self.optional_float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: self.optional_float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                attention_factor: self.optional_float("rope.scaling.attn_factor")?.filter(|&factor| factor != 1.0),
            },
            (other, _) => {
                let key = format!("key \"{}.rope.scaling.type\"", self.architecture);
                let reason = format!("{other:?} is not supported; none, linear and yarn are");
                return Err(WeightsError::invalid(self.path, key, reason));
            }
        };
        Ok(Rope {
            layout: architecture.gguf_rope,
            theta: self.optional_float("rope.freq_base")?.unwrap_or(10_000.0),
            dims: self.optional_size("rope.dimension_count")?.unwrap_or(head_dim),
            scaling,
        })
    }
}
