//! The list, the decisions of each algorithm at and around its threshold, and what it does without a signal.

use super::*;
use crate::executor::Entropy;
use crate::text::{SpecialTokens, TextError};
use serde_json::json;

/// Signals of a normalised entropy over 100 tokens.
fn unsure(entropy: f32) -> Signals {
    let width = 100u32;
    Signals { entropy: Some(Entropy { nats: entropy * (width as f32).ln(), width }), ..Signals::default() }
}

fn scored(score: f32) -> Signals {
    Signals { score: Some(score), ..Signals::default() }
}

fn nats(nats: f32) -> Signals {
    Signals { entropy: Some(Entropy { nats, width: 100 }), ..Signals::default() }
}

fn decide(algorithm: &dyn Algorithm, model: u8, signals: &Signals) -> (u8, bool) {
    let step = StepView {
        request: RequestId(1),
        model: ModelIdx(model),
        seed: 3,
        prompt_len: 1,
        tokens: &[5],
        candidate: 6,
        signals,
    };
    let Decision { to, keep } = algorithm.start().route(&step).unwrap();
    (to.0, keep)
}

/// Signals at which the large model must be asked: absent, and all that is no number.
fn useless() -> Vec<Signals> {
    vec![Signals::default(), scored(f32::NAN), nats(f32::NAN)]
}

const STAYS: (u8, bool) = (0, true);
const LEAVES: (u8, bool) = (1, false);

/// Small-side decisions just below, at and just above a threshold of 0.5, and the way back from the large model.
#[track_caller]
fn detours(name: &str, params: Value, signals: fn(f32) -> Signals, expected: [(u8, bool); 3]) {
    let algorithm = build(name, &params, 2).unwrap();
    let found = [0.499, 0.5, 0.501].map(|value| decide(&*algorithm, 0, &signals(value)));
    assert_eq!(found, expected, "{name} below, at and above its threshold");
    for signals in useless().into_iter().chain([signals(0.0), signals(1.0)]) {
        assert_eq!(decide(&*algorithm, 1, &signals), (0, true), "{name} returns after one token");
    }
    for signals in useless() {
        assert_eq!(decide(&*algorithm, 0, &signals), LEAVES, "{name}: no number is no confidence");
    }
}

#[test]
fn thresholds_are_compared_in_the_published_direction() {
    detours("r2r", json!({"head": "h", "threshold": 0.5}), scored, [STAYS, LEAVES, LEAVES]);
    detours("citer", json!({"head": "h", "threshold": 0.5}), scored, [LEAVES, STAYS, STAYS]);
    detours("co_llm", json!({"threshold": 0.5}), scored, [STAYS, STAYS, LEAVES]);
    detours("entropy", json!({"threshold": 0.5}), nats, [STAYS, LEAVES, LEAVES]);
}

#[test]
fn infinite_signals_have_their_meaning() {
    let (low, high) = (f32::NEG_INFINITY, f32::INFINITY);
    let outcome = |name: &str, signals: fn(f32) -> Signals| {
        let algorithm = build(name, &json!({"head": "h", "threshold": 0.5}), 2)
            .or_else(|_| build(name, &json!({"threshold": 0.5}), 2))
            .unwrap();
        [low, high].map(|value| decide(&*algorithm, 0, &signals(value)))
    };
    assert_eq!(outcome("r2r", scored), [STAYS, LEAVES]);
    assert_eq!(outcome("citer", scored), [LEAVES, STAYS]);
    assert_eq!(outcome("co_llm", scored), [STAYS, LEAVES]);
    assert_eq!(outcome("entropy", nats), [STAYS, LEAVES]);
    assert_eq!(outcome("r_stitch", unsure), [STAYS, LEAVES]);
}

#[test]
fn r_stitch_leaves_above_the_threshold_and_returns_at_it() {
    let algorithm = build("r_stitch", &json!({"threshold": 0.5}), 2).unwrap();
    let decide = |model, entropy| decide(&*algorithm, model, &unsure(entropy));
    assert_eq!(decide(0, 0.6), (1, false));
    assert_eq!(decide(0, 0.5), (0, true), "equality stays");
    assert_eq!(decide(1, 0.6), (1, true));
    assert_eq!(decide(1, 0.5), (0, true), "equality returns, and the token is kept");
    assert_eq!(decide(0, f32::NAN), (1, false), "not a number is not certain");
    assert_eq!(decide(1, f32::NAN), (1, true));
}

