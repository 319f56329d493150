//! Every listed algorithm through the same worlds: whole subservers with simulated devices, against a loop that only
//! knows the definition of the algorithm. Owner: the routing port. Invariant: an algorithm that is added to the list is
//! tried here, or this test fails.

use serde_json::{Value, json};
use std::sync::Arc;
use tokenrouter_core::executor::Needs;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::peer::{PeerError, PeerReq};
use tokenrouter_core::routing::{self, Algorithm, Decision, Handoff, Prior, Route, StepView, Suffix};
use tokenrouter_core::sim::Skill;
use tokenrouter_tests::world::{Play, Script, algorithm, assert_idle, assert_text, parse, play, play_with};

/// R-Stitch as a script.
const STITCH: &str = "fn needs() { #{ entropy: true } }\n\
                      fn route(step) {\n\
                      if step.entropy <= 0.1 { #{ to: 0, keep: true } } else { #{ to: 1, keep: step.model == 1 } }\n\
                      }";

/// An algorithm in the settings it is tried with.
#[derive(Clone, Debug)]
struct Case {
    name: &'static str,
    params: Value,
    models: usize,
}

impl Case {
    /// Whether both models get to write, and requests hop.
    fn routes(&self) -> bool {
        !["stay", "always"].contains(&self.name)
    }

    /// Whether candidates of the small model are dropped when control leaves it.
    fn drops(&self) -> bool {
        self.routes() && !["me", "token_trigger"].contains(&self.name)
    }

    /// The world of these lines between the models of this case.
    fn world(&self, lines: &str) -> Script {
        let models = "model m0 skill=small step=6ms\nmodel m1 step=28ms\nmodel m2 step=11ms\n";
        let models: Vec<&str> = models.lines().take(self.models).collect();
        let text = format!("{}\n{lines}", models.join("\n"));
        let mut script = parse(&text).unwrap_or_else(|error| panic!("{error:?} in\n{text}"));
        script.route = (self.name.to_owned(), self.params.clone());
        script
    }
}

/// Settings for every algorithm of the list. Simulated signals: score and normalised entropy are 0.001 on easy tokens,
/// 0.5 on hard ones of the small model; 0.3 or 0.01 on hard ones of the large model.
fn settings(name: &str) -> Vec<(Value, usize)> {
    let walk = json!({"p": [[0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3]],
                      "keep": [[true, false, true], [true, true, true], [true, true, true]]});
    match name {
        "stay" => vec![(json!({}), 1), (json!({}), 2)],
        "always" => vec![(json!({}), 2), (json!({"model": 1}), 3)],
        "bernoulli" => vec![(json!({"p": 0.35}), 2), (walk, 3)],
        "r2r" => vec![(json!({"head": "none", "threshold": 0.4}), 2)],
        "citer" => vec![(json!({"head": "none", "threshold": 0.4}), 2)],
        "co_llm" => vec![(json!({}), 2)],
        "r_stitch" => vec![(json!({"threshold": 0.1}), 2)],
        "me" => vec![(json!({"weights": [0.6, 0.4]}), 2), (json!({}), 3)],
        "entropy" => vec![(json!({}), 2)],
        "token_trigger" => vec![(json!({"tokens": [2, 3], "texts": ["w5"], "span": 3}), 2)],
        "script" => vec![(json!({"file": "stitch.rhai", "source": STITCH}), 2)],
        other => panic!("algorithm {other} is listed but has no settings in this suite; add them"),
    }
}

fn cases() -> Vec<Case> {
    let cases = |entry: &'static routing::Entry| {
        settings(entry.name).into_iter().map(|(params, models)| Case { name: entry.name, params, models })
    };
    routing::list().flat_map(cases).collect()
}

/// Plays a world and holds it to the definition of its algorithm.
fn checked(script: &Script) -> Play {
    let end = play(script);
    assert_idle(&end);
    assert_text(script, &*algorithm(script), &end);
    end
}

/// So many requests, one every 3 ms, with a length each.
fn crowd(requests: u32, max: impl Fn(u32) -> u32) -> String {
    let line = |who: u32| format!("at {}ms submit r{who} prompt={} max={}\n", who * 3, 3 + who * 5, max(who));
    (0..requests).map(line).collect()
}

/// Lines of the timeline with these words.
fn ends(end: &Play, words: &str) -> usize {
    end.timeline.lines().filter(|line| line.contains(words)).count()
}

#[test]
fn requests_end_on_either_side() {
    for case in cases() {
        let end = checked(&case.world(&format!("language hard=0.4 eos=0.04 vocab=40\n{}", crowd(14, |who| 3 + who))));
        assert_eq!(ends(&end, " Length: ") + ends(&end, " EndOfText: "), 14, "{case:?}\n{}", end.timeline);
        assert!(ends(&end, " EndOfText: ") > 0, "{case:?}\n{}", end.timeline);
        let last = |model| end.told.values().filter(|told| told.last().is_some_and(|&(_, by)| by == model)).count();
        assert!(!case.routes() || (last(0) > 0 && last(1) > 0), "{case:?}: {} and {}", last(0), last(1));
    }
}

