//! From a plan to models in memory and a running runtime. Owner: the command that was given. Invariant: weights are
//! loaded once; several runtimes can be started from them, one after another or side by side.

use super::{LaunchError, Plan, faults, plan, thresholds};
use crate::progress::Progress;
use crate::text::ModelText;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{self, ModelSpec, Placement, Runtime, RuntimeSpec};
use tokenrouter_config::{LaunchFile, Server};
use tokenrouter_core::executor::ExecutorError;
use tokenrouter_core::routing::Algorithm;
use tokenrouter_core::routing::catalog::Catalog;
use tokenrouter_core::text::TextCodec;
use tokenrouter_core::theory::profile::Profile;
use tokenrouter_gpu::load::{self, LoadedModel};
use tokenrouter_gpu::weights::GenerationDefaults;

/// A model in memory.
pub struct Member {
    /// Its name.
    pub name: String,
    /// Weights and sizes.
    pub model: Arc<LoadedModel>,
    /// Vocabulary and chat template.
    pub text: ModelText,
    /// Sampling defaults and stop tokens that came with it.
    pub generation: GenerationDefaults,
}

/// Everything in memory, ready to start.
pub struct Loaded {
    /// The effective launch file.
    pub file: LaunchFile,
    /// The routing algorithm with its parameters.
    pub algorithm: Arc<dyn Algorithm>,
    /// The algorithms that could be chosen.
    pub catalog: Catalog,
    /// What was measured of the models, if the file names it.
    pub profile: Option<Profile>,
    /// The models in the router's order; never empty.
    pub members: Vec<Member>,
}

impl Loaded {
    /// Reads the weights of all models, with a bar for each.
    ///
    /// # Errors
    /// [`LaunchError::Load`] naming the model.
    pub fn new(plan: Plan, progress: &Progress) -> Result<Loaded, LaunchError> {
        let mut members = Vec::new();
        for planned in plan.models {
            let bar = progress.bytes(&format!("load {}", planned.name), planned.inspection.weight_bytes);
            let report = &mut |at: load::Progress| bar.set_position(at.bytes);
            let model = load::load_files(&planned.files, &planned.options, report)
                .map_err(|reason| LaunchError::Load { model: planned.name.clone(), reason: Box::new(reason) })?;
            bar.finish_and_clear();
            prepare(&planned.name, &model, progress)?;
            let info = model.info();
            // Normalised entropy is over this width, padding included.
            let vocab_width = planned.limits.vocab_width;
            let (bytes, parameters) = (info.weight_bytes, info.parameters);
            tracing::info!(model = %planned.name, bytes, parameters, vocab_width, "loaded");
            members.push(Member {
                name: planned.name,
                model: Arc::new(model),
                text: planned.text,
                generation: planned.files.generation,
            });
        }
        let Plan { file, algorithm, catalog, profile, .. } = plan;
        Ok(Loaded { file, algorithm, catalog, profile, members })
    }

    /// The vocabulary shared by all models: the smallest, for the row of a learned head is a token of its own model only,
    /// and no prompt may hold it.
    pub fn codec(&self) -> Arc<dyn TextCodec> {
        let tokenizers = self.members.iter().map(|member| &member.text.tokenizer);
        let smallest = tokenizers.min_by_key(|tokenizer| tokenizer.vocab_size());
        smallest.unwrap_or(&self.members[0].text.tokenizer).clone()
    }

    /// Vocabulary and chat template for the routed name: those of the first model that has a template.
    pub fn text(&self) -> &ModelText {
        let with_template = self.members.iter().find(|member| member.text.template.is_some());
        &with_template.unwrap_or(&self.members[0]).text
    }

    /// Names of the models, by index.
    pub fn names(&self) -> Vec<String> {
        self.members.iter().map(|member| member.name.clone()).collect()
    }

    /// Starts a runtime with the launch file's algorithm. Must be called within an actix system.
    ///
    /// # Errors
    /// [`LaunchError::Start`] when the runtime refuses a setting.
    pub fn start(&self) -> Result<Runtime, LaunchError> {
        self.start_with(self.algorithm.clone())
    }

    /// As [`Loaded::start`], with another algorithm.
    ///
    /// # Errors
    /// As [`Loaded::start`]; [`LaunchError::Config`] when a text among its parameters is no token of the vocabulary, or
    /// when no thresholds can be planned.
    pub fn start_with(&self, algorithm: Arc<dyn Algorithm>) -> Result<Runtime, LaunchError> {
        let algorithm = plan::in_vocabulary(&self.file, algorithm, (self.catalog, &*self.codec()))?;
        let batching = thresholds::batching(
            &self.file,
            &thresholds::Known {
                profile: self.profile.as_ref(),
                algorithm: &*algorithm,
                weight_bytes: self.members.iter().map(|member| member.model.info().weight_bytes).collect(),
            },
        )?;
        let spec = RuntimeSpec {
            models: self.members.iter().map(|member| model_spec(member, &self.file)).collect(),
            codec: self.codec(),
            algorithm,
            batching,
            live_max: self.file.server.live_max,
            bounds: bounds(&self.file.server),
            placement: Placement::OwnArbiter,
            process: Process { faults: faults::messages(&self.file), ..Process::alone() },
        };
        Ok(runtime::start(spec)?)
    }
}

/// Takes memory and records steps where that is done ahead, with a bar.
fn prepare(name: &str, model: &LoadedModel, progress: &Progress) -> Result<(), LaunchError> {
    let mut bar = None;
    let report = &mut |done: usize, all: usize| {
        bar.get_or_insert_with(|| progress.count(&format!("record {name}"), all as u64)).set_position(done as u64);
    };
    let prepared = model.prepare(report);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    prepared.map_err(|reason| LaunchError::Load { model: name.to_owned(), reason: Box::new(reason) })
}

/// What a launch file says with 0 = no bound.
fn bounds(server: &Server) -> Bounds {
    let time = |ms: u64| Some(Duration::from_millis(ms)).filter(|limit| !limit.is_zero());
    Bounds {
        prompt_tokens_max: Some(server.prompt_tokens_max).filter(|&tokens| tokens > 0),
        first_token: time(server.queue_timeout_ms),
        whole: time(server.request_timeout_ms),
        step: time(server.step_timeout_ms),
    }
}

fn model_spec(member: &Member, file: &LaunchFile) -> ModelSpec {
    let (model, plan) = (member.model.clone(), faults::plan(file, &member.name));
    if !plan.is_empty() {
        tracing::warn!(model = %member.name, "steps of this model fail on order");
    }
    ModelSpec {
        name: member.name.clone(),
        limits: member.model.limits(),
        eos: member.model.info().eos.clone(),
        site: Site::Here(Seat::Thread(Arc::new(move || {
            let runner = model.executor().map_err(|error| ExecutorError::Lost(error.to_string()))?;
            Ok(faults::on(runner, &plan))
        }))),
    }
}
