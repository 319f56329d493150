//! How long steps of a model take on the device: decode, extend, prefill, with graphs and without. Owner: the program.
//! Invariant: a time is the median of many runs of the same step, from the call to its answer, keys and values of the whole
//! context being there; every row must have drawn a token.

use super::report::{Report, Target};
use super::text;
use std::sync::Arc;
use std::time::Instant;
use tokenrouter_core::executor::{
    Draw, Executor, ExecutorLimits, Needs, PAGE_TOKENS, Row, RowOutput, Step, StepOutput,
};
use tokenrouter_core::ids::RequestId;
use tokenrouter_core::rng::mix;
use tokenrouter_gpu::cuda::random::{RandomModel, RandomSpec};
use tokenrouter_gpu::cuda::{Cuda, CudaOptions, GraphGrid};
use tokenrouter_gpu::models::blocks::Scratch;
use tokenrouter_gpu::ops::{KvFormat, KvShape, Ops};
use tokenrouter_gpu::runner::Runner;
use tokenrouter_gpu::weights::ModelConfig;
use tokenrouter_kernels::cuda::Gpu;
use tokenrouter_kernels::matmul::cuda::device_bytes;
use tokenrouter_kernels::quant::Format;

/// Steps before the clock starts.
const WARM_UP: usize = 3;
/// Runs of a graph that are timed on the device together.
const REPLAYS: u16 = 20;

/// A model to measure, and what it should reach.
#[derive(Clone, Debug)]
pub struct Subject {
    /// What it is called.
    pub name: &'static str,
    /// Its shape.
    pub config: ModelConfig,
    /// Format of its matrices.
    pub format: Format,
    /// Milliseconds of a decode step of one row.
    pub decode_ms: Option<f64>,
    /// Share of the bandwidth of a copy in a decode step of one row.
    pub bandwidth: Option<f64>,
    /// A decode step of the most rows, in steps of one row.
    pub many: Option<f64>,
    /// An extend step of one row, in decode steps.
    pub extend: Option<f64>,
    /// Microseconds of a decode step of the most rows in which the device has nothing to do.
    pub overhead_us: Option<f64>,
}

/// Sizes of what is measured.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Tokens that each row has before a decode or extend step.
    pub context: u32,
    /// Tokens of an extend step.
    pub extend: u32,
    /// Tokens of a prefill, in one step.
    pub prefill: u32,
    /// Numbers of rows, the most last.
    pub rows: Vec<u32>,
    /// Longest sequence that executors have room for, each row of them.
    pub longest: u32,
    /// Runs of each step.
    pub repeats: usize,
}

impl Subject {
    /// Bytes of the device that it takes: weights, keys and values, activations, and an allowance for everything else.
    ///
    /// # Errors
    /// A shape that no kernel takes.
    pub fn bytes(&self, sizes: &Sizes) -> Result<u64, String> {
        const OTHERS: u64 = 512 << 20;
        let config = &self.config;
        let weights =
            config.tensors().iter().map(|&(_, [rows, cols])| device_bytes(self.format, rows, cols)).sum::<u64>();
        let kv = KvShape {
            layers: config.layers,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            format: KvFormat::default(),
        };
        let ExecutorLimits { pages, step_tokens_max, rows_max, .. } = sizes.limits(config.vocab);
        let scratch = Scratch::<Cuda>::bytes(config, step_tokens_max as usize, rows_max as usize);
        Ok(weights + u64::from(pages) * Cuda::kv_page_bytes(&kv).map_err(text)? + scratch + OTHERS)
    }
}

impl Sizes {
    /// Shapes that are recorded.
    pub fn graphs(&self) -> GraphGrid {
        GraphGrid::new(self.rows.iter().map(|&rows| rows as usize).collect(), vec![1, 2, 4])
    }

    fn most(&self) -> u32 {
        self.rows.last().copied().unwrap_or(1)
    }

