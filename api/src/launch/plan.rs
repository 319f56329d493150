//! What can be known before a weight is read: the algorithm, the opened files, vocabularies, sizes.
//! Owner: the launcher. Invariant: a [`Plan`] that exists can be loaded unless the machine fails; all its models share
//! one token table.

use super::cuda::{Gpus, before_sharing};
use super::{Environment, LaunchError, heads, scripted, thresholds};
use crate::text::ModelText;
use serde_json::Value as Json;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenrouter_config::{Bytes, ConfigError, DEFAULT_KV_BYTES, KvBudget, LaunchFile, Model};
use tokenrouter_core::executor::{ExecutorLimits, PAGE_TOKENS};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::routing::catalog::Catalog;
use tokenrouter_core::routing::{Algorithm, HeadSpec, RoutingError, script};
use tokenrouter_core::text::TextCodec;
use tokenrouter_core::theory::profile::Profile;
use tokenrouter_gpu::cpu::Cpu;
use tokenrouter_gpu::load::{self, KvMemory, LoadError, LoadOptions};
use tokenrouter_gpu::ops::{KvFormat, KvShape, Ops};
use tokenrouter_gpu::weights::{self, Inspection, ModelConfig, ModelFiles, TokenTable};
use tokenrouter_kernels::sys;

/// A launch file whose models were opened and checked.
pub struct Plan {
    /// The launch file, KV memory of every model filled in.
    pub file: LaunchFile,
    /// The routing algorithm with its parameters.
    pub algorithm: Arc<dyn Algorithm>,
    /// The algorithms that could be chosen.
    pub catalog: Catalog,
    /// What was measured of the models, if the file names it.
    pub profile: Option<Profile>,
    /// The models in the router's order.
    pub models: Vec<PlannedModel>,
}

/// A model that was opened and checked.
pub struct PlannedModel {
    /// Its name.
    pub name: String,
    /// Its files; tensor data is not read yet.
    pub files: ModelFiles,
    /// What is known of it.
    pub inspection: Inspection,
    /// Its tokens as the other models must have them: without the one that is the row of a learned head.
    pub shared_tokens: TokenTable,
    /// Vocabulary and chat template.
    pub text: ModelText,
    /// How it is loaded.
    pub options: LoadOptions,
    /// What its executor will hold and do.
    pub limits: ExecutorLimits,
}

/// The algorithm of a launch file; the script it names is read.
///
/// # Errors
/// An error at `router.algorithm`, at the parameter that is wrong, or in the script.
pub fn algorithm(file: &LaunchFile, catalog: Catalog) -> Result<Arc<dyn Algorithm>, ConfigError> {
    let router = &file.router;
    if router.algorithm == script::ENTRY.name {
        return scripted::algorithm(file, catalog);
    }
    let params = heads::params(file, catalog)?;
    catalog.build(&router.algorithm, &Json::Object(params.clone()), router.models.len()).map_err(|error| match &error {
        RoutingError::Unknown { name, known } => {
            let names: Vec<&str> = known.split(", ").collect();
            let hint = match tokenrouter_config::nearest(name, names) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known: {known}"),
            };
            file.error_at("router.algorithm", format!("unknown routing algorithm `{name}`; {hint}"))
        }
        RoutingError::Models { .. } => {
            file.error_at("router.models", format!("{error}; change router.models or router.algorithm"))
        }
        RoutingError::Param { message, .. } => wrong_param(file, (catalog, &params), message),
        RoutingError::Request { message } => file.error_at("router.params", message),
    })
}

/// The algorithm words its own errors, and not all of them name the key. It is the one the algorithm does not have, or
/// else the one without which the others are accepted.
fn wrong_param(
    file: &LaunchFile,
    (catalog, given): (Catalog, &serde_json::Map<String, Json>),
    message: &str,
) -> ConfigError {
    let algorithm = &file.router.algorithm;
    let known = known_params(algorithm, catalog);
    let unknown = given.keys().find(|key| !known.contains(&key.as_str()));
    let accepted_without = |key: &&String| {
        let mut others = given.clone();
        others.remove(*key);
        catalog.build(algorithm, &Json::Object(others), file.router.models.len()).is_ok()
    };
    let Some(key) = unknown.or_else(|| given.keys().find(accepted_without)) else {
        return file.error_at("router.params", format!("router.params: {message}"));
    };
    let near = unknown.and_then(|key| tokenrouter_config::nearest(key, known));
    let hint = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
    let place = format!("router.params.{key}");
    file.error_at(&place, format!("{place}: {message}{hint}"))
}

