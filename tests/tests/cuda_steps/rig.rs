//! What the tests of steps share: small models on the processor and on the device, texts cut into rows, and all that a step
//! says. Owner: these tests. Invariant: a sequence's pages are its own.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use tokenrouter_core::executor::{Draw, Executor, ExecutorError, Needs, Row, RowOutput, Step};
use tokenrouter_core::ids::RequestId;
use tokenrouter_core::rng::{Stream, unit};
use tokenrouter_gpu::cuda::model::CudaPlace;
use tokenrouter_gpu::cuda::{CudaOptions, GraphGrid};
use tokenrouter_gpu::load::{AnyRunner, Device, KvMemory, LoadOptions, LoadedModel};
use tokenrouter_kernels::cuda::{Devices, DevicesConfig};
use tokenrouter_tests::conformance::{demo, dequantised, load, open};
use tokenrouter_tests::cuda_sim::CudaSim;

/// Tokens of a sequence at most.
pub const CONTEXT: usize = 96;
/// Tokens of the demo models; ids beyond are padding.
pub const REAL_VOCAB: u32 = 600;
/// Pages of an executor.
pub const PAGES: u32 = 40;

/// Pseudo-random numbers.
pub struct Random {
    seed: u64,
    at: u32,
}

impl Random {
    /// From the clock, or from `GPU_CHECK_SEED`.
    pub fn fresh() -> Random {
        let seed = match std::env::var("GPU_CHECK_SEED").ok().and_then(|seed| seed.parse().ok()) {
            Some(seed) => seed,
            None => std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64),
        };
        eprintln!("GPU_CHECK_SEED={seed}");
        Random { seed, at: 0 }
    }

    /// A number within 0 and 1.
    pub fn unit(&mut self) -> f64 {
        self.at += 1;
        unit(self.seed, self.at, Stream::Owner)
    }

    /// A number below a bound.
    pub fn below(&mut self, bound: u32) -> u32 {
        (self.unit() * f64::from(bound)) as u32
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u32) as usize]
    }
}

/// Sizes of all executors here.
pub fn sizes(device: Device) -> LoadOptions {
    LoadOptions {
        device,
        threads: 1,
        kv: KvMemory::Pages(PAGES),
        context_len: Some(CONTEXT as u32),
        rows_max: 4,
        step_tokens_max: 64,
        ..LoadOptions::default()
    }
}

/// Shapes of one, two and four requests with one and four tokens.
pub fn grid() -> GraphGrid {
    GraphGrid::new(vec![1, 2, 4], vec![1, 4])
}

/// How a model uses device 0.
pub fn options(graphs: GraphGrid, deterministic: bool) -> CudaOptions {
    CudaOptions { ordinal: 0, graphs, deterministic, high_priority: false }
}

/// A model's place, with nobody else on its device.
pub fn alone_on(options: CudaOptions) -> Device {
    Device::Cuda(CudaPlace { devices: Arc::new(Devices::new(DevicesConfig::default())), options })
}

/// A model of the demo pair.
pub fn model(name: &str, options: LoadOptions) -> LoadedModel {
    load(&open(&demo(name)), options)
}

