//! Two models on one device, between which requests go at random, through the whole runtime: actors, batching, executors.
//! Owner: the program. Invariant: as many requests as there are workers are live all the time; tokens are counted in a
//! window that begins after the first answers are under way; what is compared differs in what its name says.

use super::measure::Measured;
use super::report::{Report, Target};
use super::text;
use crate::world::Words;
use serde_json::json;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{ModelSpec, Placement, Runtime, RuntimeSpec, start};
use tokenrouter_core::batching::{Batching, PolicySpec, clamp};
use tokenrouter_core::execution::Execution;
use tokenrouter_core::executor::{Executor, ExecutorError};
use tokenrouter_core::job::{Event, Job, Prompt, StopRules, Target as Answerer};
use tokenrouter_core::rng::mix;
use tokenrouter_core::routing::{self, Algorithm};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::theory::chain::throughput;
use tokenrouter_core::theory::observe::Behaviour;
use tokenrouter_core::theory::search::Budget;
use tokenrouter_core::theory::table::{Table, discretise, tick};
use tokenrouter_gpu::cuda::random::RandomModel;
use tokenrouter_gpu::cuda::{CudaOptions, GraphGrid};

/// Share of small steps after which the large model makes a token.
const P: f64 = 0.35;
/// How freely tokens are drawn.
const TEMPERATURE: f32 = 0.6;
/// No request waits longer for others: far beyond any wait of a planned threshold.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Time for requests that are left to free what they hold.
const ENDING: Duration = Duration::from_secs(10);

/// How requests are put to the pair.
#[derive(Clone, Debug)]
pub struct Load {
    /// Live requests, and tokens per second that they should get.
    pub workers: Vec<(u32, Option<f64>)>,
    /// Tokens of a prompt and of its answer.
    pub lengths: (u32, u32),
    /// Time before tokens are counted, and time in which they are.
    pub seconds: (f64, f64),
    /// Shapes that are recorded.
    pub graphs: GraphGrid,
    /// How near the throughput model should be.
    pub prediction: Option<Target>,
}

/// Two models and what the throughput model says of them.
pub struct Pair<'a> {
    ordinal: usize,
    models: [&'a Measured; 2],
    algorithm: Arc<dyn Algorithm>,
    behaviours: Vec<Behaviour>,
    table: Table,
}

/// One way of running the pair.
#[derive(Clone)]
struct Way {
    policy: PolicySpec,
    execution: Execution,
    graphs: GraphGrid,
    workers: u32,
}

