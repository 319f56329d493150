//! Heads that can be trained: the tensors that a head's description names, and the forward pass to one logit a row.
//! Owner: the training loop. Invariant: names and shapes are those of [`HeadConfig::tensors`], so what is saved opens as
//! a head, and the score of a saved head is the logistic function of [`Trainee::evaluate`].
//!
//! R2R (router.py of its authors): `x = join(concat[hidden, embedding, project(top logits)])`, a linear layer, blocks
//! `x = change(x) + W2 gelu(W1 norm(x) + b1) + b2`, a norm, a linear layer. CITER (conf_model.py): linear, batch norm,
//! ReLU, linear, linear. Layer and batch norms have eps 1e-5. Dropout is left out: early stopping takes its place.

use candle_core::{D, Device, Result, Tensor, Var};
use candle_nn::ops::{layer_norm_slow, softmax};
use std::collections::BTreeMap;
use tokenrouter_core::rng::{self, Stream};
use tokenrouter_gpu::heads::{Family, HeadConfig};

const EPS: f64 = 1e-5;
/// Weight of a new batch in the running statistics of a batch norm. (PyTorch's default.)
const MOMENTUM: f64 = 0.1;

/// Inputs of some rows; parts that the network does not read are left out.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    /// `[rows, hidden_size]`.
    pub hidden: Option<Tensor>,
    /// `[rows, embedding_size]`: the candidates' embeddings.
    pub embedding: Option<Tensor>,
    /// `[rows, logits_size]`: the highest logits, raw and descending.
    pub top: Option<Tensor>,
}

/// A head that is being trained.
pub struct Trainee {
    config: HeadConfig,
    vars: BTreeMap<String, Var>,
}

