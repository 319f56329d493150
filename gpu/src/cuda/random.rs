//! Models of random weights at real sizes, made on the device, and what measuring them needs. Owner: whoever measures.
//! Invariant: nothing is read from files; the same seed gives the same weights; apart from where its weights come from, a
//! runner is the one that serves.

use super::{Cuda, CudaOptions, CudaSizes};
use crate::load::{Assembled, Assembly, LoadError};
use crate::models::blocks::{Attention, Decoder, GatedMlp, Layer};
use crate::ops::{GateUp, HeadNorms, KvFormat, KvShape, Linear, Norm, Ops, OpsError, Qkv};
use crate::runner::Runner;
use crate::weights::synth::Shape;
use crate::weights::{ModelConfig, Rope, RopeLayout, RopeScaling};
use std::sync::Arc;
use tokenrouter_core::executor::{ExecutorLimits, PAGE_TOKENS};
use tokenrouter_kernels::cuda::{Array, CudaError, Event, Gpu};
use tokenrouter_kernels::matmul::cuda::DeviceMatrix;
use tokenrouter_kernels::quant::Format;

/// A model to make.
#[derive(Clone, Debug, PartialEq)]
pub struct RandomSpec {
    /// Its shape, of architecture `qwen3`.
    pub config: ModelConfig,
    /// Format of its matrices: BF16, Q8_0 or Q4_0.
    pub format: Format,
    /// Capacity of its executors.
    pub limits: ExecutorLimits,
    /// What the weights are drawn from.
    pub seed: u64,
}

/// A model of random weights on a device.
pub struct RandomModel {
    gpu: Gpu,
    config: ModelConfig,
    format: Format,
    assembly: Assembly,
    assembled: Assembled<Cuda>,
}

/// A Qwen3 of this shape.
pub fn qwen3(shape: Shape, tied_head: bool) -> ModelConfig {
    let Shape { hidden, layers, heads, kv_heads, head_dim, ffn, vocab, context } = shape;
    let rope = Rope { layout: RopeLayout::HalfSplit, theta: 1e6, dims: head_dim, scaling: RopeScaling::None };
    ModelConfig {
        architecture: "qwen3".into(),
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        context,
        norm_eps: 1e-6,
        rope,
        tied_head,
        qkv_bias: false,
        attn_o_bias: false,
        ffn_bias: false,
        qk_norm: true,
    }
}

/// Shape of Qwen3-8B, whose head is not tied.
pub const QWEN3_8B: Shape = Shape { hidden: 4096, layers: 36, heads: 32, ffn: 12_288, ..Shape::QWEN3_0_6B };
/// Shape of Qwen3-32B, whose head is not tied.
pub const QWEN3_32B: Shape = Shape { hidden: 5120, layers: 64, heads: 64, ffn: 25_600, ..Shape::QWEN3_0_6B };

impl RandomModel {
    /// Makes the weights.
    ///
    /// # Errors
    /// [`LoadError::Architecture`] for others than Qwen3; [`LoadError::Ops`] of the device, for lack of memory above all.
    pub fn new(gpu: &Gpu, spec: RandomSpec) -> Result<Self, LoadError> {
        let RandomSpec { config, format, limits, seed } = spec;
        if config.architecture != "qwen3" {
            return Err(LoadError::Architecture { name: config.architecture, known: "qwen3".into() });
        }
        let ops = Cuda::new(gpu, &CudaOptions::default(), CudaSizes::none()).map_err(OpsError::from)?;
        let decoder = Maker { ops, format, seed, eps: config.norm_eps }.decoder(&config, limits.context_len)?;
        let kv_shape = KvShape {
            layers: config.layers,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            format: KvFormat::default(),
        };
        let assembly = Assembly { limits, kv_shape, real_vocab: limits.vocab_width, head: None };
        let assembled = Assembled { decoder: Arc::new(decoder), head: None };
        Ok(RandomModel { gpu: gpu.clone(), config, format, assembly, assembled })
    }

    /// Capacity of the executors.
    pub fn limits(&self) -> ExecutorLimits {
        self.assembly.limits
    }

    /// A new executor, its steps recorded where the options say so; the device is the one of the weights.
    ///
    /// # Errors
    /// [`LoadError::Ops`] of the device.
    pub fn executor(&self, options: &CudaOptions) -> Result<Runner<Cuda>, LoadError> {
        let sizes = CudaSizes::of(&self.assembly.limits, &self.config, self.format.is_quantized());
        let ops = Cuda::new(&self.gpu, options, sizes).map_err(OpsError::from)?;
        let mut runner = self.assembly.runner(ops, &self.assembled, &self.config)?;
        runner.warm(&mut |_, _| ()).map_err(|error| {
            OpsError::from(CudaError::Unsupported { what: format!("steps could not be recorded: {error}") })
        })?;
        Ok(runner)
    }