/// The algorithm with texts among its parameters turned into tokens of this vocabulary.
///
/// # Errors
/// An error at the parameter whose text is no token.
pub(super) fn in_vocabulary(
    file: &LaunchFile,
    algorithm: Arc<dyn Algorithm>,
    (catalog, codec): (Catalog, &dyn TextCodec),
) -> Result<Arc<dyn Algorithm>, ConfigError> {
    match algorithm.in_vocabulary(codec) {
        Ok(known) => Ok(known.unwrap_or(algorithm)),
        Err(RoutingError::Param { message, .. }) => {
            let known = known_params(&file.router.algorithm, catalog);
            let named = known.into_iter().find(|name| message.split(':').next() == Some(name));
            let prefix = if named.is_some() { "router.params." } else { "router.params: " };
            let place = named.map_or_else(|| "router.params".to_owned(), |name| format!("router.params.{name}"));
            Err(file.error_at(&place, format!("{prefix}{message}")))
        }
        Err(error) => Err(file.error_at("router.params", error)),
    }
}

pub(super) fn known_params(algorithm: &str, catalog: Catalog) -> Vec<&'static str> {
    let entry = catalog.entries().find(|entry| entry.name == algorithm);
    entry.map(|entry| entry.params.iter().map(|param| param.name).collect()).unwrap_or_default()
}

impl Plan {
    /// Opens the models at these paths (in the order of `file.models`) and checks everything that needs no weights.
    ///
    /// # Errors
    /// [`LaunchError::Config`] at the key that is wrong.
    pub fn new(mut file: LaunchFile, paths: Vec<PathBuf>, environment: &Environment) -> Result<Plan, LaunchError> {
        let catalog = environment.catalog;
        let algorithm = algorithm(&file, catalog)?;
        let profile = thresholds::profile(&file)?;
        file.router.params = heads::params(&file, catalog)?;
        let mut models: Vec<PlannedModel> = Vec::new();
        let (mut taken, mut gpus) = (0u64, Gpus::new(&environment.cache));
        for (index, path) in paths.iter().enumerate() {
            let head = algorithm.head(ModelIdx(index as u8));
            let (planned, bytes) = plan_model((&file, &mut gpus), index, (path, taken, head))?;
            if matches!(planned.options.device, load::Device::Cpu) {
                taken = taken.saturating_add(bytes);
            }
            if let Some(first) = models.first() {
                same_tokens(&file, first, &planned)?;
            }
            models.push(planned);
        }
        gpus.share(&file, &mut models)?;
        let algorithm = match models.first() {
            Some(first) => in_vocabulary(&file, algorithm, (catalog, &*first.text.tokenizer))?,
            None => algorithm,
        };
        for (model, planned) in file.models.iter_mut().zip(&models) {
            model.context_length = Some(planned.limits.context_len);
            if model.kv == KvBudget::Default {
                model.kv = KvBudget::Tokens(planned.limits.pages * PAGE_TOKENS as u32);
            }
        }
        Ok(Plan { file, algorithm, catalog, profile, models })
    }
}

/// Opens and checks one model beside others that will take `taken` bytes; also says how many it will take.
fn plan_model(
    (file, gpus): (&LaunchFile, &mut Gpus),
    index: usize,
    (path, taken, head): (&Path, u64, Option<HeadSpec>),
) -> Result<(PlannedModel, u64), ConfigError> {
    let model = &file.models[index];
    let wrong = |key: &str, problem: &dyn Display| file.error_at(&format!("models.{}.{key}", model.name), problem);
    let files = weights::open(path).map_err(|error| wrong("path", &error))?;
    let inspection = files.inspect().map_err(|error| wrong("path", &error))?;
    let text = ModelText::load(&files).map_err(|error| wrong("path", &error))?;
    usable_cores(model).map_err(|problem| wrong("cores", &problem))?;
    let refused = |error: LoadError| {
        let message = format!("model `{}`: {error}", model.name);
        match error {
            LoadError::Head { .. } | LoadError::HeadWidth { .. } => file.error_at(heads::KEY, message),
            error => wrong(faulty_key(model, &error), &message),
        }
    };
    let device = gpus.device(file, model)?;
    let mut options = options((model, device), &inspection, file.server.live_max).map_err(refused)?;
    let mut shared_tokens = inspection.tokens;
    if let Some(HeadSpec::Row { token }) = &head {
        shared_tokens = files.tokens_without(token).map_err(|error| wrong("path", &error))?;
    }
    options.head = head.map(|head| heads::source(file, &model.name, (head, &text))).transpose()?;
    let load::Checked { limits, bytes } = load::check(&files, &options, taken).map_err(refused)?;
    let name = model.name.clone();
    Ok((PlannedModel { name, files, inspection, shared_tokens, text, options, limits }, bytes))
}

