//! A whole runtime over real models: every actor, every thread, real time. Owner: the test that serves. Invariant: a job
//! that does not end within [`STUCK_AFTER`] is a failed test, and so is memory that does not come back.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{ModelSpec, Placement, Runtime, RuntimeSnapshot, RuntimeSpec, start};
use tokenrouter_core::batching::{Batching, PolicySpec};
use tokenrouter_core::executor::{Executor, ExecutorError};
use tokenrouter_core::job::{Event, FinishReason, Job, TokenReport, Usage};
use tokenrouter_core::routing::Algorithm;
use tokenrouter_core::text::TextCodec;
use tokenrouter_gpu::load::LoadedModel;

/// How long jobs, and the clean-up after them, may take.
const STUCK_AFTER: Duration = Duration::from_secs(120);
/// How often a waiting test looks again.
const POLL: Duration = Duration::from_millis(5);

/// What a test serves.
#[derive(Clone)]
pub struct Setup {
    /// Models by name, in the router's order.
    pub models: Vec<(&'static str, Arc<LoadedModel>)>,
    /// Their vocabulary.
    pub codec: Arc<dyn TextCodec>,
    /// The routing algorithm.
    pub algorithm: Arc<dyn Algorithm>,
    /// Batching thresholds; eager when empty.
    pub thresholds: Vec<u32>,
}

/// What a job gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Answered {
    /// The prompt with log-probabilities, if they were wanted.
    pub prompt: Vec<TokenReport>,
    /// Tokens with model, entropy and log-probabilities.
    pub tokens: Vec<TokenReport>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// Totals.
    pub usage: Usage,
}

impl Answered {
    /// The same without the count of cached tokens, which depends on what was served before.
    pub fn without_cache(&self) -> Answered {
        Answered { usage: Usage { cached_tokens: 0, ..self.usage.clone() }, ..self.clone() }
    }

    /// Ids alone.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

/// Starts a runtime, lets `test` use it, and checks that all memory came back.
///
/// # Panics
/// When it does not start or does not come to rest: a failed test.
pub fn serve<T, F: Future<Output = T>>(setup: &Setup, test: impl FnOnce(Runtime) -> F) -> T {
    actix_rt::System::new().block_on(async {
        let runtime = start(spec(setup)).unwrap_or_else(|error| panic!("{error}"));
        let out = test(runtime.clone()).await;
        assert_idle(&runtime).await;
        runtime.drain(Duration::ZERO).await;
        out
    })
}

fn spec(setup: &Setup) -> RuntimeSpec {
    let models = setup.models.iter().map(|(name, model)| {
        let executor = model.clone();
        ModelSpec {
            name: (*name).to_owned(),
            limits: model.limits(),
            eos: model.info().eos.clone(),
            site: Site::Here(Seat::Thread(Arc::new(move || {
                let runner = executor.executor().map_err(|error| ExecutorError::Lost(error.to_string()))?;
                Ok(Box::new(runner) as Box<dyn Executor>)
            }))),
        }
    });
    let policy = match &setup.thresholds[..] {
        [] => PolicySpec::Eager,
        thresholds => PolicySpec::Fixed(thresholds.to_vec()),
    };
    RuntimeSpec {
        models: models.collect(),
        codec: setup.codec.clone(),
        algorithm: setup.algorithm.clone(),
        batching: Batching { policy, max_wait: Duration::from_millis(100), ..Batching::default() },
        live_max: 64,
        bounds: Bounds::default(),
        placement: Placement::OwnArbiter,
        process: Process::alone(),
    }
}

/// Runs one job to its end.
///
/// # Panics
/// When it is refused, fails or gets stuck: a failed test.
pub async fn ask(runtime: &Runtime, job: Job) -> Answered {
    let end = tokio::time::timeout(STUCK_AFTER, follow(runtime, job)).await;
    end.unwrap_or_else(|_| panic!("a job is stuck: {:?}", runtime.snapshot()))
}

async fn follow(runtime: &Runtime, job: Job) -> Answered {
    let mut reply = runtime.submit(job).await.unwrap_or_else(|refusal| panic!("refused: {refusal}"));
    let (mut prompt, mut tokens, mut text) = (Vec::new(), Vec::new(), String::new());
    loop {
        match reply.events.recv().await {
            Some(Event::Prompt(tokens_of_it)) => {
                assert!(prompt.is_empty() && tokens.is_empty(), "the prompt comes once and first");
                prompt = tokens_of_it;
            }
            Some(Event::Delta { text: more, tokens: new }) => {
                text.push_str(&more);
                tokens.extend(new);
            }
            Some(Event::Finished { reason, usage, .. }) => {
                assert_eq!(usage.completion_tokens as usize, tokens.len());
                assert_eq!(usage.by_model.iter().sum::<u32>(), usage.completion_tokens);
                return Answered { prompt, tokens, text, reason, usage };
            }
            other => panic!("the job ended in {other:?}"),
        }
    }
}

/// Runs jobs at the same time.
///
/// # Panics
/// As [`ask`].
pub async fn ask_all(runtime: &Runtime, jobs: &[Job]) -> Vec<Answered> {
    let start = |job: &Job| {
        let (runtime, job) = (runtime.clone(), job.clone());
        actix_rt::spawn(async move { ask(&runtime, job).await })
    };
    let running: Vec<_> = jobs.iter().map(start).collect();
    let mut answers = Vec::new();
    for job in running {
        answers.push(job.await.unwrap_or_else(|error| panic!("{error}")));
    }
    answers
}

/// Waits until nothing of any request is left, and returns how the runtime is then.
///
/// # Panics
/// When something stays: a failed test.
pub async fn assert_idle(runtime: &Runtime) -> RuntimeSnapshot {
    let rest = async {
        loop {
            let snapshot = runtime.snapshot();
            if is_idle(&snapshot) {
                return snapshot;
            }
            tokio::time::sleep(POLL).await;
        }
    };
    let rest = tokio::time::timeout(STUCK_AFTER, rest).await;
    rest.unwrap_or_else(|_| panic!("not idle: {:?}", runtime.snapshot()))
}

fn is_idle(snapshot: &RuntimeSnapshot) -> bool {
    let at_rest = |model: &tokenrouter_actors::runtime::ModelSnapshot| {
        let (batcher, kv) = (&model.batcher, &model.kv);
        let left = [batcher.waiting, batcher.stalled, model.decode.running, model.inter_model.pending, kv.leases];
        left.iter().all(|&count| count == 0) && kv.pages_free + kv.pages_cached == kv.pages_total
    };
    snapshot.live == 0 && snapshot.models.iter().all(at_rest)
}