    /// Bytes of weights that a step multiplies: all matrices but an embedding that is no head.
    pub fn weight_bytes(&self) -> u64 {
        let decoder = &self.assembled.decoder;
        let layers = decoder.layers.iter().flat_map(|layer| {
            let (qkv, mlp) = (&layer.attention.qkv, &layer.mlp);
            [&qkv.q, &qkv.k, &qkv.v, &layer.attention.out, &mlp.gate_up.gate, &mlp.gate_up.up, &mlp.down]
        });
        let head = decoder.head.as_ref().unwrap_or(&decoder.embed);
        layers.map(|linear| linear.weight.bytes()).sum::<u64>() + head.bytes()
    }

    /// Bytes of keys and values of a token.
    ///
    /// # Errors
    /// [`OpsError`] for a shape that no kernel takes.
    pub fn kv_bytes(&self) -> Result<u64, OpsError> {
        Ok(Cuda::kv_page_bytes(&self.assembly.kv_shape)? / PAGE_TOKENS as u64)
    }
}

impl Cuda {
    /// Plays the graph of the last step so many times more and says how long one takes on the device, milliseconds; `None`
    /// if that step was not played from a graph. A step writes the same to the same places however often it runs.
    ///
    /// # Errors
    /// What the driver says.
    pub fn replay(&mut self, times: u16) -> Result<Option<f32>, CudaError> {
        let Some(key) = self.key.filter(|&key| times > 0 && self.graphs.contains(key)) else { return Ok(None) };
        let gpu = self.stream.gpu().clone();
        let (start, end) = (Event::timed(&gpu)?, Event::timed(&gpu)?);
        start.record(&self.stream)?;
        for _ in 0..times {
            self.graphs.launch(key, &self.stream)?;
        }
        end.record(&self.stream)?;
        end.synchronize()?;
        Ok(Some(start.elapsed_ms(&end)? / f32::from(times)))
    }
}

/// Makes weights, each from a seed of its own.
struct Maker {
    ops: Cuda,
    format: Format,
    seed: u64,
    eps: f32,
}

impl Maker {
    fn decoder(mut self, config: &ModelConfig, context_len: u32) -> Result<Decoder<Cuda>, LoadError> {
        let layers = (0..config.layers).map(|_| self.layer(config)).collect::<Result<_, _>>()?;
        Ok(Decoder {
            embed: self.matrix(config.vocab, config.hidden)?,
            layers,
            final_norm: self.norm(config.hidden)?,
            head: if config.tied_head { None } else { Some(self.matrix(config.vocab, config.hidden)?) },
            rope: self.ops.rope(&config.rope, config.head_dim, context_len as usize)?,
        })
    }

    fn layer(&mut self, config: &ModelConfig) -> Result<Layer<Cuda>, OpsError> {
        let (hidden, ffn, q, kv) = (config.hidden, config.ffn, config.q_width(), config.kv_width());
        let qkv = Qkv { q: self.linear(q, hidden)?, k: self.linear(kv, hidden)?, v: self.linear(kv, hidden)? };
        let gate_up = GateUp { gate: self.linear(ffn, hidden)?, up: self.linear(ffn, hidden)? };
        let head_norms = HeadNorms { q: self.norm(config.head_dim)?, k: self.norm(config.head_dim)? };
        Ok(Layer {
            attention_norm: self.norm(hidden)?,
            attention: Attention { qkv, head_norms: Some(head_norms), out: self.linear(hidden, q)? },
            mlp_norm: self.norm(hidden)?,
            mlp: GatedMlp { gate_up, down: self.linear(hidden, ffn)? },
        })
    }

    fn matrix(&mut self, rows: usize, cols: usize) -> Result<DeviceMatrix, OpsError> {
        self.seed = self.seed.wrapping_add(1);
        let Cuda { stream, kernels, .. } = &self.ops;
        let matrix = DeviceMatrix::random(stream, &kernels.matmul, self.format, (rows, cols, self.seed))?;
        stream.synchronize()?;
        Ok(matrix)
    }

    fn linear(&mut self, rows: usize, cols: usize) -> Result<Linear<DeviceMatrix, Array<f32>>, OpsError> {
        Ok(Linear { weight: self.matrix(rows, cols)?, bias: None })
    }

    fn norm(&mut self, width: usize) -> Result<Norm<Array<f32>>, OpsError> {
        let weight = Array::from_host(&self.ops.stream, "weights", &vec![1.0; width])?;
        Ok(Norm { weight, eps: self.eps })
    }
}