    fn limits(&self, vocab: usize) -> ExecutorLimits {
        ExecutorLimits {
            pages: self.most() * self.longest.div_ceil(PAGE_TOKENS as u32),
            rows_max: self.most(),
            step_tokens_max: self.prefill,
            context_len: self.longest,
            vocab_width: vocab as u32,
        }
    }
}

/// A model that was measured.
pub struct Measured {
    /// Its weights, on the device.
    pub model: Arc<RandomModel>,
    /// Seconds of a decode step from graphs by number of rows.
    pub decode: Vec<(u32, f64)>,
}

impl Measured {
    /// Seconds of a decode step of 1 to `most` rows, on the line between those that were measured.
    pub fn seconds(&self, most: u32) -> Vec<f64> {
        (1..=most).map(|rows| between(&self.decode, rows)).collect()
    }
}

fn between(points: &[(u32, f64)], rows: u32) -> f64 {
    let after = points.iter().position(|&(at, _)| at >= rows);
    match after {
        None => points.last().map_or(f64::NAN, |&(_, seconds)| seconds),
        Some(0) => points[0].1,
        Some(after) => {
            let ((n, a), (m, b)) = (points[after - 1], points[after]);
            a + (b - a) * f64::from(rows - n) / f64::from(m - n)
        }
    }
}

/// Makes a model and measures it.
///
/// # Errors
/// What the device says; a row that draws nothing.
pub fn measure(
    gpu: &Gpu,
    (subject, sizes): (&Subject, &Sizes),
    (bandwidth, report): (f64, &mut Report),
) -> Result<Measured, String> {
    let limits = sizes.limits(subject.config.vocab);
    let spec = RandomSpec { config: subject.config.clone(), format: subject.format, limits, seed: 1 };
    let model = Arc::new(RandomModel::new(gpu, spec).map_err(text)?);
    let name = |what: String| format!("{}, {what}", subject.name);
    let options = |graphs| CudaOptions { ordinal: gpu.facts().ordinal, graphs, ..CudaOptions::default() };
    let mut driver = Driver::new(&model, &options(sizes.graphs()))?;
    let prefill = driver.fill(sizes)?;
    report.measured(
        &name(format!("prefill of {}", sizes.prefill)),
        (f64::from(sizes.prefill) / prefill, "tokens/s"),
        None,
    );
    let mut decode = Vec::new();
    for &rows in &sizes.rows {
        let seconds = driver.time((rows, sizes.context, 1), sizes.repeats)?;
        let target = subject.decode_ms.filter(|_| rows == 1).map(Target::AtMost);
        report.measured(&name(format!("decode of {rows}")), (seconds * 1e3, "ms"), target);
        decode.push((rows, seconds));
    }
    let (one, most) = (decode[0].1, decode[decode.len() - 1]);
    let read = model.weight_bytes() + model.kv_bytes().map_err(text)? * u64::from(sizes.context);
    let share = read as f64 / one / bandwidth;
    report.measured(
        &name("share of copy bandwidth, 1 row".into()),
        (share, ""),
        subject.bandwidth.map(Target::AtLeast),
    );
    report.measured(
        &name(format!("decode of {} / of 1", most.0)),
        (most.1 / one, ""),
        subject.many.map(Target::AtMost),
    );
    overhead(&mut driver, (subject, sizes), report)?;
    let extend = driver.time((1, sizes.context, sizes.extend), sizes.repeats)?;
    let extend_name = name(format!("extend of {} tokens / decode", sizes.extend));
    report.measured(&extend_name, (extend / one, ""), subject.extend.map(Target::AtMost));
    drop(driver);
    let mut eager = Driver::new(&model, &options(GraphGrid::default()))?;
    eager.fill(sizes)?;
    for &rows in &sizes.rows {
        let seconds = eager.time((rows, sizes.context, 1), sizes.repeats)?;
        report.measured(&name(format!("decode of {rows}, graphs off")), (seconds * 1e3, "ms"), None);
    }
    Ok(Measured { model, decode })
}

