//! Planned thresholds on the whole runtime, actors and all, against the throughput model: closed loops of N users on
//! simulated devices and a virtual clock. Owner: the tests. Time is stretched tenfold, so that the latencies are whole
//! milliseconds, which is what timers can do; rates are given for the time that is meant.

use proptest::prelude::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokenrouter_actors::board::PlannerSnapshot;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::{Latency, Seat};
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::planner::Planning;
use tokenrouter_actors::runtime::{ModelSpec, Placement, Reply, Runtime, RuntimeSpec, start_with};
use tokenrouter_core::batching::{Batching, PolicySpec, clamp};
use tokenrouter_core::executor::{Executor, ExecutorLimits, Needs};
use tokenrouter_core::faults::FaultPlan;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::{Event, Job, Prompt, StopRules, Target};
use tokenrouter_core::rng::{Stream, mix, unit};
use tokenrouter_core::routing::{self, Algorithm, Decision, Prior, Route, StepView};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::sim::{Language, SimExecutor, Skill};
use tokenrouter_core::theory::adapt::{Work, budget};
use tokenrouter_core::theory::chain::{Reach, throughput};
use tokenrouter_core::theory::observe::Behaviour;
use tokenrouter_core::theory::system::{Affine, System};
use tokenrouter_core::theory::table::Table;
use tokenrouter_tests::world::{Words, assert_idle, parse, play};
use tokio::time::Instant;

/// How much longer everything takes than is meant.
const STRETCH: u32 = 10;
/// The published pair: Qwen3 0.6B and 32B.
const SMALL: Duration = Duration::from_micros(6_000);
const LARGE: Duration = Duration::from_micros(27_900);
/// Tokens of one request.
const TOKENS: u32 = 400;
const VOCAB: u32 = 200;

/// Hands over with a probability that the test may change while requests run; the large model writes one token and
/// hands back, and the small one's candidate is dropped, as under R2R.
#[derive(Clone, Debug)]
struct Tide(Arc<AtomicU32>);

impl Tide {
    fn new(p: f64) -> Self {
        let tide = Tide(Arc::default());
        tide.set(p);
        tide
    }

    fn set(&self, p: f64) {
        self.0.store((p * f64::from(u32::MAX)) as u32, Ordering::Relaxed);
    }
}

impl Algorithm for Tide {
    fn needs(&self, _: ModelIdx) -> Needs {
        Needs::default()
    }

    fn prior(&self) -> Prior {
        Prior { p: vec![vec![0.8, 0.2], vec![1.0, 0.0]], c: vec![vec![1.0, 0.0], vec![1.0, 1.0]] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }
}

impl Route for Tide {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        let draw = unit(mix(step.seed), step.position(), Stream::Owner);
        let p = f64::from(self.0.load(Ordering::Relaxed)) / f64::from(u32::MAX);
        Ok(match step.model {
            ModelIdx(0) if draw < p => Decision { to: ModelIdx(1), keep: false },
            _ => Decision { to: ModelIdx(0), keep: true },
        })
    }
}

/// Steps that all take `time`, or up to a tenth more or less of it by chance.
fn steps(time: Duration, jitter: Jitter) -> Latency {
    let count = AtomicU32::new(0);
    Arc::new(move |_| match jitter {
        Jitter::None => time,
        Jitter::Tenth => {
            let n = count.fetch_add(1, Ordering::Relaxed);
            time.mul_f64(0.9 + 0.2 * unit(u64::from(time.subsec_nanos()), n, Stream::Token))
        }
    })
}

#[derive(Clone, Copy, Debug)]
enum Jitter {
    None,
    Tenth,
}

fn model(name: &str, skill: Skill, latency: Latency) -> ModelSpec {
    let limits =
        ExecutorLimits { pages: 2_000, rows_max: 64, step_tokens_max: 512, context_len: 1024, vocab_width: 1000 };
    let language = Language { vocab: VOCAB, hard: 0.35, eos: None };
    let build = move || {
        Ok(Box::new(SimExecutor::new(limits, language.clone(), skill, FaultPlan::default())) as Box<dyn Executor>)
    };
    let site = Site::Here(Seat::Timed(Arc::new(build), latency));
    ModelSpec { name: name.into(), limits, eos: Vec::new(), site }
}

