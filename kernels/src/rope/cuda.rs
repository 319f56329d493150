//! From projections to attention on a CUDA device: norms of heads, rotation, and keys and values into pages.
//!
//! Owner: a model has a [`CudaRope`]; its operations keep [`RopeKernels`]. Invariant: a head depends on itself and its
//! position alone; rotations round as on the processor; launches depend on the shape of a step alone.

use super::{RopeLayout, RopeTable};
use crate::attention::KvFormat;
use crate::attention::cuda::{HEAD_DIM_MAX, KvMemory};
use crate::cuda::{Args, Array, CudaError, Function, Gpu, Launch, Source, StepMemory, Stream, View};

/// The kernel.
pub static SOURCE: Source = Source { name: "rope.cu", text: include_str!("rope.cu"), headers: &[], exact: true };

/// Threads of a block, as in the source.
const THREADS: u32 = 256;
/// Heads of a block: one a warp.
const HEADS: usize = 8;
/// Flags, as in the source.
const NORMS: u32 = 1;
const INTERLEAVED: u32 = 2;
const F16: u32 = 4;

/// The tables of a rotation on a device.
#[derive(Debug)]
pub struct CudaRope {
    cos: Array<f32>,
    sin: Array<f32>,
    pairs: usize,
    layout: RopeLayout,
}

impl CudaRope {
    /// Copies the tables.
    ///
    /// # Errors
    /// [`CudaError::Memory`].
    pub fn new(stream: &Stream, table: &RopeTable, layout: RopeLayout) -> Result<Self, CudaError> {
        Ok(CudaRope {
            cos: Array::from_host(stream, "rotary tables", &table.cos)?,
            sin: Array::from_host(stream, "rotary tables", &table.sin)?,
            pairs: table.pairs,
            layout,
        })
    }

    /// Positions covered: `0..positions`.
    pub fn positions(&self) -> usize {
        self.cos.len() / self.pairs
    }
}

/// Norms of each head of q and k before the rotation.
#[derive(Clone, Copy, Debug)]
pub struct HeadNormArgs {
    /// `[head_dim]`
    pub q: View<f32>,
    /// `[head_dim]`
    pub k: View<f32>,
    /// Added to the mean squares of q and of k.
    pub eps: (f32, f32),
}

/// Projections of a step and where keys and values go.
#[derive(Clone, Copy, Debug)]
pub struct RotateArgs<'a> {
    /// `[tokens, heads * head_dim]`, normalised and rotated in place.
    pub q: View<f32>,
    /// `[tokens, kv_heads * head_dim]`; stays as it is.
    pub k: View<f32>,
    /// `[tokens, kv_heads * head_dim]`
    pub v: View<f32>,
    /// Tokens, padding included.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Layer of KV memory.
    pub layer: usize,
    /// Where keys and values go.
    pub kv: &'a KvMemory,
    /// Positions, each below [`CudaRope::positions`], and slots. Rows without a position are left alone; keys and values of
    /// rows without a slot go nowhere.
    pub step: &'a StepMemory,
    /// The rotation.
    pub rope: &'a CudaRope,
    /// Norms before it.
    pub norms: Option<HeadNormArgs>,
}

/// The compiled kernel.
#[derive(Clone, Debug)]
pub struct RopeKernels {
    rotate_and_store: Function,
}

impl RopeKernels {
    /// Compiles or finds it.
    ///
    /// # Errors
    /// [`CudaError`] of the compiler or the driver.
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        Ok(RopeKernels { rotate_and_store: gpu.module(&SOURCE)?.function("rotate_and_store")? })
    }

    /// Normalises where the model does, rotates, and stores keys and values.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn rotate_and_store(&self, stream: &Stream, rotate: &RotateArgs<'_>) -> Result<(), CudaError> {
        let RotateArgs { q, k, v, tokens, heads, layer, kv, step, rope, norms } = *rotate;
        let shape = kv.shape();
        let (head_dim, kv_heads) = (shape.head_dim, shape.kv_heads);
        assert!(head_dim <= HEAD_DIM_MAX && 2 * rope.pairs <= head_dim, "{} of {head_dim} values", 2 * rope.pairs);
        assert!(q.len() >= tokens * heads * head_dim, "queries of {tokens} tokens");
        assert!(k.len().min(v.len()) >= tokens * kv_heads * head_dim, "keys and values of {tokens} tokens");
        assert!(tokens <= step.limits().tokens && step.limits().pages as usize <= shape.pages, "a step too large");
        assert!(norms.is_none_or(|norms| norms.q.len() == head_dim && norms.k.len() == head_dim), "norms of heads");
        let (k_pages, v_pages) = kv.layer(layer);
        let mut flags = if norms.is_some() { NORMS } else { 0 };
        flags |= if rope.layout == RopeLayout::Interleaved { INTERLEAVED } else { 0 };
        flags |= if shape.format == KvFormat::F16 { F16 } else { 0 };
        let (q_eps, k_eps) = norms.map_or((0.0, 0.0), |norms| norms.eps);
        let args = Args::new()
            .view(q)
            .view(k)
            .view(v)
            .view(k_pages)
            .view(v_pages)
            .view(step.positions())
            .view(step.slots())
            .view(rope.cos.view())
            .view(rope.sin.view())
            .option(norms.map(|norms| norms.q))
            .option(norms.map(|norms| norms.k))
            .f32(q_eps)
            .f32(k_eps)
            .size(heads)
            .size(kv_heads)
            .size(head_dim)
            .size(kv.padded())
            .size(rope.pairs)
            .u32(flags);
        let rows = (heads + 2 * kv_heads).div_ceil(HEADS) as u32;
        let launch = Launch { grid: (tokens as u32, rows, 1), block: THREADS, shared: 0 };
        // SAFETY: the arguments are those of the kernel. It stays inside of `tokens` rows, in the tables because positions
        // are below their length, and in the layer because the step was checked against no more pages than it has.
        unsafe { self.rotate_and_store.launch(stream, launch, args) }
    }
}
