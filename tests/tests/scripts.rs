//! Scripted routers in whole worlds: the same text as the built-in algorithm, errors that cost one request, and new
//! scripts beside running requests. Owner: the routing port.

use serde_json::json;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokenrouter_core::executor::Needs;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::routing::reload::Reloadable;
use tokenrouter_core::routing::{self, Algorithm, Prior, Route};
use tokenrouter_tests::world::{Act, Script, assert_idle, assert_text, parse, play, play_with};

const R_STITCH: &str = include_str!("../../config/routers/r_stitch.rhai");

fn scripted(source: &str, threshold: f64) -> Arc<dyn Algorithm> {
    let params = json!({ "file": "mine.rhai", "source": source, "threshold": threshold });
    routing::build("script", &params, 2).unwrap_or_else(|error| panic!("{error}"))
}

/// Requests that overlap, one every 4 ms.
fn world(requests: u32, threshold: f64) -> Script {
    let mut text = format!(
        "model small skill=small step=6ms\nmodel large step=28ms\nlanguage hard=0.4 eos=0.01\n\
         route r_stitch {{\"threshold\":{threshold}}}\nbatch fixed 1,2 wait=60ms\n"
    );
    for who in 0..requests {
        text.push_str(&format!("at {}ms submit r{who} prompt={} max={}\n", who * 4, 3 + who, 30 + who));
    }
    parse(&text).unwrap_or_else(|error| panic!("{error:?}"))
}

#[test]
fn r_stitch_as_a_script_writes_what_the_built_in_one_writes() {
    for threshold in [-0.5, 0.005, 0.1, 0.4, 1.0] {
        let script = world(12, threshold);
        let (built_in, ours) = (play(&script), play_with(&script, scripted(R_STITCH, threshold)));
        assert_idle(&ours);
        assert_text(&script, &*scripted(R_STITCH, threshold), &ours);
        assert_eq!(built_in.told, ours.told, "{threshold}");
        assert_eq!(built_in.timeline, ours.timeline, "{threshold}: and at the same times");
    }
}

/// Each function of a script can fail; only the request it fails for ends, and says where.
#[test]
fn an_error_costs_one_request() {
    let stitch = |at: &str| {
        let doomed = "if step.prompt_len == 5 && step.position >= 12 { throw \"on order\"; }";
        R_STITCH.replace("let threshold", &format!("{at} let threshold")).replace("DOOMED", doomed)
    };
    let cases = [
        (stitch("DOOMED"), "mine.rhai:8:"),
        (
            format!(
                "{}\nfn send(handoff) {{ if handoff.len >= 12 && this.own {{ throw \"on order\"; }} }}",
                stitch("this.own = step.prompt_len == 5;")
            ),
            "mine.rhai:16:",
        ),
        (
            format!("{}\nfn entry(seed) {{ if unit(seed, 0) < 0.2 {{ throw \"on order\"; }} 0 }}", stitch("")),
            "mine.rhai:16:",
        ),
    ];
    for (source, place) in cases {
        let end = play_with(&world(12, 0.1), scripted(&source, 0.1));
        assert_idle(&end);
        let failed: Vec<&str> = end.timeline.lines().filter(|line| line.contains(" failed: ")).collect();
        let done =
            end.timeline.lines().filter(|line| line.contains(" Length: ") || line.contains(" EndOfText: ")).count();
        assert!(!failed.is_empty() && failed.len() < 8, "{}", end.timeline);
        assert_eq!(failed.len() + done, 12, "{}", end.timeline);
        assert!(failed.iter().all(|line| line.contains(place) && line.contains("on order")), "{failed:?}");
    }
}

/// Where a request enters can depend on its own parameters: one enters, and stays, at the small model, the other at the
/// large one.
#[test]
fn a_request_enters_by_its_own_parameters() {
    let mut script = world(2, 0.1);
    for (at, threshold) in [0.1, 0.9].into_iter().enumerate() {
        let Act::Submit(request) = &mut script.acts[at].1 else { panic!("{:?}", script.acts) };
        request.threshold = Some(threshold);
    }
    let source = "fn entry(seed) { if params().threshold > 0.5 { 1 } else { 0 } }\nfn route(step) { step.model }";
    let end = play_with(&script, scripted(source, 0.1));
    assert_idle(&end);
    let owners = |who: &str| end.told[who].iter().map(|&(_, model)| model).collect::<BTreeSet<_>>();
    assert_eq!((owners("r0"), owners("r1")), (BTreeSet::from([0]), BTreeSet::from([1])), "{}", end.timeline);
}

/// Replaces the algorithm as the request with a given number arrives.
#[derive(Debug)]
struct ReplacesAt {
    router: Reloadable,
    next: Arc<dyn Algorithm>,
    arrivals: AtomicU32,
    at: u32,
}

impl Algorithm for ReplacesAt {
    fn needs(&self, model: ModelIdx) -> Needs {
        self.router.needs(model)
    }

    fn prior(&self) -> Prior {
        self.router.prior()
    }

    fn start(&self) -> Box<dyn Route> {
        self.router.start()
    }

    fn version(&self) -> u32 {
        if self.arrivals.fetch_add(1, Ordering::Relaxed) == self.at {
            self.router.replace(Arc::clone(&self.next)).expect("no head is read");
        }
        self.router.version()
    }

    fn at(&self, version: u32) -> Option<Arc<dyn Algorithm>> {
        self.router.at(version)
    }
}

/// Requests that were running, some of which had not been at the large model yet, are finished by the old script, and
/// those that come later follow the new one, which looks at no signal at all.
#[test]
fn running_requests_finish_with_the_script_they_started_with() {
    let old = || scripted(R_STITCH, 0.1);
    let new = || scripted("fn route(step) { if step.position % 7 == 0 { 1 } else { 0 } }", 0.1);
    let script = world(12, 0.1);
    for at in [1, 5, 11] {
        let router = Reloadable::new(old(), 2);
        let replaces = ReplacesAt { router, next: new(), arrivals: AtomicU32::new(0), at };
        let end = play_with(&script, Arc::new(replaces));
        assert_idle(&end);
        let part = |range: std::ops::Range<usize>| Script { acts: script.acts[range].to_vec(), ..script.clone() };
        assert_text(&part(0..at as usize), &*old(), &end);
        assert_text(&part(at as usize..12), &*new(), &end);
        assert_eq!(end.told.len(), 12);
        assert_ne!(end.told, play(&script).told, "the scripts differ");
    }
}
