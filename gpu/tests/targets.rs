//! Log-probabilities of given tokens: what a draw of each would have said, bit for bit, however their row is cut into
//! chunks, whoever is in the batch, and however few rows are multiplied at a time.

mod common;

use common::*;
use tokenrouter_core::executor::{Drawn, Row, RowOutput, Targets, TokenLogprobs};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_gpu::load::{AnyRunner, LoadOptions};
use tokenrouter_gpu::ops::KvFormat;

const ALTERNATIVES: u8 = 3;

fn runner(shape: &Tiny, (threads, rows_max): (usize, u32), real_vocab: u32) -> AnyRunner {
    let options = LoadOptions { rows_max, real_vocab: Some(real_vocab), ..options(threads, KvFormat::F16) };
    shape.model(7).load(&options).executor().unwrap()
}

/// Draws every token by force, one after the other, and takes what is said of it.
fn by_force(runner: &mut AnyRunner, tokens: &[TokenId]) -> Vec<TokenLogprobs> {
    let table = pages(1, tokens.len());
    let draw = |at: usize, next: TokenId| {
        let params = SamplingParams { logit_bias: vec![(next, 1e4)], ..SamplingParams::default() };
        let mut row = row(1, at, &tokens[at..=at], &table);
        row.draw = Some(tokenrouter_core::executor::Draw { logprobs: Some(ALTERNATIVES), ..draw_with(params) });
        row
    };
    let mut said = Vec::new();
    for (at, &next) in tokens[1..].iter().enumerate() {
        let drawn = drawn(run(runner, vec![draw(at, next)]).remove(0));
        assert_eq!(drawn.token, next);
        said.push(drawn.logprobs.unwrap());
    }
    said
}

fn drawn(output: RowOutput) -> Drawn {
    match output {
        RowOutput::Drawn(drawn) => drawn,
        other => panic!("{other:?}"),
    }
}

/// The row that consumes `tokens[from..to]` and asks for all that it predicts.
fn asking(tokens: &[TokenId], from: usize, to: usize) -> Row {
    let targets = tokens[from + 1..tokens.len().min(to + 1)].to_vec();
    let targets = Targets { first: 0, tokens: targets, alternatives: ALTERNATIVES };
    let mut row = row(1, from, &tokens[from..to], &pages(1, tokens.len()));
    row.targets = Some(targets);
    if to < tokens.len() {
        row.draw = None;
    }
    row
}

/// Others that draw and ask in the same steps, before and behind.
fn company(step: usize, vocab: usize) -> [Row; 2] {
    let tokens = random_tokens(40 + step as u64, 6, vocab);
    let mut asks = row(3, 0, &tokens, &pages(3, 6));
    asks.targets = Some(Targets { first: 2, tokens: tokens[..4].to_vec(), alternatives: 0 });
    [row(2, 0, &tokens[..2], &pages(2, 2)), asks]
}

fn same_bits(found: &[TokenLogprobs], expected: &[TokenLogprobs], how: &str) {
    let bits = |all: &[TokenLogprobs]| -> Vec<(u32, Vec<(TokenId, u32)>)> {
        let top = |logprobs: &TokenLogprobs| logprobs.top.iter().map(|&(id, value)| (id, value.to_bits())).collect();
        all.iter().map(|logprobs| (logprobs.chosen.to_bits(), top(logprobs))).collect()
    };
    assert_eq!(bits(found), bits(expected), "{how}");
}

#[test]
fn targets_have_the_log_probabilities_of_draws() {
    for shape in Tiny::variants() {
        let tokens = random_tokens(1, 40, shape.vocab - 10);
        let real_vocab = shape.vocab as u32 - 10;
        let expected = by_force(&mut runner(&shape, (1, 8), real_vocab), &tokens);
        for (threads, rows_max) in [(1, 3), (2, 8), (3, 64)] {
            let mut runner = runner(&shape, (threads, rows_max), real_vocab);
            let alone = drawn(run(&mut runner, vec![row(1, 0, &tokens, &pages(1, 40))]).remove(0));
            for chunk in [40, 1, 7, 16] {
                for crowd in [false, true] {
                    let how = format!("{shape:?}, chunk {chunk}, {threads} threads, {rows_max} rows, company {crowd}");
                    let (mut found, mut last) = (Vec::new(), None);
                    for from in (0..40).step_by(chunk) {
                        let mut rows = vec![asking(&tokens, from, 40.min(from + chunk))];
                        if crowd {
                            let [before, behind] = company(from, shape.vocab);
                            rows.insert(0, before);
                            rows.push(behind);
                        }
                        match run(&mut runner, rows).swap_remove(usize::from(crowd)) {
                            RowOutput::Fed(targets) => found.extend(targets),
                            RowOutput::Drawn(mut drawn) => {
                                found.extend(std::mem::take(&mut drawn.targets));
                                last = Some(drawn);
                            }
                            RowOutput::Failed(reason) => panic!("{reason}"),
                        }
                    }
                    same_bits(&found, &expected, &how);
                    assert_eq!(last.unwrap().token, alone.token, "{how}");
                }
            }
        }
    }
}

/// A prompt may hold ids that are padding; they have a probability, but are no alternative.
#[test]
fn targets_are_any_ids_and_alternatives_real_tokens() {
    let shape = Tiny::new("qwen2");
    let mut runner = runner(&shape, (2, 8), 100);
    let tokens = [5, 149, 120, 7];
    let mut row = asking(&tokens, 0, 4);
    row.targets.as_mut().unwrap().alternatives = 100;
    let drawn = drawn(run(&mut runner, vec![row]).remove(0));
    assert_eq!(drawn.targets.len(), 3);
    for (at, found) in drawn.targets.iter().enumerate() {
        assert!(found.top.len() == 100 && found.top.iter().all(|&(id, _)| id < 100));
        let logits = logits_in_chunks(&mut runner, &tokens[..=at], 4);
        let log_sum = logits.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        let expected = f64::from(logits[tokens[at + 1] as usize]) - log_sum;
        assert!((f64::from(found.chosen) - expected).abs() < 1e-4, "{} {expected}", found.chosen);
    }
}

#[test]
fn logits_that_are_no_numbers_fail_the_row_that_asks_for_them_alone() {
    let mut model = Tiny::new("llama").model(11);
    let hidden = model.shape.hidden;
    let head = model.tensors["model.embed_tokens.weight"].clone();
    model.shape.tied = false;
    model.tensors.insert("lm_head.weight".into(), head);
    model.tensors.get_mut("model.embed_tokens.weight").unwrap().1[5 * hidden + 3] = f32::NAN;
    let mut runner = model.load(&options(2, KvFormat::F16)).executor().unwrap();
    let [_, other] = company(0, 5);
    let alone = run(&mut runner, vec![other.clone()]).remove(0);
    let outputs = run(&mut runner, vec![asking(&[4, 3, 5, 7, 8], 0, 4), other]);
    assert!(matches!(&outputs[0], RowOutput::Failed(reason) if reason.contains("position 2")), "{outputs:?}");
    same_bits(&drawn(outputs[1].clone()).targets, &drawn(alone).targets, "beside a broken row");
}