/// The small model says end-of-text where the large one, which was asked instead, does not.
#[test]
fn an_end_of_text_that_is_routed_away_is_not_final() {
    const EOS: u32 = 1;
    for mut case in cases().into_iter().filter(Case::drops) {
        if case.name == "citer" {
            // The simulated score is high where the small model is wrong, so it is kept there: a threshold above that.
            case.params["threshold"] = json!(0.6);
        }
        let script = case.world(&format!("language hard=0.6 eos=0 vocab=8\n{}", crowd(16, |_| 20)));
        let end = checked(&script);
        let mut replaced = 0;
        for request in script.requests() {
            let mut tokens = request.tokens(script.language.vocab);
            for &(token, model) in &end.told[&request.name] {
                let small = script.language.next(Skill::Small, &tokens).0;
                replaced += usize::from(small == EOS && token != EOS && model > 0);
                tokens.push(token);
            }
        }
        assert!(replaced > 0, "{case:?}\n{}", end.timeline);
    }
}

#[test]
fn the_last_token_may_be_made_during_a_hop() {
    for case in cases() {
        let script = case.world(&format!("language hard=0.7 vocab=8\n{}", crowd(18, |who| 1 + who % 6)));
        let end = checked(&script);
        for request in script.requests() {
            assert_eq!(end.told[&request.name].len() as u32, request.max, "{case:?}\n{}", end.timeline);
        }
        let last_elsewhere = end.told.values().any(|told| told.last().is_some_and(|&(_, by)| by == 1));
        assert!(!case.routes() || last_elsewhere, "{case:?}\n{}", end.timeline);
    }
}

#[test]
fn a_user_may_leave_at_any_moment() {
    for case in cases() {
        let mut left_pending = 0;
        for at in (1..70).step_by(4) {
            let end = checked(&case.world(&format!(
                "language hard=0.7 vocab=8\nat 0ms submit a prompt=5 max=40\nat {at}ms probe\nat {at}ms abort a\n\
                 at 200ms submit b prompt=5 max=6\n"
            )));
            assert_eq!(ends(&end, "b Length: "), 1, "{case:?} left at {at} ms\n{}", end.timeline);
            let probe = end.timeline.lines().find(|line| line.contains("probe")).expect("a probe");
            left_pending += usize::from(probe.contains("pending 1"));
        }
        assert!(!case.routes() || left_pending > 2, "{case:?}: pending {left_pending} times only");
    }
}

#[test]
fn models_may_be_lost_on_the_way() {
    for case in cases() {
        for fault in ["lost", "panic", "error", "bad_rows"] {
            for model in 0..case.models {
                let script = case.world(&format!(
                    "language hard=0.5 vocab=8\n{}fault m{model} 2 {fault}\nfault m{model} 3 {fault}\n\
                     at 5000ms submit between prompt=6 max=5\nat 9000ms submit late prompt=7 max=9\n",
                    crowd(6, |who| 6 + who)
                ));
                let end = checked(&script);
                assert_eq!(ends(&end, "late Length: "), 1, "{case:?}, m{model} {fault}\n{}", end.timeline);
                let finished = ends(&end, " Length: ") + ends(&end, " failed: ");
                assert_eq!(finished, 8, "{case:?}, m{model} {fault}\n{}", end.timeline);
                assert!(fault != "error" || ends(&end, " failed: ") == 0, "{case:?}\n{}", end.timeline);
            }
        }
    }
}

/// Tokens of the prompt of a request that takes a subserver with it.
const DOOMED: u32 = 21;

/// An algorithm that panics in the first step of one request at one model.
#[derive(Clone, Debug)]
struct PanicsAt {
    inner: Arc<dyn Algorithm>,
    model: ModelIdx,
}

impl Algorithm for PanicsAt {
    fn needs(&self, model: ModelIdx) -> Needs {
        self.inner.needs(model)
    }

    fn entry(&self, seed: u64) -> ModelIdx {
        self.inner.entry(seed)
    }

    fn prior(&self) -> Prior {
        self.inner.prior()
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(PanicsThere { route: self.inner.start(), model: self.model })
    }
}

#[derive(Debug)]
struct PanicsThere {
    route: Box<dyn Route>,
    model: ModelIdx,
}

