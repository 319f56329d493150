//! Rows, keys and values of a model on a device, and the kernels that work on them. Owner: the runner. Invariant: rows know how
//! many of them were written last.

use crate::ops::{AttentionRows, KvShape};
use tokenrouter_kernels::activation::cuda::ActivationKernels;
use tokenrouter_kernels::attention;
use tokenrouter_kernels::attention::cuda::{AttendArgs, AttendShape, AttentionKernels, KvMemory, Splits};
use tokenrouter_kernels::cuda::{Array, CudaError, Gpu, StepLimits, StepMemory, Stream, View};
use tokenrouter_kernels::head::cuda::HeadKernels;
use tokenrouter_kernels::matmul::cuda::MatmulKernels;
use tokenrouter_kernels::norm::cuda::NormKernels;
use tokenrouter_kernels::rope::cuda::RopeKernels;

/// Positions of a split of attention where results must not depend on the batch.
const FIXED_SPLIT: usize = 1024;

/// Compiled kernels of a context.
pub(super) struct Kernels {
    pub(super) matmul: MatmulKernels,
    pub(super) norm: NormKernels,
    pub(super) rope: RopeKernels,
    pub(super) activation: ActivationKernels,
    pub(super) head: HeadKernels,
}

impl Kernels {
    /// Compiles or finds them; with `deterministic`, products in one order for any number of rows.
    pub(super) fn load(gpu: &Gpu, deterministic: bool) -> Result<Self, CudaError> {
        let matmul = MatmulKernels::load(gpu)?;
        Ok(Kernels {
            matmul: if deterministic { matmul.fixed_order() } else { matmul },
            norm: NormKernels::load(gpu)?,
            rope: RopeKernels::load(gpu)?,
            activation: ActivationKernels::load(gpu)?,
            head: HeadKernels::load(gpu)?,
        })
    }
}

/// Activation rows on the device.
#[derive(Debug)]
pub struct CudaRows {
    pub(super) data: Array<f32>,
    pub(super) width: usize,
    pub(super) rows: usize,
}

impl CudaRows {
    /// The rows it holds now.
    pub(super) fn view(&self) -> View<f32> {
        self.data.part(0, self.rows * self.width)
    }
}

/// KV memory with the kernels for its heads.
#[derive(Debug)]
pub struct CudaKv {
    pub(super) memory: KvMemory,
    pub(super) kernels: AttentionKernels,
    pub(super) heads: usize,
    pub(super) scratch: Array<f32>,
}

impl CudaKv {
    /// Attention of a layer over the rows of a step.
    pub(super) fn attend(
        &self,
        (stream, step): (&Stream, &StepMemory),
        rows: &AttentionRows<CudaRows>,
        (layer, shape, deterministic): (usize, AttendShape, bool),
    ) -> Result<(), CudaError> {
        let splits = if deterministic {
            Splits::Fixed { positions: FIXED_SPLIT }
        } else {
            self.kernels.fill((self.heads, self.memory.shape().kv_heads), shape)
        };
        let args = AttendArgs {
            q: rows.q.view(),
            out: rows.out.view(),
            heads: self.heads,
            layer,
            kv: &self.memory,
            step,
            shape,
            splits,
            scratch: self.scratch.view(),
        };
        self.kernels.attend(stream, &args)
    }

    /// Keys and values, for tests that look at them.
    pub fn memory(&self) -> &KvMemory {
        &self.memory
    }
}

/// Floats of scratch that attention needs at most: while there are several shares of a context, the blocks of a step are
/// fewer than it takes to fill the device, each block has 32 rows at most, and shares fill the device at most twice.
pub(super) fn attention_scratch(
    shape: &attention::KvShape,
    heads: usize,
    (multiprocessors, deterministic): (usize, bool),
    limits: &StepLimits,
) -> usize {
    const ROWS_PER_MULTIPROCESSOR: usize = 2 * 4 * 32;
    const FIXED_ROWS: usize = 2048;
    let width = shape.head_dim.next_multiple_of(32) + 2;
    let rows = if deterministic {
        let context = limits.row_pages * attention::PAGE_TOKENS;
        context.div_ceil(FIXED_SPLIT) * FIXED_ROWS.min(limits.tokens * heads)
    } else {
        ROWS_PER_MULTIPROCESSOR * multiprocessors
    };
    rows * width
}

pub(super) fn kernel_shape(shape: &KvShape, pages: u32) -> attention::KvShape {
    let KvShape { layers, kv_heads, head_dim, format, .. } = *shape;
    attention::KvShape { layers, pages: pages as usize, kv_heads, head_dim, format }
}
