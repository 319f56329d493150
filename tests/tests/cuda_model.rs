//! Whole models on a CUDA device, on the software device: the same code that real hardware runs. Owner: everyone. Invariant:
//! the processor is right; what CUDA promises of bits is checked bit for bit.
#![cfg(target_os = "linux")]

use std::sync::Arc;
use tokenrouter_core::executor::{Draw, Executor, Row, Step};
use tokenrouter_core::ids::RequestId;
use tokenrouter_core::sampling::{SamplingParams, TokenCounts};
use tokenrouter_gpu::cuda::model::CudaPlace;
use tokenrouter_gpu::cuda::{CudaOptions, GraphGrid};
use tokenrouter_gpu::load::{Device, LoadedModel};
use tokenrouter_kernels::cuda::{Devices, DevicesConfig};
use tokenrouter_tests::conformance::{Fed, demo, dequantised, load, open};
use tokenrouter_tests::cuda_sim::CudaSim;
use tokenrouter_tests::gpu_check::whole::{self, options};

fn cuda(graphs: GraphGrid, deterministic: bool) -> Device {
    let devices = Arc::new(Devices::new(DevicesConfig::default()));
    let options = CudaOptions { ordinal: 0, graphs, deterministic, high_priority: false };
    Device::Cuda(CudaPlace { devices, options })
}

fn run(model: &LoadedModel) -> Vec<Vec<Fed>> {
    whole::run(model, &whole::script())
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

/// Whoever counts the tokens of a request copies the counts while somebody else has them.
#[test]
fn an_executor_keeps_nothing_of_a_step() {
    let _sim = CudaSim::alone().unwrap();
    for device in [Device::Cpu, cuda(GraphGrid::default(), false), cuda(GraphGrid::new(vec![1], vec![4]), false)] {
        let mut runner = load(&open(&demo("small")), options(device)).executor().unwrap();
        let history = Arc::new(TokenCounts::of(&[3, 4, 5], 2));
        let params = Arc::new(SamplingParams { presence_penalty: 0.5, temperature: 0.7, ..SamplingParams::default() });
        let draw = Draw { params, history: Some(history.clone()), ..Draw::default() };
        let (request, tokens, pages) = (RequestId(1), vec![3, 4, 5], vec![0]);
        let step = Step { rows: vec![Row { request, start: 0, tokens, pages, draw: Some(draw), targets: None }] };
        assert_eq!(runner.step(&step).unwrap().rows.len(), 1);
        drop(step);
        assert_eq!(Arc::strong_count(&history), 1);
    }
}
