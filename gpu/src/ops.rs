//! The operations a decoder is made of, fused as devices like them. Owner: one runner owns one `Ops`, which owns scratch
//! memory, threads or streams. Invariant: every operation treats rows independently and reduces in a fixed order, so a
//! row of the result does not depend on the other rows of the batch, their number, or the number of threads. (What a
//! CUDA device promises instead is in docs/cuda.md.)
//!
//! A step is staged ([`Ops::stage`]), given as one pass of operations ([`Ops::pass`]) and waited for ([`Ops::finish`]).
//! The processor does each operation at once; a GPU queues it, or plays the whole pass from a graph.

mod tail;

use crate::batch::Batch;
use crate::weights::{Rope, Tensor};
pub use tail::{Ask, DrawAt, Fault, HeadInput, HeadOutput, Reduced, Shape, Tail};
use tokenrouter_core::executor::{ExecutorError, ExecutorLimits};
use tokenrouter_kernels::KernelError;
pub use tokenrouter_kernels::attention::KvFormat;
use tokenrouter_kernels::cuda::CudaError;

/// Why a device could not take a weight or give memory.
#[derive(Debug, thiserror::Error)]
pub enum OpsError {
    /// A weight that no kernel takes.
    #[error("tensor {tensor}: {reason}")]
    Tensor {
        /// Neutral name of the tensor.
        tensor: String,
        /// What is wrong with it.
        reason: KernelError,
    },
    /// Memory, threads or cores that the machine refuses.
    #[error(transparent)]
    Device(#[from] KernelError),
    /// What a CUDA device refuses.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// A root-mean-square norm: `x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Debug)]
pub struct Norm<V> {
    /// Weight, as wide as the rows (or heads) it normalises.
    pub weight: V,
    /// Added to the mean square.
    pub eps: f32,
}

/// A layer norm: `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, `var` being the mean square deviation.
#[derive(Debug)]
pub struct LayerNorm<V> {
    /// Weight, as wide as the rows.
    pub weight: V,
    /// Bias, as wide as the rows.
    pub bias: V,
    /// Added to the variance.
    pub eps: f32,
}

/// A function applied to every value of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / 2 * (1 + erf(x / sqrt 2))`: the exact GELU, not its tanh approximation.
    Gelu,
    /// `max(x, 0)`
    Relu,
}

/// `y = W x + b` with `W` of shape `[n_out, k_in]`.
#[derive(Debug)]
pub struct Linear<M, V> {
    /// The matrix.
    pub weight: M,
    /// The bias `[n_out]`, where the architecture has one.
    pub bias: Option<V>,
}

/// The three projections of an attention block, which share their input.
#[derive(Debug)]
pub struct Qkv<M, V> {
    /// To `heads * head_dim`.
    pub q: Linear<M, V>,
    /// To `kv_heads * head_dim`.
    pub k: Linear<M, V>,
    /// To `kv_heads * head_dim`.
    pub v: Linear<M, V>,
}

/// Queries, keys and values of a batch, and what attention makes of them.
#[derive(Debug)]
pub struct AttentionRows<R> {
    /// `[tokens, heads * head_dim]`
    pub q: R,
    /// `[tokens, kv_heads * head_dim]`
    pub k: R,
    /// `[tokens, kv_heads * head_dim]`
    pub v: R,
    /// Result, `[tokens, heads * head_dim]`
    pub out: R,
}

/// The residual stream and what the last block adds to it.
#[derive(Debug)]
pub struct Residual<R> {
    /// `[tokens, hidden]`
    pub sum: R,
    /// `[tokens, hidden]`
    pub delta: R,
}

/// The two matrices of a gated MLP that share their input.
#[derive(Debug)]
pub struct GateUp<M, V> {
    /// Goes through SiLU.
    pub gate: Linear<M, V>,
    /// Multiplied with it.
    pub up: Linear<M, V>,
}

/// Intermediate rows of a gated MLP.
#[derive(Debug)]
pub struct GatedRows<R> {
    /// Result `[tokens, ffn]`.
    pub gate: R,
    /// Scratch of the same shape; its contents are not defined afterwards.
    pub up: R,
}

/// Norms of each head of q and k before the rotation (Qwen3).
#[derive(Debug)]
pub struct HeadNorms<V> {
    /// `[head_dim]`
    pub q: Norm<V>,
    /// `[head_dim]`
    pub k: Norm<V>,
}

/// Shape of the KV memory of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Decoder layers.
    pub layers: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Storage of keys and values.
    pub format: KvFormat,
}

