//! Ten thousand requests in bursts, through every policy and every execution mode, with users who leave and executors
//! that fail. Each user reads what the definition of the algorithm says; nothing is stuck, nothing is left behind.

use std::fmt::Write;
use std::time::Duration;
use tokenrouter_core::batching::PolicySpec;
use tokenrouter_core::execution::Execution;
use tokenrouter_core::rng::mix;
use tokenrouter_core::theory::table::Table;
use tokenrouter_tests::world::{Play, Script, algorithm, assert_idle, assert_text, parse, play};

const MODES: [Execution; 4] = [Execution::Async, Execution::ModelSync, Execution::StepSync, Execution::StdServing];

/// Requests of one world. Twenty worlds: four modes, five ways of batching.
const REQUESTS: u64 = 500;

/// Random numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = mix(self.0);
        self.0 % limit
    }
}

fn policies() -> Vec<(PolicySpec, bool)> {
    let thresholds = |live: u32| vec![1 + live % 3, (live / 2).max(1), 1 + live % 5];
    let planned =
        PolicySpec::Planned(Table::new((1..=40).map(|live| (live, thresholds(live))).collect()).expect("a table"));
    vec![
        (PolicySpec::Eager, false),
        (PolicySpec::Fixed(vec![2, 3, 1]), false),
        (PolicySpec::Fixed(vec![40, 40, 40]), false),
        (planned.clone(), false),
        (planned, true),
    ]
}

/// Bursts of up to 24 requests, then a pause; every tenth user leaves, every fifth request is for one model, prompts
/// share beginnings. Memory is short.
fn world(seed: u64) -> Script {
    let mut dice = Dice(seed);
    let mut text = "model small skill=small step=3ms token=0.02ms pages=90 rows=12 chunk=96\n\
                    model large step=13ms token=0.05ms pages=90 rows=12 chunk=96\n\
                    model other step=6ms token=0.03ms pages=70 rows=8 chunk=64\n\
                    language hard=0.3 eos=0.03 vocab=60\nlive_max 48\n\
                    route bernoulli {\"p\":[[0.7,0.2,0.1],[0.5,0.4,0.1],[0.3,0.3,0.4]]}\n"
        .to_owned();
    let (mut at, mut burst) = (0, 0);
    for who in 0..REQUESTS {
        if burst == 0 {
            burst = 1 + dice.below(24);
            at += dice.below(400);
        }
        burst -= 1;
        at += dice.below(3);
        let (prompt, max, start) = (1 + dice.below(70), 1 + dice.below(14), dice.below(7));
        let only =
            if dice.below(5) == 0 { [" only=small", " only=large", " only=other"][dice.below(3) as usize] } else { "" };
        writeln!(text, "at {at}ms submit r{who} prompt={prompt} max={max} seed={start}{only}").expect("a string");
        if dice.below(10) == 0 {
            writeln!(text, "at {}ms abort r{who}", at + dice.below(250)).expect("a string");
        }
    }
    for model in ["small", "large", "other"] {
        for fault in ["error", "error", "lost", "panic", "bad_rows"] {
            writeln!(text, "fault {model} {} {fault}", dice.below(400)).expect("a string");
        }
    }
    parse(&text).unwrap_or_else(|error| panic!("{error:?}"))
}

/// How the requests of a play ended.
fn ends(play: &Play) -> [usize; 4] {
    [" Length: ", " EndOfText: ", " refused: ", " failed: "].map(|end| play.timeline.matches(end).count())
}

fn soak(mode: Execution) {
    let mut sum = [0; 4];
    for (index, (policy, adaptive)) in policies().into_iter().enumerate() {
        let mut script = world(1 + index as u64);
        script.batching.policy = policy;
        script.batching.adaptive = adaptive;
        script.batching.max_wait = Duration::from_millis(60);
        script.batching.execution = mode;
        script.batching.prefill_ahead = index % 2 == 1 && !mode.takes_turns();
        let end = play(&script);
        assert_idle(&end);
        assert!(end.end.models.iter().all(|model| model.subserver.children_restarts == 0), "an actor died");
        assert_text(&script, &*algorithm(&script), &end);
        let found = ends(&end);
        assert!(found[0] + found[1] > 300, "{mode:?} {index}: {found:?}");
        sum.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
    }
    println!("{mode:?}: {} full, {} end of text, {} refused, {} failed of 2500", sum[0], sum[1], sum[2], sum[3]);
}

#[test]
fn async_mode() {
    soak(MODES[0]);
}

#[test]
fn model_sync() {
    soak(MODES[1]);
}

#[test]
fn step_sync() {
    soak(MODES[2]);
}

#[test]
fn std_serving() {
    soak(MODES[3]);
}
