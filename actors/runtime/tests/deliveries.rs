//! When tokens reach their reader: after the next step of their model has been handed over, before anything that follows
//! from them, and at once when no step follows; and when requests reach a peer. Owner: the tests. The models count: token
//! n of a text is n.

use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::{ExecutorFactory, Seat};
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{ModelSpec, Placement, Reply, Runtime, RuntimeSpec, start};
use tokenrouter_core::batching::{Batching, PolicySpec};
use tokenrouter_core::executor::{Drawn, Executor, ExecutorError, ExecutorLimits, Needs, RowOutput, Step, StepOutput};
use tokenrouter_core::ids::{ModelIdx, TokenId};
use tokenrouter_core::job::{Event, Failure, Job, Prompt, StopRules, Target};
use tokenrouter_core::routing::{Algorithm, Decision, Handoff, Prior, Route, StepView, Suffix};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::text::{SpecialTokens, TextCodec, TextError};

const SMALL: ModelIdx = ModelIdx(0);
const LARGE: ModelIdx = ModelIdx(1);
/// No event of these tests takes as long.
const PATIENCE: Duration = Duration::from_secs(20);
/// Words that a gate keeps for steps to come.
const STEPS_AHEAD: usize = 4;
/// What a timed step takes.
const STEP: Duration = Duration::from_millis(1);

/// The vocabulary: numbers.
struct Numbers;

impl TextCodec for Numbers {
    fn encode(&self, _: &str, _: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        Err(TextError("prompts are ids".into()))
    }

    fn token_bytes(&self, _: TokenId) -> Option<&[u8]> {
        Some(b"x")
    }

    fn is_special(&self, _: TokenId) -> bool {
        false
    }

    fn vocab_size(&self) -> u32 {
        1_000
    }

    fn bos(&self) -> Option<TokenId> {
        None
    }

    fn strips_leading_space(&self) -> bool {
        false
    }
}

/// Which model goes on after a step, by seed of the request, model and position; every candidate is kept.
#[derive(Clone, Copy, Debug)]
struct Way(fn(u64, ModelIdx, u32) -> ModelIdx);

/// Positions from this one on cannot be handed over.
const NO_HANDOVER: u32 = 900;

impl Algorithm for Way {
    fn needs(&self, _: ModelIdx) -> Needs {
        Needs::default()
    }

    fn prior(&self) -> Prior {
        Prior { p: vec![vec![0.5, 0.5], vec![0.5, 0.5]], c: vec![vec![1.0, 1.0], vec![1.0, 1.0]] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(*self)
    }
}

impl Route for Way {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        Ok(Decision { to: (self.0)(step.seed, step.model, step.position()), keep: true })
    }

    fn send(&mut self, handoff: &Handoff<'_>) -> Result<Suffix, String> {
        match handoff.tokens.len() as u32 {
            NO_HANDOVER.. => Err("no way".into()),
            _ => Ok(Suffix { base: handoff.known[handoff.to.index()], ext: Vec::new() }),
        }
    }
}

/// Draws the position of each token, in a step that begins when it may.
struct Counter {
    begun: Arc<AtomicU32>,
    /// A step takes a word from here, if there is anything to take it from.
    gate: Option<Arc<Mutex<Receiver<()>>>>,
}

const LIMITS: ExecutorLimits =
    ExecutorLimits { pages: 200, rows_max: 8, step_tokens_max: 1_024, context_len: 1_000, vocab_width: 1_000 };

impl Executor for Counter {
    fn limits(&self) -> ExecutorLimits {
        LIMITS
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = &self.gate {
            // A gate that is gone stands open.
            gate.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
        }
        let rows = step.rows.iter().map(|row| match row.draw {
            Some(_) => RowOutput::Drawn(Drawn { token: row.start + row.tokens.len() as u32, ..Drawn::default() }),
            None => RowOutput::Fed(Vec::new()),
        });
        Ok(StepOutput { rows: rows.collect() })
    }
}

