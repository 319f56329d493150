//! From a path to a model that can run: opens the files, checks memory, puts weights on a device, makes executors.
//! Owner: the launcher keeps the `LoadedModel`; executors come and go. Invariant: weights are loaded once and shared, and
//! again only after their device was lost; every executor has KV memory, scratch and threads or a stream of its own, so a
//! new one starts clean after a panic of the old.

mod assemble;
mod loaded;
mod running;

use crate::cpu::{Cpu, CpuOptions};
use crate::cuda::Cuda;
use crate::cuda::model::{CudaModel, CudaPlace};
use crate::cuda::plan::Cost;
use crate::heads::{self, HeadSource};
use crate::models::blocks::Scratch;
use crate::ops::{KvFormat, KvShape, Ops, OpsError};
use crate::weights::{self, ModelFiles, WeightsError};
pub(crate) use assemble::{Assembled, Assembly};
pub use loaded::LoadedModel;
use loaded::Place;
pub use running::AnyRunner;
use std::path::{Path, PathBuf};
use tokenrouter_core::executor::{ExecutorLimits, PAGE_TOKENS};
use tokenrouter_core::ids::TokenId;

/// Most rows of a step and most tokens of a step; larger numbers are mistakes.
const ROWS_LIMIT: u32 = 4096;
const STEP_TOKENS_LIMIT: u32 = 65_536;

/// What runs a model.
#[derive(Clone, Debug, Default)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// A CUDA device.
    Cuda(CudaPlace),
}

/// How a model is loaded and how its executors are sized.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// What runs it.
    pub device: Device,
    /// Worker threads, the thread that calls `step` included; 0 = one per usable core.
    pub threads: usize,
    /// Cores the threads are pinned to; `None` = the system places them.
    pub cores: Option<Vec<usize>>,
    /// KV memory of an executor.
    pub kv: KvMemory,
    /// Storage of keys and values.
    pub kv_format: KvFormat,
    /// Longest sequence, in tokens; `None` = what the model was made for.
    pub context_len: Option<u32>,
    /// Rows of a step at most.
    pub rows_max: u32,
    /// Tokens of a step at most.
    pub step_tokens_max: u32,
    /// Number of real tokens: ids from here on are padding and never drawn; `None` = the whole row.
    pub real_vocab: Option<u32>,
    /// The learned head whose score the routing reads.
    pub head: Option<HeadSource>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            device: Device::Cpu,
            threads: 0,
            cores: None,
            kv: KvMemory::Bytes(512 << 20),
            kv_format: KvFormat::default(),
            context_len: None,
            rows_max: 64,
            step_tokens_max: 512,
            real_vocab: None,
            head: None,
        }
    }
}

/// How much KV memory an executor gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvMemory {
    /// As many pages as fit into this many bytes.
    Bytes(u64),
    /// This many pages of [`PAGE_TOKENS`] tokens.
    Pages(u32),
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its files cannot be used.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The device refused.
    #[error(transparent)]
    Ops(#[from] OpsError),
    /// No builder for the architecture.
    #[error("architecture {name:?} is not registered; known are {known}")]
    Architecture {
        /// As the model names it.
        name: String,
        /// The registered ones.
        known: String,
    },
    /// A context longer than the model's.
    #[error("context length {asked} is not between 1 and the {model} tokens this model was made for; lower it")]
    Context {
        /// As asked.
        asked: u32,
        /// The model's own.
        model: usize,
    },
    /// A learned head for hidden rows of another width.
    #[error(
        "head {}: made for a model with {what} of {head}, this one has {model}; use the head that was trained for this model",
        folder.display()
    )]
    HeadWidth {
        /// Folder of the head.
        folder: PathBuf,
        /// Which width.
        what: &'static str,
        /// The head's.
        head: usize,
        /// The model's.
        model: usize,
    },
    /// A learned head that cannot be used, or not with this model.
    #[error("head {reason}")]
    Head {
        /// Which one and why.
        reason: String,
    },
    /// A step size that makes no sense.
    #[error("{what} is {value}; it must be between 1 and {max}")]
    StepSize {
        /// `rows_max` or `step_tokens_max`.
        what: &'static str,
        /// As asked.
        value: u32,
        /// The limit.
        max: u32,
    },
    /// KV memory that holds no page.
    #[error(
        "kv memory of {bytes} bytes holds no page of {page_bytes} bytes; give at least {sequence_bytes} bytes for one sequence of the full context"
    )]
    KvTooSmall {
        /// As asked.
        bytes: u64,
        /// Bytes of one page in all layers.
        page_bytes: u64,
        /// Bytes of one sequence of the full context.
        sequence_bytes: u64,
    },
    /// More memory than the machine can give.
    #[error(
        "needs {weights} bytes for weights, {kv} for kv memory and {scratch} for a step beside {taken} of other models, \
         {available} are available; lower the kv memory or use smaller weights"
    )]
    Memory {
        /// Bytes of the weights.
        weights: u64,
        /// Bytes of KV memory.
        kv: u64,
        /// Bytes of activations.
        scratch: u64,
        /// Bytes that models before it take.
        taken: u64,
        /// Bytes the machine can give now.
        available: u64,
    },
}

