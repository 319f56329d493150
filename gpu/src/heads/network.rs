//! The networks of learned heads over device operations. Owner: the loaded model, shared by its runners. Invariant: only
//! operations that treat rows independently are used.
//!
//! R2R (router.py of its authors): `x = join(concat[hidden, embedding, project(top logits)])`, a linear layer, blocks
//! `x = change(x) + W2 gelu(W1 norm(x) + b1) + b2`, and a norm with a linear layer to one number.
//! CITER (conf_model.py): linear, batch norm, ReLU, linear, linear to one number. Dropout does nothing here. Both end
//! in a logistic function. Layer and batch norms have eps 1e-5.

use super::HeadFiles;
use super::config::{Family, HeadConfig};
use crate::load::LoadError;
use crate::ops::{Activation, HeadOutput, LayerNorm, Linear, Ops, OpsError};
use crate::weights::{Tensor, Weights};
use tokenrouter_kernels::quant::{Format, dequantize_row};

const EPS: f32 = 1e-5;

/// A linear layer on a device.
type Product<O> = Linear<<O as Ops>::Matrix, <O as Ops>::Vector>;

/// A network on a device.
pub struct Network<O: Ops> {
    config: HeadConfig,
    layers: Layers<O>,
}

enum Layers<O: Ops> {
    R2r(R2r<O>),
    Mlp([Product<O>; 3]),
}

struct R2r<O: Ops> {
    logits: Option<Product<O>>,
    hidden_norm: Option<LayerNorm<O::Vector>>,
    token_norm: Option<LayerNorm<O::Vector>>,
    join: Option<Product<O>>,
    input: Product<O>,
    blocks: Vec<Block<O>>,
    out_norm: LayerNorm<O::Vector>,
    out: Product<O>,
}

struct Block<O: Ops> {
    norm: LayerNorm<O::Vector>,
    up: Product<O>,
    down: Product<O>,
    change: Option<Product<O>>,
}

/// Activation memory of a network.
pub struct Scratch<O: Ops> {
    hidden: Part<O>,
    token: Part<O>,
    top: O::Rows,
    projected: O::Rows,
    joined: O::Rows,
    first: O::Rows,
    input: O::Rows,
    blocks: Vec<BlockRows<O>>,
    normed: O::Rows,
    out: O::Rows,
}

/// A part of the joined input, and the same normalised.
struct Part<O: Ops> {
    raw: O::Rows,
    normed: O::Rows,
}

struct BlockRows<O: Ops> {
    normed: O::Rows,
    wide: O::Rows,
    changed: O::Rows,
    out: O::Rows,
}

/// What a network reads of a step.
pub struct NetworkInput<'a, O: Ops> {
    /// Hidden rows after the final norm, of all outputs of the step.
    pub hidden: &'a O::Rows,
    /// The model's token embedding.
    pub embed: &'a O::Matrix,
    /// The outputs that are scored.
    pub scored: &'a [u32],
}

/// Puts the tensors of a head on a device.
struct Builder<'a, O: Ops> {
    ops: &'a mut O,
    weights: &'a Weights,
}

