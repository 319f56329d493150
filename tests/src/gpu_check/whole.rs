//! Whole models on the device against the processor, which multiplies the same weights widened to F32. Owner: the program.
//! Invariant: prompts, decodes and extends of several sequences, together and alone; with fixed order, a sequence gets the
//! same bits alone and beside others.

use super::{Finding, same};
use crate::conformance::{Fed, Walker, dequantised, load, rounded};
use std::path::Path;
use std::sync::Arc;
use tokenrouter::launch::embedded;
use tokenrouter_core::rng::{Stream, unit};
use tokenrouter_gpu::cuda::model::CudaPlace;
use tokenrouter_gpu::cuda::{CudaOptions, GraphGrid};
use tokenrouter_gpu::load::{Device, KvMemory, LoadOptions, LoadedModel};
use tokenrouter_gpu::weights::synth::{Shape, Synth};
use tokenrouter_gpu::weights::{self, ModelFiles};
use tokenrouter_kernels::cuda::Devices;
use tokenrouter_kernels::quant::Format;

/// Sequences of the script.
const SEQUENCES: usize = 3;
/// What rounding does in sums of fixed order, of the largest logit of a row: keys and values have 16 bits, and a sum that
/// is rounded another way moves some of them by their last.
const EXACT: f64 = 2e-3;
/// Prompts of more than 16 rows round activations to 16 bits.
const ROUNDED: f64 = 2e-2;
/// A small Qwen3.
const SMALL: Shape =
    Shape { hidden: 128, layers: 2, heads: 4, kv_heads: 2, head_dim: 32, ffn: 256, vocab: 320, context: 256 };

/// A model as it is stored, and what the processor makes of the same weights.
pub struct Model {
    name: String,
    stored: ModelFiles,
    reference: LoadedModel,
}

impl Model {
    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// The device, and how a model uses it.
struct Way<'a> {
    devices: &'a Arc<Devices>,
    ordinal: usize,
    graphs: bool,
    deterministic: bool,
}

/// Rows of a step: which sequence is fed up to which token.
pub type Script = Vec<Vec<(usize, usize)>>;

/// Prompts of different lengths together, decodes, extends of several tokens, and one alone.
pub fn script() -> Script {
    vec![
        vec![(0, 5), (1, 17), (2, 1)],
        vec![(0, 6), (1, 18), (2, 2)],
        vec![(1, 20)],
        vec![(0, 9), (2, 3)],
        vec![(0, 10), (1, 21), (2, 40)],
        vec![(2, 41)],
    ]
}

