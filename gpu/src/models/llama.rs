//! Llama (also SmolLM2, and Mistral without sliding windows): the plain pre-norm decoder; biases only where the
//! configuration has them. Owner: the registration list. Invariant: none beyond the shared blocks.

use super::blocks::{Attention, Decoder, Layer};
use super::parts::Parts;
use crate::load::LoadError;
use crate::ops::Ops;

/// Builds the decoder.
///
/// # Errors
/// [`LoadError`] naming the tensor that cannot be used.
pub fn build<O: Ops>(parts: &mut Parts<'_, O>) -> Result<Decoder<O>, LoadError> {
    let config = parts.config;
    parts.decoder(|parts, layer| {
        Ok(Layer {
            attention_norm: parts.norm(&format!("layers.{layer}.attn_norm"))?,
            attention: Attention {
                qkv: parts.qkv(layer, config.qkv_bias.into())?,
                head_norms: None,
                out: parts.linear(&format!("layers.{layer}.attn_o"), config.attn_o_bias.into())?,
            },
            mlp_norm: parts.norm(&format!("layers.{layer}.ffn_norm"))?,
            mlp: parts.gated_mlp(layer, config.ffn_bias.into())?,
        })
    })
}
