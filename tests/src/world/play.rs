//! Plays a scenario and writes down what its users see. Owner: the World.

use super::codec::Words;
use super::script::{Act, Request, Script};
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{ModelSpec, Placement, Reply, Runtime, RuntimeSnapshot, RuntimeSpec, start};
use tokenrouter_core::executor::{Executor, Step};
use tokenrouter_core::faults::{Fault, FaultPlan, Stall};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::{Event, Job, Prompt, StopRules, Target};
use tokenrouter_core::routing::{self, Algorithm};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::sim::SimExecutor;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// How long a scenario may take, in virtual time, before it counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(3600);

/// How long a stuck step takes: longer than any scenario.
const FOR_EVER: Duration = Duration::from_secs(1 << 20);

/// Time after the last end in which everything is released.
const RELEASED: Duration = Duration::from_secs(1);

/// The same where the messages that say so may be lost: they are missed when the next one comes, which may be lost too.
const MISSED: Duration = Duration::from_secs(40);

/// What a scenario did.
#[derive(Debug)]
pub struct Play {
    /// What users saw and probes found, a line each.
    pub timeline: String,
    /// Tokens and models per request.
    pub told: HashMap<String, super::reference::Told>,
    /// How the server was when all had ended.
    pub end: RuntimeSnapshot,
}

/// Plays a scenario to its end.
///
/// # Panics
/// When the scenario cannot be started or does not end: a failed test.
pub fn play(script: &Script) -> Play {
    play_with(script, algorithm(script))
}

/// Plays a scenario with an algorithm that is not on the list.
///
/// # Panics
/// As [`play`].
pub fn play_with(script: &Script, algorithm: Arc<dyn Algorithm>) -> Play {
    watch(script, algorithm, |_, _, _| {})
}

/// Plays a scenario and shows every step as it begins: the index of its model, the virtual time, what is to be done.
///
/// # Panics
/// As [`play`].
pub fn watch(
    script: &Script,
    algorithm: Arc<dyn Algorithm>,
    seen: impl Fn(usize, Duration, &Step) + Send + Sync + 'static,
) -> Play {
    let system = actix_rt::System::with_tokio_rt(|| {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().expect("a runtime")
    });
    system.block_on(perform(script, algorithm, Arc::new(seen)))
}

/// The algorithm a scenario names, in the vocabulary of the scenario.
pub fn algorithm(script: &Script) -> Arc<dyn Algorithm> {
    let (name, params) = &script.route;
    let built = routing::build(name, params, script.models.len()).expect("the scenario's algorithm");
    let known = built.in_vocabulary(&Words::new(script.language.vocab)).expect("texts of the vocabulary");
    known.unwrap_or(built)
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Notes>>);

#[derive(Default)]
struct Notes {
    lines: String,
    told: HashMap<String, super::reference::Told>,
}

impl Log {
    fn line(&self, begin: Instant, text: &str) {
        let ms = begin.elapsed().as_secs_f64() * 1e3;
        let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(notes.lines, "{ms:8.1} {text}").expect("a string takes all");
    }
}

/// Sees a step of a model as it begins.
type Begun = Arc<dyn Fn(usize, &Step) + Send + Sync>;

/// The same, with the time.
type Seen = Arc<dyn Fn(usize, Duration, &Step) + Send + Sync>;

async fn perform(script: &Script, algorithm: Arc<dyn Algorithm>, seen: Seen) -> Play {
    let begin = Instant::now();
    let seen = move |model: usize, step: &Step| seen(model, begin.elapsed(), step);
    let runtime = start(spec(script, algorithm, Arc::new(seen))).expect("the scenario's server starts");
    let log = Log::default();
    let mut users: HashMap<String, JoinHandle<()>> = HashMap::new();
    for (moment, act) in &script.acts {
        tokio::time::sleep_until(begin + *moment).await;
        match act {
            Act::Submit(request) => {
                let user = follow(runtime.clone(), script.clone(), request.clone(), (begin, log.clone()));
                users.insert(request.name.clone(), actix_rt::spawn(user));
            }
            Act::Abort(name) => {
                log.line(begin, &format!("{name} aborted"));
                users.get(name).expect("abort names a request").abort();
            }
            Act::Probe => log.line(begin, &format!("probe {}", describe(&runtime.snapshot()))),
        }
    }
    for (name, user) in users {
        let ended = tokio::time::timeout(STUCK_AFTER, user).await;
        assert!(ended.is_ok(), "request {name} is stuck: {}", describe(&runtime.snapshot()));
    }
    // Releases are still on their way through the mailboxes.
    tokio::time::sleep(if script.link_faults.is_empty() { RELEASED } else { MISSED }).await;
    let end = runtime.snapshot();
    log.line(begin, &format!("end {}", describe(&end)));
    let notes = std::mem::take(&mut *log.0.lock().unwrap_or_else(PoisonError::into_inner));
    Play { timeline: notes.lines, told: notes.told, end }
}

