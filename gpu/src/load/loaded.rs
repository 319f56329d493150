//! A model in memory, and the executors that are made of it. Owner: the launcher. Invariant: see [`super`].

use super::{AnyRunner, Assembled, Assembly, LoadError, ModelInfo};
use crate::cpu::{Cpu, CpuOptions};
use crate::cuda::model::CudaModel;
use crate::weights::ModelConfig;
use crate::work::Work;
use tokenrouter_core::executor::ExecutorLimits;

/// A model whose weights are in memory.
pub struct LoadedModel {
    pub(super) info: ModelInfo,
    pub(super) config: ModelConfig,
    pub(super) limits: ExecutorLimits,
    pub(super) place: Place,
}

/// Where its weights are.
pub(super) enum Place {
    Cpu { options: CpuOptions, assembled: Assembled<Cpu>, assembly: Assembly },
    Cuda(Box<CudaModel>),
}

impl LoadedModel {
    /// Facts about the model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes and operations of its steps; `None` where nobody has counted what the device reads.
    pub fn work(&self) -> Option<Work> {
        match &self.place {
            Place::Cpu { assembled, .. } => {
                Some(Work::of(&assembled.decoder, &self.config, self.info.kv_bytes_per_token))
            }
            Place::Cuda(_) => None,
        }
    }

    /// Capacity of the executors.
    pub fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    /// Builds what the first executor needs, where that takes time or can fail: on a CUDA device memory is taken and steps
    /// are recorded, `progress` being told how many of how many.
    ///
    /// # Errors
    /// As [`LoadedModel::executor`].
    pub fn prepare(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<(), LoadError> {
        match &self.place {
            Place::Cpu { .. } => Ok(()),
            Place::Cuda(model) => model.prepare(progress),
        }
    }

    /// Whether executors that are made from now on play recorded steps, where the model does so at all: on a CUDA device whose
    /// options list shapes.
    pub fn play_graphs(&self, play: bool) {
        if let Place::Cuda(model) = &self.place {
            model.play_graphs(play);
        }
    }

    /// A new executor: shares the weights, has threads or a stream, scratch and empty KV memory of its own. On a CUDA device
    /// that was lost, the weights are put there again.
    ///
    /// # Errors
    /// [`LoadError::Ops`] when the machine refuses threads or memory, or the device does.
    pub fn executor(&self) -> Result<AnyRunner, LoadError> {
        Ok(match &self.place {
            Place::Cpu { options, assembled, assembly } => {
                AnyRunner::Cpu(Box::new(assembly.runner(Cpu::new(options)?, assembled, &self.config)?))
            }
            Place::Cuda(model) => AnyRunner::Cuda(Box::new(model.executor()?)),
        })
    }
}
