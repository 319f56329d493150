//! Execution modes: whatever may step when, and whatever a hop keeps, users read the same. On the virtual clock the
//! steps themselves can be watched, so that what a mode promises is seen and not only its effect.

use proptest::prelude::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokenrouter_core::batching::PolicySpec;
use tokenrouter_core::execution::Execution;
use tokenrouter_core::executor::{Needs, Step};
use tokenrouter_core::faults::Fault;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::routing::{Algorithm, Decision, Prior, Route, StepView};
use tokenrouter_tests::world::{Play, Script, algorithm, assert_idle, assert_text, parse, play, play_with, watch};

const MODES: [Execution; 4] = [Execution::Async, Execution::ModelSync, Execution::StepSync, Execution::StdServing];

/// Three models, ten requests and a walk between the models.
const CROWD: &str = "model small skill=small step=6ms pages=200\n\
                     model large step=28ms pages=200\n\
                     model other step=11ms pages=200\n\
                     language hard=0.4 eos=0.02 vocab=60\n\
                     route bernoulli {\"p\":[[0.6,0.3,0.1],[0.5,0.4,0.1],[0.3,0.3,0.4]]}\n";

fn crowd(mode: Execution, lines: &str) -> Script {
    let requests = (0..10).map(|who| {
        let only = if who == 7 { " only=other" } else { "" };
        format!("at {}ms submit r{who} prompt={} max={}{only}\n", who * 5, 3 + who * 9, 6 + who * 2)
    });
    let text = format!("{CROWD}{lines}{}", requests.collect::<String>());
    let mut script = parse(&text).unwrap_or_else(|error| panic!("{error:?} in\n{text}"));
    script.batching.execution = mode;
    script
}

fn checked(script: &Script) -> Play {
    let end = play(script);
    assert_idle(&end);
    assert_text(script, &*algorithm(script), &end);
    end
}

#[test]
fn texts_are_the_same_in_every_mode_at_every_threshold() {
    let thresholds = [[1, 1, 1], [2, 1, 1], [1, 3, 2], [4, 4, 4]];
    let mut texts = Vec::new();
    for mode in MODES {
        for thresholds in thresholds {
            let mut script = crowd(mode, "");
            script.batching.policy = PolicySpec::Fixed(thresholds.to_vec());
            let end = checked(&script);
            assert!(!end.timeline.contains("failed"), "{mode:?}\n{}", end.timeline);
            assert!(end.told.len() == 10 && end.told.values().all(|told| !told.is_empty()));
            texts.push(end.told);
        }
    }
    assert!(texts.iter().all(|told| *told == texts[0]));
}

#[test]
fn executors_may_fail_in_every_mode() {
    for mode in MODES {
        for fault in ["error", "lost", "panic", "bad_rows"] {
            for step in [0, 3, 9] {
                let faults = format!("fault large {step} {fault}\nfault small {} {fault}\n", step + 2);
                let end = checked(&crowd(mode, &faults));
                let lost = end.timeline.matches(" failed: ").count();
                assert!(fault == "bad_rows" || lost == 0, "{mode:?} {fault}\n{}", end.timeline);
            }
        }
    }
}

/// When a step of which model began and ended, in virtual time.
type Steps = Arc<Mutex<Vec<(usize, Duration, Duration)>>>;

fn steps_of(mode: Execution) -> Vec<(usize, Duration, Duration)> {
    let steps = Steps::default();
    let script = crowd(mode, "");
    let log = Arc::clone(&steps);
    let times: Vec<_> = script.models.iter().map(|model| model.time).collect();
    let end = watch(&script, algorithm(&script), move |model: usize, now: Duration, step: &Step| {
        log.lock().unwrap().push((model, now, now + times[model].latency(step)));
    });
    assert_idle(&end);
    assert_text(&script, &*algorithm(&script), &end);
    let turns = end.end.conductor.as_ref().map(|mailbox| (mailbox.depth, mailbox.messages > 0));
    assert_eq!(turns, mode.takes_turns().then_some((0, true)), "{mode:?}: the mailbox of the conductor");
    std::mem::take(&mut *steps.lock().unwrap())
}