/// Signals of a number.
type Signalled = fn(f32) -> Signals;

/// Every algorithm with a threshold, its parameters, and the signal it compares.
fn thresholded() -> [(&'static str, Value, Signalled); 5] {
    [
        ("r2r", json!({"head": "h", "threshold": 0.5}), scored as Signalled),
        ("citer", json!({"head": "h"}), scored),
        ("co_llm", json!({}), scored),
        ("r_stitch", json!({}), unsure),
        ("entropy", json!({}), nats),
    ]
}

#[test]
fn a_request_may_have_its_own_threshold() {
    for (name, params, signals) in thresholded() {
        let server = build(name, &params, 2).unwrap();
        for (threshold, value) in [(0.25, 0.3), (0.35, 0.3), (-1.0, 0.0), (2.0, 1.0)] {
            let mut own = params.clone();
            own["threshold"] = json!(threshold);
            let expected = decide(&*build(name, &own, 2).unwrap(), 0, &signals(value));
            let changed = server.with(&json!({"threshold": threshold})).unwrap();
            assert_eq!(decide(&*changed, 0, &signals(value)), expected, "{name} at {threshold}");
            assert_eq!(changed.needs(ModelIdx(0)), server.needs(ModelIdx(0)));
            assert_eq!(changed.head(ModelIdx(0)), server.head(ModelIdx(0)));
        }
        let ends = [-1.0, 2.0].map(|end| decide(&*server.with(&json!({"threshold": end})).unwrap(), 0, &signals(0.3)));
        assert_ne!(ends[0], ends[1], "{name}: the two ends are opposites");
        let same = server.with(&json!({})).unwrap();
        assert_eq!(decide(&*same, 0, &signals(0.3)), decide(&*server, 0, &signals(0.3)), "{name}");
        for wrong in [json!(-1.1), json!(1e9), json!("high"), json!(null), json!([0.5])] {
            let error = server.with(&json!({"threshold": wrong})).map(drop).unwrap_err().to_string();
            assert!(error.contains("threshold must be a number within -1 and"), "{name}: {error}");
        }
        let error = server.with(&json!({"treshold": 0.1})).map(drop).unwrap_err().to_string();
        assert!(error.contains("`treshold`") && error.contains("only `threshold`"), "{name}: {error}");
        assert!(server.with(&json!(0.3)).is_err(), "{name}: not an object");
    }
    for name in ["stay", "always", "bernoulli", "me"] {
        let error = build(name, &Value::Null, 2).unwrap().with(&json!({"p": 1})).map(drop).unwrap_err().to_string();
        assert!(error.contains("takes no parameters per request"), "{error}");
    }
}

/// Processes of one server compare these texts: they name what matters and nothing that differs between two of them.
#[test]
fn descriptions_are_the_same_in_every_process() {
    for (name, params, _) in thresholded() {
        let text = |threshold: f64| {
            let mut own = params.clone();
            own["threshold"] = json!(threshold);
            format!("{:?}", build(name, &own, 2).unwrap())
        };
        assert_eq!(text(0.5), text(0.5));
        assert_ne!(text(0.5), text(0.25));
        assert!(!text(0.5).contains("0x"), "{}", text(0.5));
    }
    let trigger = |tokens: Value| format!("{:?}", build("token_trigger", &json!({ "tokens": tokens }), 2).unwrap());
    assert_ne!(trigger(json!([1])), trigger(json!([2])));
}

/// What `GET /v1/routers` says of a parameter is what happens.
#[test]
fn the_list_of_parameters_is_true() {
    for entry in list().filter(|entry| entry.name != script::ENTRY.name) {
        let mut table = json!({});
        for (name, value) in [("head", json!("h")), ("threshold", json!(0.5)), ("tokens", json!([1]))] {
            if entry.params.iter().any(|param| param.name == name) {
                table[name] = value;
            }
        }
        let algorithm = build(entry.name, &table, 2).unwrap_or_else(|error| panic!("{error}"));
        for param in entry.params {
            let with = |value: Value| algorithm.with(&json!({ param.name: value })).map(drop);
            let built = |value: Value| {
                let mut own = table.clone();
                own[param.name] = value;
                build(entry.name, &own, 2).map(drop)
            };
            let (good, bad) = match param.kind {
                Kind::Number { minimum, maximum } => (
                    vec![json!(minimum), json!(maximum)],
                    vec![json!(minimum - 0.01), json!(maximum + 0.01), json!("1"), json!(f64::MAX)],
                ),
                Kind::Integer { minimum } => {
                    (vec![json!(minimum)], vec![json!(i64::from(minimum) - 1), json!(1.5), json!("1")])
                }
                Kind::String => (vec![json!("words")], vec![json!(1)]),
                Kind::Array { items: "integer" } => (vec![json!([3, 4])], vec![json!(["3"]), json!(3)]),
                Kind::Array { items: "string" } => (vec![json!(["a"])], vec![json!([3]), json!("a")]),
                Kind::Array { items: "number" } => (vec![json!([0.25, 0.75])], vec![json!(["a"]), json!(0.5)]),
                Kind::Array { .. } => (vec![json!([[true, false], [true, true]])], vec![json!([true])]),
                Kind::Any => (vec![json!(0.5)], vec![json!("half")]),
            };
            for value in good {
                assert!(built(value.clone()).is_ok(), "{} {} = {value}", entry.name, param.name);
                assert_eq!(with(value.clone()).is_ok(), param.per_request, "{} {} = {value}", entry.name, param.name);
            }
            for value in bad {
                assert!(built(value.clone()).is_err(), "{} {} = {value}", entry.name, param.name);
                assert!(with(value.clone()).is_err(), "{} {} = {value}", entry.name, param.name);
            }
        }
    }
}

#[test]
fn learned_heads_are_named_where_they_are_read() {
    let head = |name, params| {
        let algorithm = build(name, &params, 2).unwrap();
        assert_eq!(algorithm.needs(ModelIdx(0)), Needs { score: true, ..Needs::default() });
        assert_eq!(algorithm.needs(ModelIdx(1)), Needs::default());
        assert_eq!(algorithm.head(ModelIdx(1)), None);
        algorithm.head(ModelIdx(0)).unwrap()
    };
    let checkpoint = |path: &str, family| HeadSpec::Checkpoint { path: path.into(), family };
    assert_eq!(head("r2r", json!({"head": "a/b", "threshold": 0.4})), checkpoint("a/b", "r2r"));
    assert_eq!(head("citer", json!({"head": "c"})), checkpoint("c", "citer"));
    assert_eq!(head("co_llm", json!({})), HeadSpec::Row { token: "<|defer|>".into() });
    assert_eq!(head("co_llm", json!({"token": "<x>"})), HeadSpec::Row { token: "<x>".into() });
}

#[test]
fn defaults_are_the_published_ones() {
    let edge = |name, params, signals: fn(f32) -> Signals, values: [f32; 2]| {
        let algorithm = build(name, &params, 2).unwrap();
        values.map(|value| decide(&*algorithm, 0, &signals(value)))
    };
    assert_eq!(edge("citer", json!({"head": "h"}), scored, [0.979, 0.98]), [LEAVES, STAYS]);
    assert_eq!(edge("co_llm", json!({}), scored, [0.15, 0.151]), [STAYS, LEAVES]);
    assert_eq!(edge("entropy", json!({}), nats, [0.449, 0.45]), [STAYS, LEAVES]);
    assert_eq!(edge("r_stitch", json!({}), unsure, [0.0299, 0.0301]), [STAYS, LEAVES]);
    assert_eq!(build("me", &Value::Null, 3).unwrap().prior().p[0], [0.5, 0.3, 0.2]);
}

#[test]
fn a_trigger_hands_over_for_a_span() {
    let algorithm = build("token_trigger", &json!({"tokens": [9, 4], "span": 3}), 2).unwrap();
    let signals = Signals::default();
    let walk = |algorithm: &dyn Algorithm, model, candidates: &[TokenId]| -> Vec<u8> {
        let mut route = algorithm.start();
        let mut one = |&candidate: &TokenId| {
            let step = StepView {
                request: RequestId(1),
                model: ModelIdx(model),
                seed: 3,
                prompt_len: 1,
                tokens: &[5],
                candidate,
                signals: &signals,
            };
            let Decision { to, keep } = route.route(&step).unwrap();
            assert!(keep);
            to.0
        };
        candidates.iter().map(&mut one).collect()
    };
    assert_eq!(walk(&*algorithm, 0, &[1, 9, 2, 4]), [0, 1, 0, 1]);
    assert_eq!(walk(&*algorithm, 1, &[1, 9, 2, 4, 4, 4, 1]), [1, 1, 0, 1, 1, 0, 1], "two spans of three and a third");
    let short = algorithm.with(&json!({"span": 1})).unwrap();
    assert_eq!(walk(&*short, 1, &[1, 1]), [0, 0]);
    for wrong in [json!(0), json!(-1), json!(1.5), json!("2")] {
        assert!(algorithm.with(&json!({"span": wrong})).is_err());
    }
}

/// A vocabulary of letters and a few pairs of them.
#[derive(Debug)]
struct Letters;

impl TextCodec for Letters {
    fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        assert_eq!(special, SpecialTokens::Parse, "a launch file may name control tokens");
        match text {
            "!" => Err(TextError("no such letter".into())),
            "ab" => Ok(vec![900]),
            _ => Ok(text.chars().map(u32::from).collect()),
        }
    }

    fn token_bytes(&self, _: TokenId) -> Option<&[u8]> {
        None
    }

    fn is_special(&self, _: TokenId) -> bool {
        false
    }

    fn vocab_size(&self) -> u32 {
        1000
    }

    fn bos(&self) -> Option<TokenId> {
        None
    }

    fn strips_leading_space(&self) -> bool {
        false
    }
}