impl Trainee {
    /// A head with weights from the seed: linear layers uniform within `1/sqrt(inputs)`, as PyTorch has them, norms at 1
    /// and 0.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(config: HeadConfig, seed: u64) -> Result<Trainee> {
        let mut vars = BTreeMap::new();
        let mut inputs = 1;
        for (index, (name, [rows, cols])) in (0u64..).zip(config.tensors()) {
            let (norm, matrix) = (is_norm(&name), name.ends_with(".weight") && !is_norm(&name));
            let values: Vec<f32> = if norm {
                let one = name.ends_with(".weight") || name.ends_with("running_var");
                vec![f32::from(u8::from(one)); rows * cols]
            } else {
                if matrix {
                    inputs = cols;
                }
                let bound = 1.0 / (inputs as f64).sqrt();
                let key = rng::mix(seed ^ rng::mix(index));
                let draw = |at| (bound * (2.0 * rng::unit(key, at, Stream::Token) - 1.0)) as f32;
                (0..(rows * cols) as u32).map(draw).collect()
            };
            let dims = if matrix { vec![rows, cols] } else { vec![cols] };
            vars.insert(name, Var::from_tensor(&Tensor::from_vec(values, dims, &Device::Cpu)?)?);
        }
        Ok(Trainee { config, vars })
    }

    /// Its description.
    pub fn config(&self) -> &HeadConfig {
        &self.config
    }

    /// What an optimiser changes: everything but running statistics.
    pub fn trained(&self) -> Vec<Var> {
        self.vars.iter().filter(|(name, _)| !name.contains("running_")).map(|(_, var)| var.clone()).collect()
    }

    /// All tensors as they are now.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn snapshot(&self) -> Result<BTreeMap<String, Tensor>> {
        self.vars.iter().map(|(name, var)| Ok((name.clone(), var.as_tensor().copy()?))).collect()
    }

    /// Logits `[rows]` with the running statistics, as a served head has them.
    ///
    /// # Errors
    /// Inputs of the wrong shape.
    pub fn evaluate(&self, inputs: &Inputs) -> Result<Tensor> {
        match self.config.family {
            Family::R2r => self.r2r(inputs),
            Family::Citer => {
                let x = self.linear("mlp.0", part(&inputs.hidden)?)?;
                self.after_first(&x, (self.var("mlp.1.running_mean"), self.var("mlp.1.running_var")))
            }
        }
    }

    /// Logits `[rows]` for a step of training: a batch norm takes the statistics of these rows and remembers them.
    ///
    /// # Errors
    /// Inputs of the wrong shape.
    pub fn train(&self, inputs: &Inputs) -> Result<Tensor> {
        if self.config.family == Family::R2r {
            return self.r2r(inputs);
        }
        let x = self.linear("mlp.0", part(&inputs.hidden)?)?;
        let mean = x.mean(0)?;
        let variance = x.broadcast_sub(&mean)?.sqr()?.mean(0)?;
        let rows = x.dim(0)? as f64;
        self.remember("mlp.1.running_mean", &mean)?;
        self.remember("mlp.1.running_var", &(&variance * (rows / (rows - 1.0).max(1.0)))?)?;
        self.after_first(&x, (&mean, &variance))
    }

    fn remember(&self, name: &str, value: &Tensor) -> Result<()> {
        let var = &self.vars[name];
        var.set(&((var.as_tensor() * (1.0 - MOMENTUM))? + (value.detach() * MOMENTUM)?)?)
    }

    /// What comes behind CITER's first linear layer.
    fn after_first(&self, x: &Tensor, (mean, variance): (&Tensor, &Tensor)) -> Result<Tensor> {
        let x = x.broadcast_sub(mean)?.broadcast_div(&(variance + EPS)?.sqrt()?)?;
        let x = x.broadcast_mul(self.var("mlp.1.weight"))?.broadcast_add(self.var("mlp.1.bias"))?.relu()?;
        self.linear("linear", &self.linear("mlp.4", &x)?)?.squeeze(1)
    }

    fn r2r(&self, inputs: &Inputs) -> Result<Tensor> {
        let mut x = self.linear("backbone.input_projection", &self.joined(inputs)?)?;
        for (index, (from, to)) in self.config.blocks().enumerate() {
            let name = |part: &str| format!("backbone.blocks.{index}.{part}");
            let wide = self.linear(&name("mlp.0"), &self.norm(&name("layer_norm"), &x)?)?.gelu_erf()?;
            let out = self.linear(&name("mlp.3"), &wide)?;
            let kept = if from == to { x } else { self.linear(&name("dim_change"), &x)? };
            x = (kept + out)?;
        }
        self.linear("backbone.output_layer.1", &self.norm("backbone.output_layer.0", &x)?)?.squeeze(1)
    }

    fn joined(&self, inputs: &Inputs) -> Result<Tensor> {
        let (class, normalize) = (self.config.class, self.config.normalize_input);
        let reads = class.inputs();
        let normed = |name: &str, x: &Tensor| if normalize { self.norm(name, x) } else { Ok(x.clone()) };
        let mut parts = Vec::new();
        if reads.hidden {
            parts.push(normed(class.hidden_norm(), part(&inputs.hidden)?)?);
        }
        if reads.token {
            parts.push(normed("layer_norm_token", part(&inputs.embedding)?)?);
        }
        if reads.logits {
            let top = part(&inputs.top)?;
            let top = if normalize { softmax(top, D::Minus1)? } else { top.clone() };
            parts.push(self.linear("logits_projection", &top)?);
        }
        let joined = Tensor::cat(&parts, 1)?;
        class.join().map_or(Ok(joined.clone()), |join| self.linear(join, &joined))
    }

    fn var(&self, name: &str) -> &Tensor {
        self.vars[name].as_tensor()
    }

    fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.var(&format!("{name}.weight")).t()?)?.broadcast_add(self.var(&format!("{name}.bias")))
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let [weight, bias] = ["weight", "bias"].map(|part| self.var(&format!("{name}.{part}")));
        layer_norm_slow(x, weight, bias, EPS as f32)
    }
}

/// Whether a tensor belongs to a layer or batch norm.
fn is_norm(name: &str) -> bool {
    name.contains("norm") || name.starts_with("mlp.1.") || name.contains("output_layer.0.")
}

fn part(tensor: &Option<Tensor>) -> Result<&Tensor> {
    tensor.as_ref().ok_or_else(|| candle_core::Error::Msg("an input of the network is missing".into()))
}
