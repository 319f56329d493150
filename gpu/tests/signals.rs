//! Signals, log-probabilities, draws and faults of a runner over a tiny model.

mod common;

use common::*;
use std::sync::Arc;
use tokenrouter_core::executor::{Drawn, Executor, ExecutorError, Needs, Row, RowOutput, Signals, Step};
use tokenrouter_core::sampling::{SamplingParams, TokenCounts};
use tokenrouter_gpu::load::{AnyRunner, LoadOptions};
use tokenrouter_gpu::ops::KvFormat;

const EVERYTHING: Needs = Needs { entropy: true, top_k: 7, hidden: true, score: false };

fn runner() -> AnyRunner {
    let options = LoadOptions { real_vocab: Some(140), ..options(2, KvFormat::F16) };
    Tiny::new("llama").model(11).load(&options).executor().unwrap()
}

fn needing(needs: Needs, logprobs: Option<u8>) -> Row {
    let mut row = row(1, 0, &[5, 6, 7], &[3]);
    row.draw = Some(tokenrouter_core::executor::Draw { needs, logprobs, ..greedy() });
    row
}

fn drawn(mut outputs: Vec<RowOutput>) -> Drawn {
    match outputs.pop() {
        Some(RowOutput::Drawn(drawn)) => drawn,
        other => panic!("{other:?}"),
    }
}

#[test]
fn signals_describe_the_raw_logits() {
    let mut runner = runner();
    let found = drawn(run(&mut runner, vec![needing(EVERYTHING, Some(4))]));
    let logits: Vec<f64> = runner.last_logits(0).unwrap().iter().map(|&l| f64::from(l)).collect();
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let log_sum = max + logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
    let nats: f64 = logits.iter().map(|l| (log_sum - l) * (l - log_sum).exp()).sum();
    let entropy = found.signals.entropy.unwrap();
    assert!((f64::from(entropy.nats) - nats).abs() < 1e-4, "{} {nats}", entropy.nats);
    assert_eq!(entropy.width, 150);
    let mut order: Vec<u32> = (0..150).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    assert_eq!(found.signals.top.iter().map(|t| t.0).collect::<Vec<_>>(), order[..7]);
    assert!(found.signals.top.iter().all(|&(id, logit)| f64::from(logit) == logits[id as usize]));
    assert_eq!(bits(&found.signals.hidden), bits(runner.last_hidden(0).unwrap()));
    let real: Vec<u32> = order.iter().copied().filter(|&id| id < 140).collect();
    assert_eq!(found.token, real[0]);
    let logprobs = found.logprobs.unwrap();
    assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), real[..4]);
    assert_eq!(logprobs.top[0].1, logprobs.chosen);
    assert!((f64::from(logprobs.chosen) - (logits[real[0] as usize] - log_sum)).abs() < 1e-4);
}

#[test]
fn only_what_is_asked_for_is_reported() {
    let mut runner = runner();
    let found = drawn(run(&mut runner, vec![needing(Needs::default(), None)]));
    assert_eq!(found.signals, Signals::default());
    assert_eq!(found.logprobs, None);
    let only_entropy = drawn(run(&mut runner, vec![needing(Needs { entropy: true, ..Needs::default() }, None)]));
    assert!(only_entropy.signals.top.is_empty() && only_entropy.signals.hidden.is_empty());
    assert_eq!(only_entropy.token, found.token);
}

