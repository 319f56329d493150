//! A model on a CUDA device. Owner: the loaded model. Invariant: all executors of one life of the device share its weights;
//! when the device was lost, the first executor that is built afterwards opens it again and puts the weights there anew.

use super::memory::{attention_scratch, kernel_shape};
use super::plan::Cost;
use super::{Cuda, CudaOptions, CudaSizes, GraphGrid};
use crate::heads::HeadFiles;
use crate::load::{Assembled, Assembly, LoadError};
use crate::models::blocks::Scratch;
use crate::ops::{KvShape, OpsError};
use crate::runner::Runner;
use crate::weights::{ModelConfig, ModelFiles, Weights};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_kernels::attention::cuda::KvMemory;
use tokenrouter_kernels::cuda::{AnswerMemory, CudaError, Devices, Gpu, StepMemory, TOP_MAX};
use tokenrouter_kernels::head::cuda::HeadScratch;
use tokenrouter_kernels::matmul::cuda::{Layout, device_bytes};

/// Bytes that a recorded step takes on the device: an allowance, for the driver does not say.
const GRAPH_BYTES: u64 = 4 << 20;
/// Multiprocessors to plan scratch for before a device is open; no device has more.
const MULTIPROCESSORS_MAX: usize = 256;

/// Where a model lives.
#[derive(Clone, Debug)]
pub struct CudaPlace {
    /// The devices of this machine.
    pub devices: Arc<Devices>,
    /// How the model uses its own.
    pub options: CudaOptions,
}

/// A model whose weights are on a device.
pub struct CudaModel {
    place: CudaPlace,
    files: ModelFiles,
    assembly: Assembly,
    life: Mutex<Option<Life>>,
    /// The first executor, built before anybody asks for it.
    first: Mutex<Option<Runner<Cuda>>>,
    plays_graphs: AtomicBool,
}

/// Weights in one life of the device.
struct Life {
    gpu: Gpu,
    assembled: Arc<Assembled<Cuda>>,
}

impl CudaPlace {
    /// What a model will take, before anything is read.
    pub(crate) fn cost(
        &self,
        files: &ModelFiles,
        (limits, kv): (&ExecutorLimits, &KvShape),
        head: Option<&HeadFiles>,
    ) -> Cost {
        let config = &files.config;
        let (tokens, rows) = (limits.step_tokens_max as usize, limits.rows_max as usize);
        let CudaSizes { step, products } = CudaSizes::of(limits, config, is_quantized(config, &files.weights));
        let kernel = kernel_shape(kv, limits.pages);
        let scratch = attention_scratch(&kernel, kv.heads, (MULTIPROCESSORS_MAX, self.options.deterministic), &step);
        let recorded = self.options.graphs.shapes(rows, tokens).len() as u64 * if head.is_some() { 2 } else { 1 };
        let workspace = Scratch::<Cuda>::bytes(config, tokens, rows)
            + 4 * scratch as u64
            + HeadScratch::bytes(rows, config.vocab)
            + AnswerMemory::bytes(rows)
            + StepMemory::bytes(&step)
            + products.bytes()
            // Cosines and sines of all positions.
            + 4 * limits.context_len as u64 * config.head_dim as u64;
        Cost {
            weights: weight_bytes(config, &files.weights) + head.map_or(0, |head| head.weights.total_bytes()),
            workspace,
            graphs: recorded * GRAPH_BYTES,
            page: KvMemory::bytes_per_page(&kernel).unwrap_or(0),
        }
    }
}

/// Bytes of a model's tensors as the device keeps them.
fn weight_bytes(config: &ModelConfig, weights: &Weights) -> u64 {
    let bytes = |(name, [rows, cols]): &(String, [usize; 2])| match weights.tensor(name) {
        Ok(tensor) if *rows > 1 => device_bytes(tensor.format, *rows, *cols),
        _ => 4 * (*rows as u64) * (*cols as u64),
    };
    config.tensors().iter().map(bytes).sum()
}

fn is_quantized(config: &ModelConfig, weights: &Weights) -> bool {
    config
        .tensors()
        .iter()
        .any(|(name, _)| weights.tensor(name).is_ok_and(|tensor| Layout::of(tensor.format).is_quantized()))
}