/// What a step takes beyond the time of its graph, which is timed back to back on the device.
fn overhead(driver: &mut Driver, (subject, sizes): (&Subject, &Sizes), report: &mut Report) -> Result<(), String> {
    let rows = sizes.most();
    let step = driver.time((rows, sizes.context, 1), sizes.repeats)?;
    let name = format!("{}, step of {rows} outside kernels", subject.name);
    match driver.runner.device().replay(REPLAYS).map_err(text)? {
        None => return Err(format!("a step of {rows} rows was not played from a graph")),
        Some(graph_ms) => {
            let outside = step * 1e6 - f64::from(graph_ms) * 1e3;
            report.measured(&name, (outside, "us"), subject.overhead_us.map(Target::AtMost));
        }
    }
    Ok(())
}

/// An executor with rows of its own.
struct Driver {
    runner: Runner<Cuda>,
    /// Pages of each row.
    pages: u32,
}

impl Driver {
    fn new(model: &RandomModel, options: &CudaOptions) -> Result<Driver, String> {
        let limits = model.limits();
        Ok(Driver { runner: model.executor(options).map_err(text)?, pages: limits.pages / limits.rows_max })
    }

    /// Gives every row its context; seconds of a prefill in one step.
    fn fill(&mut self, sizes: &Sizes) -> Result<f64, String> {
        for row in 0..sizes.most() {
            for start in (0..sizes.context).step_by(sizes.prefill as usize) {
                let tokens = sizes.prefill.min(sizes.context - start);
                self.step(vec![self.row(row, start, tokens)])?;
            }
        }
        // Positions beyond the context are written too, and never read.
        self.time((1, 0, sizes.prefill), sizes.repeats.min(5))
    }

    fn row(&self, index: u32, start: u32, tokens: u32) -> Row {
        let vocab = u64::from(self.runner.limits().vocab_width);
        let token = |at: u32| (mix(u64::from(index) << 32 | u64::from(at)) % vocab) as u32;
        let used = (start + tokens).div_ceil(PAGE_TOKENS as u32);
        Row {
            request: RequestId(u64::from(index)),
            start,
            tokens: (start..start + tokens).map(token).collect(),
            pages: (0..used).map(|page| index * self.pages + page).collect(),
            draw: Some(Draw {
                params: Arc::default(),
                history: None,
                banned: Arc::from([]),
                mask: None,
                needs: Needs::default(),
                logprobs: None,
            }),
            targets: None,
        }
    }

    fn step(&mut self, rows: Vec<Row>) -> Result<f64, String> {
        let step = Step { rows };
        self.timed(&step)
    }

    fn timed(&mut self, step: &Step) -> Result<f64, String> {
        let began = Instant::now();
        let StepOutput { rows } = self.runner.step(step).map_err(text)?;
        let seconds = began.elapsed().as_secs_f64();
        match rows.iter().find(|row| !matches!(row, RowOutput::Drawn(_))) {
            None => Ok(seconds),
            Some(row) => Err(format!("a row drew nothing: {row:?}")),
        }
    }

    /// Median seconds of a step of so many rows, each from a position on, of so many tokens.
    fn time(&mut self, (rows, start, tokens): (u32, u32, u32), repeats: usize) -> Result<f64, String> {
        let step = Step { rows: (0..rows).map(|index| self.row(index, start, tokens)).collect() };
        for _ in 0..WARM_UP.min(repeats) {
            self.timed(&step)?;
        }
        let mut seconds = (0..repeats).map(|_| self.timed(&step)).collect::<Result<Vec<_>, _>>()?;
        seconds.sort_unstable_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_between_measured_numbers_of_rows_lie_on_a_line() {
        let points = [(1, 1.0), (2, 2.0), (4, 3.0)];
        let found: Vec<f64> = (1..=6).map(|rows| between(&points, rows)).collect();
        assert_eq!(found, [1.0, 2.0, 2.5, 3.0, 3.0, 3.0]);
    }
}