fn server(algorithm: Arc<dyn Algorithm>, batching: Batching, jitter: Jitter) -> RuntimeSpec {
    let models = vec![
        model("small", Skill::Small, steps(SMALL * STRETCH, jitter)),
        model("large", Skill::Large, steps(LARGE * STRETCH, jitter)),
    ];
    let (placement, process) = (Placement::Here, Process::alone());
    let codec = Arc::new(Words::new(VOCAB));
    RuntimeSpec { models, codec, algorithm, batching, live_max: 64, bounds: Bounds::default(), placement, process }
}

/// No wait shorter than the model allows for.
fn patient(policy: PolicySpec) -> Batching {
    Batching { policy, max_wait: Duration::from_secs(600), ..Batching::default() }
}

fn planning() -> Planning {
    Planning { every: Duration::from_millis(500) * STRETCH, ..Planning::default() }
}

fn job(seed: u64, tokens: u32) -> Job {
    Job {
        prompt: Prompt::Ids(vec![(seed % u64::from(VOCAB)) as u32]),
        target: Target::Routed,
        routing: None,
        sampling: SamplingParams { seed, ..SamplingParams::default() },
        stop: StopRules { max_tokens: Some(tokens), ..StopRules::default() },
        logprobs: None,
        constraint: None,
        prompt_logprobs: None,
        entropy: false,
    }
}

/// One user: a request after the other.
async fn user(runtime: Runtime, seed: u64) {
    for n in 0.. {
        let Reply { mut events, .. } = runtime.submit(job(mix(seed ^ n << 32), TOKENS)).await.expect("accepted");
        while let Some(event) = events.recv().await {
            assert!(!matches!(event, Event::Failed(_)), "{event:?}");
        }
    }
}

fn on_virtual_time<T>(future: impl Future<Output = T>) -> T {
    let system = actix_rt::System::with_tokio_rt(|| {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().expect("a runtime")
    });
    system.block_on(future)
}

/// So many users for so long.
#[derive(Clone, Copy, Debug)]
struct Stage {
    users: u32,
    /// Probability of a hop.
    p: f64,
    seconds: u32,
}

/// Runs the stages one after the other, each with users of its own; tokens a second of each.
async fn stages(runtime: &Runtime, stages: &[Stage], mut enter: impl FnMut(&Runtime, usize)) -> Vec<f64> {
    let mut rates = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        enter(runtime, index);
        let seed = |n: u32| mix(index as u64 * 1_000 + u64::from(n));
        let users: Vec<_> = (0..stage.users).map(|n| actix_rt::spawn(user(runtime.clone(), seed(n)))).collect();
        let (begin, before) = (Instant::now(), told(runtime));
        tokio::time::sleep(Duration::from_secs(1) * stage.seconds * STRETCH).await;
        let took = begin.elapsed().as_secs_f64() / f64::from(STRETCH);
        rates.push((told(runtime) - before) as f64 / took);
        users.iter().for_each(|user| user.abort());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    rates
}

fn told(runtime: &Runtime) -> u64 {
    runtime.snapshot().models.iter().map(|model| model.client.completion_tokens).sum()
}

/// T(B) of the published pair, tokens a second.
fn predicted(users: u32, p: f64, thresholds: &[u32]) -> f64 {
    let constant = |time: Duration| Affine { base: time.as_micros() as f64 / 100.0, per_request: 0.0 };
    let (moves, tokens) = (vec![vec![1.0 - p, p], vec![1.0, 0.0]], vec![vec![1.0, 0.0], vec![1.0, 0.0]]);
    let system = System::affine(users, &[constant(SMALL), constant(LARGE)], moves, tokens).expect("a system");
    throughput(&system, thresholds, Reach::default()).expect("a small chain").throughput * 1e4
}

/// The published figure: N = 2, 3, 4 and every B_1. The runtime is within 3 % of T(B) everywhere, with the same best.
#[test]
fn the_runtime_is_as_fast_as_the_throughput_model_says() {
    for users in 2..=4u32 {
        let mut rates: Vec<(f64, f64)> = Vec::new();
        for second in 1..=users {
            let algorithm = routing::build("bernoulli", &serde_json::json!({ "p": 0.35 }), 2).expect("an algorithm");
            let batching = patient(PolicySpec::Fixed(vec![1, second]));
            let stage = Stage { users, p: 0.35, seconds: 200 };
            let measured = on_virtual_time(async {
                let runtime = start_with(server(algorithm, batching, Jitter::None), planning()).expect("a runtime");
                stages(&runtime, &[stage], |_, _| {}).await[0]
            });
            let expected = predicted(users, 0.35, &[1, second]);
            println!("N {users} B_1 {second}: {measured:.2} tokens/s for {expected:.2}");
            assert!((measured / expected - 1.0).abs() < 0.03, "N {users} B_1 {second}: {measured} for {expected}");
            rates.push((measured, expected));
        }
        let best =
            |by: fn(&(f64, f64)) -> f64| (0..rates.len()).max_by(|&a, &b| by(&rates[a]).total_cmp(&by(&rates[b])));
        assert_eq!(best(|rate| rate.0), best(|rate| rate.1), "N {users}: {rates:?}");
    }
}

