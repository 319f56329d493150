//! One server in several processes, with simulated devices: what each of them is started with, and what a user of one
//! sees. Owner: the link tests and the program they start. Invariant: every process is given the same server.

use crate::world::Words;
use crate::world::reference::{self, Told};
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::Address;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{ModelSpec, Placement, Reply, Runtime, RuntimeSpec};
use tokenrouter_core::batching::{Batching, PolicySpec};
use tokenrouter_core::executor::{Executor, ExecutorError, ExecutorLimits, Step, StepOutput};
use tokenrouter_core::faults::FaultPlan;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::{Event, Failure, FinishReason, Job, Prompt, StopRules, Target};
use tokenrouter_core::rng::mix;
use tokenrouter_core::routing::{self, Algorithm};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::sim::{Language, SimExecutor, Skill};

const VOCAB: u32 = 200;

const LIMITS: ExecutorLimits =
    ExecutorLimits { pages: 400, rows_max: 16, step_tokens_max: 256, context_len: 1024, vocab_width: 1000 };

/// A server and how its models are spread over processes.
#[derive(Clone, Debug)]
pub struct Town {
    /// Process of each model.
    pub homes: Vec<usize>,
    /// The algorithm.
    pub algorithm: Arc<dyn Algorithm>,
    /// Thresholds; empty = eager.
    pub thresholds: Vec<u32>,
    /// Time of a step.
    pub step: Duration,
}

impl Town {
    /// Models that hand over at random and often, and do not always keep what they drew.
    ///
    /// # Panics
    /// When there are fewer than two models: a wrong test.
    pub fn restless(homes: &[usize], step: Duration) -> Self {
        let models = homes.len();
        let share = 1.0 / models as f64;
        let keep: Vec<Vec<bool>> = (0..models).map(|i| (0..models).map(|j| i != 0 || j != 1).collect()).collect();
        let params = serde_json::json!({"p": vec![vec![share; models]; models], "keep": keep});
        let algorithm = routing::build("bernoulli", &params, models).expect("the parameters are right");
        Town { homes: homes.to_vec(), algorithm, thresholds: Vec::new(), step }
    }

    /// What process `me` is started with; `addresses` of all processes as this one shall see them.
    pub fn spec(&self, me: usize, addresses: &[Address]) -> RuntimeSpec {
        let models = self.homes.iter().enumerate().map(|(index, &home)| ModelSpec {
            name: name(index),
            limits: LIMITS,
            eos: Vec::new(),
            site: match home == me {
                true => Site::Here(self.device(index)),
                false => Site::Peer(addresses[home].clone()),
            },
        });
        RuntimeSpec {
            models: models.collect(),
            codec: Arc::new(Words::new(VOCAB)),
            algorithm: Arc::clone(&self.algorithm),
            batching: Batching {
                policy: match &self.thresholds[..] {
                    [] => PolicySpec::Eager,
                    thresholds => PolicySpec::Fixed(thresholds.to_vec()),
                },
                max_wait: Duration::from_millis(20),
                ..Batching::default()
            },
            live_max: 64,
            bounds: Bounds::default(),
            placement: Placement::OwnArbiter,
            process: Process::among_peers(addresses[me].clone()),
        }
    }

    fn device(&self, model: usize) -> Seat {
        let (language, skill, step) = (language(), skill(model), self.step);
        Seat::Thread(Arc::new(move || {
            let inner = SimExecutor::new(LIMITS, language.clone(), skill, FaultPlan::default());
            Ok(Box::new(Slow { inner, step }) as Box<dyn Executor>)
        }))
    }

    /// What a request must say.
    pub fn expected(&self, ask: Ask) -> Told {
        let skills: Vec<Skill> = (0..self.homes.len()).map(skill).collect();
        let prompt = ask.prompt();
        match ask.only {
            None => reference::tell(&language(), &skills, &*self.algorithm, (&prompt, ask.seed, ask.max)),
            Some(only) => {
                let alone = language().alone(skills[only], &prompt, ask.max as usize);
                alone.into_iter().map(|token| (token, only)).collect()
            }
        }
    }
}