/// Refuses a head that reads more of the highest logits than a list holds.
///
/// # Errors
/// [`LoadError::Head`].
pub(crate) fn check_head(head: &HeadFiles) -> Result<(), LoadError> {
    let (folder, reads) = (head.path.display(), head.config.logits_size);
    if reads <= TOP_MAX {
        return Ok(());
    }
    let reason =
        format!("{folder}: reads the {reads} highest logits, CUDA devices list {TOP_MAX}; set device = \"cpu\"");
    Err(LoadError::Head { reason })
}

impl CudaModel {
    /// Opens the device and puts the weights there.
    pub(crate) fn load(
        place: CudaPlace,
        files: &ModelFiles,
        assembly: Assembly,
        report: &mut dyn FnMut(u64),
    ) -> Result<Self, LoadError> {
        let model = CudaModel {
            place,
            files: files.clone(),
            assembly,
            life: Mutex::default(),
            first: Mutex::default(),
            plays_graphs: AtomicBool::new(true),
        };
        model.weights(report)?;
        Ok(model)
    }

    /// The device, open, and the weights on it.
    fn weights(&self, report: &mut dyn FnMut(u64)) -> Result<(Gpu, Arc<Assembled<Cuda>>), LoadError> {
        let gpu = self.place.devices.open(self.place.options.ordinal).map_err(OpsError::from)?;
        let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(life) = life.as_ref().filter(|life| life.gpu.is_same(&gpu)) {
            return Ok((gpu, life.assembled.clone()));
        }
        // What is left of a lost device goes first, so that there is room.
        *life = None;
        let mut ops = Cuda::new(&gpu, &self.place.options, CudaSizes::none()).map_err(OpsError::from)?;
        if !self.place.options.deterministic && !ops.has_blas() {
            tracing::warn!("libcublasLt.so.12 was not found: long prompts take longer");
        }
        let assembled = Arc::new(self.assembly.load(&mut ops, &self.files, report)?);
        *life = Some(Life { gpu: gpu.clone(), assembled: assembled.clone() });
        Ok((gpu, assembled))
    }

    /// Builds the first executor, so that what the device refuses is known before a request comes; `progress` is told how
    /// many of how many shapes are recorded.
    ///
    /// # Errors
    /// [`LoadError::Ops`] of the device.
    pub(crate) fn prepare(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<(), LoadError> {
        let runner = self.build(progress)?;
        *self.first.lock().unwrap_or_else(PoisonError::into_inner) = Some(runner);
        Ok(())
    }

    /// An executor with its steps recorded: the one that was prepared, or a new one.
    ///
    /// # Errors
    /// [`LoadError::Ops`] of the device.
    pub fn executor(&self) -> Result<Runner<Cuda>, LoadError> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut runner) = first
            && self.plays_graphs.load(Ordering::Relaxed)
            && !runner.device().stream().gpu().is_lost()
        {
            return Ok(runner);
        }
        self.build(&mut |_, _| ())
    }

    /// Whether executors that are built from now on play recorded steps.
    pub(crate) fn play_graphs(&self, play: bool) {
        self.plays_graphs.store(play, Ordering::Relaxed);
    }

    fn build(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<Runner<Cuda>, LoadError> {
        let began = Instant::now();
        let (gpu, assembled) = self.weights(&mut |_| ())?;
        let (config, weights) = (&self.files.config, &self.files.weights);
        let sizes = CudaSizes::of(&self.assembly.limits, config, is_quantized(config, weights));
        let mut options = self.place.options.clone();
        if !self.plays_graphs.load(Ordering::Relaxed) {
            options.graphs = GraphGrid::default();
        }
        let ops = Cuda::new(&gpu, &options, sizes).map_err(OpsError::from)?;
        let mut runner = self.assembly.runner(ops, &assembled, &self.files.config)?;
        runner.warm(progress).map_err(|error| {
            OpsError::from(CudaError::Unsupported { what: format!("steps could not be recorded: {error}") })
        })?;
        let (shapes, ms) = (runner.device().recorded(), began.elapsed().as_millis() as u64);
        let device = format_args!("cuda:{}", self.place.options.ordinal);
        tracing::info!(%device, shapes, ms, "steps are recorded");
        Ok(runner)
    }
}