fn behaviours(p: f64) -> Vec<Behaviour> {
    let one = |time: Duration, moves: [f64; 2]| {
        let (seconds, tokens) = (vec![time.as_secs_f64(); 64], vec![1.0, 0.0]);
        Behaviour { steps: 1.0, seconds, moves: moves.to_vec(), tokens }
    };
    vec![one(SMALL, [1.0 - p, p]), one(LARGE, [1.0, 0.0])]
}

/// p jumps from 0.1 to 0.4 and N swings between 1 and 32. Adaptive batching knows neither; the oracle gets the table for
/// the p of each stage as the stage begins.
#[test]
fn adaptive_batching_keeps_up_with_one_who_knows() {
    let stage = |users, p| Stage { users, p, seconds: if users < 8 { 25 } else { 10 } };
    let plan: Vec<Stage> = [
        (8, 0.1),
        (32, 0.1),
        (1, 0.1),
        (16, 0.1),
        (32, 0.4),
        (4, 0.4),
        (16, 0.4),
        (1, 0.4),
        (8, 0.4),
        (32, 0.4),
        (16, 0.1),
        (32, 0.1),
    ]
    .map(|(users, p)| stage(users, p))
    .to_vec();
    let tables: Vec<Table> =
        plan.iter().map(|stage| Table::plan(&behaviours(stage.p), 32, budget()).expect("a table")).collect();
    let run = |batching: Batching, is_oracle: bool| {
        let tide = Tide::new(0.1);
        on_virtual_time(async {
            let runtime =
                start_with(server(Arc::new(tide.clone()), batching, Jitter::None), planning()).expect("a runtime");
            let rates = stages(&runtime, &plan, |runtime, index| {
                tide.set(plan[index].p);
                if is_oracle {
                    runtime.adopt(tables[index].clone()).expect("two models");
                }
            });
            (rates.await, runtime.planner())
        })
    };
    let (eager, _) = run(patient(PolicySpec::Eager), false);
    let (oracle, _) = run(patient(PolicySpec::Eager), true);
    let (adaptive, planner) = run(Batching { adaptive: true, ..patient(PolicySpec::Eager) }, false);
    for (index, stage) in plan.iter().enumerate() {
        let (eager, oracle, adaptive) = (eager[index], oracle[index], adaptive[index]);
        println!("{stage:?}: eager {eager:.1}, oracle {oracle:.1}, adaptive {adaptive:.1}");
    }
    println!("{planner:?}");
    let total =
        |rates: &[f64]| rates.iter().zip(&plan).map(|(rate, stage)| rate * f64::from(stage.seconds)).sum::<f64>();
    let (best, found) = (total(&oracle), total(&adaptive));
    assert!(found > 0.95 * best, "{found} of {best}");
    for ((stage, eager), adaptive) in plan.iter().zip(&eager).zip(&adaptive) {
        assert!(*adaptive > 0.98 * eager, "{stage:?}: {adaptive} for {eager}");
    }
    assert!(total(&oracle) > 1.02 * total(&eager), "thresholds matter here");
}

/// Under a steady workload, latencies that differ from step to step included, the table settles and stays.
#[test]
fn a_steady_workload_keeps_its_table() {
    let (early, late) = on_virtual_time(async {
        let batching = Batching { adaptive: true, ..patient(PolicySpec::Eager) };
        let runtime = start_with(server(Arc::new(Tide::new(0.35)), batching, Jitter::Tenth), planning());
        let runtime = runtime.expect("a runtime");
        let mut seen: Vec<PlannerSnapshot> = Vec::new();
        let stage = |seconds| Stage { users: 8, p: 0.35, seconds };
        stages(&runtime, &[stage(30), stage(90), stage(1)], |runtime, _| {
            seen.push(runtime.planner().unwrap_or_default())
        })
        .await;
        (seen[1].clone(), seen[2].clone())
    });
    assert!((1..=2).contains(&early.adopted), "{early:?}");
    assert!(late.looks > early.looks + 150, "{early:?} {late:?}");
    assert_eq!((late.adopted, late.failed), (early.adopted, 0), "{early:?} {late:?}");
}

