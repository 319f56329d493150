//! The real HTTP server over the real runtime: with two simulated models (routed name "pair", models "small" and "large"),
//! which speak a language of their own or say what a script wants, or with the models of a launch file.
//! Owner: the test that starts it. Invariant: it lives in a thread of its own and listens on a free port of the loopback;
//! every request of the simulated pair hops.

use crate::scripted::{self, Scripted, Voice};
use crate::series::value;
use crate::world::Words;
use actix_rt::System;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokenrouter::http::keys::Keys;
use tokenrouter::http::types::chat::Conversation;
use tokenrouter::http::types::generation::SamplingDefaults;
use tokenrouter::http::{App, ChatTemplate, Limits, Listen, Parts, Router, Served, server};
use tokenrouter::launch::{self, Environment, Loaded, Overrides};
use tokenrouter::progress::Progress;
use tokenrouter::telemetry::{Settings, Tracer};
use tokenrouter::text::tools::ToolDialect;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{ModelSpec, Placement, Runtime, RuntimeSnapshot, RuntimeSpec, start};
use tokenrouter_core::batching::{Batching, PolicySpec};
use tokenrouter_core::executor::{
    Executor, ExecutorError, ExecutorLimits, Row, RowOutput, Step, StepOutput, TokenLogprobs,
};
use tokenrouter_core::faults::{FaultPlan, Faulty, LinkFaults, Stall};
use tokenrouter_core::ids::{ModelIdx, RequestId, TokenId};
use tokenrouter_core::job::{Prompt, Target};
use tokenrouter_core::routing::{self, Algorithm};
use tokenrouter_core::sim::{Language, SimExecutor, Skill};
use tokenrouter_core::text::{SpecialTokens, TextCodec};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

const VOCAB: u32 = 32;
const LIMITS: ExecutorLimits =
    ExecutorLimits { pages: 512, rows_max: 8, step_tokens_max: 64, context_len: 2048, vocab_width: VOCAB };

/// What a test changes.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Batching thresholds; eager when absent.
    pub thresholds: Option<Vec<u32>>,
    /// Time of a step.
    pub step: Duration,
    /// Bounds on requests.
    pub bounds: Bounds,
    /// Bounds of the HTTP side.
    pub http: Limits,
    /// Who may ask.
    pub keys: Keys,
    /// What both models say, over a vocabulary of bytes; absent: a language of words.
    pub voice: Option<Voice>,
    /// What each model's device holds and does; the width of its rows follows from the vocabulary.
    pub limits: ExecutorLimits,
    /// Requests accepted at once.
    pub live_max: u32,
    /// What goes wrong with the steps of each model; a stuck one goes on when it is [freed](Server::free).
    pub faults: [FaultPlan; 2],
    /// What goes wrong with messages between the models.
    pub link_faults: Vec<LinkFaults>,
    /// How the models call tools.
    pub tools: ToolDialect,
    /// Who gets traces.
    pub telemetry: Option<Settings>,
}

impl Setup {
    /// Models that repeat their prompt up to the first zero byte and take no time; see [`scripted::script`].
    pub fn parrots() -> Setup {
        Setup { voice: Some(scripted::parrot), step: Duration::ZERO, ..Setup::default() }
    }

    fn limits(&self) -> ExecutorLimits {
        ExecutorLimits { vocab_width: if self.voice.is_some() { scripted::VOCAB } else { VOCAB }, ..self.limits }
    }

    fn codec(&self) -> Arc<dyn TextCodec> {
        match self.voice {
            Some(_) => Arc::new(scripted::Bytes::default()),
            None => Arc::new(Words::new(VOCAB)),
        }
    }

    fn eos(&self) -> Vec<TokenId> {
        if self.voice.is_some() { vec![scripted::EOS] } else { Vec::new() }
    }
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            thresholds: None,
            step: Duration::from_millis(1),
            bounds: Bounds::default(),
            http: Limits::default(),
            keys: Keys::default(),
            voice: None,
            limits: LIMITS,
            live_max: 64,
            faults: Default::default(),
            link_faults: Vec::new(),
            tools: ToolDialect::Plain,
            telemetry: None,
        }
    }
}