/// Where an attention block stands in the model.
#[derive(Debug)]
pub struct Site<'a, O: Ops + ?Sized> {
    /// Index of the layer.
    pub layer: usize,
    /// Positions, spans and page tables.
    pub batch: &'a Batch,
    /// Rotation of q and k.
    pub rope: &'a O::Rope,
    /// Norms of each head before the rotation.
    pub head_norms: Option<&'a HeadNorms<O::Vector>>,
}

/// A device as models see it. Rows buffers remember how many rows they hold: an operation that writes `out` gives it as
/// many rows as its input has.
pub trait Ops {
    /// A weight matrix on the device, in its storage format.
    type Matrix;
    /// A weight vector on the device, f32.
    type Vector;
    /// Cosines and sines of all positions.
    type Rope;
    /// Activation rows on the device: up to `rows_max` rows of a fixed width, f32.
    type Rows;
    /// Paged keys and values of all layers.
    type Kv;
    /// What draws tokens and keeps answers.
    type Answers;

    /// Puts a matrix on the device.
    ///
    /// # Errors
    /// [`OpsError`] when no kernel multiplies the tensor as it is stored.
    fn matrix(&mut self, tensor: Tensor) -> Result<Self::Matrix, OpsError>;

    /// Puts a vector on the device.
    ///
    /// # Errors
    /// [`OpsError`] when the tensor cannot be read as numbers.
    fn vector(&mut self, tensor: Tensor) -> Result<Self::Vector, OpsError>;

    /// Prepares the rotation for positions `0..positions` of heads of this width.
    ///
    /// # Errors
    /// [`OpsError`] when the tables cannot be made.
    fn rope(&mut self, rope: &Rope, head_dim: usize, positions: usize) -> Result<Self::Rope, OpsError>;

    /// Memory for activations.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    fn rows(&mut self, rows_max: usize, width: usize) -> Result<Self::Rows, OpsError>;

    /// Bytes of one page of KV memory in all layers.
    ///
    /// # Errors
    /// [`OpsError`] for a shape that no kernel takes.
    fn kv_page_bytes(shape: &KvShape) -> Result<u64, OpsError>;

    /// KV memory of `pages` pages.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    fn kv(&mut self, shape: &KvShape, pages: u32) -> Result<Self::Kv, OpsError>;

    /// What draws tokens for up to `rows_max` rows of `vocab` logits, of which the first `real_vocab` are tokens.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    fn answers(&mut self, rows_max: usize, vocab: (usize, usize)) -> Result<Self::Answers, OpsError>;

    /// Shapes of passes that are prepared before the first step, within these limits.
    fn shapes(&self, limits: &ExecutorLimits) -> Vec<Shape>;

    /// Stages a pass of padding only, to prepare its shape.
    fn stage_shape(&mut self, shape: Shape, tail: &Tail);

    /// A step begins on the calling thread, with this batch and these questions. What is staged stays as it is until the
    /// step is finished.
    fn stage(&mut self, batch: &Batch, tail: &Tail);

    /// The operations of a step whose every part depends on what was staged alone. `give` gives them, unless they are
    /// played from what was recorded.
    fn pass(&mut self, give: &mut dyn FnMut(&mut Self));

    /// Waits for all that was given; what `out` has for the host is there then.
    ///
    /// # Errors
    /// [`ExecutorError`] of the device, of any operation since it was staged.
    fn finish(&mut self, out: &mut HeadOutput<Self>) -> Result<(), ExecutorError>;

    /// `out[i] = table[batch.tokens[i]]`
    fn embed(&mut self, table: &Self::Matrix, batch: &Batch, out: &mut Self::Rows);

