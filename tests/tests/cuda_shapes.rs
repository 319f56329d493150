//! What a CUDA device promises of bits without a fixed order of sums: in one recorded shape of few rows, a request has the
//! same bits beside any others and alone, and a step that fills its shape has them without a graph as well. On the software
//! device. Owner: docs/cuda.md, which promises it.
#![cfg(target_os = "linux")]

use std::sync::Arc;
use tokenrouter_core::rng::{Stream, mix, unit};
use tokenrouter_gpu::cuda::model::CudaPlace;
use tokenrouter_gpu::cuda::{CudaOptions, GraphGrid};
use tokenrouter_gpu::load::{Device, KvMemory, LoadOptions, LoadedModel};
use tokenrouter_kernels::cuda::{Devices, DevicesConfig};
use tokenrouter_tests::conformance::{Fed, Walker, demo, dequantised, load, open};
use tokenrouter_tests::cuda_sim::CudaSim;

/// Requests, and tokens of each in a step: 16 rows, which no other library multiplies.
const SHAPE: (usize, usize) = (4, 4);
/// Long enough that several blocks share a context.
const TOKENS: usize = 76;

/// Requests of the large shape: so many that the blocks of a context are fewer than for a request alone.
const MANY: usize = 80;
/// A context that is shared among blocks, and its part that is read at once.
const LONG: (usize, usize) = (480, 60);

fn model(graphs: GraphGrid) -> LoadedModel {
    load(&open(&demo("small")), options(graphs))
}

fn options(graphs: GraphGrid) -> LoadOptions {
    let devices = Arc::new(Devices::new(DevicesConfig::default()));
    let options = CudaOptions { graphs, ..CudaOptions::default() };
    LoadOptions {
        device: Device::Cuda(CudaPlace { devices, options }),
        kv: KvMemory::Pages(MANY as u32 * 32),
        context_len: Some(512),
        rows_max: MANY as u32,
        step_tokens_max: MANY as u32,
        ..LoadOptions::default()
    }
}

fn one_shape() -> GraphGrid {
    GraphGrid::new(vec![SHAPE.0], vec![SHAPE.1])
}

fn texts() -> Vec<Vec<u32>> {
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64);
    eprintln!("seed {seed}");
    let token = |text: usize, at: usize| 3 + (unit(mix(seed ^ text as u64), at as u32, Stream::Owner) * 600.0) as u32;
    (0..SHAPE.0).map(|text| (0..TOKENS).map(|at| token(text, at)).collect()).collect()
}

/// What is said of each of these texts after every step, fed four tokens at a time.
fn feed(model: &LoadedModel, texts: &[Vec<u32>], which: &[usize]) -> Vec<Vec<Fed>> {
    let mut walker = Walker::new(model, SHAPE.0);
    let mut said: Vec<Vec<Fed>> = which.iter().map(|_| Vec::new()).collect();
    for end in (SHAPE.1..=TOKENS).step_by(SHAPE.1) {
        let rows: Vec<(usize, &[u32])> = which.iter().map(|&text| (text, &texts[text][..end])).collect();
        said.iter_mut().zip(walker.step(&rows)).for_each(|(said, fed)| said.push(fed));
    }
    said
}

fn same(what: &str, found: &[Fed], expected: &[Fed]) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found.bits() == expected.bits(), "{what}: logits of step {step}");
        // What the step itself said: the draw and its entropy.
        assert_eq!(format!("{:?}", found.drawn), format!("{:?}", expected.drawn), "{what}: step {step}");
    }
}

#[test]
fn a_request_has_the_same_bits_beside_any_others_in_its_shape() {
    let _sim = CudaSim::alone().unwrap();
    let (model, texts) = (model(one_shape()), texts());
    let all = feed(&model, &texts, &[0, 1, 2, 3]);
    for others in [&[2][..], &[3, 0, 1]] {
        for (&text, said) in others.iter().zip(&feed(&model, &texts, others)) {
            same(&format!("text {text} among {others:?}"), said, &all[text]);
        }
    }
}

#[test]
fn a_step_that_fills_its_shape_needs_no_graph_for_its_bits() {
    let _sim = CudaSim::alone().unwrap();
    let texts = texts();
    let [played, given] = [one_shape(), GraphGrid::default()].map(|graphs| feed(&model(graphs), &texts, &[0, 1, 2, 3]));
    for (text, (played, given)) in played.iter().zip(&given).enumerate() {
        same(&format!("text {text}"), given, played);
    }
}

/// What is said of a long text after its last token, which is fed beside so many short ones.
fn last(model: &LoadedModel, others: usize) -> Fed {
    let token = |text: usize, at: usize| 3 + (mix((text * 1000 + at) as u64) % 600) as u32;
    let long: Vec<u32> = (0..LONG.0 + 1).map(|at| token(0, at)).collect();
    let short: Vec<Vec<u32>> = (1..MANY).map(|text| vec![token(text, 0)]).collect();
    let mut walker = Walker::new(model, MANY);
    for end in (LONG.1..=LONG.0).step_by(LONG.1) {
        walker.feed(0, &long[..end]);
    }
    let mut rows: Vec<(usize, &[u32])> =
        short[..others].iter().enumerate().map(|(at, text)| (at + 1, &text[..])).collect();
    rows.push((0, &long));
    walker.step(&rows).remove(others)
}

/// Weights in F32, so that no other library multiplies however many rows there are.
#[test]
fn contexts_are_cut_by_the_shape_and_not_by_who_is_in_it() {
    let _sim = CudaSim::alone().unwrap();
    let folder = std::env::temp_dir().join(format!("tokenrouter-cuda-shapes-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let files = dequantised(open(&demo("small")), &folder);
    let in_shape = load(&files, options(GraphGrid::new(vec![MANY], vec![1])));
    let alone = last(&in_shape, 0);
    same("beside others", &[last(&in_shape, MANY / 2)], std::slice::from_ref(&alone));
    // In a shape of its own there are more blocks: what is promised of a shape does not hold across shapes.
    let own = last(&load(&files, options(GraphGrid::new(vec![1, MANY], vec![1]))), 0);
    assert!(own.bits() != alone.bits(), "the shape has no say here, so the test shows nothing");
    std::fs::remove_dir_all(&folder).unwrap();
}
