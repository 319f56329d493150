//! Scripts one decision at a time: what they see, what they may answer, what is refused and where. Owner: the algorithm.

use super::*;
use crate::executor::{Entropy, Signals};
use crate::ids::RequestId;
use crate::peer::Known;
use crate::routing::{build, r_stitch};
use proptest::prelude::*;
use serde_json::json;

const R_STITCH: &str = include_str!("../../../../../config/routers/r_stitch.rhai");

fn built(source: &str, params: Value, models: usize) -> Result<Arc<dyn Algorithm>, String> {
    let mut table = json!({ "file": "my.rhai", "source": source });
    table.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
    build("script", &table, models).map_err(|error| error.to_string())
}

fn script(source: &str) -> Arc<dyn Algorithm> {
    built(source, json!({}), 2).unwrap_or_else(|error| panic!("{error}"))
}

fn step<'a>(model: u8, tokens: &'a [TokenId], signals: &'a Signals) -> StepView<'a> {
    StepView {
        request: RequestId(1),
        model: ModelIdx(model),
        seed: u64::MAX - 4,
        prompt_len: 2,
        tokens,
        candidate: 9,
        signals,
    }
}

fn entropy(normalised: f32) -> Signals {
    let width = 1000u32;
    Signals { entropy: Some(Entropy { nats: normalised * (width as f32).ln(), width }), ..Signals::default() }
}