#[test]
fn triggers_may_be_texts_of_one_token() {
    let texts = |texts: Value| build("token_trigger", &json!({"tokens": [9], "texts": texts, "span": 2}), 2).unwrap();
    let unknown = texts(json!(["ab", "c"]));
    let known = unknown.in_vocabulary(&Letters).unwrap().expect("there are texts");
    assert!(known.in_vocabulary(&Letters).unwrap().is_none(), "once is enough");
    let signals = Signals::default();
    let step = |model: u8, candidate: TokenId| StepView {
        request: RequestId(1),
        model: ModelIdx(model),
        seed: 3,
        prompt_len: 1,
        tokens: &[5],
        candidate,
        signals: &signals,
    };
    let calls = |algorithm: &dyn Algorithm, candidate| algorithm.start().route(&step(0, candidate)).map(|d| d.to.0);
    let found = [9, 900, u32::from('c'), u32::from('a'), u32::from('b')].map(|token| calls(&*known, token));
    assert_eq!(found, [Ok(1), Ok(1), Ok(1), Ok(0), Ok(0)]);
    let own = known.with(&json!({"span": 5})).unwrap();
    assert_eq!(calls(&*own, 900), Ok(1), "a request with a span of its own has the same triggers");
    for model in [0, 1] {
        let fault = unknown.start().route(&step(model, 9)).unwrap_err();
        assert!(fault.contains("\"ab\"") && fault.contains("without a vocabulary"), "{fault}");
    }
    for (wrong, words) in [
        (json!(["ab", "ac"]), ["texts: \"ac\" is not one token but 2 ([97, 99])", "or list ids as tokens"]),
        (json!([""]), ["texts: \"\" is not one token but 0 ([])", "give a text that is one token"]),
        (json!(["!"]), ["texts: \"!\": cannot tokenise: no such letter", ""]),
    ] {
        let error = texts(wrong).in_vocabulary(&Letters).map(drop).unwrap_err().to_string();
        assert!(words.iter().all(|words| error.contains(words)), "{error}");
    }
    for name in ["stay", "r_stitch", "me"] {
        assert!(build(name, &json!({}), 2).unwrap().in_vocabulary(&Letters).unwrap().is_none(), "{name}");
    }
}