/// A door in front of a device, and who went through it.
#[derive(Clone, Default)]
struct Gate(Arc<Door>);

#[derive(Default)]
struct Door {
    shut: Mutex<bool>,
    moved: Condvar,
    /// Steps that are stuck on order may go on.
    freed: Mutex<bool>,
    /// Requests of each step so far.
    steps: Mutex<Vec<Vec<RequestId>>>,
}

impl Gate {
    fn set(&self, shut: bool) {
        *self.0.shut.lock().expect("no panic holds it") = shut;
        self.0.moved.notify_all();
    }

    fn free(&self) {
        *self.0.freed.lock().expect("no panic holds it") = true;
        self.0.moved.notify_all();
    }

    /// A fault holds a step up.
    fn stall(&self, stall: Stall) {
        let mut freed = self.0.freed.lock().expect("no panic holds it");
        let begin = Instant::now();
        while !*freed {
            let rest = match stall {
                Stall::For(time) if begin.elapsed() >= time => return,
                Stall::For(time) => time - begin.elapsed(),
                Stall::Held => Duration::from_secs(1),
            };
            freed = self.0.moved.wait_timeout(freed, rest).expect("no panic holds it").0;
        }
    }

    /// Takes `least` time, and longer while the door is shut.
    fn pass(&self, least: Duration) {
        let begin = Instant::now();
        let mut shut = self.0.shut.lock().expect("no panic holds it");
        while *shut || begin.elapsed() < least {
            let rest = if *shut { Duration::MAX } else { least.saturating_sub(begin.elapsed()) };
            shut = self.0.moved.wait_timeout(shut, rest.min(Duration::from_secs(1))).expect("no panic holds it").0;
        }
    }
}

/// A simulated model that takes its time.
struct Gated {
    inner: Box<dyn Executor>,
    gate: Gate,
    step: Duration,
}

impl Executor for Gated {
    fn limits(&self) -> ExecutorLimits {
        self.inner.limits()
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        self.gate.pass(self.step);
        let requests = step.rows.iter().map(|row| row.request).collect();
        self.gate.0.steps.lock().expect("no panic holds it").push(requests);
        let mut output = self.inner.step(step)?;
        step.rows.iter().zip(&mut output.rows).for_each(|(row, output)| add_logprobs(row, output));
        Ok(output)
    }
}

/// Unless the model says it: the token drawn is the most probable; the ones after it in the vocabulary follow.
fn add_logprobs(row: &Row, output: &mut RowOutput) {
    let wanted = row.draw.as_ref().and_then(|draw| draw.logprobs);
    if let (RowOutput::Drawn(drawn), Some(alternatives)) = (output, wanted)
        && drawn.logprobs.is_none()
    {
        let token = |place: u8| (drawn.token + u32::from(place)) % VOCAB;
        let top = (0..alternatives).map(|place| (token(place), -0.25 - f32::from(place))).collect();
        drawn.logprobs = Some(TokenLogprobs { chosen: -0.25, top });
    }
}

/// A conversation is its words, one turn after the other.
struct Turns {
    tools: ToolDialect,
}

impl ChatTemplate for Turns {
    fn prompt(&self, conversation: &Conversation) -> Result<Prompt, String> {
        let turns: Vec<&str> = conversation.messages.iter().map(|message| message.content.trim()).collect();
        Ok(Prompt::Text { text: turns.join(" "), special: SpecialTokens::AsText, add_bos: false })
    }

    fn tools(&self) -> ToolDialect {
        self.tools
    }
}