#[track_caller]
fn refused(source: &str, expected: &str) {
    let error = built(source, json!({}), 2).map(drop).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

/// What the one decision of a script fails with.
#[track_caller]
fn fails(body: &str, expected: &str) {
    let algorithm = script(body);
    let error = algorithm.start().route(&step(0, &[1, 2, 3], &Signals::default())).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

proptest! {
    #[test]
    fn r_stitch_in_script_decides_as_the_built_in_one(
        threshold in -0.5f64..1.5,
        steps in prop::collection::vec((0u8..2, 0.0f32..1.0), 1..40),
    ) {
        let fast = (r_stitch::ENTRY.build)(&json!({ "threshold": threshold }), 2).unwrap();
        let slow = built(R_STITCH, json!({ "threshold": threshold }), 2).unwrap();
        prop_assert_eq!(fast.needs(ModelIdx(1)), slow.needs(ModelIdx(1)));
        let (mut fast, mut slow) = (fast.start(), slow.start());
        for (model, unsure) in steps {
            let signals = entropy(unsure);
            let step = step(model, &[1, 2], &signals);
            prop_assert_eq!(fast.route(&step), slow.route(&step));
        }
    }
}

#[test]
fn the_default_threshold_is_that_of_the_built_in_one() {
    assert!(R_STITCH.lines().filter(|line| !line.is_empty() && !line.starts_with("//")).count() <= 15);
    let (fast, slow) = ((r_stitch::ENTRY.build)(&json!({}), 2).unwrap(), script(R_STITCH));
    for unsure in [0.0, 0.029, 0.03, 0.031, 1.0] {
        for model in [0, 1] {
            let signals = entropy(unsure);
            let step = step(model, &[1, 2], &signals);
            assert_eq!(fast.start().route(&step), slow.start().route(&step), "{unsure} at {model}");
        }
    }
}

/// Thresholds and signals that are equal as written and not as doubles: equality stays, in the script too.
#[test]
fn equality_is_the_same_in_a_script() {
    for threshold in (1..400u16).map(|step| f64::from(step) / 400.0).chain([0.1, 0.3, 0.7]) {
        let params = json!({ "threshold": threshold });
        let (fast, slow) = ((r_stitch::ENTRY.build)(&params, 2).unwrap(), built(R_STITCH, params, 2).unwrap());
        let near = threshold as f32;
        for unsure in [near.next_down(), near, near.next_up()] {
            for model in [0, 1] {
                let signals =
                    Signals { entropy: Some(Entropy { nats: unsure * 2f32.ln(), width: 2 }), ..Signals::default() };
                let step = step(model, &[1, 2], &signals);
                assert_eq!(
                    fast.start().route(&step),
                    slow.start().route(&step),
                    "{unsure} at {threshold}, model {model}"
                );
            }
        }
    }
    let literal = script("fn needs() { #{ entropy: true } } fn route(step) { if step.nats == 0.1 { 1 } else { 0 } }");
    let signals = Signals { entropy: Some(Entropy { nats: 0.1, width: 2 }), ..Signals::default() };
    assert_eq!(literal.start().route(&step(0, &[1, 2], &signals)).map(|decision| decision.to.0), Ok(1));
}

#[test]
fn a_step_is_seen_whole() {
    let algorithm = script(
        "fn needs() { #{ entropy: true, top_k: 2, hidden: true } }
         fn route(step) {
             if step.model != 1 || step.position != 4 || step.prompt_len != 2 || step.candidate != 9 { throw \"numbers\"; }
             if step.seed != -5 { throw \"seed\"; }
             if step.token(0) != 11 || step.token(-1) != 14 { throw \"token\"; }
             if step.tail(2) != [13, 14] || step.tail(9).len() != 4 || step.tail(-1).len() != 0 { throw \"tail\"; }
             if step.top[0].token != 7 || step.top[0].logit != 2.5 { throw \"top\"; }
             if step.hidden.len() != 2 || step.hidden[1] != -1.0 { throw \"hidden\"; }
             if step.entropy < 0.249 || step.entropy > 0.251 || step.nats < 1.7 { throw \"entropy\"; }
             let draw = unit(step.seed, step.position);
             if draw < 0.0 || draw >= 1.0 { throw \"unit\"; }
             0
         }",
    );
    assert_eq!(algorithm.needs(ModelIdx(0)), Needs { entropy: true, top_k: 2, hidden: true, score: false });
    let signals = Signals { top: vec![(7, 2.5), (8, 1.0)], hidden: vec![0.5, -1.0], ..entropy(0.25) };
    let decision = algorithm.start().route(&step(1, &[11, 12, 13, 14], &signals));
    assert_eq!(decision, Ok(Decision { to: ModelIdx(0), keep: true }), "a number alone keeps at model 1");
    assert_eq!(
        script("fn route(step) { 1 }").start().route(&step(0, &[1, 2, 3], &Signals::default())),
        Ok(Decision { to: ModelIdx(1), keep: false }),
        "a number alone drops on leaving model 0"
    );
}

#[test]
fn state_belongs_to_one_request_at_one_model() {
    let algorithm =
        script("fn route(step) { this.n = (this.n ?? 0) + 1; if this.n == 3 { this.n = 0; 1 } else { 0 } }");
    let (mut a, mut b) = (algorithm.start(), algorithm.start());
    let signals = Signals::default();
    let walk = |route: &mut Box<dyn Route>| route.route(&step(0, &[1, 2, 3], &signals)).unwrap().to.0;
    assert_eq!((walk(&mut a), walk(&mut a)), (0, 0));
    assert_eq!(walk(&mut b), 0);
    assert_eq!((walk(&mut a), walk(&mut a)), (1, 0));
}

fn message(base: u32, tokens: &[TokenId], ext: Vec<u8>) -> PeerReq {
    PeerReq {
        request: RequestId(1),
        home: ModelIdx(0),
        from: ModelIdx(0),
        to: ModelIdx(1),
        spec: None,
        base,
        tokens: tokens.into(),
        known: Known::from_slice(&[5, 5]),
        hops: 1,
        cached: 0,
        barren: 0,
        dropped: None,
        live: crate::live::LiveNotes::new(),
        ext,
        left: None,
    }
}

#[test]
fn notes_travel_to_the_peer() {
    let algorithm = script(
        "fn route(step) { if (this.left ?? 0) > 0 { this.left -= 1; 1 } else { 0 } }
         fn send(handoff) { #{ note: #{ span: handoff.len - handoff.known[handoff.to] } } }
         fn receive(message) { this.left = message.note.span; }",
    );
    let known = Known::from_slice(&[5, 3]);
    let tokens = [1, 2, 3, 4, 5];
    let handoff = Handoff { request: RequestId(1), from: ModelIdx(0), to: ModelIdx(1), tokens: &tokens, known: &known };
    let suffix = algorithm.start().send(&handoff).unwrap();
    assert_eq!(suffix.base, 3);
    let mut message = message(3, &[4, 5], suffix.ext);
    let (mut peer, mut held) = (algorithm.start(), vec![1, 2, 3]);
    peer.receive(&mut held, &message).unwrap();
    assert_eq!(held, tokens);
    let signals = Signals::default();
    let walk: Vec<u8> = (0..3).map(|_| peer.route(&step(1, &tokens, &signals)).unwrap().to.0).collect();
    assert_eq!(walk, [1, 1, 0]);
    message.ext = b"not json".to_vec();
    let error = peer.receive(&mut vec![1, 2, 3], &message).unwrap_err();
    assert!(
        matches!(&error, PeerError::Routing(text) if text.contains("my.rhai:3:10: receive(message): note")),
        "{error}"
    );
}

#[test]
fn entries_are_drawn_and_checked() {
    let algorithm = script("fn entry(seed) { if unit(seed, 0) < 0.5 { 0 } else { 1 } } fn route(step) { step.model }");
    let large = (0..2000u64).filter(|&seed| algorithm.entry(crate::rng::mix(seed)) == ModelIdx(1)).count();
    assert!((900..1100).contains(&large), "{large}");
    let broken = script("fn entry(seed) { 2 } fn route(step) { step.model }");
    assert_eq!(broken.entry(1), ModelIdx(0));
    let signals = Signals::default();
    let error = broken.start().route(&step(0, &[1, 2], &signals)).unwrap_err();
    assert!(error.contains("entry(seed): 2 is no model; there are 0 to 1"), "{error}");
    assert!(broken.start().route(&step(0, &[1, 2, 3], &signals)).is_ok(), "only the first step asks");
}

#[test]
fn mistakes_are_refused_with_their_place() {
    refused("fn route(step) {\n  let x = ;\n}", "my.rhai:2:11: ");
    refused("fn router(step) { 0 }", "there is no function route(step)");
    refused("fn route() { 0 }", "function route takes 1 parameters, not 0");
    refused("fn needs() {\n\n  1 + nothing\n}\nfn route(step) { 0 }", "my.rhai:3:7: Variable not found: nothing");
    refused("fn needs() { #{ entropie: true } } fn route(s) { 0 }", "needs(): ");
    refused("fn needs() { #{ top_k: 5000 } } fn route(s) { 0 }", "top_k is 5000; at most 256");
    refused("fn needs() { #{ score: true } } fn route(s) { 0 }", "score and head go together");
    refused("fn prior() { #{ p: [[1.0]], c: [[1.0]] } } fn route(s) { 0 }", "p and c must be 2 x 2");
    refused("fn route(s) { eval(\"1\") }", "my.rhai:1:15: ");
    refused("import \"std\" as s; fn route(s) { 0 }", "my.rhai:1:");
    let error = build("script", &json!({}), 2).map(drop).unwrap_err().to_string();
    assert!(error.contains("`file` is missing"), "{error}");
}

#[test]
fn a_step_that_goes_wrong_says_where() {
    fails("fn route(step) {\n  step.entropy\n}", "my.rhai:2:8: step.entropy was not asked for");
    fails("fn route(step) { throw \"no idea\"; }", "my.rhai:1:18: ");
    fails("fn route(step) { helper(step) }\nfn helper(step) {\n  1 / 0\n}", "my.rhai:3:5: ");
    fails("\nfn route(step) { \"large\" }", "my.rhai:2:1: route(step): must give the number of a model, not string");
    fails("fn route(step) { 2 }", "2 is no model; there are 0 to 1");
    fails("fn route(step) { #{ to: 0, kept: true } }", "unknown key `kept`, expected one of to, keep");
    fails("fn route(step) { #{ keep: true } }", "`to` is missing");
    fails("fn route(step) { step.token(3) }", "token(3): there are 3 committed tokens");
    fails("fn route(step) { open_file(\"x\") }", "open_file");
    let signals = entropy(f32::NAN);
    let error = script(R_STITCH).start().route(&step(0, &[1, 2], &signals)).unwrap_err();
    assert!(error.contains("step.entropy is not a number"), "{error}");
}

#[test]
fn every_call_is_bounded() {
    fails("fn route(step) { loop { } }", "my.rhai:1:1: route: Too many operations");
    fails("fn helper() { loop { } }\n  fn route(step) { helper() }", "my.rhai:2:3: route: Too many operations");
    fails("// fn route(step)\n\nprivate fn no() { 1 } fn route (step) { loop { } }", "my.rhai:3:23: route: Too many");
    fails("\nfn route(step) { route(step) }", "my.rhai:2:1: route: Stack overflow");
    fails("fn route(step) { let s = \"x\"; loop { s += s; } }", "my.rhai:1:1: route: Length of string too large");
    fails("fn route(step) { let a = [1]; loop { a += a; } }", "my.rhai:1:1: route: Size of array/BLOB too large");
    fails(
        "fn route(step) { let a = []; for i in 0..1000000 { a.push(\"xxxxxxxx\"); } 0 }",
        "Size of array/BLOB too large",
    );
    fails("fn route(step) { let m = #{}; let i = 0; loop { m[`k${i}`] = i; i += 1; } }", "Too many operations");
}

/// Calls within expressions within blocks, as deep as both bounds allow, on the stack of an ordinary thread.
#[test]
fn the_deepest_script_ends_in_an_error() {
    for (open, close) in [("1 + (", ")"), ("if true { ", " } else { 0 }"), ("[", "][0]"), ("{ let x = ", "; x }")] {
        for nested in [8, 16, 24, 40] {
            let body = format!("{}route(step){}", open.repeat(nested), close.repeat(nested));
            match built(&format!("fn route(step) {{ {body} }}"), json!({}), 2) {
                Ok(script) => {
                    let error = script.start().route(&step(0, &[1, 2, 3], &Signals::default())).unwrap_err();
                    assert!(error.contains("my.rhai"), "{error}");
                }
                Err(refused) => assert!(refused.contains("my.rhai:1:"), "{refused}"),
            }
        }
    }
}

/// Values within values, in one call and over many.
#[test]
fn values_cannot_be_nested_without_end() {
    fails("fn route(step) { let a = []; loop { a = [a]; } }", "my.rhai");
    fails("fn route(step) { let a = #{}; loop { a = #{ a: a }; } }", "my.rhai");
    fails("fn route(step) { let a = #{}; loop { a = [#{ a: a }]; } }", "my.rhai");
    fails("fn route(step) { let a = []; loop { let b = []; b.push(a); a = b; } }", "my.rhai");
    fails("fn route(step) { let a = []; loop { let b = [0]; b[0] = a; a = b; } }", "my.rhai");
    fails("fn route(step) { let a = #{}; loop { let b = #{}; b.a = a; a = b; } }", "my.rhai");
    fails("fn route(step) { let a = []; loop { let b = [0]; b.insert(0, a); a = b; } }", "my.rhai");
    refused("fn route(step) { let f = |x| x; f.call(1) }", "my.rhai:1:26: ");
    refused("fn route(step) { let f = Fn(\"route\"); 1 }", "my.rhai:1:26: ");
    let signals = Signals::default();
    for grows in [
        "this.a = [this.a];",
        "for i in 0..900 { let b = #{}; b.a = this.a; this.a = b; }",
        "for i in 0..900 { this[`k${step.position}-${this.len()}`] = i; }",
        "for i in 0..9 { let s = \"x\"; s.pad(9000, 'x'); this[`k${this.len()}`] = s; }",
    ] {
        let mut route = script(&format!("fn route(step) {{ {grows} 0 }}")).start();
        let failed = (0..2000).find_map(|_| route.route(&step(0, &[1, 2, 3], &signals)).err());
        let failed = failed.unwrap_or_else(|| panic!("{grows} goes on for ever"));
        assert!(failed.starts_with("my.rhai"), "{failed}");
    }
    let deep = script(
        "fn route(step) { 0 } fn send(h) { let a = #{}; for i in 0..200 { let b = #{}; b.a = a; a = b; } #{ note: a } }",
    );
    let known = Known::from_slice(&[3, 3]);
    let handoff =
        Handoff { request: RequestId(1), from: ModelIdx(0), to: ModelIdx(1), tokens: &[1, 2, 3], known: &known };
    assert!(deep.start().send(&handoff).unwrap_err().contains("note: values lie more than"));
}

#[test]
fn requests_change_what_the_file_sets() {
    let algorithm = built(R_STITCH, json!({ "threshold": 0.5, "list": [1, 2] }), 2).unwrap();
    let signals = entropy(0.6);
    let to = |algorithm: &dyn Algorithm| algorithm.start().route(&step(0, &[1, 2], &signals)).unwrap().to.0;
    assert_eq!(to(&*algorithm), 1);
    assert_eq!(to(&*algorithm.with(&json!({ "threshold": 0.7 })).unwrap()), 0);
    assert_eq!(to(&*algorithm), 1, "the server's own is unchanged");
    let says = |overrides: Value| algorithm.with(&overrides).map(drop).unwrap_err().to_string();
    assert!(says(json!({ "treshold": 0.7 })).contains("`treshold` is not set in the launch file; set are: "));
    assert!(says(json!({ "threshold": "x" })).contains("is not of the kind of 0.5"));
    assert!(says(json!({ "file": "x" })).contains("`file` is not set"));
    assert!(says(json!(3)).contains("must be an object"));
}

#[test]
fn equal_scripts_look_equal() {
    let text = |source: &str, threshold: f64| format!("{:?}", built(source, json!({ "t": threshold }), 2).unwrap());
    assert_eq!(text(R_STITCH, 0.5), text(R_STITCH, 0.5));
    assert_ne!(text(R_STITCH, 0.5), text(R_STITCH, 0.6));
    assert_ne!(text(R_STITCH, 0.5), text("fn route(step) { 0 }", 0.5));
}
