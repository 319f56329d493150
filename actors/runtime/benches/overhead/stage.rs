//! A runtime whose executors answer at once or after a fixed time, and what they saw. Owner: the bench. Invariant: an
//! executor does nothing but wait, note the time and answer; it reads no prefix, so its own cost does not depend on the
//! context.

use crate::memory;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{ModelSpec, Placement, RuntimeSpec, start};
use tokenrouter_core::batching::Batching;
use tokenrouter_core::execution::Execution;
use tokenrouter_core::executor::{
    Drawn, Executor, ExecutorError, ExecutorLimits, PAGE_TOKENS, RowOutput, Step, StepOutput,
};
use tokenrouter_core::ids::{ModelIdx, TokenId};
use tokenrouter_core::job::{Event, Job, Prompt, StopRules, Target};
use tokenrouter_core::routing;
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::text::{SpecialTokens, TextCodec, TextError};

const VOCABULARY: u32 = 256;
/// Steps at the end in which requests end one after another, and tokens at the beginning in which they begin.
const ENDING: usize = 32;

/// Which model makes a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// The small one.
    None,
    /// Control changes after every step; the small model's candidates are dropped.
    EveryStep,
}

/// What is played.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Requests, all at once.
    pub requests: usize,
    /// Tokens of each prompt.
    pub prompt: usize,
    /// Tokens of each answer.
    pub tokens: usize,
    /// Who makes them.
    pub routing: Routing,
    /// How the models run beside each other.
    pub execution: Execution,
    /// What a step takes; its thread sleeps, as one that waits for a device does.
    pub step: Duration,
}

impl Default for Load {
    fn default() -> Self {
        let (routing, execution) = (Routing::None, Execution::Async);
        Load { requests: 1, prompt: 16, tokens: 1_000, routing, execution, step: Duration::ZERO }
    }
}

/// One step as an executor saw it.
#[derive(Clone, Copy, Debug)]
struct Seen {
    model: usize,
    begin: Instant,
    end: Instant,
    rows: usize,
    tokens: usize,
}

/// What was seen.
#[derive(Debug)]
pub struct Play {
    steps: Vec<Seen>,
    /// From the call that hands a request in to the runtime's answer.
    pub accepted: Vec<Duration>,
    /// Bytes in use that a generated token adds.
    pub bytes_per_token: f64,
}

impl Play {
    /// Between consecutive steps of one model with this many rows of one token each.
    pub fn gaps(&self, model: usize, rows: usize) -> Vec<Duration> {
        let steps: Vec<&Seen> = self.steps.iter().filter(|step| step.model == model).collect();
        let full = |step: &Seen| step.rows == rows && step.tokens == rows;
        let pairs = steps.windows(2).filter(|pair| full(pair[0]) && full(pair[1]));
        pairs.map(|pair| pair[1].begin.saturating_duration_since(pair[0].end)).collect()
    }

    /// From the output of one model to the step that follows at the other.
    pub fn hops(&self, from: usize, to: usize) -> Vec<Duration> {
        let pairs = self.steps.windows(2).filter(|pair| pair[0].model == from && pair[1].model == to);
        // The first two carry the prompt.
        pairs.skip(2).map(|pair| pair[1].begin.saturating_duration_since(pair[0].end)).collect()
    }

    /// Mean tokens of a step of one model after the prompt.
    pub fn consumed(&self, model: usize) -> f64 {
        let steps = self.steps.iter().filter(|step| step.model == model).skip(self.steps.len() / 8);
        let (steps, tokens) = steps.fold((0, 0), |(steps, tokens), step| (steps + 1, tokens + step.tokens));
        tokens as f64 / f64::from(steps)
    }

    /// From one step's start to the next one's, for the last `band` steps of a model before its requests end.
    pub fn last_periods(&self, model: usize, band: usize) -> Vec<Duration> {
        let begins: Vec<Instant> =
            self.steps.iter().filter(|step| step.model == model).map(|step| step.begin).collect();
        let last = begins.len().saturating_sub(ENDING);
        let first = last.saturating_sub(band);
        begins[first..last].windows(2).map(|pair| pair[1] - pair[0]).collect()
    }
}

/// Answers without computing.
struct Blank {
    model: usize,
    takes: Duration,
    limits: ExecutorLimits,
    steps: Arc<Mutex<Vec<Seen>>>,
}

impl Blank {
    #[allow(clippy::disallowed_methods, reason = "a device that computes blocks its own thread and nobody else's")]
    fn compute(&self) {
        if !self.takes.is_zero() {
            std::thread::sleep(self.takes);
        }
    }
}

impl Executor for Blank {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        let begin = Instant::now();
        self.compute();
        let answer = |draws: bool| match draws {
            true => RowOutput::Drawn(Drawn { token: 7, ..Drawn::default() }),
            false => RowOutput::Fed(Vec::new()),
        };
        let rows = step.rows.iter().map(|row| answer(row.draw.is_some())).collect();
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let (rows_now, tokens) = (step.rows.len(), step.tokens());
        steps.push(Seen { model: self.model, begin, end: Instant::now(), rows: rows_now, tokens });
        Ok(StepOutput { rows })
    }
}

