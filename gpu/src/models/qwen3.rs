//! Qwen3: each head of q and k is normalised before the rotation; heads may be wider than `hidden / heads`. Owner: the
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
    let config = parts.config;
    parts.decoder(|parts, layer| {
        Ok(Layer {
            attention_norm: parts.norm(&format!("layers.{layer}.attn_norm"))?,
            attention: Attention {
                qkv: parts.qkv(layer, config.qkv_bias.into())?,
                head_norms: Some(parts.head_norms(layer)?),
                out: parts.linear(&format!("layers.{layer}.attn_o"), config.attn_o_bias.into())?,
            },
            mlp_norm: parts.norm(&format!("layers.{layer}.ffn_norm"))?,
            mlp: parts.gated_mlp(layer, Bias::Absent)?,
        })
    })
}