impl Route for PanicsThere {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        assert!(step.prompt_len != DOOMED || step.model != self.model, "on order");
        self.route.route(step)
    }

    fn send(&mut self, handoff: &Handoff<'_>) -> Result<Suffix, String> {
        self.route.send(handoff)
    }

    fn receive(&mut self, tokens: &mut Vec<u32>, message: &PeerReq) -> Result<(), PeerError> {
        self.route.receive(tokens, message)
    }
}

/// Actors of a subserver die under requests that are there, pending there, or away from there: what was lost fails with
/// a message, the rest goes on, and the subserver serves again.
#[test]
fn subservers_may_be_rebuilt_on_the_way() {
    for case in cases() {
        let mut deaths = 0;
        for model in 0..case.models {
            let script = case.world(&format!(
                "language hard=0.5 vocab=8\n{}at 7ms submit doomed prompt={DOOMED} max=30\n\
                 at 5000ms submit between prompt=6 max=5\nat 9000ms submit late prompt=7 max=9\n",
                crowd(6, |who| 6 + who)
            ));
            let panics = PanicsAt { inner: algorithm(&script), model: ModelIdx(model as u8) };
            let end = play_with(&script, Arc::new(panics));
            assert_idle(&end);
            assert_text(&script, &*algorithm(&script), &end);
            let restarts: u64 = end.end.models.iter().map(|model| model.subserver.children_restarts).sum();
            assert_eq!(restarts as usize, ends(&end, "doomed failed: "), "{case:?}, m{model}\n{}", end.timeline);
            assert_eq!(ends(&end, " Length: ") + ends(&end, " failed: "), 9, "{case:?}, m{model}\n{}", end.timeline);
            assert_eq!(ends(&end, "between Length: "), 1, "{case:?}, m{model}\n{}", end.timeline);
            assert_eq!(ends(&end, "late Length: "), 1, "{case:?}, m{model}\n{}", end.timeline);
            deaths += restarts;
        }
        assert!(deaths > 0 && (!case.routes() || deaths as usize == case.models), "{case:?}: {deaths}");
    }
}

#[test]
fn company_and_thresholds_change_no_text() {
    for case in cases() {
        let language = "language hard=0.4 eos=0.02 vocab=40\n";
        let requests = crowd(8, |who| 9 + who);
        let alone: Vec<Play> =
            requests.lines().map(|request| checked(&case.world(&format!("{language}{request}\n")))).collect();
        for thresholds in ["1,1,1", "2,2,2", "1,3,2", "4,1,2", "8,8,8"] {
            let thresholds: Vec<&str> = thresholds.split(',').take(case.models).collect();
            let batch = format!("batch fixed {} wait=90ms\n", thresholds.join(","));
            let end = checked(&case.world(&format!("{language}{batch}{requests}")));
            assert_eq!(end.told.len(), alone.len(), "{case:?} {batch}{}", end.timeline);
            for one in &alone {
                let (name, told) = one.told.iter().next().expect("a request");
                assert_eq!(&end.told[name], told, "{case:?} {batch}");
            }
        }
    }
}

/// The ends of every algorithm's scale, at which one model is alone: the algorithm, its parameters, that model.
fn identities() -> Vec<(&'static str, Value, usize)> {
    let pairs = [
        ("stay", json!({}), 0),
        ("always", json!({"model": 0}), 0),
        ("always", json!({"model": 1}), 1),
        ("bernoulli", json!({"p": 0}), 0),
        ("bernoulli", json!({"p": 1}), 1),
        ("r2r", json!({"head": "none", "threshold": 0}), 1),
        ("r2r", json!({"head": "none", "threshold": -0.5}), 1),
        ("r2r", json!({"head": "none", "threshold": 1.001}), 0),
        ("citer", json!({"head": "none", "threshold": 0}), 0),
        ("citer", json!({"head": "none", "threshold": 1.001}), 1),
        ("co_llm", json!({"threshold": 1}), 0),
        ("co_llm", json!({"threshold": -0.001}), 1),
        ("r_stitch", json!({"threshold": 1}), 0),
        ("r_stitch", json!({"threshold": -0.001}), 1),
        ("me", json!({"weights": [1, 0]}), 0),
        ("me", json!({"weights": [0, 1]}), 1),
        ("entropy", json!({"threshold": 0}), 1),
        ("entropy", json!({"threshold": 23}), 0),
        ("token_trigger", json!({"tokens": [100_000]}), 0),
    ];
    pairs.into()
}

#[track_caller]
fn alone(script: &Script, end: &Play, model: usize) {
    let skill = script.models[model].skill;
    for request in script.requests() {
        let text = script.language.alone(skill, &request.tokens(script.language.vocab), request.max as usize);
        let expected: Vec<(u32, usize)> = text.into_iter().map(|token| (token, model)).collect();
        assert_eq!(end.told[&request.name], expected, "{:?}: {}", script.route, request.name);
    }
}