#[test]
fn an_ensemble_draws_owners_by_weight() {
    let weights = [0.5, 0.3, 0.2];
    let algorithm = build("me", &json!({"weights": weights}), 3).unwrap();
    let signals = Signals::default();
    let mut owners = [[0u32; 3]; 2];
    let draws = 20_000u32;
    for draw in 0..draws {
        let tokens = vec![0; draw as usize % 40 + 1];
        let step = StepView {
            request: RequestId(1),
            model: ModelIdx((draw % 3) as u8),
            seed: u64::from(draw / 40),
            prompt_len: 1,
            tokens: &tokens,
            candidate: 0,
            signals: &signals,
        };
        let decision = algorithm.start().route(&step).unwrap();
        assert!(decision.keep);
        owners[0][decision.to.index()] += 1;
        owners[1][algorithm.entry(u64::from(draw)).index()] += 1;
    }
    for (counts, what) in owners.iter().zip(["later owners", "entry models"]) {
        let term = |(&count, weight): (&u32, f64)| {
            let expected = weight * f64::from(draws);
            (f64::from(count) - expected).powi(2) / expected
        };
        let chi_square: f64 = counts.iter().zip(weights).map(term).sum();
        // 0.999 quantile of the distribution with 2 degrees of freedom; the draws are fixed, so this cannot flicker.
        assert!(chi_square < 13.82, "{what}: {counts:?}, chi-square {chi_square}");
    }
    assert!(algorithm.greedy_warning().is_some());
}

