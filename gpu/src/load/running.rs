//! An executor of a loaded model, whatever device it is on. Owner: the executor actor. Invariant: none of its own.

use crate::cpu::Cpu;
use crate::cuda::Cuda;
use crate::runner::Runner;
use tokenrouter_core::executor::{Executor, ExecutorError, ExecutorLimits, Step, StepOutput};

/// A runner on one of the devices.
pub enum AnyRunner {
    /// On the processor.
    Cpu(Box<Runner<Cpu>>),
    /// On a CUDA device.
    Cuda(Box<Runner<Cuda>>),
}

impl AnyRunner {
    /// As [`Runner::last_logits`].
    pub fn last_logits(&mut self, row: usize) -> Option<&[f32]> {
        match self {
            AnyRunner::Cpu(runner) => runner.last_logits(row),
            AnyRunner::Cuda(runner) => runner.last_logits(row),
        }
    }

    /// As [`Runner::last_hidden`].
    pub fn last_hidden(&mut self, row: usize) -> Option<&[f32]> {
        match self {
            AnyRunner::Cpu(runner) => runner.last_hidden(row),
            AnyRunner::Cuda(runner) => runner.last_hidden(row),
        }
    }
}

impl Executor for AnyRunner {
    fn limits(&self) -> ExecutorLimits {
        match self {
            AnyRunner::Cpu(runner) => runner.limits(),
            AnyRunner::Cuda(runner) => runner.limits(),
        }
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        match self {
            AnyRunner::Cpu(runner) => runner.step(step),
            AnyRunner::Cuda(runner) => runner.step(step),
        }
    }
}
