//! Elementwise operations and the small operations of learned heads, against f64 or the same in plain loops.

use super::{Finding, Random, bits, same, text};
use tokenrouter_gpu::heads::math;
use tokenrouter_kernels::activation::cuda::{ActivationKernels, PlaceArgs, TopRowsArgs};
use tokenrouter_kernels::cuda::{
    AnswerMemory, Array, Ask, CudaError, Draw, Gpu, NONE, StepInput, StepLimits, StepMemory, Stream, TOP_MAX, View, ask,
};
use tokenrouter_kernels::head::cuda::{HeadArgs, HeadKernels, HeadScratch};

/// Runs all checks.
///
/// # Errors
/// What differs where everything must be equal, or what the device says.
pub fn check(gpu: &Gpu, seed: u64) -> Result<Vec<Finding>, String> {
    let mut random = Random::new(seed);
    let bench =
        Bench { stream: Stream::new(gpu, 0).map_err(text)?, kernels: ActivationKernels::load(gpu).map_err(text)? };
    let mut findings = bench.elementwise(&mut random)?;
    bench.place(&mut random)?;
    findings.push(bench.softmax(&mut random)?);
    findings.extend(bench.heads(&mut random)?);
    Ok(findings)
}

struct Bench {
    stream: Stream,
    kernels: ActivationKernels,
}

impl Bench {
    fn put(&self, values: &[f32]) -> Result<Array<f32>, String> {
        Array::from_host(&self.stream, "a check", values).map_err(text)
    }

    fn get(&self, array: &Array<f32>) -> Result<Vec<f32>, String> {
        array.to_host(&self.stream).map_err(text)
    }

    /// What an operation on two arrays leaves in the first.
    fn run(
        &self,
        x: &[f32],
        y: &[f32],
        operation: impl FnOnce(View<f32>, View<f32>) -> Result<(), CudaError>,
    ) -> Result<Vec<f32>, String> {
        let (x, y) = (self.put(x)?, self.put(y)?);
        operation(x.view(), y.view()).map_err(text)?;
        self.get(&x)
    }

    fn elementwise(&self, random: &mut Random) -> Result<Vec<Finding>, String> {
        let (stream, kernels) = (&self.stream, &self.kernels);
        let mut silu = Finding::new("activation: silu", 2e-6);
        let mut gelu = Finding::new("activation: gelu", 1e-6);
        for len in [1, 3, 4, 1023, 1024, 1025, 40_003] {
            let mut x: Vec<f32> = (0..len).map(|_| random.normal() * 3.0).collect();
            let special = [f32::NAN, 1e30, -1e30, 0.0, -0.0, -90.0, f32::INFINITY];
            if len > 1000 {
                special.iter().for_each(|value| x[random.below(len)] = *value);
            }
            let y = random.normals(len);
            let found = self.run(&x, &y, |x, y| kernels.silu_mul(stream, x, y))?;
            for ((x, y), found) in x.iter().zip(&y).zip(found) {
                let expected = f64::from(*x) / (1.0 + (-f64::from(*x)).exp()) * f64::from(*y);
                silu.note(found, expected, expected.abs().max(1e-30));
            }
            let found = self.run(&x, &y, |x, _| kernels.gelu(stream, x))?;
            for (x, found) in x.iter().zip(found) {
                let expected = f64::from(math::gelu(*x));
                gelu.note(found, expected, expected.abs().max(0.5));
            }
            let found = self.run(&x, &y, |x, y| kernels.add(stream, x, y))?;
            let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
            same_or_nan(&format!("activation: {len} sums"), &found, &expected)?;
            let found = self.run(&x, &y, |x, _| kernels.relu(stream, x))?;
            let expected: Vec<f32> = x.iter().map(|&x| if x < 0.0 { 0.0 } else { x }).collect();
            same_or_nan(&format!("activation: relu of {len}"), &found, &expected)?;
        }
        Ok(vec![silu, gelu])
    }

    fn place(&self, random: &mut Random) -> Result<(), String> {
        for _ in 0..6 {
            let (rows, width) = (1 + random.below(9), 1 + random.below(300));
            let column = random.below(200);
            let out_width = column + width + random.below(50);
            let (part, mut expected) = (random.normals(rows * width), random.normals(rows * out_width));
            let found = self.run(&expected, &part, |out, part| {
                self.kernels.place(&self.stream, &PlaceArgs { part, width, out, out_width, column, rows })
            })?;
            for (part, row) in part.chunks(width).zip(expected.chunks_mut(out_width)) {
                row[column..column + width].copy_from_slice(part);
            }
            same("activation: place", &bits(&found), &bits(&expected))?;
        }
        Ok(())
    }

