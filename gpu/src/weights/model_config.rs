//! The shape of a decoder, whatever file it came from. Owner: the loaded model. Invariant: a configuration that left the
//! loaders is consistent ([`ModelConfig::check`]) and its tensors exist with the shapes it implies.

use super::error::{Result, WeightsError};
use super::rope::Rope;
use super::tensor::Weights;
use std::path::Path;

/// Most layers of a model.
const MAX_LAYERS: usize = 4096;
/// Largest width, vocabulary or context length.
const MAX_DIM: usize = 1 << 28;

/// Shape and constants of a decoder-only transformer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `llama`, `qwen2` or `qwen3`.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Query heads per layer.
    pub heads: usize,
    /// Key/value heads per layer; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Inner width of the feed-forward network.
    pub ffn: usize,
    /// Rows of the embedding = width of a logits row; may exceed the number of real tokens.
    pub vocab: usize,
    /// Longest sequence the model was made for, tokens.
    pub context: usize,
    /// Added to the mean square in every RMS norm.
    pub norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Whether the output head is the embedding (`head.weight` is then absent).
    pub tied_head: bool,
    /// Whether `attn_q`, `attn_k` and `attn_v` have biases.
    pub qkv_bias: bool,
    /// Whether `attn_o` has a bias.
    pub attn_o_bias: bool,
    /// Whether the three feed-forward matrices have biases.
    pub ffn_bias: bool,
    /// Whether each head of q and k is normalised before the rotation.
    pub qk_norm: bool,
}

/// Sampling defaults and stop tokens that come with a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Tokens that end an answer; the model's own first, no duplicates.
    pub eos: Vec<u32>,
    /// First token of a text, where the model has one.
    pub bos: Option<u32>,
    /// Whether the model's makers sample by default; `None` = unsaid.
    pub do_sample: Option<bool>,
    /// Default temperature.
    pub temperature: Option<f32>,
    /// Default top-k.
    pub top_k: Option<u32>,
    /// Default top-p.
    pub top_p: Option<f32>,
    /// Default min-p.
    pub min_p: Option<f32>,
    /// Default repetition penalty.
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    /// Adds a stop token once.
    pub(super) fn add_eos(&mut self, id: u32) {
        if !self.eos.contains(&id) {
            self.eos.push(id);
        }
    }
}

impl ModelConfig {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Checks that the numbers fit together; `file` is named in the error.
    ///
    /// # Errors
    /// [`WeightsError::Invalid`] naming the first number that is impossible.
    pub fn check(&self, file: &Path) -> Result<()> {
        let dims = [
            ("hidden size", self.hidden, MAX_DIM),
            ("number of layers", self.layers, MAX_LAYERS),
            ("number of heads", self.heads, MAX_DIM),
            ("number of key/value heads", self.kv_heads, MAX_DIM),
            ("head width", self.head_dim, MAX_DIM),
            ("feed-forward width", self.ffn, MAX_DIM),
            ("vocabulary size", self.vocab, MAX_DIM),
            ("context length", self.context, MAX_DIM),
            ("total width of the heads", self.heads.saturating_mul(self.head_dim), MAX_DIM),
        ];
        for (what, value, limit) in dims {
            if value == 0 || value > limit {
                return Err(WeightsError::invalid(file, what, format!("is {value}; it must be from 1 to {limit}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let reason = format!("{} does not divide the {} query heads", self.kv_heads, self.heads);
            return Err(WeightsError::invalid(file, "number of key/value heads", reason));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            let reason = format!("is {}; it must lie between 0 and 1", self.norm_eps);
            return Err(WeightsError::invalid(file, "epsilon of the norms", reason));
        }
        match self.rope.fault(self.head_dim) {
            Some(reason) => Err(WeightsError::invalid(file, "rotary embedding", reason)),
            None => Ok(()),
        }
    }

    /// Neutral name and shape (`[rows, cols]`, a vector is one row) of every tensor this model reads, in model order.
    pub fn tensors(&self) -> Vec<(String, [usize; 2])> {
        let (hidden, ffn, q, kv) = (self.hidden, self.ffn, self.q_width(), self.kv_width());
        let mut out = vec![("embed.weight".to_owned(), [self.vocab, hidden])];
        for layer in 0..self.layers {
            let mut add = |part: &str, shape| out.push((format!("layers.{layer}.{part}"), shape));
            add("attn_norm.weight", [1, hidden]);
            for (part, rows) in [("attn_q", q), ("attn_k", kv), ("attn_v", kv)] {
                add(&format!("{part}.weight"), [rows, hidden]);
                if self.qkv_bias {
                    add(&format!("{part}.bias"), [1, rows]);
                }
            }
            if self.qk_norm {
                add("attn_q_norm.weight", [1, self.head_dim]);
                add("attn_k_norm.weight", [1, self.head_dim]);
            }
            add("attn_o.weight", [hidden, q]);
            if self.attn_o_bias {
                add("attn_o.bias", [1, hidden]);
            }
            add("ffn_norm.weight", [1, hidden]);
            for (part, rows, cols) in [("ffn_gate", ffn, hidden), ("ffn_up", ffn, hidden), ("ffn_down", hidden, ffn)] {
                add(&format!("{part}.weight"), [rows, cols]);
                if self.ffn_bias {
                    add(&format!("{part}.bias"), [1, rows]);
                }
            }
        }
        out.push(("final_norm.weight".to_owned(), [1, hidden]));
        if !self.tied_head {
            out.push(("head.weight".to_owned(), [self.vocab, hidden]));
        }
        out
    }

    /// Checks that every tensor of [`Self::tensors`] exists with its shape, and that none is left over.
    ///
    /// # Errors
    /// The first tensor that is missing, misshapen, or known to the naming but not used by this configuration: such a
    /// file was made for a computation this model does not do.
    pub(super) fn check_tensors(&self, weights: &Weights) -> Result<()> {
        let wanted = self.tensors();
        for (name, shape) in &wanted {
            weights.expect(name, *shape)?;
        }
        let wanted: std::collections::HashSet<&str> = wanted.iter().map(|(name, _)| name.as_str()).collect();
        match weights.names().filter(|name| !wanted.contains(name)).min() {
            None => Ok(()),
            Some(extra) => Err(WeightsError::invalid(
                weights.origin(),
                format!("tensor {extra:?}"),
                format!("is not part of architecture {:?} with this configuration", self.architecture),
            )),
        }
    }
}
