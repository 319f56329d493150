//! How a model uses a CUDA device, and what its scratch is made for. Owner: the launcher.

use super::GraphGrid;
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