/// Bytes of weights loaded so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Loaded.
    pub bytes: u64,
    /// In all.
    pub total: u64,
}

/// Facts about a loaded model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// Name of the file or directory, without extension.
    pub name: String,
    /// `llama`, `qwen2`, ...
    pub architecture: String,
    /// Longest sequence, in tokens.
    pub context_len: u32,
    /// Width of a logits row.
    pub vocab_width: u32,
    /// Tokens that end an answer.
    pub eos: Vec<TokenId>,
    /// Bytes of the weights as stored.
    pub weight_bytes: u64,
    /// Bytes of keys and values per token.
    pub kv_bytes_per_token: u64,
    /// Number of weights.
    pub parameters: u64,
}

/// Opens and loads a model from a GGUF file or an HF directory.
///
/// # Errors
/// [`LoadError`], before any weight is read where that is possible.
pub fn load(path: &Path, options: &LoadOptions, progress: &mut dyn FnMut(Progress)) -> Result<LoadedModel, LoadError> {
    load_files(&weights::open(path)?, options, progress)
}

/// Loads a model whose files are open.
///
/// # Errors
/// As [`load`].
pub fn load_files(
    files: &ModelFiles,
    options: &LoadOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<LoadedModel, LoadError> {
    let plan = plan(files, options, 0)?;
    let total = files.weights.total_bytes();
    let mut report = |bytes| progress(Progress { bytes, total });
    let vocab_width = plan.limits.vocab_width;
    let assembly = Assembly {
        limits: plan.limits,
        kv_shape: plan.kv_shape,
        real_vocab: options.real_vocab.unwrap_or(vocab_width).min(vocab_width),
        head: options.head.clone(),
    };
    let place = match &options.device {
        Device::Cpu => {
            let options = CpuOptions { threads: options.threads, cores: options.cores.clone().unwrap_or_default() };
            let assembled = assembly.load(&mut Cpu::new(&options)?, files, &mut report)?;
            Place::Cpu { options, assembled, assembly }
        }
        Device::Cuda(place) => Place::Cuda(Box::new(CudaModel::load(place.clone(), files, assembly, &mut report)?)),
    };
    report(total);
    Ok(LoadedModel { info: info(files, &plan), config: files.config.clone(), limits: plan.limits, place })
}

/// Sizes of a model's executors, all checked.
#[derive(Clone, Copy, Debug)]
struct Plan {
    limits: ExecutorLimits,
    kv_shape: KvShape,
    page_bytes: u64,
    /// Weights, KV memory and scratch.
    bytes: u64,
}

/// What a check found.
#[derive(Clone, Copy, Debug)]
pub struct Checked {
    /// What the executor will hold and do.
    pub limits: ExecutorLimits,
    /// Bytes of memory that the model will take.
    pub bytes: u64,
}

/// Checks that the model can run as asked, before any weight is read, beside models that will take `taken` bytes.
///
/// # Errors
/// As [`load`].
pub fn check(files: &ModelFiles, options: &LoadOptions, taken: u64) -> Result<Checked, LoadError> {
    let Plan { limits, bytes, .. } = plan(files, options, taken)?;
    Ok(Checked { limits, bytes })
}

/// What a model takes on its CUDA device; nothing for one on the processor.
///
/// # Errors
/// As [`load`].
pub fn cuda_cost(files: &ModelFiles, options: &LoadOptions) -> Result<Cost, LoadError> {
    let Device::Cuda(place) = &options.device else { return Ok(Cost::default()) };
    let Plan { limits, kv_shape, .. } = plan(files, options, 0)?;
    let head = heads::open_for(&files.config, options.head.as_ref())?;
    Ok(place.cost(files, (&limits, &kv_shape), head.as_ref()))
}

fn plan(files: &ModelFiles, options: &LoadOptions, taken: u64) -> Result<Plan, LoadError> {
    let config = &files.config;
    let sizes =
        [("rows_max", options.rows_max, ROWS_LIMIT), ("step_tokens_max", options.step_tokens_max, STEP_TOKENS_LIMIT)];
    if let Some(&(what, value, max)) = sizes.iter().find(|(_, value, max)| *value == 0 || value > max) {
        return Err(LoadError::StepSize { what, value, max });
    }
    let own_context = u32::try_from(config.context).unwrap_or(u32::MAX);
    let context_len = options.context_len.unwrap_or(own_context);
    if context_len == 0 || context_len > own_context {
        return Err(LoadError::Context { asked: context_len, model: config.context });
    }
    let kv_shape = KvShape {
        layers: config.layers,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        format: options.kv_format,
    };
    let page_bytes = match &options.device {
        Device::Cpu => Cpu::kv_page_bytes(&kv_shape)?,
        Device::Cuda(_) => Cuda::kv_page_bytes(&kv_shape)?,
    };
    let pages = match options.kv {
        KvMemory::Pages(pages) => pages,
        KvMemory::Bytes(bytes) => u32::try_from(bytes / page_bytes).unwrap_or(u32::MAX),
    };
    if pages == 0 {
        let bytes = if let KvMemory::Bytes(bytes) = options.kv { bytes } else { 0 };
        let sequence_bytes = page_bytes.saturating_mul(u64::from(context_len.div_ceil(PAGE_TOKENS as u32)));
        return Err(LoadError::KvTooSmall { bytes, page_bytes, sequence_bytes });
    }
    let (rows_max, step_tokens_max) = (options.rows_max, options.step_tokens_max);
    let vocab_width = config.vocab as u32;
    let limits = ExecutorLimits { pages, rows_max, step_tokens_max, context_len, vocab_width };
    let head = heads::open_for(config, options.head.as_ref())?;
    let bytes = match &options.device {
        // The kernels keep a repacked copy of a head beside its file.
        Device::Cpu => {
            let head = head.map_or(0, |head| 2 * head.weights.total_bytes());
            let weights = files.weights.total_bytes().saturating_add(head);
            let kv = page_bytes.saturating_mul(u64::from(pages));
            let scratch = Scratch::<Cpu>::bytes(config, step_tokens_max as usize, rows_max as usize);
            let bytes = weights.saturating_add(kv).saturating_add(scratch);
            if let Some(available) = available_memory().filter(|&available| bytes.saturating_add(taken) > available) {
                return Err(LoadError::Memory { weights, kv, scratch, taken, available });
            }
            bytes
        }
        // Models on a CUDA device are planned together: see `cuda::plan`.
        Device::Cuda(place) => {
            head.as_ref().map_or(Ok(()), crate::cuda::model::check_head)?;
            place.cost(files, (&limits, &kv_shape), head.as_ref()).fixed()
        }
    };
    Ok(Plan { limits, kv_shape, page_bytes, bytes })
}

fn info(files: &ModelFiles, plan: &Plan) -> ModelInfo {
    let origin = files.weights.origin();
    let stem = if origin.is_dir() { origin.file_name() } else { origin.file_stem() };
    ModelInfo {
        name: stem.map_or_else(|| origin.display().to_string(), |stem| stem.to_string_lossy().into_owned()),
        architecture: files.config.architecture.clone(),
        context_len: plan.limits.context_len,
        vocab_width: plan.limits.vocab_width,
        eos: files.generation.eos.clone(),
        weight_bytes: files.weights.total_bytes(),
        kv_bytes_per_token: plan.page_bytes / PAGE_TOKENS as u64,
        parameters: files.config.tensors().iter().map(|(_, [rows, cols])| *rows as u64 * *cols as u64).sum(),
    }
}

/// Bytes of memory the machine can give without swapping; `None` where the system does not say.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}
