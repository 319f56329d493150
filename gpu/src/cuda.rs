//! CUDA devices. Owner: the runner. Invariant: that of [`tokenrouter_kernels::cuda`].

pub mod draws;