impl<O: Ops> Builder<'_, O> {
    fn linear(&mut self, name: &str) -> Result<Product<O>, LoadError> {
        let weight = self.ops.matrix(self.weights.tensor(&format!("{name}.weight"))?)?;
        let bias = self.ops.vector(self.weights.tensor(&format!("{name}.bias"))?)?;
        Ok(Linear { weight, bias: Some(bias) })
    }

    fn linear_if(&mut self, name: Option<&str>) -> Result<Option<Product<O>>, LoadError> {
        name.map(|name| self.linear(name)).transpose()
    }

    fn norm(&mut self, name: &str) -> Result<LayerNorm<O::Vector>, LoadError> {
        let weight = self.ops.vector(self.weights.tensor(&format!("{name}.weight"))?)?;
        let bias = self.ops.vector(self.weights.tensor(&format!("{name}.bias"))?)?;
        Ok(LayerNorm { weight, bias, eps: EPS })
    }

    fn r2r(&mut self, config: &HeadConfig) -> Result<R2r<O>, LoadError> {
        let (class, inputs) = (config.class, config.class.inputs());
        let normalised = |wanted: bool| wanted && config.normalize_input;
        let blocks = config.blocks().enumerate().map(|(index, (from, to))| {
            let name = |part: &str| format!("backbone.blocks.{index}.{part}");
            Ok(Block {
                norm: self.norm(&name("layer_norm"))?,
                up: self.linear(&name("mlp.0"))?,
                down: self.linear(&name("mlp.3"))?,
                change: if from == to { None } else { Some(self.linear(&name("dim_change"))?) },
            })
        });
        Ok(R2r {
            blocks: blocks.collect::<Result<_, LoadError>>()?,
            logits: self.linear_if(inputs.logits.then_some("logits_projection"))?,
            hidden_norm: if normalised(inputs.hidden) { Some(self.norm(class.hidden_norm())?) } else { None },
            token_norm: if normalised(inputs.token) { Some(self.norm("layer_norm_token")?) } else { None },
            join: self.linear_if(class.join())?,
            input: self.linear("backbone.input_projection")?,
            out_norm: self.norm("backbone.output_layer.0")?,
            out: self.linear("backbone.output_layer.1")?,
        })
    }

    /// The first layer with the batch norm folded into it: `W' = s W`, `b' = s (b - mean) + beta`,
    /// `s = gamma / sqrt(var + eps)`, all in f64.
    fn folded(&mut self) -> Result<Product<O>, LoadError> {
        let (weight, bias) = (self.numbers("mlp.0.weight")?, self.numbers("mlp.0.bias")?);
        let [gamma, beta, mean, var] = ["weight", "bias", "running_mean", "running_var"]
            .map(|part| self.numbers(&format!("mlp.1.{part}")).map(|tensor| tensor.1));
        let (gamma, beta, mean, var) = (gamma?, beta?, mean?, var?);
        let ([rows, cols], weight) = weight;
        let scale: Vec<f64> =
            gamma.iter().zip(&var).map(|(&g, &v)| f64::from(g) / (f64::from(v) + f64::from(EPS)).sqrt()).collect();
        let weight = weight.chunks(cols).zip(&scale).flat_map(|(row, s)| row.iter().map(move |&w| f64::from(w) * s));
        let bias = (0..rows).map(|r| (f64::from(bias.1[r]) - f64::from(mean[r])) * scale[r] + f64::from(beta[r]));
        Ok(Linear {
            weight: self.ops.matrix(tensor("mlp.0.weight", [rows, cols], weight))?,
            bias: Some(self.ops.vector(tensor("mlp.0.bias", [1, rows], bias))?),
        })
    }

    fn numbers(&self, name: &str) -> Result<([usize; 2], Vec<f32>), LoadError> {
        let tensor = self.weights.tensor(name)?;
        let mut values = vec![0.0; tensor.rows() * tensor.cols()];
        let row_bytes = tensor.bytes.as_slice().len() / tensor.rows().max(1);
        for (row, bytes) in values.chunks_mut(tensor.cols()).zip(tensor.bytes.as_slice().chunks(row_bytes)) {
            dequantize_row(tensor.format, bytes, row)
                .map_err(|reason| OpsError::Tensor { tensor: name.to_owned(), reason })?;
        }
        Ok((tensor.shape, values))
    }
}

fn tensor(name: &str, shape: [usize; 2], values: impl Iterator<Item = f64>) -> Tensor {
    let bytes: Vec<u8> = values.flat_map(|value| (value as f32).to_le_bytes()).collect();
    Tensor { name: name.to_owned(), shape, format: Format::F32, bytes: bytes.into() }
}

impl<O: Ops> Network<O> {
    /// Puts a head on a device.
    ///
    /// # Errors
    /// [`LoadError`] when the device refuses a tensor.
    pub fn new(ops: &mut O, files: &HeadFiles) -> Result<Self, LoadError> {
        let mut builder = Builder { ops, weights: &files.weights };
        let layers = match files.config.family {
            Family::R2r => Layers::R2r(builder.r2r(&files.config)?),
            Family::Citer => Layers::Mlp([builder.folded()?, builder.linear("mlp.4")?, builder.linear("linear")?]),
        };
        Ok(Network { config: files.config.clone(), layers })
    }

    /// Its description.
    pub fn config(&self) -> &HeadConfig {
        &self.config
    }

    /// Scores outputs by what the head of the model found; a score is between 0 and 1, or NaN where the network overflows.
    pub fn score(
        &self,
        ops: &mut O,
        input: NetworkInput<'_, O>,
        (scratch, found): (&mut Scratch<O>, &mut HeadOutput<O>),
    ) {
        let scored = input.scored;
        match &self.layers {
            Layers::R2r(r2r) => r2r.run(ops, &self.config, (input, found), scratch),
            Layers::Mlp([first, second, last]) => {
                ops.scored(input.hidden, scored, &mut scratch.hidden.raw);
                ops.linear(&scratch.hidden.raw, first, &mut scratch.first);
                ops.activate(&mut scratch.first, Activation::Relu);
                ops.linear(&scratch.first, second, &mut scratch.input);
                ops.linear(&scratch.input, last, &mut scratch.out);
            }
        }
        ops.score(&scratch.out, scored, found);
    }
}