#[test]
fn signals_do_not_feel_sampling_parameters() {
    let mut runner = runner();
    let plain = drawn(run(&mut runner, vec![needing(EVERYTHING, Some(3))]));
    let mut row = needing(EVERYTHING, Some(3));
    let params = SamplingParams {
        temperature: 3.0,
        logit_bias: vec![(plain.token, -100.0), (9, 100.0)],
        seed: 3,
        ..Default::default()
    };
    row.draw.as_mut().unwrap().params = Arc::new(params);
    let biased = drawn(run(&mut runner, vec![row]));
    assert_eq!(biased.token, 9);
    assert_eq!(biased.signals, plain.signals);
    let top = plain.logprobs.unwrap().top;
    assert_eq!(biased.logprobs.unwrap().top, top);
    // Penalties of tokens seen before, and bans.
    let mut row = needing(EVERYTHING, Some(3));
    let draw = row.draw.as_mut().unwrap();
    let params = SamplingParams { repetition_penalty: 50.0, frequency_penalty: 90.0, ..Default::default() };
    draw.params = Arc::new(params);
    draw.history = Some(Arc::new(TokenCounts::of(&[5, 6, 7, plain.token], 3)));
    draw.banned = [plain.signals.top[1].0].into();
    let penalised = drawn(run(&mut runner, vec![row]));
    assert!(plain.signals.top[..2].iter().all(|&(id, _)| id != penalised.token), "{penalised:?}");
    assert_eq!(penalised.signals, plain.signals);
    assert_eq!(penalised.logprobs.unwrap().top, top);
}

#[test]
fn only_rows_that_draw_have_logits() {
    let mut runner = runner();
    let mut chunk = row(1, 0, &[1, 2, 3], &[0]);
    chunk.draw = None;
    let outputs = run(&mut runner, vec![row(2, 0, &[4], &[1]), chunk, row(3, 0, &[5, 6], &[2])]);
    assert!(matches!(outputs[..], [RowOutput::Drawn(_), RowOutput::Fed(_), RowOutput::Drawn(_)]));
    assert!(runner.last_logits(0).is_some() && runner.last_logits(1).is_none() && runner.last_logits(2).is_some());
    assert!(run(&mut runner, Vec::new()).is_empty());
}

#[test]
fn a_row_that_is_not_a_number_fails_alone() {
    let mut model = Tiny::new("llama").model(11);
    let hidden = model.shape.hidden;
    // The embedding of token 5 is broken (untied head, so only rows that read it are).
    let head = model.tensors["model.embed_tokens.weight"].clone();
    model.shape.tied = false;
    model.tensors.insert("lm_head.weight".into(), head);
    model.tensors.get_mut("model.embed_tokens.weight").unwrap().1[5 * hidden + 3] = f32::NAN;
    let mut runner = model.load(&options(2, KvFormat::F16)).executor().unwrap();
    let good = bits(&logits_in_chunks(&mut runner, &[7, 8], 2));
    let outputs = run(&mut runner, vec![row(2, 0, &[4, 5], &[10]), row(1, 0, &[7, 8], &[20])]);
    assert!(matches!(&outputs[0], RowOutput::Failed(reason) if reason.contains("position 1")), "{outputs:?}");
    assert!(matches!(outputs[1], RowOutput::Drawn(_)));
    assert_eq!(bits(runner.last_logits(1).unwrap()), good);
    assert!(matches!(run(&mut runner, vec![row(3, 0, &[4], &[10])])[0], RowOutput::Drawn(_)));
}

#[test]
fn a_row_with_everything_masked_fails_alone() {
    let mut runner = runner();
    let mut banned = row(1, 0, &[1], &[0]);
    banned.draw.as_mut().unwrap().banned = (0..150).collect();
    let outputs = run(&mut runner, vec![banned, row(2, 0, &[1], &[1])]);
    assert!(matches!(&outputs[0], RowOutput::Failed(reason) if reason.contains("masked")), "{outputs:?}");
    assert!(matches!(outputs[1], RowOutput::Drawn(_)));
}

#[test]
fn a_bad_step_is_refused_and_the_next_one_runs() {
    let mut runner = runner();
    let limits = runner.limits();
    for bad in
        [row(1, 0, &[150], &[0]), row(1, 0, &[1], &[limits.pages]), row(1, 256, &[1], &[0]), row(1, 0, &[], &[0])]
    {
        let refused = runner.step(&Step { rows: vec![bad] });
        assert!(matches!(refused, Err(ExecutorError::Step(_))), "{refused:?}");
    }
    assert!(matches!(run(&mut runner, vec![row(1, 0, &[1], &[0])])[0], RowOutput::Drawn(_)));
}
