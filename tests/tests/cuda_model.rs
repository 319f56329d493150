//! Whole models on a CUDA device, on the software device: the same code that real hardware runs. Owner: everyone. Invariant:
//! the processor is right; what CUDA promises of bits is checked bit for bit.
#![cfg(target_os = "linux")]

use std::sync::Arc;
use tokenrouter_core::rng::{Stream, unit};
use tokenrouter_gpu::cuda::model::CudaPlace;
use tokenrouter_gpu::cuda::{CudaOptions, GraphGrid};
use tokenrouter_gpu::load::{Device, KvMemory, LoadOptions, LoadedModel};
use tokenrouter_kernels::cuda::{Devices, DevicesConfig};
use tokenrouter_tests::conformance::{Fed, Walker, demo, dequantised, load, open};
use tokenrouter_tests::cuda_sim::CudaSim;

fn options(device: Device) -> LoadOptions {
    LoadOptions {
        device,
        threads: 1,
        kv: KvMemory::Pages(64),
        context_len: Some(128),
        rows_max: 8,
        step_tokens_max: 64,
        ..LoadOptions::default()
    }
}

fn cuda(graphs: GraphGrid, deterministic: bool) -> Device {
    let devices = Arc::new(Devices::new(DevicesConfig::default()));
    let options = CudaOptions { ordinal: 0, graphs, deterministic, high_priority: false };
    Device::Cuda(CudaPlace { devices, options })
}

/// Steps of three sequences: prompts of different lengths together, decodes, extends of several tokens, and one alone.
fn script() -> Vec<Vec<(usize, usize)>> {
    vec![
        vec![(0, 5), (1, 17), (2, 1)],
        vec![(0, 6), (1, 18), (2, 2)],
        vec![(1, 20)],
        vec![(0, 9), (2, 3)],
        vec![(0, 10), (1, 21), (2, 40)],
        vec![(2, 41)],
    ]
}

fn run(model: &LoadedModel) -> Vec<Vec<Fed>> {
    let mut walker = Walker::new(model, 3);
    let token = |sequence: usize, at: usize| 3 + (unit(sequence as u64, at as u32, Stream::Owner) * 90.0) as u32;
    let texts: Vec<Vec<u32>> = (0..3).map(|s| (0..64).map(|at| token(s, at)).collect()).collect();
    let mut step = |rows: Vec<(usize, usize)>| {
        let rows: Vec<(usize, &[u32])> = rows.iter().map(|&(s, len)| (s, &texts[s][..len])).collect();
        walker.step(&rows)
    };
    script().into_iter().map(&mut step).collect()
}

/// Largest difference of a logit, as a share of the largest of its row.
fn worst(a: &[Vec<Fed>], b: &[Vec<Fed>]) -> f32 {
    let rows = a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| {
        let scale = a.logits.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let off = a.logits.iter().zip(&b.logits).map(|(a, b)| (a - b).abs());
        // NaN is as far off as can be.
        off.fold(0.0, |most: f32, x| if x.is_nan() { f32::INFINITY } else { most.max(x) }) / scale
    });
    rows.fold(0.0, f32::max)
}

#[test]
fn a_model_says_the_same_as_on_the_processor() {
    let sim = CudaSim::alone().unwrap();
    for name in ["small", "large"] {
        let stored = open(&demo(name));
        // The processor rounds activations to 8 bits for quantised weights, the GPU does not: both multiply floats here.
        let folder = std::env::temp_dir().join(format!("tokenrouter-cuda-model-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let files = dequantised(open(&demo(name)), &folder);
        let expected = run(&load(&files, options(Device::Cpu)));
        for (graphs, deterministic) in [
            (GraphGrid::default(), false),
            (GraphGrid::new(vec![1, 4], vec![1, 4]), false),
            (GraphGrid::new(vec![1, 4], vec![1, 4]), true),
        ] {
            let began = std::time::Instant::now();
            let found = run(&load(&stored, options(cuda(graphs.clone(), deterministic))));
            let worst = worst(&expected, &found);
            eprintln!("{name} {graphs:?} {deterministic}: {worst} in {:?}", began.elapsed());
            // Prompts of more than 16 rows round activations to 16 bits, unless sums keep their order.
            let most = if deterministic { 1e-4 } else { 2e-2 };
            assert!(worst < most, "{name}: {worst}; {:?}", sim.last_report());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// Some sandboxes let nobody register memory of the host.
#[test]
fn memory_that_cannot_be_registered_is_used_as_it_is() {
    let sim = CudaSim::alone().unwrap();
    let files = open(&demo("small"));
    let expected = run(&load(&files, options(cuda(GraphGrid::default(), true))));
    for nth in 1..=40 {
        sim.fail("cuMemHostRegister", nth, 800);
    }
    sim.reset_counters();
    let found = run(&load(&files, options(cuda(GraphGrid::default(), true))));
    assert!(sim.calls("cuMemHostRegister") > 0 && sim.calls("pageable copy") > 0);
    let bits = |steps: &[Vec<Fed>]| -> Vec<Vec<u32>> { steps.iter().flatten().map(Fed::bits).collect() };
    assert_eq!(bits(&expected), bits(&found));
}
