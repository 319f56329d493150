//! How a model uses a CUDA device, and what its scratch is made for. Owner: the launcher.

use super::GraphGrid;
use crate::weights::ModelConfig;
use tokenrouter_core::executor::{ExecutorLimits, PAGE_TOKENS};
use tokenrouter_kernels::cuda::StepLimits;
use tokenrouter_kernels::matmul::cuda::ScratchSize;

/// How a model uses a CUDA device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Number of the device.
    pub ordinal: usize,
    /// Shapes of steps that are recorded; none = every launch is given by itself.
    pub graphs: GraphGrid,
    /// Every sum in an order that does not depend on the batch: a request's answer is the same bits alone and in any batch.
    /// Long prompts are slower.
    pub deterministic: bool,
    /// Whether this model's work goes before that of others on the device.
    pub high_priority: bool,
}

/// Sizes that a device's scratch is made for.
#[derive(Clone, Copy, Debug)]
pub struct CudaSizes {
    /// Of steps.
    pub step: StepLimits,
    /// Of products.
    pub products: ScratchSize,
}

impl CudaSizes {
    /// For an executor of these limits.
    pub fn of(limits: &ExecutorLimits, config: &ModelConfig, quantized: bool) -> CudaSizes {
        let (tokens, rows) = (limits.step_tokens_max as usize, limits.rows_max as usize);
        let row_pages = (limits.context_len as usize).div_ceil(PAGE_TOKENS);
        CudaSizes {
            step: StepLimits { tokens, rows, row_pages, pages: limits.pages, vocab: limits.vocab_width },
            products: ScratchSize {
                rows: tokens,
                cols: config.hidden.max(config.q_width()).max(config.ffn),
                quantized,
            },
        }
    }

    /// For one that puts weights on a device and takes no step.
    pub fn none() -> CudaSizes {
        CudaSizes {
            step: StepLimits { tokens: 1, rows: 1, row_pages: 1, pages: 1, vocab: 1 },
            products: ScratchSize { rows: 1, cols: 1, quantized: false },
        }
    }
}