/// How its models are loaded.
pub fn options(device: Device) -> LoadOptions {
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

/// The demo pair.
///
/// # Errors
/// A file that cannot be written or read.
pub fn demo_pair(folder: &Path) -> Result<Vec<Model>, String> {
    let demo = embedded::lay_out(folder).map_err(|error| error.to_string())?;
    ["small", "large"].map(|name| model(&format!("demo {name}"), &demo.join(name), folder)).into_iter().collect()
}

/// Small Qwen3 models of random weights: BF16, and quantised.
///
/// # Errors
/// A file that cannot be written or read.
pub fn synthetic(folder: &Path, (formats, seed): (&[Format], u64)) -> Result<Vec<Model>, String> {
    let make = |&format: &Format| {
        let name = format!("Qwen3 {}", format.name());
        let stored = if format == Format::BF16 { Format::Q8_0 } else { format };
        let path = folder.join(format!("{}-{seed}.gguf", format.name()));
        let synth = Synth { shape: SMALL, format: stored, seed };
        synth.write(&path, &mut |_| ()).map_err(|error| error.to_string())?;
        if format != Format::BF16 {
            return model(&name, &path, folder);
        }
        let rounded_to = folder.join(format!("{}-{seed}", format.name()));
        std::fs::create_dir_all(&rounded_to).map_err(|error| format!("{}: {error}", rounded_to.display()))?;
        compared(&name, rounded(open(&path)?, &rounded_to), folder)
    };
    formats.iter().map(make).collect()
}

fn open(path: &Path) -> Result<ModelFiles, String> {
    weights::open(path).map_err(|error| error.to_string())
}

fn model(name: &str, path: &Path, folder: &Path) -> Result<Model, String> {
    compared(name, open(path)?, folder)
}

fn compared(name: &str, stored: ModelFiles, folder: &Path) -> Result<Model, String> {
    let wide = folder.join(format!("{name} as F32"));
    std::fs::create_dir_all(&wide).map_err(|error| format!("{}: {error}", wide.display()))?;
    let reference = load(&dequantised(stored.clone(), &wide), options(Device::Cpu));
    Ok(Model { name: name.to_owned(), stored, reference })
}

/// Compares models with the processor: launch by launch, from graphs, and from graphs in fixed order.
///
/// # Errors
/// Bits that differ in fixed order between a sequence alone and beside others.
pub fn check((devices, ordinal): (&Arc<Devices>, usize), models: &[Model]) -> Result<Vec<Finding>, String> {
    let mut findings = Vec::new();
    for Model { name, stored, reference } in models {
        let expected = run(reference, &script());
        for (what, graphs, deterministic) in
            [("launches", false, false), ("graphs", true, false), ("graphs, fixed order", true, true)]
        {
            let way = Way { devices, ordinal, graphs, deterministic };
            let loaded = load(stored, options(way.device()));
            let found = run(&loaded, &script());
            let tolerance = if deterministic { EXACT } else { ROUNDED };
            let mut finding = Finding::new(&format!("{name}, {what}"), tolerance);
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                let expected: Vec<f64> = expected.logits.iter().map(|&logit| f64::from(logit)).collect();
                finding.note_rows((&found.logits, &expected), expected.len());
            }
            findings.push(finding);
            if deterministic {
                alone(name, &loaded, &found)?;
            }
        }
    }
    Ok(findings)
}

/// Each sequence by itself must get the bits that it got beside the others.
fn alone(name: &str, model: &LoadedModel, together: &[Vec<Fed>]) -> Result<(), String> {
    for sequence in 0..SEQUENCES {
        let script = script();
        let own: Script =
            script.iter().map(|step| step.iter().copied().filter(|row| row.0 == sequence).collect()).collect();
        let own: Script = own.into_iter().filter(|step: &Vec<_>| !step.is_empty()).collect();
        let found = run(model, &own);
        let rows = script.iter().zip(together).flat_map(|(step, fed)| step.iter().zip(fed));
        let expected = rows.filter(|(row, _)| row.0 == sequence).map(|(_, fed)| fed);
        for (at, (found, expected)) in found.iter().flatten().zip(expected).enumerate() {
            same(&format!("{name}, step {at} of sequence {sequence} alone"), &found.bits(), &expected.bits())?;
        }
    }
    Ok(())
}

/// What a model says to each row of a script.
pub fn run(model: &LoadedModel, script: &Script) -> Vec<Vec<Fed>> {
    let mut walker = Walker::new(model, SEQUENCES);
    let token = |sequence: usize, at: usize| 3 + (unit(sequence as u64, at as u32, Stream::Owner) * 90.0) as u32;
    let texts: Vec<Vec<u32>> = (0..SEQUENCES).map(|s| (0..64).map(|at| token(s, at)).collect()).collect();
    let mut step = |rows: &Vec<(usize, usize)>| {
        let rows: Vec<(usize, &[u32])> = rows.iter().map(|&(s, len)| (s, &texts[s][..len])).collect();
        walker.step(&rows)
    };
    script.iter().map(&mut step).collect()
}

impl Way<'_> {
    fn device(&self) -> Device {
        let graphs = if self.graphs { GraphGrid::new(vec![1, 4], vec![1, 4]) } else { GraphGrid::default() };
        let options =
            CudaOptions { ordinal: self.ordinal, graphs, deterministic: self.deterministic, high_priority: false };
        Device::Cuda(CudaPlace { devices: self.devices.clone(), options })
    }
}
