//! Whole steps with random parameters against the processor. A token is right if the sampler of the host draws it from the
//! logits of the device, always; and it is the processor's, but for the few draws that fall within the rounding of the logits.

use crate::rig::{
    CONTEXT, REAL_VOCAB, Random, Said, Texts, alone_on, executor, grid, model, options, reference, say, sizes,
};
use std::path::PathBuf;
use std::sync::Arc;
use tokenrouter_core::constraint::Mask;
use tokenrouter_core::executor::{Draw, Drawn, Needs, Row, RowOutput, Step, Targets, TokenLogprobs};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::sampling::{SamplingParams, TokenCounts};
use tokenrouter_gpu::heads::{Family, HeadSource};

use tokenrouter_gpu::load::{Device, LoadOptions};
use tokenrouter_gpu::sampling::Sampler;
use tokenrouter_tests::conformance::{demo, open};
use tokenrouter_tests::cuda_sim::CudaSim;

/// Most that a logit, a hidden value or a logarithm of a probability is off.
const TOLERANCE: f32 = 0.02;

fn params(random: &mut Random) -> SamplingParams {
    let mut bias = Vec::new();
    if random.below(3) == 0 {
        bias = (0..random.below(40)).map(|_| (random.below(REAL_VOCAB), random.unit() as f32 * 8.0 - 4.0)).collect();
    }
    SamplingParams {
        temperature: random.pick(&[0.0, 0.0, 0.3, 0.8, 1.0, 1.7, -1.0]),
        top_k: random.pick(&[0, 0, 1, 5, 40, 300, 5000]),
        top_p: random.pick(&[1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p: random.pick(&[0.0, 0.0, 0.05, 0.9]),
        repetition_penalty: random.pick(&[1.0, 1.0, 1.3, 0.7]),
        presence_penalty: random.pick(&[0.0, 0.0, 0.6]),
        frequency_penalty: random.pick(&[0.0, 0.0, 0.2, -0.2]),
        logit_bias: bias,
        seed: u64::from(random.below(1000)),
    }
}

fn draw(random: &mut Random, seen: &[TokenId], score: bool) -> Draw {
    let params = params(random);
    let ids = |random: &mut Random, most| -> Vec<TokenId> {
        (0..random.below(most)).map(|_| random.below(REAL_VOCAB)).collect()
    };
    let mask = match random.below(8) {
        0 => Some(ids(random, 4)),
        1 => Some(ids(random, 400)),
        _ => None,
    };
    let banned = if random.below(4) == 0 { ids(random, 20) } else { Vec::new() };
    let history = params.reads_history().then(|| Arc::new(TokenCounts::of(seen, seen.len() / 2)));
    Draw {
        params: Arc::new(params),
        history,
        banned: banned.into(),
        mask: mask.map(|ids| Mask::of(&ids)),
        needs: Needs {
            entropy: random.below(2) == 0,
            top_k: random.pick(&[0, 0, 1, 10, 100]),
            hidden: random.below(2) == 0,
            score: score && random.below(3) > 0,
        },
        logprobs: random.pick(&[None, Some(0), Some(3), Some(20)]),
    }
}

/// A step of these parts: prefill chunks that draw nothing, draws of all kinds, questions about the text itself.
fn step(random: &mut Random, texts: &Texts, (parts, score): (&[(usize, std::ops::Range<usize>)], bool)) -> Step {
    let mut row = |(text, part): &(usize, std::ops::Range<usize>)| -> Row {
        let seen = &texts.tokens(*text)[..part.end];
        let draw = (random.below(8) > 0).then(|| draw(random, seen, score));
        let mut row = texts.row(*text, part.clone(), draw);
        if random.below(6) == 0 {
            let first = random.below(part.len() as u32);
            let tokens = (first..part.len() as u32).map(|_| random.below(REAL_VOCAB)).collect();
            row.targets = Some(Targets { first, tokens, alternatives: random.pick(&[0, 4]) });
        }
        row
    };
    Step { rows: parts.iter().map(&mut row).collect() }
}

fn near(a: f32, b: f32) -> bool {
    a == b || (a - b).abs() <= TOLERANCE
}

/// Descending lists whose ids agree wherever the values tell them apart.
#[track_caller]
fn check_list(expected: &[(TokenId, f32)], found: &[(TokenId, f32)]) {
    assert_eq!(expected.len(), found.len(), "{expected:?} {found:?}");
    for (at, (a, b)) in expected.iter().zip(found).enumerate() {
        assert!(near(a.1, b.1), "{at}: {a:?} {b:?}");
        let apart = |other: Option<&(TokenId, f32)>| other.is_some_and(|other| (other.1 - a.1).abs() > 2.0 * TOLERANCE);
        if at > 0 && apart(expected.get(at - 1)) && apart(expected.get(at + 1)) {
            assert_eq!(a.0, b.0, "{at}: {a:?} {b:?}");
        }
    }
}

#[track_caller]
fn check_targets(expected: &[TokenLogprobs], found: &[TokenLogprobs]) {
    assert_eq!(expected.len(), found.len());
    for (expected, found) in expected.iter().zip(found) {
        assert!(near(expected.chosen, found.chosen), "{expected:?} {found:?}");
        check_list(&expected.top, &found.top);
    }
}

#[track_caller]
fn check_signals(expected: &Drawn, found: &Drawn) {
    let (a, b) = (&expected.signals, &found.signals);
    assert_eq!((a.entropy.is_some(), a.score.is_some()), (b.entropy.is_some(), b.score.is_some()));
    if let (Some(a), Some(b)) = (a.entropy, b.entropy) {
        assert!(a.width == b.width && near(a.nats, b.nats), "{a:?} {b:?}");
    }
    check_list(&a.top, &b.top);
    assert!(a.hidden.len() == b.hidden.len() && a.hidden.iter().zip(&b.hidden).all(|(a, b)| near(*a, *b)));
    check_targets(&expected.targets, &found.targets);
    assert_eq!(expected.logprobs.is_some(), found.logprobs.is_some());
    if let (Some(a), Some(b)) = (&expected.logprobs, &found.logprobs) {
        check_list(&a.top, &b.top);
    }
    if expected.token != found.token {
        return;
    }
    // Both speak of the token that was drawn.
    if let (Some(a), Some(b)) = (a.score, b.score) {
        assert!(near(a, b), "scores {a} {b}");
    }
    if let (Some(a), Some(b)) = (&expected.logprobs, &found.logprobs) {
        assert!(near(a.chosen, b.chosen), "{a:?} {b:?}");
    }
}

/// Rows that drew, and those of them that drew another token than the processor.
#[derive(Default, Debug)]
struct Tally {
    drawn: u32,
    other: u32,
    failed: u32,
    scored: u32,
}

impl Tally {
    fn check(&mut self, row: &Row, expected: &Said, (found, sampler): (&Said, &mut Sampler)) {
        match (&expected.output, &found.output) {
            (RowOutput::Fed(a), RowOutput::Fed(b)) => check_targets(a, b),
            (RowOutput::Failed(a), RowOutput::Failed(b)) => {
                self.failed += 1;
                assert_eq!(a, b);
            }
            (RowOutput::Drawn(a), RowOutput::Drawn(b)) => {
                let draw = row.draw.as_ref().expect("it drew");
                let position = row.start + row.tokens.len() as u32;
                assert_eq!(sampler.draw(&found.logits, draw, position), Ok(b.token), "{draw:?}");
                self.drawn += 1;
                self.other += u32::from(a.token != b.token);
                self.scored += u32::from(b.signals.score.is_some());
                check_signals(a, b);
            }
            (a, b) => panic!("{a:?}\n{b:?}\n{row:?}"),
        }
    }
}

fn check(random: &mut Random, head: Option<HeadSource>) {
    let name = "small";
    let with = |device| LoadOptions { head: head.clone(), ..sizes(device) };
    let expected = reference(name, with(Device::Cpu));
    let loaded = model(name, with(alone_on(options(grid(), true))));
    let real_vocab = open(&demo(name)).inspect().unwrap().tokens.len;
    assert!(real_vocab >= REAL_VOCAB, "{real_vocab}");
    let mut sampler = Sampler::new(loaded.limits().vocab_width as usize, real_vocab as usize);
    let (mut cpu, mut cuda, mut tally) = (executor(&expected), executor(&loaded), Tally::default());
    for _ in 0..4 {
        let texts = Texts::new(random, 4);
        for parts in texts.steps(random) {
            let step = step(random, &texts, (&parts, head.is_some()));
            let (expected, found) = (say(&mut cpu, &step).unwrap(), say(&mut cuda, &step).unwrap());
            for ((row, expected), found) in step.rows.iter().zip(&expected).zip(&found) {
                tally.check(row, expected, (found, &mut sampler));
            }
        }
    }
    eprintln!("{head:?}: {tally:?}");
    let Tally { drawn, other, failed, scored } = tally;
    assert!(drawn > CONTEXT as u32 / 2 && failed > 0 && (scored > 0) == head.is_some(), "{tally:?}");
    assert!(other <= 1 + drawn / 50, "{tally:?}");
}

fn trained(name: &str, family: Family) -> Option<HeadSource> {
    let path: PathBuf = demo("heads").join(name);
    Some(HeadSource::Checkpoint { path, family })
}

#[test]
fn draws_and_signals_are_those_of_the_processor() {
    let _sim = CudaSim::alone().unwrap();
    check(&mut Random::fresh(), None);
}

#[test]
fn learned_heads_score_as_on_the_processor() {
    let _sim = CudaSim::alone().unwrap();
    let mut random = Random::fresh();
    for head in [trained("r2r", Family::R2r), trained("citer", Family::Citer), Some(HeadSource::Row { token: 17 })] {
        check(&mut random, head);
    }
}