/// Pairs of steps, of two models, that overlap in time.
fn overlaps(steps: &[(usize, Duration, Duration)]) -> Vec<[(usize, Duration, Duration); 2]> {
    let pairs = steps.iter().enumerate().flat_map(|(at, one)| steps[at + 1..].iter().map(move |other| [*one, *other]));
    pairs.filter(|[one, other]| one.0 != other.0 && one.1 < other.2 && other.1 < one.2).collect()
}

#[test]
fn one_model_at_a_time() {
    assert!(!overlaps(&steps_of(Execution::Async)).is_empty(), "what is watched here happens otherwise");
    let steps = steps_of(Execution::ModelSync);
    assert!((0..3).all(|model| steps.iter().any(|step| step.0 == model)));
    assert!(overlaps(&steps).is_empty(), "{:?}", overlaps(&steps));
}

#[test]
fn all_begin_together_and_wait_for_the_slowest() {
    let begins_apart = |pairs: &[[(usize, Duration, Duration); 2]]| pairs.iter().any(|[one, other]| one.1 != other.1);
    assert!(begins_apart(&overlaps(&steps_of(Execution::Async))));
    let pairs = overlaps(&steps_of(Execution::StepSync));
    assert!(!pairs.is_empty() && !begins_apart(&pairs), "{pairs:?}");
}

/// A request that hopped in a round takes part in the next one at its new model: no model with work is left out of it.
#[test]
fn who_hops_in_a_round_steps_in_the_next() {
    let script = |mode: &str| {
        let text = format!(
            "model left step=10ms\nmodel right step=10ms\nroute bernoulli {{\"p\":[[0,1],[1,0]],\"keep\":[[true,true],[true,true]]}}\nexecution {mode}\n\
             at 0ms submit a prompt=4 max=20\nat 0ms submit b prompt=4 max=20\n"
        );
        parse(&text).expect("a scenario")
    };
    // Both requests move in step, so the barrier costs nothing: as many rounds as tokens.
    let end = checked(&script("step_sync"));
    assert!(end.timeline.contains("200.0 b Length"), "{}", end.timeline);
    let end = checked(&script("model_sync"));
    assert!(end.timeline.contains("200.0 b Length"), "{}", end.timeline);
}

#[test]
fn a_fresh_request_at_each_hop_is_looked_up_and_computed_again() {
    let text = "model small skill=small step=6ms\nmodel large step=28ms\nlanguage hard=0.5\nroute r_stitch {\"threshold\":0.1}\n\
                at 0ms submit a prompt=100 max=40\n";
    let ends = ["async", "std_serving"].map(|mode| checked(&parse(&format!("execution {mode}\n{text}")).unwrap()));
    let [kept, fresh] = ends.each_ref().map(|end| &end.end.models[0]);
    assert_eq!((kept.kv.prefix_queries, kept.kv.prefix_hit_tokens), (1, 0));
    assert_eq!(fresh.kv.prefix_queries, 1 + fresh.inter_model.returned);
    assert!(fresh.inter_model.returned > 3 && fresh.kv.prefix_hit_tokens > 96 * fresh.inter_model.returned);
    assert!(fresh.kv.pages_allocated > kept.kv.pages_allocated);
    assert!(fresh.decode.extend_tokens > kept.decode.extend_tokens);
    // What is cached is said of the new request, not of its returns.
    assert!(ends.iter().all(|end| end.timeline.contains("cached 0")), "{}", ends[1].timeline);
}

const AHEAD: &str = "model small skill=small step=25ms token=0.1ms\nmodel large step=20ms token=1ms chunk=600\nlanguage hard=0.05\n\
                     route r_stitch {\"threshold\":0.1}\n";