/// A running server; it lives in a thread of its own.
pub struct Server {
    /// Where it listens.
    pub address: SocketAddr,
    runtime: Runtime,
    gates: Vec<Gate>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Server {
    /// Starts a server over simulated models.
    pub fn start(setup: Setup) -> Server {
        let gates = vec![Gate::default(), Gate::default()];
        let doors = gates.clone();
        Server::over(gates, move || {
            let runtime = start(spec(&setup, &doors)).expect("the settings are right");
            (app(&setup, runtime.clone()), runtime)
        })
    }

    /// Starts a server over the models of a launch file, as `tokenrouter serve` does.
    pub fn launch(file: PathBuf) -> Server {
        Server::launch_in(file, Environment::read())
    }

    /// The same with an environment of its own; faults are obeyed.
    pub fn launch_in(file: PathBuf, environment: Environment) -> Server {
        Server::over(Vec::new(), move || {
            let (environment, progress) = (Environment { faults: true, ..environment }, Progress::hidden());
            let file =
                launch::read(Some(&file), &Overrides::default(), &environment).expect("the launch file is right");
            let plan = launch::prepare(file, &environment, &progress).expect("the models are there");
            let loaded = Loaded::new(plan, &progress).expect("the models can be loaded");
            let runtime = loaded.start().expect("the settings are right");
            (launch::app(&loaded, runtime.clone()).expect("the metrics can be set up"), runtime)
        })
    }

    fn over(gates: Vec<Gate>, build: impl FnOnce() -> (App, Runtime) + Send + 'static) -> Server {
        let (stop, stopped) = oneshot::channel();
        let (ready, started) = mpsc::sync_channel(1);
        let thread = std::thread::spawn(move || {
            System::new().block_on(async move {
                let (app, runtime) = build();
                let listen = Listen { addresses: vec![([127, 0, 0, 1], 0).into()], workers: 2 };
                let (server, bound) = server(app, &listen).expect("a free port");
                let handle = server.handle();
                let served = actix_rt::spawn(server);
                ready.send((bound[0], runtime.clone())).expect("the test waits");
                stopped.await.ok();
                runtime.drain(Duration::from_secs(2)).await;
                handle.stop(false).await;
                served.await.expect("no panic").expect("no error");
            });
        });
        let (address, runtime) = started.recv_timeout(Duration::from_secs(60)).expect("the server starts");
        Server { address, runtime, gates, stop, thread }
    }

    /// Requests that are alive.
    pub fn live(&self) -> u32 {
        self.runtime.snapshot().live
    }

    /// Stops the device of a model before its next step.
    pub fn hold(&self, model: usize) {
        self.gates[model].set(true);
    }

    /// Lets it go on.
    pub fn release(&self, model: usize) {
        self.gates[model].set(false);
    }

    /// Lets the steps of a model go on that are stuck on order.
    pub fn free(&self, model: usize) {
        self.gates[model].free();
    }

    /// Requests of each step of a model so far.
    pub fn steps(&self, model: usize) -> Vec<Vec<RequestId>> {
        self.gates[model].0.steps.lock().expect("no panic holds it").clone()
    }

    /// Waits until a condition holds.
    pub async fn until(&self, what: &str, holds: impl Fn(&RuntimeSnapshot) -> bool) {
        self.within(Duration::from_secs(5), what, holds).await;
    }

    /// Waits until no request is alive and no KV page is held by one.
    pub async fn idle_within(&self, limit: Duration, when: &str) {
        self.within(limit, when, |snapshot| {
            let idle = |model: &tokenrouter_actors::runtime::ModelSnapshot| {
                model.kv.pages_free + model.kv.pages_cached == model.kv.pages_total
                    && model.kv.leases == 0
                    && model.inter_model.pending == 0
                    && model.batcher.waiting == 0
            };
            snapshot.live == 0 && snapshot.models.iter().all(idle)
        })
        .await;
    }

    async fn within(&self, limit: Duration, what: &str, holds: impl Fn(&RuntimeSnapshot) -> bool) {
        let begin = Instant::now();
        loop {
            let snapshot = self.runtime.snapshot();
            if holds(&snapshot) {
                return;
            }
            assert!(begin.elapsed() < limit, "{what}: not within {limit:?}: {snapshot:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// One series of `/metrics`, by its name and those of its labels that tell it from others.
    pub async fn metric(&self, series: &str) -> f64 {
        let mut socket = TcpStream::connect(self.address).await.expect("the server listens");
        let request = "GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        socket.write_all(request.as_bytes()).await.expect("the request is sent");
        let mut text = String::new();
        socket.read_to_string(&mut text).await.expect("an answer");
        value(&text, series)
    }

    /// Ends the server.
    pub fn stop(self) {
        self.gates.iter().for_each(|gate| gate.set(false));
        self.gates.iter().for_each(Gate::free);
        self.stop.send(()).expect("the server runs");
        self.thread.join().expect("the server ends without a panic");
    }
}

fn simulated(limits: ExecutorLimits, skill: Skill) -> SimExecutor {
    SimExecutor::new(limits, Language { vocab: VOCAB, hard: 0.2, eos: None }, skill, FaultPlan::default())
}

fn spec(setup: &Setup, gates: &[Gate]) -> RuntimeSpec {
    let models = ["small", "large"].into_iter().zip([Skill::Small, Skill::Large]).zip(gates);
    let models = models.zip(&setup.faults).map(|(((name, skill), gate), faults)| {
        let (gate, faults, step, limits, voice) =
            (gate.clone(), faults.clone(), setup.step, setup.limits(), setup.voice);
        let device = move || -> Box<dyn Executor> {
            match voice {
                Some(voice) => Box::new(Scripted::new(limits, voice)),
                None => Box::new(simulated(limits, skill)),
            }
        };
        ModelSpec {
            name: name.to_owned(),
            limits,
            eos: setup.eos(),
            site: Site::Here(Seat::Thread(Arc::new(move || {
                let (model, stall) = (Gated { inner: device(), gate: gate.clone(), step }, gate.clone());
                Ok(Box::new(Faulty::new(model, faults.clone(), Arc::new(move |time| stall.stall(time)))))
            }))),
        }
    });
    RuntimeSpec {
        models: models.collect(),
        codec: setup.codec(),
        algorithm: algorithm(),
        batching: Batching {
            policy: setup.thresholds.clone().map_or(PolicySpec::Eager, PolicySpec::Fixed),
            max_wait: Duration::from_secs(60),
            ..Batching::default()
        },
        live_max: setup.live_max,
        bounds: setup.bounds,
        placement: Placement::OwnArbiter,
        process: Process { faults: setup.link_faults.clone(), ..Process::alone() },
    }
}

/// Small to large always, large to small half the time: both models see every request.
fn algorithm() -> Arc<dyn Algorithm> {
    let chances = serde_json::json!({"p": [[0.0, 1.0], [0.5, 0.5]], "keep": [[true, true], [true, true]]});
    routing::build("bernoulli", &chances, 2).expect("the parameters are right")
}

fn app(setup: &Setup, runtime: Runtime) -> App {
    let served = |id: &str, target| Served {
        id: id.to_owned(),
        target,
        context_len: setup.limits.context_len,
        defaults: SamplingDefaults::default(),
        chat: Some(Arc::new(Turns { tools: setup.tools })),
    };
    let parts = Parts {
        engine: Arc::new(runtime),
        codec: setup.codec(),
        served: vec![
            served("pair", Target::Routed),
            served("small", Target::Only(ModelIdx(0))),
            served("large", Target::Only(ModelIdx(1))),
        ],
        model_names: vec!["small".to_owned(), "large".to_owned()],
        router: Router { active: "bernoulli".to_owned(), algorithm: algorithm(), entries: routing::list().collect() },
        limits: setup.http,
    };
    let tracer = setup.telemetry.clone().map(Tracer::start);
    App::new(parts).expect("the metrics can be set up").with_keys(setup.keys.clone()).with_tracer(tracer)
}
