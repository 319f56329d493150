//! The CPU executor against the slow f64 forward pass, for every architecture and variant.

mod common;

use common::*;
use tokenrouter_gpu::ops::KvFormat;

fn worst(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(&a, &b)| (f64::from(a) - b).abs()).fold(0.0, f64::max)
}

/// Logits here are of magnitude 10; f32 sums over these widths are good to a few 1e-6 of that.
#[test]
fn f32_weights_and_f32_kv_match_to_rounding() {
    for (case, shape) in Tiny::variants().iter().enumerate() {
        let model = shape.model(case as u64 + 100);
        let mut runner = model.load(&options(2, KvFormat::F32)).executor().unwrap();
        let tokens = random_tokens(case as u64, 37, shape.vocab);
        let (hidden, logits) = model.reference(&tokens);
        let table = pages(1, tokens.len());
        let mut fed = 0;
        for upto in [1, 5, 16, 17, 36, 37] {
            run(&mut runner, vec![row(1, fed, &tokens[fed..upto], &table)]);
            fed = upto;
            let off = worst(runner.last_logits(0).unwrap(), &logits[upto - 1]);
            assert!(off < 2e-4, "{shape:?} at {upto}: logits off by {off}");
            let off = worst(runner.last_hidden(0).unwrap(), &hidden[upto - 1]);
            assert!(off < 2e-4, "{shape:?} at {upto}: hidden off by {off}");
        }
    }
}

#[test]
fn narrow_kv_stays_close() {
    for (case, shape) in Tiny::variants().iter().enumerate() {
        let model = shape.model(case as u64 + 200);
        let tokens = random_tokens(case as u64 + 50, 40, shape.vocab);
        let (_, logits) = model.reference(&tokens);
        // Off by a 2048th of each number, a 256th, and a 254th of the largest of 16.
        for (kv, tolerance) in [(KvFormat::F16, 3e-2), (KvFormat::BF16, 1.2e-1), (KvFormat::Q8, 2.4e-1)] {
            let mut runner = model.load(&options(1, kv)).executor().unwrap();
            let found = logits_in_chunks(&mut runner, &tokens, 40);
            let off = worst(&found, &logits[39]);
            assert!(off < tolerance, "{kv:?} {shape:?}: logits off by {off}");
        }
    }
}
