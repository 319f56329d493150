//! Bit-identity: the logits of a row do not depend on chunking, on other rows, on pages, on threads, or on hops.

mod common;

use common::*;
use tokenrouter_core::executor::{Executor, PageId, RowOutput, Step};
use tokenrouter_core::ids::TokenId;
use tokenrouter_gpu::load::AnyRunner;
use tokenrouter_gpu::ops::KvFormat;

fn runner(shape: &Tiny, threads: usize, kv: KvFormat) -> AnyRunner {
    shape.model(7).load(&options(threads, kv)).executor().unwrap()
}

#[test]
fn chunks_threads_and_company_do_not_change_a_bit() {
    for shape in Tiny::variants() {
        for kv in KvFormat::ALL {
            let tokens = random_tokens(1, 45, shape.vocab);
            let whole = bits(&logits_in_chunks(&mut runner(&shape, 1, kv), &tokens, 45));
            for threads in 1..=3 {
                let mut runner = runner(&shape, threads, kv);
                for chunk in [45, 1, 2, 3, 7, 16, 17] {
                    let found = bits(&logits_in_chunks(&mut runner, &tokens, chunk));
                    assert_eq!(found, whole, "{shape:?} {kv:?} chunk {chunk} threads {threads}");
                }
                for place in 0..4 {
                    let found = bits(&in_company(&mut runner, &tokens, (place, shape.vocab)));
                    assert_eq!(found, whole, "{shape:?} {kv:?} place {place} threads {threads}");
                }
            }
        }
    }
}

/// Feeds the request in pieces of 6 as row `place` of steps with three other requests of different lengths and phases.
fn in_company(runner: &mut AnyRunner, tokens: &[TokenId], (place, vocab): (usize, usize)) -> Vec<f32> {
    let others: Vec<Vec<TokenId>> = (0..3).map(|o| random_tokens(90 + o, 100, vocab)).collect();
    let mut fed = [0usize; 3];
    for (index, piece) in tokens.chunks(6).enumerate() {
        let mut rows = Vec::new();
        for (other, all) in others.iter().enumerate() {
            let len = [1, 4, 9][other];
            rows.push(row(
                2 + other as u64,
                fed[other],
                &all[fed[other]..fed[other] + len],
                &pages(2 + other as u64, 100),
            ));
            fed[other] += len;
        }
        rows.insert(place, row(1, index * 6, piece, &pages(1, tokens.len())));
        run(runner, rows);
    }
    runner.last_logits(place).unwrap().to_vec()
}

#[test]
fn eight_requests_together_generate_what_each_generates_alone() {
    let shape = Tiny::new("qwen3");
    let prompts: Vec<Vec<TokenId>> = (0..8).map(|r| random_tokens(300 + r, 3 + 4 * r as usize, shape.vocab)).collect();
    let mut together = runner(&shape, 2, KvFormat::F16);
    let mut batch = prompts.clone();
    let mut fed = [0usize; 8];
    for _ in 0..12 {
        let mut rows = Vec::new();
        for (r, tokens) in batch.iter().enumerate() {
            // Long prompts arrive in two pieces while others decode already.
            let end = if fed[r] == 0 { tokens.len().min(8) } else { tokens.len() };
            let mut piece = row(r as u64, fed[r], &tokens[fed[r]..end], &pages(r as u64, 64));
            if end < tokens.len() {
                piece.draw = None;
            }
            fed[r] = end;
            rows.push(piece);
        }
        for (tokens, output) in batch.iter_mut().zip(run(&mut together, rows)) {
            if let RowOutput::Drawn(drawn) = output {
                tokens.push(drawn.token);
            }
        }
    }
    for (r, prompt) in prompts.iter().enumerate() {
        let mut alone = runner(&shape, 1, KvFormat::F16);
        let mut tokens = prompt.clone();
        let mut fed = 0;
        while tokens.len() < batch[r].len() {
            let outputs = run(&mut alone, vec![row(0, fed, &tokens[fed..], &pages(0, 64))]);
            fed = tokens.len();
            let RowOutput::Drawn(drawn) = &outputs[0] else { panic!("{outputs:?}") };
            tokens.push(drawn.token);
        }
        assert!(tokens.len() >= prompt.len() + 11);
        assert_eq!(tokens, batch[r], "request {r}");
    }
}

/// A request that left and comes back extends its kept KV by what others wrote; the logits equal a fresh full prefill.
#[test]
fn extend_after_a_hop_equals_a_fresh_prefill() {
    for shape in [Tiny::new("llama"), Tiny::new("qwen2")] {
        let tokens = random_tokens(5, 60, shape.vocab);
        let mut runner = runner(&shape, 2, KvFormat::F16);
        let scattered: Vec<PageId> = vec![9, 63, 0, 31];
        let mut here = 0;
        for upto in [20, 21, 22, 35, 36, 60] {
            run(&mut runner, vec![row(1, here, &tokens[here..upto], &scattered), row(2, 0, &tokens[..3], &[40])]);
            here = upto;
            let extended = bits(runner.last_logits(0).unwrap());
            run(&mut runner, vec![row(3, 0, &tokens[..upto], &[50, 51, 52, 53])]);
            assert_eq!(extended, bits(runner.last_logits(0).unwrap()), "{} at {upto}", shape.architecture);
        }
    }
}

#[test]
fn a_new_executor_starts_clean_and_equal() {
    let shape = Tiny::new("llama");
    let model = shape.model(7).load(&options(2, KvFormat::F16));
    let tokens = random_tokens(6, 20, shape.vocab);
    let mut first = model.executor().unwrap();
    let expected = bits(&logits_in_chunks(&mut first, &tokens, 20));
    assert!(first.step(&Step { rows: vec![row(1, 0, &[0], &[64])] }).is_err());
    drop(first);
    let mut second = model.executor().unwrap();
    assert_eq!(bits(&logits_in_chunks(&mut second, &tokens, 3)), expected);
}
