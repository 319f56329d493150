//! Takes the tensors of a model file and puts them on a device as blocks. Owner: loading, for its duration. Invariant:
//! tensors are asked for by their neutral names and checked against the configuration before they get here.

use super::blocks::{Decoder, GatedMlp, Layer};
use crate::load::LoadError;
use crate::ops::{GateUp, HeadNorms, Linear, Norm, Ops, Qkv};
use crate::weights::{ModelConfig, Weights};

/// A model file being turned into blocks.
pub struct Parts<'a, O: Ops> {
    /// The device.
    pub ops: &'a mut O,
    /// Shape of the model.
    pub config: &'a ModelConfig,
    /// Tensors of the model.
    pub weights: &'a Weights,
    /// Positions the rotation must cover.
    pub context_len: usize,
    /// Told the bytes loaded so far after each tensor.
    pub progress: &'a mut dyn FnMut(u64),
    /// Bytes loaded so far.
    pub loaded: u64,
}

/// Whether a matrix comes with a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// The tensor of the same name ending in `.bias`.
    Present,
    /// None.
    Absent,
}

impl From<bool> for Bias {
    fn from(present: bool) -> Bias {
        if present { Bias::Present } else { Bias::Absent }
    }
}

impl<O: Ops> Parts<'_, O> {
    /// The matrix of a neutral name.
    ///
    /// # Errors
    /// [`LoadError`] when the tensor is missing or cannot be multiplied.
    pub fn matrix(&mut self, name: &str) -> Result<O::Matrix, LoadError> {
        let tensor = self.weights.tensor(name)?;
        let bytes = tensor.bytes.as_slice().len() as u64;
        let matrix = self.ops.matrix(tensor)?;
        self.loaded += bytes;
        (self.progress)(self.loaded);
        Ok(matrix)
    }

    fn vector(&mut self, name: &str) -> Result<O::Vector, LoadError> {
        let tensor = self.weights.tensor(name)?;
        self.loaded += tensor.bytes.as_slice().len() as u64;
        Ok(self.ops.vector(tensor)?)
    }

    /// `PREFIX.weight`, and `PREFIX.bias` where there is one.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn linear(&mut self, prefix: &str, bias: Bias) -> Result<Linear<O::Matrix, O::Vector>, LoadError> {
        let weight = self.matrix(&format!("{prefix}.weight"))?;
        let bias = match bias {
            Bias::Present => Some(self.vector(&format!("{prefix}.bias"))?),
            Bias::Absent => None,
        };
        Ok(Linear { weight, bias })
    }

    /// The norm `PREFIX.weight`.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn norm(&mut self, prefix: &str) -> Result<Norm<O::Vector>, LoadError> {
        Ok(Norm { weight: self.vector(&format!("{prefix}.weight"))?, eps: self.config.norm_eps })
    }

    /// Projections of a layer's attention.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn qkv(&mut self, layer: usize, bias: Bias) -> Result<Qkv<O::Matrix, O::Vector>, LoadError> {
        Ok(Qkv {
            q: self.linear(&format!("layers.{layer}.attn_q"), bias)?,
            k: self.linear(&format!("layers.{layer}.attn_k"), bias)?,
            v: self.linear(&format!("layers.{layer}.attn_v"), bias)?,
        })
    }

    /// Norms of each head of a layer's q and k.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn head_norms(&mut self, layer: usize) -> Result<HeadNorms<O::Vector>, LoadError> {
        Ok(HeadNorms {
            q: self.norm(&format!("layers.{layer}.attn_q_norm"))?,
            k: self.norm(&format!("layers.{layer}.attn_k_norm"))?,
        })
    }

    /// The gated MLP of a layer.
    ///
    /// # Errors
    /// As [`Self::matrix`].
    pub fn gated_mlp(&mut self, layer: usize, bias: Bias) -> Result<GatedMlp<O>, LoadError> {
        Ok(GatedMlp {
            gate_up: GateUp {
                gate: self.linear(&format!("layers.{layer}.ffn_gate"), bias)?,
                up: self.linear(&format!("layers.{layer}.ffn_up"), bias)?,
            },
            down: self.linear(&format!("layers.{layer}.ffn_down"), bias)?,
        })
    }

    /// A decoder whose layers `layer` builds.
    ///
    /// # Errors
    /// As [`Self::matrix`], and whatever `layer` returns.
    pub fn decoder(
        &mut self,
        layer: impl Fn(&mut Self, usize) -> Result<Layer<O>, LoadError>,
    ) -> Result<Decoder<O>, LoadError> {
        Ok(Decoder {
            embed: self.matrix("embed.weight")?,
            layers: (0..self.config.layers).map(|index| layer(self, index)).collect::<Result<_, _>>()?,
            final_norm: self.norm("final_norm")?,
            head: if self.config.tied_head { None } else { Some(self.matrix("head.weight")?) },
            rope: self.ops.rope(&self.config.rope, self.config.head_dim, self.context_len)?,
        })
    }
}