#[test]
fn bernoulli_walks_as_often_as_it_is_told() {
    let algorithm = build("bernoulli", &json!({"p": 0.35}), 2).unwrap();
    let mut left = 0;
    for position in 0..20_000u32 {
        let tokens = vec![0; position as usize % 50 + 1];
        let signals = Signals::default();
        let step = StepView {
            request: RequestId(1),
            model: ModelIdx(0),
            seed: u64::from(position / 50),
            prompt_len: 1,
            tokens: &tokens,
            candidate: 0,
            signals: &signals,
        };
        left += u32::from(algorithm.start().route(&step).unwrap().to == ModelIdx(1));
    }
    let expected = 0.35 * 20_000.0;
    let sigma = (20_000.0f64 * 0.35 * 0.65).sqrt();
    assert!((f64::from(left) - expected).abs() < 4.0 * sigma, "{left} of 20000");
}

#[track_caller]
fn refused(name: &str, params: Value, models: usize, expected: &str) {
    let error = build(name, &params, models).map(drop).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn wrong_parameters_are_named() {
    refused("r_stich", json!({}), 2, "unknown routing algorithm `r_stich`; known are stay, always, bernoulli, r2r,");
    refused("r_stitch", json!({"treshold": 0.1}), 2, "unknown field `treshold`, expected `threshold`");
    refused("r_stitch", json!({"threshold": "high"}), 2, "invalid type: string");
    refused("r_stitch", json!({}), 3, "between 2 to 2 models, not 3");
    refused("bernoulli", json!({"p": 1.5}), 2, "within 0 and 1");
    refused("bernoulli", json!({"p": [[0.5, 0.4], [1.0, 0.0]]}), 2, "row 0 must hold probabilities that sum to 1");
    refused(
        "bernoulli",
        json!({"p": [[0.5, 0.5], [1.0, 0.0]], "keep": [[true, false], [false, true]]}),
        2,
        "both drop",
    );
    refused("bernoulli", json!({"p": [[1.0]]}), 2, "2 x 2");
    refused("r2r", json!({"threshold": 0.4}), 2, "head is missing");
    refused("r2r", json!({"head": "h"}), 2, "threshold is missing and the checkpoint gives none");
    refused("r2r", json!({"head": "h", "threshold": 2.5}), 2, "threshold must be a number within -1 and 2, not 2.5");
    refused("citer", json!({}), 2, "head is missing");
    refused("citer", json!({"head": "h", "threshold": -3}), 2, "within -1 and 2, not -3");
    refused("co_llm", json!({"threshold": 1e300}), 2, "within -1 and 2, not inf");
    refused("co_llm", json!({"token": ""}), 2, "token is empty");
    refused("entropy", json!({"threshold": 24}), 2, "within -1 and 23, not 24");
    refused("r_stitch", json!({"threshold": 3}), 2, "within -1 and 2, not 3");
    refused("me", json!({"weights": [0.5, 0.5]}), 3, "2 are given for 3 models");
    refused("me", json!({"weights": [0.5, 0.6]}), 2, "must sum to 1, not 1.1");
    refused("me", json!({"weights": [1.5, -0.5]}), 2, "within 0 and 1, not 1.5");
    refused("me", json!({}), 9, "between 2 to 8 models, not 9");
    refused("always", json!({"model": 2}), 2, "the router's models are 0 to 1");
    refused("token_trigger", json!({}), 2, "tokens and texts are missing or empty");
    refused("token_trigger", json!({"texts": [7]}), 2, "invalid type: integer");
    refused("token_trigger", json!({"tokens": ["wait"]}), 2, "invalid type: string");
    refused("token_trigger", json!({"tokens": [1], "span": 0}), 2, "span must be 1 or more");
}
