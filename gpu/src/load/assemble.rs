//! A model put together on any device. Owner: the loaded model. Invariant: the same parts in the same order on every
//! device; only the operations differ.

use super::LoadError;
use crate::heads::{self, HeadSource, Network, Seat};
use crate::models::blocks::{Decoder, Memory, Scratch, ScratchSizes};
use crate::models::{self, parts::Parts};
use crate::ops::{KvShape, Ops};
use crate::runner::{Runner, RunnerParts};
use crate::weights::{ModelConfig, ModelFiles};
use std::sync::Arc;
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_core::ids::TokenId;

/// How a model is put together.
pub(crate) struct Assembly {
    pub(crate) limits: ExecutorLimits,
    pub(crate) kv_shape: KvShape,
    pub(crate) real_vocab: u32,
    pub(crate) head: Option<HeadSource>,
}

/// Weights on a device.
pub(crate) struct Assembled<O: Ops> {
    pub(crate) decoder: Arc<Decoder<O>>,
    pub(crate) head: Option<LoadedHead<O>>,
}

/// A learned head on a device.
pub(crate) enum LoadedHead<O: Ops> {
    Network(Arc<Network<O>>),
    Row(TokenId),
}

impl Assembly {
    /// Puts the weights on a device; `report` is told the bytes loaded so far.
    pub(crate) fn load<O: Ops>(
        &self,
        ops: &mut O,
        files: &ModelFiles,
        report: &mut dyn FnMut(u64),
    ) -> Result<Assembled<O>, LoadError> {
        let head_files = heads::open_for(&files.config, self.head.as_ref())?;
        let decoder = models::build(&mut Parts {
            ops: &mut *ops,
            config: &files.config,
            weights: &files.weights,
            context_len: self.limits.context_len as usize,
            progress: report,
            loaded: 0,
        })?;
        let head = match (&self.head, head_files) {
            (_, Some(head)) => Some(LoadedHead::Network(Arc::new(Network::new(ops, &head)?))),
            (Some(HeadSource::Row { token }), None) => Some(LoadedHead::Row(*token)),
            _ => None,
        };
        Ok(Assembled { decoder: Arc::new(decoder), head })
    }

    /// A runner with KV memory and scratch of its own.
    pub(crate) fn runner<O: Ops>(
        &self,
        mut ops: O,
        assembled: &Assembled<O>,
        config: &ModelConfig,
    ) -> Result<Runner<O>, LoadError> {
        let (limits, real_vocab) = (self.limits, self.real_vocab);
        let kv = ops.kv(&self.kv_shape, limits.pages)?;
        let (tokens_max, outputs_max) = (limits.step_tokens_max as usize, limits.rows_max as usize);
        let sizes = ScratchSizes { tokens_max, outputs_max, real_vocab: real_vocab as usize };
        let scratch = Scratch::new(&mut ops, config, sizes)?;
        let head = match &assembled.head {
            Some(LoadedHead::Network(network)) => Some(Seat::network(&mut ops, network.clone(), outputs_max)?),
            Some(LoadedHead::Row(token)) => Some(Seat::row(*token)),
            None => None,
        };
        let (model, memory) = (assembled.decoder.clone(), Memory { kv, scratch });
        Ok(Runner::new(RunnerParts { ops, model, memory, limits, real_vocab, head }))
    }
}