#[test]
fn a_prompt_that_was_prefilled_ahead_is_found_at_the_first_hop() {
    let requests = "at 0ms submit a prompt=200 max=80\nat 2000ms submit b prompt=200 max=80 seed=5\n";
    let [plain, ahead] = ["", "prefill_ahead\n"].map(|line| {
        let script = parse(&format!("{AHEAD}{line}{requests}")).expect("a scenario");
        let mut lengths = Vec::new();
        let log = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&log);
        let end = watch(&script, algorithm(&script), move |model: usize, _, step: &Step| {
            let drawn = step.rows.iter().filter(|row| row.draw.is_some());
            into.lock().unwrap().extend(drawn.map(|row| (model, row.request, row.tokens.len())));
            assert!(model == 0 || step.rows.iter().all(|row| row.draw.is_some() || row.tokens.len() <= 64));
        });
        assert_idle(&end);
        assert_text(&script, &*algorithm(&script), &end);
        let log = std::mem::take(&mut *log.lock().unwrap());
        let mut seen = Vec::new();
        for (model, request, tokens) in log {
            if model == 1 && !seen.contains(&request) {
                seen.push(request);
                lengths.push(tokens);
            }
        }
        (end, lengths)
    });
    assert_eq!(plain.0.told, ahead.0.told);
    assert_eq!((plain.1.len(), ahead.1.len()), (2, 2));
    // One hops early, when two pieces were done; of the other all twelve whole pages of the prompt were there.
    let shorter: Vec<usize> = plain.1.iter().zip(&ahead.1).map(|(plain, ahead)| plain - ahead).collect();
    assert_eq!(shorter, [128, 192], "{:?} and {:?}", plain.1, ahead.1);
}

#[test]
fn who_leaves_is_not_prefilled_any_further() {
    let at = |gone: &str| {
        let text = format!("{AHEAD}prefill_ahead\nat 0ms submit a prompt=400 max=200\n{gone}");
        let script = parse(&text).expect("a scenario");
        let end = checked(&script);
        end.end.models[1].decode.extend_tokens
    };
    let early = at("at 30ms abort a\n");
    assert_eq!(early, 64, "one piece, begun before");
    assert!(at("") > 380);
}

/// A batch waits for the piece of a prompt that is in the step, and for no further one.
#[test]
fn what_waits_goes_first() {
    let stay = |who: u32| format!("at {who}ms submit b{who} prompt=300 max=40 threshold=2\n");
    let text = format!("{AHEAD}{}at 7ms submit a prompt=40 max=30 only=large\n", (0..6).map(stay).collect::<String>());
    let [alone, beside] = ["", "prefill_ahead\n"].map(|line| {
        let end = checked(&parse(&format!("{text}{line}")).expect("a scenario"));
        let line = end.timeline.lines().find(|line| line.contains("a Length")).expect("an end");
        let ms: f64 = line.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a time");
        (ms, end.end.models[1].decode.extend_tokens)
    });
    assert!(beside.1 > alone.1 + 3 * 280, "prompts were prefilled: {} and {}", alone.1, beside.1);
    assert!((alone.0..=alone.0 + 84.0).contains(&beside.0), "{} and {}", alone.0, beside.0);
}

/// Nothing is announced of a request that stays at one model.
#[test]
fn who_cannot_come_is_not_expected() {
    let text = format!("{AHEAD}prefill_ahead\nat 0ms submit a prompt=300 max=40 only=small\n");
    let end = checked(&parse(&text).expect("a scenario"));
    assert_eq!(end.end.models[1].decode.steps, 0);
}

#[test]
fn turns_do_not_go_with_prefill_ahead() {
    let script = parse(&format!("{AHEAD}prefill_ahead\nexecution step_sync\n")).expect("a scenario");
    let refused = std::panic::catch_unwind(|| play(&script)).expect_err("not started");
    let message = refused.downcast_ref::<String>().expect("a message");
    assert!(message.contains("batching.prefill_ahead needs models that step when they may"), "{message}");
}

