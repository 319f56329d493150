//! Models on CUDA devices: which device, how its memory is shared out. Owner: the launcher. Invariant: models on one device
//! are planned together, before a weight is read; what does not fit is refused with the sum.

use super::plan::PlannedModel;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tokenrouter_config::{self as config, ConfigError, CudaPriority, KvBudget, LaunchFile, Model};
use tokenrouter_core::executor::PAGE_TOKENS;
use tokenrouter_gpu::cuda::model::CudaPlace;
use tokenrouter_gpu::cuda::plan::{self, Budget, Member, Pages};
use tokenrouter_gpu::cuda::{CudaOptions, GraphGrid};
use tokenrouter_gpu::load::{self, Device, KvMemory, LoadOptions};
use tokenrouter_kernels::cuda::{Devices, DevicesConfig};

/// Folder of compiled kernels below that of the program's own files.
const CUBINS: &str = "cubins";

/// The CUDA devices that a launch file uses, with what was free on each before a model was put there.
pub(super) struct Gpus {
    devices: Arc<Devices>,
    free: BTreeMap<u32, u64>,
}

impl Gpus {
    /// Touches nothing yet; compiled kernels are kept below `cache`.
    pub(super) fn new(cache: &Path) -> Gpus {
        let config = DevicesConfig { cache: Some(cache.join(CUBINS)) };
        Gpus { devices: Arc::new(Devices::new(config)), free: BTreeMap::new() }
    }

    /// What runs a model; opens its device.
    ///
    /// # Errors
    /// An error at the model's device when there is none that can be used.
    pub(super) fn device(&mut self, file: &LaunchFile, model: &Model) -> Result<Device, ConfigError> {
        let (config::Device::Cuda(ordinal), Some(cuda)) = (model.device, &model.cuda) else { return Ok(Device::Cpu) };
        let key = format!("models.{}.device", model.name);
        let wrong = |error| file.error_at(&key, format!("model `{}`: {error}", model.name));
        if !self.free.contains_key(&ordinal) {
            let gpu = self.devices.open(ordinal as usize).map_err(wrong)?;
            let (free, _) = gpu.memory().map_err(wrong)?;
            let facts = gpu.facts();
            let (name, driver, (major, minor)) = (&facts.name, facts.driver, facts.capability);
            tracing::info!(device = %format_args!("cuda:{ordinal}"), name, driver, capability = %format_args!("{major}.{minor}"), free, "found");
            self.free.insert(ordinal, free);
        }
        let numbers = |list: &[u32]| list.iter().map(|&number| number as usize).collect();
        let graphs = match cuda.graphs {
            true => GraphGrid::new(numbers(&cuda.graph_rows), numbers(&cuda.graph_tokens)),
            false => GraphGrid::default(),
        };
        let options = CudaOptions {
            ordinal: ordinal as usize,
            graphs,
            deterministic: cuda.deterministic,
            high_priority: cuda.priority == CudaPriority::High,
        };
        Ok(Device::Cuda(CudaPlace { devices: self.devices.clone(), options }))
    }

    /// Shares the memory of each device out among the models on it.
    ///
    /// # Errors
    /// An error at the first model of a device whose models do not fit.
    pub(super) fn share(&self, file: &LaunchFile, models: &mut [PlannedModel]) -> Result<(), ConfigError> {
        let percent = file.cuda.map_or(0, |cuda| u64::from(cuda.memory_percent));
        for (&ordinal, &free) in &self.free {
            let bytes = free / 100 * percent;
            let budget = Budget { ordinal: ordinal as usize, free, bytes };
            let here = |index: &usize| file.models[*index].device == config::Device::Cuda(ordinal);
            let indices: Vec<usize> = (0..models.len()).filter(here).collect();
            let Some(&first) = indices.first() else { continue };
            let members = indices
                .iter()
                .map(|&index| member(file, (&file.models[index], &models[index])))
                .collect::<Result<Vec<_>, _>>()?;
            let key = format!("models.{}.device", file.models[first].name);
            let shares = plan::share(budget, &members).map_err(|refused| file.error_at(&key, refused))?;
            for ((&index, pages), Member { name, cost, .. }) in indices.iter().zip(shares).zip(&members) {
                let planned = &mut models[index];
                planned.options.kv = KvMemory::Pages(pages);
                planned.limits.pages = pages;
                let (tokens, weights, workspace, graphs) =
                    (u64::from(pages) * PAGE_TOKENS as u64, cost.weights, cost.workspace, cost.graphs);
                let device = format_args!("cuda:{ordinal}");
                tracing::info!(model = %name, %device, weights, workspace, graphs, kv_tokens = tokens, "planned");
            }
        }
        Ok(())
    }
}

/// What a model wants of its device.
fn member(file: &LaunchFile, (model, planned): (&Model, &PlannedModel)) -> Result<Member, ConfigError> {
    let cost = load::cuda_cost(&planned.files, &planned.options)
        .map_err(|error| file.error_at(&format!("models.{}.device", model.name), error))?;
    let pages = match model.kv {
        KvBudget::Default => Pages::Shared { most: most_pages(file, planned) },
        KvBudget::Memory(_) | KvBudget::Tokens(_) => Pages::Fixed(planned.limits.pages),
    };
    Ok(Member { name: model.name.clone(), cost, pages })
}

/// The pages of all live requests, were each as long as it can be.
fn most_pages(file: &LaunchFile, planned: &PlannedModel) -> u32 {
    planned.limits.context_len.div_ceil(PAGE_TOKENS as u32).saturating_mul(file.server.live_max)
}

/// KV memory of a model before it was shared out: a page each, so that everything else can be checked.
pub(super) fn before_sharing(options: &LoadOptions, model: &Model) -> Option<KvMemory> {
    let shared = matches!(options.device, Device::Cuda(_)) && model.kv == KvBudget::Default;
    shared.then_some(KvMemory::Pages(1))
}