    /// `out = norm(x)`
    fn rms_norm(&mut self, x: &Self::Rows, norm: &Norm<Self::Vector>, out: &mut Self::Rows);

    /// `residual.sum += residual.delta; out = norm(residual.sum)`
    fn add_rms_norm(&mut self, residual: &mut Residual<Self::Rows>, norm: &Norm<Self::Vector>, out: &mut Self::Rows);

    /// `out = W x + b`
    fn linear(&mut self, x: &Self::Rows, linear: &Linear<Self::Matrix, Self::Vector>, out: &mut Self::Rows);

    /// Queries, keys and values of `x`.
    fn qkv(&mut self, x: &Self::Rows, qkv: &Qkv<Self::Matrix, Self::Vector>, out: &mut AttentionRows<Self::Rows>);

    /// Normalises the heads of q and k where the site says so, rotates them to their positions, and writes keys and
    /// values to the pages of their spans.
    fn rotate_and_store(&mut self, site: &Site<'_, Self>, rows: &mut AttentionRows<Self::Rows>, kv: &mut Self::Kv);

    /// Causal grouped-query attention from `rows.q` to `rows.out`: the query at position `p` reads positions `0..=p`
    /// through its page table.
    fn attend(&mut self, site: &Site<'_, Self>, rows: &mut AttentionRows<Self::Rows>, kv: &Self::Kv);

    /// `out.gate = silu(gate(x)) * up(x)`
    fn gate_up(&mut self, x: &Self::Rows, pair: &GateUp<Self::Matrix, Self::Vector>, out: &mut GatedRows<Self::Rows>);

    /// `out[i] = x[outputs[i]]` for the outputs that were staged.
    fn select(&mut self, x: &Self::Rows, outputs: &[u32], out: &mut Self::Rows);

    /// Logits `matrix x hidden`, and the answer to `asks[i]` about row `i` of them. Only rows that are to be kept need to
    /// be written.
    fn head(&mut self, input: HeadInput<'_, Self>, out: &mut HeadOutput<Self>);

    /// Draws the token of each row of `out`.
    fn draw(&mut self, draws: &[DrawAt], out: &mut HeadOutput<Self>);

    /// Rows of the outputs that are scored: `out[i] = x[scored[i]]`. A device may take all outputs instead, in this and in
    /// the three operations that follow.
    fn scored(&mut self, x: &Self::Rows, scored: &[u32], out: &mut Self::Rows);

    /// Embeddings of the tokens that were drawn: `out[i] = table[token of scored[i]]`.
    fn embed_drawn(&mut self, table: &Self::Matrix, from: (&HeadOutput<Self>, &[u32]), out: &mut Self::Rows);

    /// The highest logits of each row that is scored, as wide as `out`, minus infinity where there are fewer; with
    /// `softmax`, what that makes of them.
    fn top_logits(&mut self, from: (&HeadOutput<Self>, &[u32]), softmax: bool, out: &mut Self::Rows);

    /// Scores from rows of one value: `scores[scored[i]] = 1 / (1 + exp(-x[i]))`.
    fn score(&mut self, x: &Self::Rows, scored: &[u32], out: &mut HeadOutput<Self>);

    /// Writes the rows of `part` side by side with what `out` has: into its columns from `column` on.
    fn place(&mut self, part: &Self::Rows, column: usize, out: &mut Self::Rows);

    /// `out = norm(x)`
    fn layer_norm(&mut self, x: &Self::Rows, norm: &LayerNorm<Self::Vector>, out: &mut Self::Rows);

    /// `rows = activation(rows)`
    fn activate(&mut self, rows: &mut Self::Rows, activation: Activation);

    /// `sum += delta`
    fn add(&mut self, sum: &mut Self::Rows, delta: &Self::Rows);

    /// A row as host memory, once all that was given is done.
    ///
    /// # Errors
    /// [`ExecutorError`] of the device.
    fn row<'a>(&'a mut self, rows: &'a Self::Rows, index: usize) -> Result<&'a [f32], ExecutorError>;
}