/// What a network reads, and what the head of the model found.
type Inputs<'a, O> = (NetworkInput<'a, O>, &'a HeadOutput<O>);

impl<O: Ops> R2r<O> {
    fn run(&self, ops: &mut O, config: &HeadConfig, input: Inputs<'_, O>, scratch: &mut Scratch<O>) {
        self.join(ops, config, input, scratch);
        ops.linear(&scratch.first, &self.input, &mut scratch.input);
        let mut x = &scratch.input;
        for (block, BlockRows { normed, wide, changed, out }) in self.blocks.iter().zip(&mut scratch.blocks) {
            ops.layer_norm(x, &block.norm, normed);
            ops.linear(normed, &block.up, wide);
            ops.activate(wide, Activation::Gelu);
            ops.linear(wide, &block.down, out);
            match &block.change {
                Some(change) => {
                    ops.linear(x, change, changed);
                    ops.add(out, changed);
                }
                None => ops.add(out, x),
            }
            x = out;
        }
        ops.layer_norm(x, &self.out_norm, &mut scratch.normed);
        ops.linear(&scratch.normed, &self.out, &mut scratch.out);
    }

    /// From the inputs to `scratch.first`.
    fn join(&self, ops: &mut O, config: &HeadConfig, (input, found): Inputs<'_, O>, s: &mut Scratch<O>) {
        let inputs = config.class.inputs();
        if let Some(projection) = &self.logits {
            ops.top_logits((found, input.scored), config.normalize_input, &mut s.top);
            let to = if self.join.is_some() { &mut s.projected } else { &mut s.first };
            ops.linear(&s.top, projection, to);
        }
        let Some(join) = &self.join else { return };
        ops.scored(input.hidden, input.scored, &mut s.hidden.raw);
        s.hidden.place(ops, self.hidden_norm.as_ref(), (0, &mut s.joined));
        if inputs.token {
            ops.embed_drawn(input.embed, (found, input.scored), &mut s.token.raw);
            s.token.place(ops, self.token_norm.as_ref(), (config.hidden_size, &mut s.joined));
        }
        if inputs.logits {
            ops.place(&s.projected, config.hidden_size + config.embedding_size, &mut s.joined);
        }
        ops.linear(&s.joined, join, &mut s.first);
    }
}

impl<O: Ops> Part<O> {
    fn new(ops: &mut O, rows_max: usize, width: usize) -> Result<Self, OpsError> {
        Ok(Part { raw: ops.rows(rows_max, width)?, normed: ops.rows(rows_max, width)? })
    }

    /// Puts the rows, normalised where there is a norm, into the columns of `to` from `column` on.
    fn place(&mut self, ops: &mut O, norm: Option<&LayerNorm<O::Vector>>, (column, to): (usize, &mut O::Rows)) {
        match norm {
            Some(norm) => {
                ops.layer_norm(&self.raw, norm, &mut self.normed);
                ops.place(&self.normed, column, to);
            }
            None => ops.place(&self.raw, column, to),
        }
    }
}

impl<O: Ops> Scratch<O> {
    /// Memory for up to `rows_max` rows of a network.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    pub fn new(ops: &mut O, config: &HeadConfig, rows_max: usize) -> Result<Self, OpsError> {
        let mut rows = |width: usize| ops.rows(rows_max, width.max(1));
        let (first, last) = config.ends();
        let blocks = config.blocks().map(|(from, to)| {
            let wide = rows(from * config.expansion)?;
            Ok(BlockRows { normed: rows(from)?, wide, changed: rows(to)?, out: rows(to)? })
        });
        let r2r = config.family == Family::R2r;
        Ok(Scratch {
            blocks: if r2r { blocks.collect::<Result<_, OpsError>>()? } else { Vec::new() },
            top: rows(config.logits_size)?,
            projected: rows(config.hidden_size)?,
            joined: rows(config.joined())?,
            first: rows(first)?,
            input: rows(if r2r { first } else { last })?,
            normed: rows(last)?,
            out: rows(1)?,
            hidden: Part::new(ops, rows_max, config.hidden_size.max(1))?,
            token: Part::new(ops, rows_max, config.embedding_size.max(1))?,
        })
    }
}
