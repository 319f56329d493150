//! Whole models with quantised weights, read from GGUF files: close to the exact answer, and bit-identical whatever the
//! chunking, the company and the threads.

mod common;

use common::gguf::quantised;
use common::*;
use tokenrouter_gpu::load::load;
use tokenrouter_gpu::ops::KvFormat;
use tokenrouter_kernels::quant::Format;

const FORMATS: [Format; 8] =
    [Format::Q8_0, Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q4_K, Format::Q5_K, Format::Q6_K];

/// Relative distance of two rows.
fn distance(found: &[f32], exact: &[f64]) -> f64 {
    let power: f64 = exact.iter().map(|x| x * x).sum();
    let error: f64 = exact.iter().zip(found).map(|(x, &y)| (x - f64::from(y)).powi(2)).sum();
    (error / power).sqrt()
}

/// Activations are rounded to int8 in blocks of 32 before every product, which costs a few percent. A reference that
/// rounds too is met to f32 accuracy, unless a value lies so close to the edge between two codes that f32 and f64 round
/// it apart: rare in a prompt of one token, so the median of several such prompts tells.
#[test]
fn int8_products_differ_from_the_exact_ones_by_the_rounding_of_activations() {
    for (case, format) in FORMATS.into_iter().enumerate() {
        let architecture = ["llama", "qwen2", "qwen3"][case % 3];
        let (path, mut model) = quantised(architecture, format, case as u64);
        let mut runner = load(&path, &options(2, KvFormat::F32), &mut |_| ()).unwrap().executor().unwrap();
        let tokens = random_tokens(case as u64, 30, model.shape.vocab);
        let to_exact = distance(&logits_in_chunks(&mut runner, &tokens, 30), &model.reference(&tokens).1[29]);
        model.int8 = true;
        let mut to_rounded: Vec<f64> = tokens[..9]
            .iter()
            .map(|&token| distance(&logits_in_chunks(&mut runner, &[token], 1), &model.reference(&[token]).1[0]))
            .collect();
        to_rounded.sort_by(f64::total_cmp);
        assert!(to_exact < 0.06, "{architecture} {}: {to_exact} from the exact logits", format.name());
        assert!(to_rounded[4] < 2e-6, "{architecture} {}: {to_rounded:?} from the rounded logits", format.name());
    }
}

#[test]
fn quantised_logits_do_not_depend_on_batch_chunks_or_threads() {
    for (case, format) in FORMATS.into_iter().enumerate() {
        let (path, model) = quantised(["llama", "qwen2", "qwen3"][case % 3], format, 100 + case as u64);
        let tokens = random_tokens(case as u64, 33, model.shape.vocab);
        let mut expected: Option<Vec<u32>> = None;
        for threads in 1..=3 {
            let options = options(threads, KvFormat::F16);
            let mut runner = load(&path, &options, &mut |_| ()).unwrap().executor().unwrap();
            for chunk in [33, 1, 2, 3, 7, 16] {
                let found = bits(&logits_in_chunks(&mut runner, &tokens, chunk));
                assert_eq!(*expected.get_or_insert(found.clone()), found, "{} {threads} {chunk}", format.name());
            }
            let table = pages(1, 33);
            run(&mut runner, vec![row(1, 0, &tokens[..32], &table)]);
            let other = |request: u64, len| row(request, 0, &random_tokens(request, len, 150), &pages(request, 40));
            run(&mut runner, vec![other(2, 5), other(3, 1), row(1, 32, &tokens[32..], &table), other(4, 40)]);
            let found = bits(runner.last_logits(2).unwrap());
            assert_eq!(expected.as_ref(), Some(&found), "{} {threads} in company", format.name());
        }
    }
}