    fn softmax(&self, random: &mut Random) -> Result<Finding, String> {
        let mut finding = Finding::new("activation: softmax", 1e-6);
        for (rows, width) in [(1, 1), (3, 20), (9, 100), (17, 128), (8, 129)] {
            let mut x: Vec<f32> = (0..rows * width).map(|_| random.normal() * 5.0 + 300.0).collect();
            if width > 1 {
                x[0] = f32::NEG_INFINITY;
            }
            let found = self.run(&x, &[], |x, _| self.kernels.softmax(&self.stream, x, width))?;
            x.chunks_mut(width).for_each(math::softmax);
            let expected: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
            finding.note_rows((&found, &expected), width);
        }
        Ok(finding)
    }

    /// The lists of outputs as rows, and scores.
    fn heads(&self, random: &mut Random) -> Result<Vec<Finding>, String> {
        let (outputs, vocab) = (11, 300);
        let stream = &self.stream;
        let counts: Vec<usize> = (0..outputs).map(|_| random.of(&[0, 1, 20, TOP_MAX])).collect();
        let mut answers = self.lists((&counts, vocab), random).map_err(text)?;
        let mut finding = Finding::new("activation: softmax of the highest logits", 1e-6);
        for width in [1, 20, 100, TOP_MAX] {
            for softmax in [false, true] {
                let out: Array<f32> = Array::new(stream.gpu(), "a check", outputs * width).map_err(text)?;
                let args = TopRowsArgs { answers: &answers, out: out.view(), rows: outputs, width, softmax };
                self.kernels.top_rows(stream, &args).map_err(text)?;
                let found = self.get(&out)?;
                for (index, found) in found.chunks(width).enumerate() {
                    let mut expected: Vec<f32> = answers.host().tops(index).map(|top| top.logit).take(width).collect();
                    expected.resize(width, f32::NEG_INFINITY);
                    if softmax {
                        math::softmax(&mut expected);
                        let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
                        finding.note_rows((found, &expected), width);
                    } else {
                        same("activation: highest logits", &bits(found), &bits(&expected))?;
                    }
                }
            }
        }
        let mut scores = Finding::new("activation: scores", 1e-6);
        let mut x: Vec<f32> = (0..outputs).map(|_| random.normal() * 10.0).collect();
        (x[0], x[1], x[2]) = (f32::NAN, f32::NEG_INFINITY, 100.0);
        let numbers = self.put(&x)?;
        self.kernels.scores(stream, numbers.view(), &answers).map_err(text)?;
        answers.download(stream, false).map_err(text)?;
        stream.synchronize().map_err(text)?;
        for (index, x) in x.iter().enumerate() {
            scores.note(answers.host().answer(index).score, 1.0 / (1.0 + (-f64::from(*x)).exp()), 1.0);
        }
        Ok(vec![finding, scores])
    }

    /// Answers with lists of these lengths, made as in a step.
    fn lists(&self, (counts, vocab): (&[usize], usize), random: &mut Random) -> Result<AnswerMemory, CudaError> {
        let (stream, outputs) = (&self.stream, counts.len());
        let gpu = stream.gpu();
        let limits = StepLimits { tokens: 1, rows: outputs, row_pages: 1, pages: 1, vocab: vocab as u32 };
        let mut step = StepMemory::new(stream, limits)?;
        let ask = |count: &usize| Ask {
            flags: ask::PRESENT,
            real_vocab: vocab as u32,
            top_k: *count as u32,
            target: NONE,
            ..Ask::default()
        };
        let input = StepInput {
            outputs: vec![0; outputs],
            asks: counts.iter().map(ask).collect(),
            draws: vec![Draw { mask_first: NONE, ..Draw::default() }; outputs],
            ..StepInput::default()
        };
        step.reserve(stream, &input)?;
        step.upload(stream, &input)?;
        let logits = Array::from_host(stream, "a check", &random.normals(outputs * vocab))?;
        let mut answers = AnswerMemory::new(stream, outputs)?;
        let scratch = HeadScratch::new(gpu, outputs, vocab)?;
        let args = HeadArgs { logits: logits.view(), outputs, step: &step, answers: &answers, scratch: &scratch };
        HeadKernels::load(gpu)?.reduce(stream, &args, None)?;
        answers.download(stream, true)?;
        stream.synchronize()?;
        Ok(answers)
    }
}

/// Equal bit by bit, but for what kind of NaN something is.
fn same_or_nan(what: &str, found: &[f32], expected: &[f32]) -> Result<(), String> {
    let plain = |values: &[f32]| -> Vec<u32> {
        values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    };
    same(what, &plain(found), &plain(expected))
}