/// Moves after every token, and panics at one position: a fault in an actor itself.
#[derive(Clone, Debug)]
struct PanicsAt(u32);

impl Algorithm for PanicsAt {
    fn needs(&self, _: ModelIdx) -> Needs {
        Needs::default()
    }

    fn prior(&self) -> Prior {
        Prior { p: vec![vec![0.5; 2]; 2], c: vec![vec![1.0; 2]; 2] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }
}

impl Route for PanicsAt {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        assert_ne!(step.position(), self.0, "on order");
        Ok(Decision { to: ModelIdx(1 - step.model.0), keep: true })
    }
}

/// The actors of a model die while it has a turn: the turn goes on to the others, and the new actors get theirs.
#[test]
fn a_turn_does_not_die_with_its_actors() {
    for mode in MODES {
        let text = "model left step=5ms\nmodel right step=9ms\n\
                    at 0ms submit doomed prompt=20 max=20\nat 1ms submit beside prompt=3 max=4\n\
                    at 20ms submit late prompt=3 max=9 only=right\nat 500ms submit after prompt=3 max=6\n";
        let mut script = parse(text).expect("a scenario");
        script.batching.execution = mode;
        let end = play_with(&script, Arc::new(PanicsAt(26)));
        assert_idle(&end);
        let restarts: u64 = end.end.models.iter().map(|model| model.subserver.children_restarts).sum();
        assert_eq!(restarts, 1, "{mode:?}\n{}", end.timeline);
        for line in ["doomed failed: internal failure", "late Length", "after Length"] {
            assert!(end.timeline.contains(line), "{mode:?}\n{}", end.timeline);
        }
    }
}

prop_compose! {
    fn worlds()(
        mode in 0usize..4,
        ahead in prop::bool::ANY,
        models in 2usize..4,
        thresholds in prop::collection::vec(1u32..5, 3),
        pages in prop::collection::vec(8u32..40, 3),
        rows in 1u32..6,
        requests in prop::collection::vec((0u32..60, 1u32..90, 1u32..16), 1..7),
        aborts in prop::collection::vec((0usize..7, 1u32..300), 0..3),
        faults in prop::collection::vec((0usize..3, 0u64..12, 0usize..4), 0..3),
    ) -> Script {
        let mut text = String::new();
        for model in 0..models {
            let (step, skill, pages) = (5 * (model + 1), if model == 0 { "small" } else { "large" }, pages[model]);
            text += &format!("model m{model} skill={skill} step={step}ms token=0.05ms pages={pages} rows={rows} chunk=80\n");
        }
        text += "language hard=0.3 eos=0.02\n";
        text += match models {
            2 => "route r_stitch {\"threshold\":0.1}\n",
            _ => "route bernoulli {\"p\":[[0.5,0.3,0.2],[0.3,0.4,0.3],[0.4,0.4,0.2]]}\n",
        };
        for (index, (at, prompt, max)) in requests.iter().enumerate() {
            text += &format!("at {at}ms submit r{index} prompt={prompt} max={max} seed={}\n", index % 3);
        }
        for (who, at) in aborts {
            if let Some((submitted, ..)) = requests.get(who) {
                text += &format!("at {}ms abort r{who}\n", submitted + at);
            }
        }
        let kinds = [Fault::Error, Fault::Lost, Fault::Panic, Fault::BadRows];
        let mut script = parse(&text).unwrap();
        for (model, step, kind) in faults {
            if model < models {
                script.models[model].faults.push((step, kinds[kind]));
            }
        }
        script.batching.execution = MODES[mode];
        script.batching.prefill_ahead = ahead && !MODES[mode].takes_turns();
        script.batching.policy = PolicySpec::Fixed(thresholds[..models].to_vec());
        script.batching.max_wait = Duration::from_millis(70);
        script
    }
}

proptest! {
    #[test]
    fn random_worlds_in_every_mode(script in worlds()) {
        checked(&script);
    }
}
