//! CUDA devices: contexts, streams, memory, graphs, compiled kernels and the arrays of a step, over cudarc.
//!
//! Owner: the launcher owns one [`Devices`]; a model has a [`Stream`] and arrays of its own on a shared [`Gpu`].
//! Invariant: nothing of CUDA is touched before [`Devices::open`], which refuses a machine without a usable driver in one
//! line. Every call goes through [`Gpu::call`], which refuses a context that was lost, so that a handle of a dead context
//! never reaches the driver.

mod answers;
mod cache;
mod changes;
mod compile;
mod devices;
mod error;
mod gpu;
mod graph;
mod launch;
mod memory;
mod step;
mod stream;

pub use answers::{Answer, AnswerMemory, Answers, Candidate, TOP_MAX};
pub use compile::{Compiled, Source, compile_cached, compile_for};
pub use devices::{Devices, DevicesConfig};
pub use error::CudaError;
pub use gpu::{Facts, Gpu};
pub use graph::Graph;
pub use launch::{Args, Function, Launch, Module};
pub use memory::{Array, Element, Pinned, View};
pub use step::{Ask, Draw, Edit, NONE, Span, StepInput, StepLimits, StepMemory, ask, draw};
pub use stream::{Event, Stream};

/// Every CUDA source of this crate.
pub fn sources() -> impl Iterator<Item = &'static Source> {
    use crate::{activation, attention, head, matmul, norm, rope};
    let single = [&norm::cuda::SOURCE, &rope::cuda::SOURCE, &activation::cuda::SOURCE];
    let pairs = [&head::cuda::REDUCE, &head::cuda::SAMPLE, &matmul::cuda::MATMUL, &matmul::cuda::ROWS];
    single.into_iter().chain(pairs).chain(attention::cuda::sources())
}