#[test]
fn at_the_ends_of_the_scale_one_model_is_alone() {
    let lines = format!("language hard=0.5 eos=0.02 vocab=40\n{}", crowd(8, |who| 10 + who));
    for (name, params, model) in identities() {
        let script = Case { name, params, models: 2 }.world(&lines);
        alone(&script, &checked(&script), model);
    }
    for model in 0..3 {
        let mut weights = [0; 3];
        weights[model] = 1;
        let script = Case { name: "me", params: json!({ "weights": weights }), models: 3 }.world(&lines);
        alone(&script, &checked(&script), model);
    }
}

/// A request's own threshold overrides the server's, for itself alone.
#[test]
fn requests_with_thresholds_of_their_own_live_side_by_side() {
    for case in cases() {
        let built = routing::build(case.name, &case.params, case.models).expect("the settings are right");
        let high = if case.name == "entropy" { 23.0 } else { 2.0 };
        if built.with(&json!({"threshold": high})).is_err() || case.name == "script" {
            continue;
        }
        let submit = |who: &str, threshold: &str| {
            format!(
                "at 0ms submit {who} prompt=6 max=15 seed=77 {threshold}\nat 2ms submit {who}2 prompt=9 max=12 {threshold}\n"
            )
        };
        let (low, high) = (submit("low", "threshold=-0.5"), submit("high", &format!("threshold={high}")));
        let script = case.world(&format!("language hard=0.5 vocab=40\n{low}{high}{}", submit("own", "")));
        let end = checked(&script);
        // Below zero the large model is alone, except where a low score is what makes it leave.
        let (at_low, at_high) = if case.name == "citer" { (0, 1) } else { (1, 0) };
        assert!(end.told["low"].iter().all(|&(_, by)| by == at_low), "{case:?}\n{}", end.timeline);
        assert!(end.told["high"].iter().all(|&(_, by)| by == at_high), "{case:?}\n{}", end.timeline);
        let own: Vec<usize> = end.told["own"].iter().map(|&(_, by)| by).collect();
        assert!(own.contains(&0) && own.contains(&1), "{case:?}\n{}", end.timeline);
    }
}

#[test]
fn wrong_parameters_of_a_request_are_refused_and_named() {
    let case = Case { name: "r_stitch", params: json!({}), models: 2 };
    let script = case.world(
        "at 0ms submit single prompt=5 max=4 only=m1 threshold=0.5\nat 0ms submit far prompt=5 max=4 threshold=7\n\
         at 0ms submit right prompt=5 max=4 threshold=0.5\n",
    );
    let end = play(&script);
    assert_idle(&end);
    assert_eq!(
        ends(&end, "single refused: routing: a request for a single model is not routed"),
        1,
        "{}",
        end.timeline
    );
    assert_eq!(ends(&end, "far refused: routing: threshold must be a number within -1 and 2, not 7"), 1);
    assert_eq!(ends(&end, "right Length: "), 1, "{}", end.timeline);
    let case = Case { name: "me", ..case };
    let end = play(&case.world("at 0ms submit a prompt=5 max=4 threshold=0.5\n"));
    assert_eq!(ends(&end, "a refused: routing: the server's algorithm takes no parameters per request"), 1);
}

/// Breaks a rule on order.
#[derive(Clone, Debug)]
struct Breaks(fn(ModelIdx) -> Decision);

impl Algorithm for Breaks {
    fn needs(&self, _: ModelIdx) -> Needs {
        Needs::default()
    }

    fn prior(&self) -> Prior {
        Prior { p: vec![vec![0.5, 0.5]; 2], c: vec![vec![0.0, 0.0]; 2] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }
}

impl Route for Breaks {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        Ok((self.0)(step.model))
    }
}

#[test]
fn hops_without_tokens_are_an_error_and_no_livelock() {
    let bounces: fn(ModelIdx) -> Decision = |model| Decision { to: ModelIdx(1 - model.0), keep: false };
    let stands: fn(ModelIdx) -> Decision = |model| Decision { to: model, keep: false };
    let strays: fn(ModelIdx) -> Decision = |_| Decision { to: ModelIdx(7), keep: true };
    for (breaks, message) in [
        (bounces, "two hops in a row committed no token"),
        (stands, "stays at model m0 without keeping the token"),
        (strays, "chose model m7 of 2"),
    ] {
        let case = Case { name: "stay", params: json!({}), models: 2 };
        let script = case.world("at 0ms submit a prompt=5 max=9\nat 1ms submit b prompt=5 max=9\n");
        let end = play_with(&script, Arc::new(Breaks(breaks)));
        assert_idle(&end);
        assert_eq!(ends(&end, " failed: routing failed: "), 2, "{}", end.timeline);
        assert_eq!(ends(&end, message), 2, "{}", end.timeline);
    }
}