/// A plan that panics changes nothing and is not tried again at every look.
#[test]
fn a_plan_that_panics_changes_nothing() {
    let (rate, planner) = on_virtual_time(async {
        let batching = Batching { adaptive: true, ..patient(PolicySpec::Eager) };
        let broken = Planning { run: Arc::new(|_| panic!("on order")), ..planning() };
        let runtime = start_with(server(Arc::new(Tide::new(0.35)), batching, Jitter::None), broken);
        let runtime = runtime.expect("a runtime");
        let stage = Stage { users: 3, p: 0.35, seconds: 40 };
        (stages(&runtime, &[stage], |_, _| {}).await[0], runtime.planner().expect("it plans"))
    });
    assert!((rate / predicted(3, 0.35, &[1, 1]) - 1.0).abs() < 0.05, "{rate}");
    assert_eq!((planner.planned, planner.adopted, planner.last_error.as_deref()), (0, 0, Some("panicked: on order")));
    assert!((3..10).contains(&planner.failed), "{planner:?}");
}

/// In real time and on threads: while a plan takes as long as the test lets it, requests come, run and end.
#[test]
fn serving_does_not_wait_for_a_plan() {
    let ((begun, has_begun), (go_on, may_go_on)) = (sync_channel(1), sync_channel::<()>(1));
    let gate = Mutex::new((begun, may_go_on));
    let slow = move |work: Work| {
        let gate = gate.lock().unwrap_or_else(PoisonError::into_inner);
        gate.0.try_send(()).ok();
        gate.1.recv().map_err(|error| error.to_string())?;
        work.run()
    };
    actix_rt::System::new().block_on(async move {
        let latency = |ms: u64| -> Latency { Arc::new(move |_| Duration::from_millis(ms)) };
        let spec = RuntimeSpec {
            models: vec![model("small", Skill::Small, latency(1)), model("large", Skill::Large, latency(3))],
            placement: Placement::OwnArbiter,
            ..server(Arc::new(Tide::new(0.4)), Batching { adaptive: true, ..Batching::default() }, Jitter::None)
        };
        let planning = Planning { every: Duration::from_millis(20), run: Arc::new(slow) };
        let runtime = start_with(spec, planning).expect("a runtime");
        let users: Vec<_> = (0..4).map(|n| actix_rt::spawn(user(runtime.clone(), n))).collect();
        let limit = Instant::now() + Duration::from_secs(20);
        while has_begun.try_recv().is_err() {
            assert!(Instant::now() < limit, "no plan began: {:?}", runtime.planner());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let Reply { mut events, .. } = runtime.submit(job(99, 50)).await.expect("accepted");
        let end = tokio::time::timeout(Duration::from_secs(20), async {
            let mut last = None;
            while let Some(event) = events.recv().await {
                last = Some(event);
            }
            last
        });
        assert!(matches!(end.await, Ok(Some(Event::Finished { .. }))));
        assert_eq!(runtime.planner().map(|planner| planner.planned), Some(0), "the plan is not done");
        go_on.send(()).expect("it waits");
        while runtime.planner().is_some_and(|planner| planner.planned == 0) {
            assert!(Instant::now() < limit, "the plan was lost: {:?}", runtime.planner());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        users.iter().for_each(|user| user.abort());
        drop(go_on);
        runtime.drain(Duration::from_secs(5)).await;
    });
}

/// B follows N as soon as the word of an end has reached the Batchers: before any step is over.
#[test]
fn thresholds_follow_the_live_requests_at_once() {
    let mut script = parse(
        "model small skill=small step=100ms\nmodel large step=1000ms\nroute bernoulli {\"p\":1}\n\
         at 0ms submit a max=1\nat 0ms submit b max=9\nat 0ms submit c max=9\nat 0ms submit d max=9\n\
         at 50ms probe\nat 1101ms probe\nat 1150ms abort b\nat 1151ms probe\nat 1160ms abort c\nat 1161ms probe\n\
         at 1170ms abort d\n",
    )
    .expect("a scenario");
    let rows = [1u32, 2, 3, 4].map(|n| (n, vec![1, n])).to_vec();
    script.batching = patient(PolicySpec::Planned(Table::new(rows).expect("a table")));
    let end = play(&script);
    assert_idle(&end);
    let probes: Vec<&str> = end.timeline.lines().filter(|line| line.contains("probe")).collect();
    // Four, then a has finished, then b has left, then c.
    for (probe, live) in probes.iter().zip([4, 3, 2, 1]) {
        let (small, large) = (format!("small[B 1 of {live},"), format!("large[B {live} of {live},"));
        assert!(probe.contains(&small) && probe.contains(&large), "{live}: {}", end.timeline);
    }
    assert_eq!(probes.len(), 4);
}

fn feasible(thresholds: &[u32], live: u32) -> bool {
    thresholds.iter().all(|&b| b >= 1) && thresholds.iter().map(|b| b - 1).sum::<u32>() < live.max(1)
}

proptest! {
    /// Whatever a table holds, what a Batcher goes by lets somebody start.
    #[test]
    fn tables_are_feasible_once_clamped(
        rows in prop::collection::btree_map(1u32..80, prop::collection::vec(1u32..90, 3), 1..8),
        live in 0u32..200,
    ) {
        let table = Table::new(rows.into_iter().collect()).expect("ascending rows");
        let clamped = clamp(table.thresholds(live), live);
        prop_assert!(feasible(&clamped, live), "{clamped:?} for {live}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Planned rows are feasible as they are, and what lies between them once clamped.
    #[test]
    fn planned_tables_are_feasible(
        p in 0.0f64..1.0,
        back in 0.05f64..1.0,
        seconds in prop::collection::vec((1e-4f64..0.1, 0.0f64..0.01), 2),
    ) {
        let one = |(base, each): (f64, f64), moves: [f64; 2], drops: f64| Behaviour {
            steps: 1.0,
            seconds: (1..=16).map(|b| base + each * f64::from(b)).collect(),
            moves: moves.to_vec(),
            tokens: vec![1.0, drops],
        };
        let all = [one(seconds[0], [1.0 - p, p], 0.0), one(seconds[1], [back, 1.0 - back], 1.0)];
        let table = Table::plan(&all, 12, budget()).expect("a table");
        for (n, thresholds) in table.rows() {
            prop_assert!(feasible(thresholds, *n), "{thresholds:?} for {n}");
        }
        for live in 0..40 {
            prop_assert!(feasible(&clamp(table.thresholds(live), live), live), "{live}");
        }
    }
}

/// Stays at the first model, and panics at the first step of the request of one seed: a fault in an actor itself.
#[derive(Clone, Debug)]
struct Trips(u64);

impl Algorithm for Trips {
    fn needs(&self, _: ModelIdx) -> Needs {
        Needs::default()
    }

    fn prior(&self) -> Prior {
        Prior { p: vec![vec![1.0, 0.0], vec![0.0, 1.0]], c: vec![vec![1.0, 1.0]; 2] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }
}

impl Route for Trips {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        assert_ne!(step.seed, self.0, "on order");
        Ok(Decision { to: step.model, keep: true })
    }
}

/// A Batcher that is rebuilt goes by the thresholds in force, not by those of the launch.
#[test]
fn rebuilt_actors_go_by_the_table_in_force() {
    on_virtual_time(async {
        let spec = server(Arc::new(Trips(7)), patient(PolicySpec::Eager), Jitter::None);
        let runtime = start_with(spec, planning()).expect("a runtime");
        let rows = vec![(1, vec![1, 1]), (4, vec![3, 2])];
        runtime.adopt(Table::new(rows).expect("a table")).expect("two models");
        let Reply { mut events, .. } = runtime.submit(job(7, 20)).await.expect("accepted");
        while events.recv().await.is_some() {}
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut replies = Vec::new();
        for seed in 0..4 {
            replies.push(runtime.submit(job(seed, 20)).await.expect("accepted"));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        let models = runtime.snapshot().models;
        assert_eq!(models.iter().map(|model| model.subserver.children_restarts).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(models.iter().map(|model| model.batcher.threshold).collect::<Vec<_>>(), [3, 2]);
        assert!(runtime.adopt(Table::new(vec![(1, vec![1])]).expect("a table")).is_err(), "one model of two");
    });
}
