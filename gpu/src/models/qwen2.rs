//! Qwen2 and Qwen2.5: a Llama whose q, k and v always have biases and whose other matrices never do. Owner: the
//! registration list. Invariant: none beyond the shared blocks.

use super::blocks::{Attention, Decoder, Layer};
use super::parts::{Bias, Parts};
use crate::load::LoadError;
use crate::ops::Ops;

/// Builds the decoder.
///
/// # Errors
/// [`LoadError`] naming the tensor that cannot be used.
pub fn build<O: Ops>(parts: &mut Parts<'_, O>) -> Result<Decoder<O>, LoadError> {
    parts.decoder(|parts, layer| {
        Ok(Layer {
            attention_norm: parts.norm(&format!("layers.{layer}.attn_norm"))?,
            attention: Attention {
                qkv: parts.qkv(layer, Bias::Present)?,
                head_norms: None,
                out: parts.linear(&format!("layers.{layer}.attn_o"), Bias::Absent)?,
            },
            mlp_norm: parts.norm(&format!("layers.{layer}.ffn_norm"))?,
            mlp: parts.gated_mlp(layer, Bias::Absent)?,
        })
    })
}