/// The key of a model's table that an error of the loader is about.
fn faulty_key(model: &Model, error: &LoadError) -> &'static str {
    match error {
        LoadError::Context { .. } => "context_length",
        LoadError::StepSize { what, .. } => what,
        LoadError::KvTooSmall { .. } | LoadError::Memory { .. } => match model.kv {
            KvBudget::Tokens(_) => "kv_tokens",
            KvBudget::Memory(_) | KvBudget::Default => "kv_memory",
        },
        LoadError::Weights(_)
        | LoadError::Ops(_)
        | LoadError::Architecture { .. }
        | LoadError::Head { .. }
        | LoadError::HeadWidth { .. } => "path",
    }
}

fn usable_cores(model: &Model) -> Result<(), String> {
    let usable = sys::usable_cores();
    let missing = model.cores.iter().flatten().find(|core| !usable.contains(&(**core as usize)));
    match missing {
        Some(core) => {
            Err(format!("model `{}`: core {core} cannot be used; this process may use {usable:?}", model.name))
        }
        None => Ok(()),
    }
}

/// The loader's options for a model of the launch file.
fn options(
    (model, device): (&Model, load::Device),
    inspection: &Inspection,
    live_max: u32,
) -> Result<LoadOptions, LoadError> {
    let cores = model.cores.as_ref().map(|cores| cores.iter().map(|core| *core as usize).collect::<Vec<_>>());
    let options = LoadOptions {
        device,
        threads: super::cores::threads(model),
        cores,
        kv: kv_memory(model, &inspection.config, live_max)?,
        kv_format: kv_format(model),
        context_len: model.context_length,
        rows_max: model.rows_max,
        step_tokens_max: model.step_tokens_max,
        real_vocab: Some(inspection.tokens.len),
        head: None,
    };
    Ok(LoadOptions { kv: before_sharing(&options, model).unwrap_or(options.kv), ..options })
}

/// KV memory as asked for; by default room for the context of every live request, within [`DEFAULT_KV_BYTES`].
fn kv_memory(model: &Model, config: &ModelConfig, live_max: u32) -> Result<KvMemory, LoadError> {
    let pages = |tokens: u64| u32::try_from(tokens.div_ceil(PAGE_TOKENS as u64)).unwrap_or(u32::MAX);
    Ok(match model.kv {
        KvBudget::Memory(Bytes(bytes)) => KvMemory::Bytes(bytes),
        KvBudget::Tokens(tokens) => KvMemory::Pages(pages(u64::from(tokens))),
        KvBudget::Default => {
            let ModelConfig { layers, heads, kv_heads, head_dim, .. } = *config;
            let shape = KvShape { layers, heads, kv_heads, head_dim, format: kv_format(model) };
            let affordable = DEFAULT_KV_BYTES.0 / Cpu::kv_page_bytes(&shape)?.max(1);
            let context = model.context_length.map_or(config.context as u64, u64::from);
            let wanted = pages(context).saturating_mul(live_max);
            KvMemory::Pages(u32::try_from(affordable).unwrap_or(u32::MAX).min(wanted))
        }
    })
}

fn kv_format(model: &Model) -> KvFormat {
    match model.kv_format {
        tokenrouter_config::KvFormat::F16 => KvFormat::F16,
        tokenrouter_config::KvFormat::Bf16 => KvFormat::BF16,
        tokenrouter_config::KvFormat::F32 => KvFormat::F32,
        tokenrouter_config::KvFormat::Q8 => KvFormat::Q8,
    }
}

/// All models of a router speak in the same token ids.
fn same_tokens(file: &LaunchFile, first: &PlannedModel, other: &PlannedModel) -> Result<(), ConfigError> {
    let (a, b) = (first.shared_tokens, other.shared_tokens);
    if a == b {
        return Ok(());
    }
    let difference = if a.len == b.len {
        format!("both have {} tokens but not the same", a.len)
    } else {
        format!("{} and {} tokens", a.len, b.len)
    };
    let message = format!(
        "the token table of model `{}` differs from that of `{}` ({difference}); a router needs models of one tokenizer",
        other.name, first.name
    );
    Err(file.error_at(&format!("models.{}.path", other.name), message))
}