fn language() -> Language {
    Language { vocab: VOCAB, hard: 0.3, eos: None }
}

fn skill(model: usize) -> Skill {
    if model == 0 { Skill::Small } else { Skill::Large }
}

fn name(model: usize) -> String {
    format!("model-{model}")
}

/// A device that takes its time.
struct Slow {
    inner: SimExecutor,
    step: Duration,
}

impl Executor for Slow {
    fn limits(&self) -> ExecutorLimits {
        self.inner.limits()
    }

    #[allow(clippy::disallowed_methods, reason = "a slow device blocks its own thread and nobody else's")]
    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        if !self.step.is_zero() {
            std::thread::sleep(self.step);
        }
        self.inner.step(step)
    }
}

/// A request: everything follows from the seed.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Seed of prompt and routing.
    pub seed: u64,
    /// Tokens to generate.
    pub max: u32,
    /// A single model.
    pub only: Option<usize>,
}

impl Ask {
    fn prompt(self) -> Vec<u32> {
        let len = 1 + mix(self.seed) % 40;
        (0..len).map(|at| (mix(self.seed ^ (at << 32)) % u64::from(VOCAB)) as u32).collect()
    }

    /// As the runtime takes it.
    pub fn job(self) -> Job {
        Job {
            prompt: Prompt::Ids(self.prompt()),
            target: self.only.map_or(Target::Routed, |model| Target::Only(ModelIdx(model as u8))),
            routing: None,
            sampling: SamplingParams { seed: self.seed, ..SamplingParams::default() },
            stop: StopRules { max_tokens: Some(self.max), ..StopRules::default() },
            logprobs: None,
            constraint: None,
            prompt_logprobs: None,
            entropy: false,
        }
    }
}

/// What a user saw.
#[derive(Debug)]
pub struct Heard {
    /// Tokens and their models.
    pub told: Told,
    /// How it ended.
    pub end: Result<FinishReason, Failure>,
}

/// Whether all peers of this process are connected to it, both ways.
pub fn is_connected(runtime: &Runtime) -> bool {
    let here = runtime.snapshot().models.into_iter().filter(|model| model.elsewhere.is_none());
    here.map(|model| model.inter_model.connected)
        .all(|connected| !connected.is_empty() && connected.iter().all(|&up| up))
}

/// Why a process is not at rest, if it is not: something of a request is left.
pub fn unrest(runtime: &Runtime) -> Option<String> {
    let end = runtime.snapshot();
    let left = end.models.iter().find(|model| {
        let (waiting, running) = (model.batcher.waiting + model.batcher.stalled, model.decode.running);
        let kept = model.kv.pages_free + model.kv.pages_cached != model.kv.pages_total;
        waiting + running + model.inter_model.pending > 0 || model.kv.leases > 0 || kept || model.batcher.live > 0
    });
    match left {
        None if end.live == 0 => None,
        None => Some(format!("{} live", end.live)),
        Some(model) => Some(format!("{model:?}")),
    }
}

/// Follows a request to its end.
///
/// # Panics
/// When it is refused, or its stream closes without an end: a failed test.
pub async fn follow(runtime: Runtime, ask: Ask, mut each: impl FnMut(usize)) -> Heard {
    let Reply { mut events, .. } = runtime.submit(ask.job()).await.unwrap_or_else(|refusal| panic!("{refusal}"));
    let mut told = Told::new();
    while let Some(event) = events.recv().await {
        match event {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => {
                told.extend(tokens.iter().map(|token| (token.id, token.model.index())));
                each(told.len());
            }
            Event::Finished { reason, .. } => return Heard { told, end: Ok(reason) },
            Event::Failed(failure) => return Heard { told, end: Err(failure) },
        }
    }
    panic!("the stream of {ask:?} closed without an end");
}