async fn follow(runtime: Runtime, script: Script, request: Request, (begin, log): (Instant, Log)) {
    let name = &request.name;
    let names: Vec<&str> = script.models.iter().map(|model| model.name.as_str()).collect();
    let Reply { mut events, .. } = match runtime.submit(job(&script, &request)).await {
        Ok(reply) => reply,
        Err(refusal) => return log.line(begin, &format!("{name} refused: {refusal}")),
    };
    while let Some(event) = events.recv().await {
        match event {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => {
                let said: Vec<String> =
                    tokens.iter().map(|token| format!("{}:w{}", names[token.model.index()], token.id)).collect();
                let told = tokens.iter().map(|token| (token.id, token.model.index()));
                log.0.lock().unwrap_or_else(PoisonError::into_inner).told.entry(name.clone()).or_default().extend(told);
                log.line(begin, &format!("{name} {}", said.join(" ")));
            }
            Event::Finished { reason, usage, .. } => {
                let by: Vec<String> =
                    usage.by_model.iter().zip(&names).map(|(count, name)| format!("{name} {count}")).collect();
                let (hops, cached) = (usage.hops, usage.cached_tokens);
                let line = format!("{name} {reason:?}: {}, hops {hops}, cached {cached}", by.join(", "));
                return log.line(begin, &line);
            }
            Event::Failed(failure) => return log.line(begin, &format!("{name} failed: {failure}")),
        }
    }
    log.line(begin, &format!("{name} cut off"));
}

fn describe(snapshot: &RuntimeSnapshot) -> String {
    let model = |model: &tokenrouter_actors::runtime::ModelSnapshot| {
        format!(
            "{}[B {} of {}, waiting {}+{}, running {}, pending {}, pages {}]",
            model.name,
            model.batcher.threshold,
            model.batcher.live,
            model.batcher.waiting,
            model.batcher.stalled,
            model.decode.running,
            model.inter_model.pending,
            model.kv.pages_total - model.kv.pages_free - model.kv.pages_cached,
        )
    };
    snapshot.models.iter().map(model).collect::<Vec<_>>().join(" ")
}

fn job(script: &Script, request: &Request) -> Job {
    let only = |name: &String| script.models.iter().position(|model| model.name == *name).expect("only= names a model");
    Job {
        prompt: Prompt::Ids(request.tokens(script.language.vocab)),
        target: request.only.as_ref().map_or(Target::Routed, |name| Target::Only(ModelIdx(only(name) as u8))),
        routing: request.routing(),
        sampling: SamplingParams { seed: request.seed, ..SamplingParams::default() },
        stop: StopRules { max_tokens: Some(request.max), ..StopRules::default() },
        logprobs: None,
        constraint: None,
        prompt_logprobs: None,
        entropy: false,
    }
}

fn spec(script: &Script, algorithm: Arc<dyn Algorithm>, seen: Begun) -> RuntimeSpec {
    let models = script.models.iter().enumerate().map(|(index, model)| {
        let (limits, language, skill) = (model.limits, script.language.clone(), model.skill);
        let faults = FaultPlan::new(model.faults.clone());
        let (time, seen, orders) = (model.time, Arc::clone(&seen), faults.clone());
        let build = move || {
            Ok(Box::new(SimExecutor::new(limits, language.clone(), skill, faults.clone())) as Box<dyn Executor>)
        };
        let latency = move |step: &Step| {
            seen(index, step);
            time.latency(step)
                + match orders.upcoming().and_then(Fault::stall) {
                    Some(Stall::For(time)) => time,
                    Some(Stall::Held) => FOR_EVER,
                    None => Duration::ZERO,
                }
        };
        let site = Site::Here(Seat::Timed(Arc::new(build), Arc::new(latency)));
        let eos = script.language.eos.map(|(eos, _)| eos).into_iter().collect();
        ModelSpec { name: model.name.clone(), limits, eos, site }
    });
    let models: Vec<ModelSpec> = models.collect();
    RuntimeSpec {
        algorithm,
        models,
        codec: Arc::new(Words::new(script.language.vocab)),
        batching: script.batching.clone(),
        live_max: script.live_max,
        bounds: script.bounds,
        placement: Placement::Here,
        process: Process { faults: script.link_faults.clone(), ..Process::alone() },
    }
}