impl<'a> Pair<'a> {
    /// Plans thresholds for up to `most` requests from the measured times.
    ///
    /// # Errors
    /// There is no plan for these times.
    pub fn new(ordinal: usize, models: [&'a Measured; 2], most: u32) -> Result<Pair<'a>, String> {
        let algorithm = routing::build("bernoulli", &json!({ "p": P }), models.len()).map_err(text)?;
        let prior = algorithm.prior();
        let ways = prior.p.into_iter().zip(prior.c).zip(models);
        let behaviour = |((moves, tokens), model): ((Vec<f64>, Vec<f64>), &Measured)| Behaviour {
            steps: 0.0,
            seconds: model.seconds(most),
            moves,
            tokens,
        };
        let behaviours: Vec<Behaviour> = ways.map(behaviour).collect();
        let table = Table::plan(&behaviours, most, Budget::default())?;
        Ok(Pair { ordinal, models, algorithm, behaviours, table })
    }

    /// Tokens per second by the throughput model: each model's times as measured alone, no time for anything else.
    fn predicted(&self, workers: u32) -> Result<f64, String> {
        let system = discretise(&self.behaviours, workers)?;
        let thresholds = clamp(self.table.thresholds(workers), workers);
        let exact = throughput(&system, &thresholds, Budget::default().reach)?;
        Ok(exact.throughput / tick(&self.behaviours, workers)?)
    }

    /// Rows of every number of requests, then of the most with one thing changed at a time.
    ///
    /// # Errors
    /// A request is refused or fails.
    pub fn run(&self, load: &Load, report: &mut Report) -> Result<(), String> {
        let needed = (load.seconds.0 + load.seconds.1).ceil() as u64 + 5;
        let planned = Way {
            policy: PolicySpec::Planned(self.table.clone()),
            execution: Execution::Async,
            graphs: load.graphs.clone(),
            workers: 1,
        };
        for &(workers, target) in &load.workers {
            let name = format!("N = {workers}, planned thresholds");
            if !report.has_time(&name, needed) {
                continue;
            }
            let found = self.play(&Way { workers, ..planned.clone() }, load)?;
            report.measured(&name, (found, "tokens/s"), target.map(Target::AtLeast));
            let predicted = self.predicted(workers)?;
            report.measured(&format!("N = {workers}, predicted"), (predicted, "tokens/s"), None);
            report.measured(&format!("N = {workers}, found / predicted"), (found / predicted, ""), load.prediction);
        }
        let Some(&(workers, _)) = load.workers.last() else { return Ok(()) };
        let eager = PolicySpec::Eager;
        let changed = [
            ("graphs off", Way { graphs: GraphGrid::default(), ..planned.clone() }),
            ("thresholds of 1", Way { policy: eager.clone(), ..planned.clone() }),
            ("std_serving", Way { policy: eager, execution: Execution::StdServing, ..planned }),
        ];
        for (what, way) in changed {
            let name = format!("N = {workers}, {what}");
            if report.has_time(&name, needed) {
                let found = self.play(&Way { workers, ..way }, load)?;
                report.measured(&name, (found, "tokens/s"), None);
            }
        }
        Ok(())
    }

    /// Tokens per second of a runtime of its own.
    fn play(&self, way: &Way, load: &Load) -> Result<f64, String> {
        actix_rt::System::new().block_on(async {
            let runtime = start(self.spec(way)).map_err(text)?;
            let found = drive(&runtime, (way.workers, self.vocab()), load).await;
            runtime.drain(ENDING).await;
            found
        })
    }

    fn vocab(&self) -> u32 {
        self.models[0].model.limits().vocab_width
    }

    fn spec(&self, way: &Way) -> RuntimeSpec {
        let options = CudaOptions { ordinal: self.ordinal, graphs: way.graphs.clone(), ..CudaOptions::default() };
        let models = ["small", "large"].into_iter().zip(self.models);
        RuntimeSpec {
            models: models.map(|(name, measured)| seated(name, &measured.model, &options)).collect(),
            codec: Arc::new(Words::new(self.vocab())),
            algorithm: self.algorithm.clone(),
            batching: Batching {
                policy: way.policy.clone(),
                max_wait: MAX_WAIT,
                execution: way.execution,
                ..Batching::default()
            },
            // A request that has just ended may still be counted when the next one comes.
            live_max: 2 * way.workers,
            bounds: Bounds::default(),
            placement: Placement::OwnArbiter,
            process: Process::alone(),
        }
    }
}

fn seated(name: &str, model: &Arc<RandomModel>, options: &CudaOptions) -> ModelSpec {
    let (limits, model, options) = (model.limits(), model.clone(), options.clone());
    let factory = move || {
        let runner = model.executor(&options).map_err(|error| ExecutorError::Lost(error.to_string()))?;
        Ok(Box::new(runner) as Box<dyn Executor>)
    };
    let site = Site::Here(Seat::Thread(Arc::new(factory)));
    ModelSpec { name: name.to_owned(), limits, eos: Vec::new(), site }
}

/// Tokens per second of a closed loop of workers.
async fn drive(runtime: &Runtime, (workers, vocab): (u32, u32), load: &Load) -> Result<f64, String> {
    let count = Rc::new(Cell::new(0u64));
    let worker = |number: u32| {
        let (runtime, count, lengths) = (runtime.clone(), count.clone(), load.lengths);
        actix_rt::spawn(async move {
            let mut seed = mix(u64::from(number));
            loop {
                if let Err(reason) = answer(&runtime, job((seed, vocab), lengths), &count).await {
                    return reason;
                }
                seed = mix(seed);
            }
        })
    };
    let tasks: Vec<_> = (0..workers).map(worker).collect();
    let (before, window) = load.seconds;
    tokio::time::sleep(Duration::from_secs_f64(before)).await;
    let (first, began) = (count.get(), Instant::now());
    tokio::time::sleep(Duration::from_secs_f64(window)).await;
    let found = (count.get() - first) as f64 / began.elapsed().as_secs_f64();
    for task in tasks {
        if task.is_finished() {
            return Err(task.await.unwrap_or_else(text));
        }
        task.abort();
    }
    if found > 0.0 { Ok(found) } else { Err(format!("no token came in {window} s")) }
}

fn job((seed, vocab): (u64, u32), (prompt, output): (u32, u32)) -> Job {
    let token = |at: u32| (mix(seed ^ u64::from(at)) % u64::from(vocab)) as u32;
    Job {
        prompt: Prompt::Ids((0..prompt).map(token).collect()),
        target: Answerer::Routed,
        routing: None,
        sampling: SamplingParams { temperature: TEMPERATURE, seed, ..SamplingParams::default() },
        stop: StopRules { max_tokens: Some(output), min_tokens: output, ..StopRules::default() },
        logprobs: None,
        constraint: None,
        prompt_logprobs: None,
        entropy: false,
    }
}

/// Runs a request to its end; tokens are counted as they come.
async fn answer(runtime: &Runtime, job: Job, count: &Cell<u64>) -> Result<(), String> {
    let mut events = runtime.submit(job).await.map_err(text)?.events;
    while let Some(event) = events.recv().await {
        match event {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => count.set(count.get() + tokens.len() as u64),
            Event::Finished { .. } => return Ok(()),
            Event::Failed(failure) => return Err(failure.to_string()),
        }
    }
    Err("the answer ended without a reason".into())
}
