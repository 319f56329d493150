//! Time of the R2R network at its published size (H = E = 1024, six blocks of 1024) with random weights, by rows.
//! Usage: `cargo run --release -p tokenrouter-gpu --example head_step [threads]`. Owner: whoever measures. Invariant: what
//! is timed is what a step runs.

use std::time::Instant;
use tokenrouter_core::rng::{Stream, mix, unit};
use tokenrouter_gpu::cpu::{Cpu, CpuOptions};
use tokenrouter_gpu::heads::{self, Class, Family, HeadConfig, Network, NetworkInput, Scratch};
use tokenrouter_gpu::ops::{HeadOutput, Ops};
use tokenrouter_gpu::weights::Tensor;
use tokenrouter_kernels::quant::Format;

const WIDTH: usize = 1024;

fn random(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    (0..count as u32).map(|at| (unit(mix(seed), at, Stream::Token) as f32 * 2.0 - 1.0) * scale).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn config() -> HeadConfig {
    HeadConfig {
        format: 1,
        family: Family::R2r,
        class: Class::HiddenStatesTokenLMHeadLogitsClassifier,
        hidden_size: WIDTH,
        embedding_size: WIDTH,
        logits_size: 100,
        layers: vec![WIDTH; 6],
        expansion: 4,
        normalize_input: false,
        threshold: None,
        model: None,
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(0), |text| text.parse())?;
    let folder = std::env::temp_dir().join(format!("head-step-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join(heads::CONFIG_FILE), serde_json::to_string(&config())?)?;
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = (config().tensors().into_iter().enumerate())
        .map(|(seed, (name, [rows, cols]))| {
            let dims = if rows == 1 { vec![cols] } else { vec![rows, cols] };
            (name, dims, bytes(&random(seed as u64, rows * cols, 0.04)))
        })
        .collect();
    let views = tensors.iter().map(|(name, dims, bytes)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, dims.clone(), bytes);
        view.map(|view| (name.as_str(), view))
    });
    let file = safetensors::serialize(views.collect::<Result<Vec<_>, _>>()?, None)?;
    std::fs::write(folder.join(heads::WEIGHTS_FILE), file)?;
    let mut ops = Cpu::new(&CpuOptions { threads, cores: Vec::new() })?;
    let network = Network::new(&mut ops, &heads::open(&folder)?)?;
    std::fs::remove_dir_all(&folder)?;
    println!("{} weights", tensors.iter().map(|(_, dims, _)| dims.iter().product::<usize>()).sum::<usize>());
    let table = Tensor {
        name: "embed".into(),
        shape: [64, WIDTH],
        format: Format::F32,
        bytes: bytes(&random(1, 64 * WIDTH, 1.0)).into(),
    };
    let embed = ops.matrix(table)?;
    for rows in [1, 4, 16, 64usize] {
        let mut scratch = Scratch::new(&mut ops, network.config(), rows)?;
        let mut hidden = ops.rows(rows, WIDTH)?;
        hidden.fill(&random(2, rows * WIDTH, 1.0));
        let scored: Vec<u32> = (0..rows as u32).collect();
        let mut found = HeadOutput::of_top(&mut ops, rows, &random(3, rows * 100, 10.0))?;
        let mut best = f64::INFINITY;
        for _ in 0..8 {
            let input = NetworkInput { hidden: &hidden, embed: &embed, scored: &scored };
            let start = Instant::now();
            network.score(&mut ops, input, (&mut scratch, &mut found));
            best = best.min(start.elapsed().as_secs_f64());
        }
        println!("{rows:3} rows: {:8.2} ms, {:6.2} ms a row", best * 1e3, best * 1e3 / rows as f64);
    }
    Ok(())
}