/// A vocabulary of single letters.
struct Letters(Vec<u8>);

impl TextCodec for Letters {
    fn encode(&self, text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.0.get(id as usize..=id as usize)
    }

    fn is_special(&self, _id: TokenId) -> bool {
        false
    }

    fn vocab_size(&self) -> u32 {
        VOCABULARY
    }

    fn bos(&self) -> Option<TokenId> {
        None
    }

    fn strips_leading_space(&self) -> bool {
        false
    }
}

/// Plays a load through a runtime whose actors live on threads of their own, as in a server.
pub fn play(load: Load) -> Play {
    let room = load.requests * (load.prompt + load.tokens) * 2 + 4096;
    let steps = Arc::new(Mutex::new(Vec::with_capacity(load.tokens * 3 + room / 256)));
    let spec = spec(load, (room, &steps));
    let (accepted, bytes_per_token) = actix_rt::System::new().block_on(run(load, spec));
    let steps = std::mem::take(&mut *steps.lock().unwrap_or_else(PoisonError::into_inner));
    Play { steps, accepted, bytes_per_token }
}

fn spec(load: Load, (room, steps): (usize, &Arc<Mutex<Vec<Seen>>>)) -> RuntimeSpec {
    let limits = ExecutorLimits {
        pages: room.div_ceil(PAGE_TOKENS) as u32,
        rows_max: 512,
        step_tokens_max: 16_384,
        context_len: 1 << 20,
        vocab_width: VOCABULARY,
    };
    let model = |model: usize| {
        let steps = Arc::clone(steps);
        let takes = load.step;
        let blank = move || Blank { model, takes, limits, steps: Arc::clone(&steps) };
        let factory = move || Ok(Box::new(blank()) as Box<dyn Executor>);
        let site = Site::Here(Seat::Thread(Arc::new(factory)));
        ModelSpec { name: format!("m{model}"), limits, eos: Vec::new(), site }
    };
    let params = serde_json::json!({ "p": [[0.0, 1.0], [1.0, 0.0]] });
    RuntimeSpec {
        models: (0..2).map(model).collect(),
        codec: Arc::new(Letters((0..VOCABULARY).map(|id| b'a' + (id % 26) as u8).collect())),
        algorithm: routing::build("bernoulli", &params, 2).expect("valid parameters"),
        batching: Batching { execution: load.execution, ..Batching::default() },
        live_max: 1024,
        bounds: Bounds::default(),
        placement: Placement::OwnArbiter,
        process: Process::alone(),
    }
}

async fn run(load: Load, spec: RuntimeSpec) -> (Vec<Duration>, f64) {
    let runtime = start(spec).expect("a valid runtime");
    let mut accepted = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..load.requests {
        let begin = Instant::now();
        streams.push(runtime.submit(job(load)).await.expect("there is room").events);
        accepted.push(begin.elapsed());
    }
    let first = streams.swap_remove(0);
    let others: Vec<_> =
        streams.into_iter().map(|stream| tokio::task::spawn_local(drain(stream, Vec::new()))).collect();
    let marks = [ENDING, load.tokens - ENDING];
    let bytes = drain(first, marks.to_vec()).await;
    for other in others {
        other.await.expect("a reader does not panic");
    }
    runtime.drain(Duration::ZERO).await;
    let tokens = load.requests * (load.tokens - 2 * ENDING);
    (accepted, (bytes[1] - bytes[0]) as f64 / tokens as f64)
}

fn job(load: Load) -> Job {
    Job {
        prompt: Prompt::Ids(vec![1; load.prompt]),
        target: match load.routing {
            Routing::None => Target::Only(ModelIdx(0)),
            Routing::EveryStep => Target::Routed,
        },
        routing: None,
        sampling: SamplingParams::default(),
        stop: StopRules { max_tokens: Some(load.tokens as u32), ignore_eos: true, ..StopRules::default() },
        logprobs: None,
        constraint: None,
        prompt_logprobs: None,
        entropy: false,
    }
}

/// Reads a stream to its end; the bytes in use when it passed each mark.
async fn drain(mut events: tokio::sync::mpsc::Receiver<Event>, mut marks: Vec<usize>) -> Vec<i64> {
    let (mut got, mut bytes) = (0, Vec::new());
    while let Some(event) = events.recv().await {
        match event {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => got += tokens.len(),
            Event::Finished { .. } => break,
            Event::Failed(failure) => panic!("the request failed: {failure}"),
        }
        while marks.first().is_some_and(|&mark| got >= mark) {
            marks.remove(0);
            bytes.push(memory::live());
        }
    }
    bytes
}