fn factory(begun: &Arc<AtomicU32>, gate: Option<Receiver<()>>) -> ExecutorFactory {
    let (begun, gate) = (Arc::clone(begun), gate.map(|gate| Arc::new(Mutex::new(gate))));
    Arc::new(move || Ok(Box::new(Counter { begun: Arc::clone(&begun), gate: gate.clone() })))
}

/// A step takes [`STEP`], on the thread of the actors.
fn timed(begun: &Arc<AtomicU32>) -> Seat {
    Seat::Timed(factory(begun, None), Arc::new(|_| STEP))
}

/// A step waits for a word from the test, on a thread of its own.
fn gated(begun: &Arc<AtomicU32>) -> (Seat, SyncSender<()>) {
    let (open, gate) = sync_channel(STEPS_AHEAD);
    (Seat::Thread(factory(begun, Some(gate))), open)
}

fn run(way: Way, thresholds: [u32; 2], seats: [Seat; 2]) -> Runtime {
    run_on(Placement::Here, way, (thresholds, seats))
}

fn run_on(placement: Placement, way: Way, (thresholds, seats): ([u32; 2], [Seat; 2])) -> Runtime {
    let model =
        |seat, name: &str| ModelSpec { name: name.into(), limits: LIMITS, eos: Vec::new(), site: Site::Here(seat) };
    let [small, large] = seats;
    let spec = RuntimeSpec {
        models: vec![model(small, "small"), model(large, "large")],
        codec: Arc::new(Numbers),
        algorithm: Arc::new(way),
        batching: Batching {
            policy: PolicySpec::Fixed(thresholds.to_vec()),
            max_wait: Duration::from_secs(3_600),
            ..Batching::default()
        },
        live_max: 8,
        bounds: Bounds::default(),
        placement,
        process: Process::alone(),
    };
    start(spec).expect("a valid runtime")
}

async fn submit(runtime: &Runtime, seed: u64, (prompt, tokens): (u32, u32)) -> Reply {
    let job = Job {
        prompt: Prompt::Ids(vec![1; prompt as usize]),
        target: Target::Routed,
        routing: None,
        sampling: SamplingParams { seed, ..SamplingParams::default() },
        stop: StopRules { max_tokens: Some(tokens), ..StopRules::default() },
        logprobs: None,
        constraint: None,
        prompt_logprobs: None,
        entropy: false,
    };
    runtime.submit(job).await.expect("there is room")
}

async fn next(reply: &mut Reply) -> Event {
    let event = tokio::time::timeout(PATIENCE, reply.events.recv()).await;
    event.expect("an event is due").expect("the stream is open")
}

/// Tokens of the next event, which is not the end.
async fn tokens(reply: &mut Reply) -> Vec<TokenId> {
    match next(reply).await {
        Event::Delta { tokens, .. } => tokens.iter().map(|token| token.id).collect(),
        event => panic!("{event:?} instead of tokens"),
    }
}

fn play(test: impl Future<Output = ()>) {
    actix_rt::System::new().block_on(test);
}

#[test]
fn the_next_step_is_handed_over_before_tokens_are_delivered() {
    play(async {
        let begun = Arc::default();
        let runtime = run(Way(|_, _, _| SMALL), [1, 1], [timed(&begun), timed(&Arc::default())]);
        let mut reply = submit(&runtime, 0, (1, 20)).await;
        for n in 1..20 {
            assert_eq!(tokens(&mut reply).await, [n]);
            assert_eq!(begun.load(Ordering::SeqCst), n + 1, "steps begun when token {n} was read");
        }
        runtime.drain(PATIENCE).await;
    });
}