/// The same on the processor, its weights turned into floats: the processor would round activations for others.
pub fn reference(name: &str, options: LoadOptions) -> LoadedModel {
    let folder: PathBuf = std::env::temp_dir().join(format!(
        "tokenrouter-cuda-steps-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    std::fs::create_dir_all(&folder).expect("the temporary folder takes files");
    let loaded = load(&dequantised(open(&demo(name)), &folder), options);
    std::fs::remove_dir_all(&folder).expect("it is there");
    loaded
}

/// Everything said of the token after a row, and the logits.
pub fn all_needs() -> Draw {
    let needs = Needs { entropy: true, top_k: 5, hidden: true, score: false };
    Draw { needs, logprobs: Some(3), ..Draw::default() }
}

/// Texts, each with pages of its own.
pub struct Texts {
    tokens: Vec<Vec<u32>>,
    pages: Vec<Vec<u32>>,
}

impl Texts {
    /// Random texts of random lengths.
    pub fn new(random: &mut Random, count: usize) -> Texts {
        let text = |random: &mut Random| -> Vec<u32> {
            (0..24 + random.below(CONTEXT as u32 - 40)).map(|_| random.below(REAL_VOCAB)).collect()
        };
        let tokens = (0..count).map(|_| text(random)).collect();
        let mut texts = Texts { tokens, pages: Vec::new() };
        texts.move_pages(random);
        texts
    }

    /// Deals the pages anew.
    pub fn move_pages(&mut self, random: &mut Random) {
        let mut all: Vec<u32> = (0..PAGES).collect();
        for index in (1..all.len()).rev() {
            all.swap(index, random.below(index as u32 + 1) as usize);
        }
        let each = CONTEXT.div_ceil(16);
        self.pages = all.chunks_exact(each).take(self.tokens.len()).map(<[u32]>::to_vec).collect();
    }

    /// Number of texts.
    pub fn count(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens of a text.
    pub fn len(&self, text: usize) -> usize {
        self.tokens[text].len()
    }

    /// Tokens of a text, all of them.
    pub fn tokens(&self, text: usize) -> &[u32] {
        &self.tokens[text]
    }

    /// A row that feeds a part of a text.
    pub fn row(&self, text: usize, part: Range<usize>, draw: Option<Draw>) -> Row {
        Row {
            request: RequestId(text as u64),
            start: part.start as u32,
            tokens: self.tokens[text][part.clone()].to_vec(),
            pages: self.pages[text][..part.end.div_ceil(16)].to_vec(),
            draw,
            targets: None,
        }
    }

    /// Steps that feed all texts to their ends: some of them at a time, by parts of random lengths, short ones as a rule.
    pub fn steps(&self, random: &mut Random) -> Vec<Vec<(usize, Range<usize>)>> {
        let mut fed = vec![0; self.count()];
        let mut steps = Vec::new();
        while (0..self.count()).any(|text| fed[text] < self.len(text)) {
            let mut step = Vec::new();
            // Four tokens at most are played from a graph.
            let longest = random.pick(&[1, 4, 4, 15]);
            for (text, fed) in fed.iter_mut().enumerate() {
                let left = self.len(text) - *fed;
                if left > 0 && random.below(3) > 0 {
                    let part = (1 + random.below(longest) as usize).min(left);
                    step.push((text, *fed..*fed + part));
                    *fed += part;
                }
            }
            if !step.is_empty() {
                steps.push(step);
            }
        }
        steps
    }

    /// A step of these parts, all with the same draw.
    pub fn step(&self, parts: &[(usize, Range<usize>)], draw: &Draw) -> Step {
        let row = |(text, part): &(usize, Range<usize>)| self.row(*text, part.clone(), Some(draw.clone()));
        Step { rows: parts.iter().map(row).collect() }
    }
}

/// What a row said, and its logits.
#[derive(Clone, Debug)]
pub struct Said {
    /// The answer.
    pub output: RowOutput,
    /// Raw logits.
    pub logits: Vec<f32>,
}

impl Said {
    /// Every bit of it; numbers are written so that they can be read back exactly.
    pub fn bits(&self) -> String {
        let logits: Vec<u32> = self.logits.iter().map(|logit| logit.to_bits()).collect();
        format!("{:?} {logits:x?}", self.output)
    }
}

/// Runs a step and reads everything.
pub fn say(runner: &mut AnyRunner, step: &Step) -> Result<Vec<Said>, ExecutorError> {
    let outputs = runner.step(step)?.rows;
    let mut said = |(row, output)| Said { output, logits: runner.last_logits(row).unwrap_or_default().to_vec() };
    Ok(outputs.into_iter().enumerate().map(&mut said).collect())
}

/// A new executor.
pub fn executor(model: &LoadedModel) -> AnyRunner {
    model
        .executor()
        .unwrap_or_else(|error| panic!("{error}; the device says {:?}", CudaSim::load().unwrap().last_report()))
}

/// Runs steps on a new executor and writes down every bit that is said.
pub fn bits_of(model: &LoadedModel, steps: &[Step]) -> Vec<String> {
    let mut runner = executor(model);
    let mut bits = Vec::new();
    for step in steps {
        let said = say(&mut runner, step).unwrap_or_else(|error| panic!("{error}"));
        bits.extend(said.iter().map(Said::bits));
    }
    bits
}