/// Two requests, and the small model waits for both of them: while one is at the large model nothing starts.
#[test]
fn tokens_are_delivered_though_no_step_follows() {
    play(async {
        let begun = Arc::default();
        let ((small, small_gate), (large, large_gate)) = (gated(&begun), gated(&Arc::default()));
        let way = Way(|seed, _, _| if seed == 1 { LARGE } else { SMALL });
        let runtime = run(way, [2, 1], [small, large]);
        let mut stays = submit(&runtime, 0, (1, 4)).await;
        let mut leaves = submit(&runtime, 1, (1, 2)).await;
        small_gate.send(()).expect("the executor lives");
        assert_eq!(tokens(&mut stays).await, [1], "it was alone when it came");
        small_gate.send(()).expect("the executor lives");
        assert_eq!(tokens(&mut leaves).await, [1], "before the peer's answer");
        assert_eq!(tokens(&mut stays).await, [2], "though it waits for the other now");
        assert_eq!(begun.load(Ordering::SeqCst), 2, "steps of the small model");
        drop((small_gate, large_gate));
        assert_eq!(tokens(&mut leaves).await, [2]);
        assert!(matches!(next(&mut leaves).await, Event::Finished { .. }));
        for n in 3..5 {
            assert_eq!(tokens(&mut stays).await, [n]);
        }
        assert!(matches!(next(&mut stays).await, Event::Finished { .. }));
        runtime.drain(PATIENCE).await;
    });
}

/// A token that came late would come together with the one that the peer made after it.
#[test]
fn each_token_is_delivered_before_the_peer_makes_the_next() {
    play(async {
        let turns: fn(u64, ModelIdx, u32) -> ModelIdx = |seed, model, position| match (seed + u64::from(position)) % 3 {
            0 => model,
            _ if model == SMALL => LARGE,
            _ => SMALL,
        };
        let runtime = run(Way(turns), [1, 1], [timed(&Arc::default()), timed(&Arc::default())]);
        let mut replies = Vec::new();
        for seed in 0..6 {
            replies.push(submit(&runtime, seed, (3, 50)).await);
        }
        for (seed, mut reply) in (0..).zip(replies) {
            let mut model = SMALL;
            for position in 3..53 {
                let Event::Delta { tokens, .. } = next(&mut reply).await else { panic!("{seed}: the end came early") };
                let got: Vec<_> = tokens.iter().map(|token| (token.id, token.model)).collect();
                assert_eq!(got, [(position, model)], "request {seed}");
                model = turns(seed, model, position);
            }
            assert!(matches!(next(&mut reply).await, Event::Finished { .. }));
        }
        runtime.drain(PATIENCE).await;
    });
}

/// The last token and the failure are said in one breath.
#[test]
fn a_token_comes_before_the_failure_of_its_request() {
    play(async {
        let way = Way(|_, _, position| if position < NO_HANDOVER { SMALL } else { LARGE });
        let runtime = run(way, [1, 1], [timed(&Arc::default()), timed(&Arc::default())]);
        let mut reply = submit(&runtime, 0, (NO_HANDOVER - 1, 20)).await;
        assert_eq!(tokens(&mut reply).await, [NO_HANDOVER - 1]);
        assert_eq!(tokens(&mut reply).await, [NO_HANDOVER]);
        assert_eq!(next(&mut reply).await, Event::Failed(Failure::Routing("no way".into())));
        runtime.drain(PATIENCE).await;
    });
}

/// The small model waits for both requests, so they go to the large model together, whose thread could begin with the first
/// before the second is there. It does not: both come in one message, and it makes one step for two tokens.
#[test]
fn requests_that_leave_together_are_batched_together() {
    play(async {
        let (small, large) = (Arc::default(), Arc::default());
        let seats = [Seat::Thread(factory(&small, None)), Seat::Thread(factory(&large, None))];
        let to_and_fro = Way(|_, model, _| if model == SMALL { LARGE } else { SMALL });
        let runtime = run_on(Placement::OwnArbiter, to_and_fro, ([2, 1], seats));
        let mut replies = Vec::new();
        for seed in 0..2 {
            replies.push(submit(&runtime, seed, (1, 400)).await);
        }
        for mut reply in replies {
            while !matches!(next(&mut reply).await, Event::Finished { .. }) {}
        }
        // 200 visits of each; until they meet, and after the first has ended, they are alone.
        let steps = large.load(Ordering::SeqCst);
        assert!((200..230).contains(&steps), "{steps} steps of the large model");
        runtime.drain(PATIENCE).await;
    });
}
