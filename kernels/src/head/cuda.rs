//! Reductions of logits and draws on a CUDA device.
//!
//! Owner: a model has one [`HeadScratch`]; its operations keep [`HeadKernels`]. Invariant: what a row says depends on
//! nothing but the row, and is the same from run to run; on equal logits the token is that of the sampler on the host.
//! Launches depend on the number of outputs and the width of a row alone.

use crate::cuda::{
    AnswerMemory, Args, Array, CudaError, Function, Gpu, Launch, NONE, Source, StepMemory, Stream, View,
};

const HEADERS: &[(&str, &str)] = &[("ranks.cuh", include_str!("ranks.cuh"))];

/// Reductions.
pub static REDUCE: Source = Source { name: "head.cu", text: include_str!("head.cu"), headers: HEADERS, exact: false };

/// Draws.
pub static SAMPLE: Source =
    Source { name: "sample.cu", text: include_str!("sample.cu"), headers: HEADERS, exact: true };

/// Ids of a chunk, as `CHUNK` in the source.
const CHUNK: usize = 1024;
/// Threads of a block that reads a chunk.
const CHUNK_THREADS: u32 = 256;
/// Threads of a block that reads what the chunks of a row say; one for each chunk.
const ROW_THREADS: u32 = 512;
/// Partial sums of weights per chunk.
const SUMS: usize = 2;
/// Words of what a chunk says.
const PART_WORDS: usize = 4;

/// Compiled kernels.
#[derive(Clone, Debug)]
pub struct HeadKernels {
    read: Function,
    answer: Function,
    adjust: Function,
    weigh: Function,
    draw: Function,
}

/// Memory that steps have in common.
#[derive(Debug)]
pub struct HeadScratch {
    outputs_max: usize,
    vocab: usize,
    /// `[outputs, chunks]`
    parts: Array<u64>,
    /// Sorted keys of chunks: `[outputs, chunks, CHUNK]`, or shorter runs.
    runs: Array<u64>,
    /// Adjusted logits `[outputs, vocab]`.
    work: Array<f32>,
    /// `[outputs, chunks, SUMS]`
    sums: Array<f64>,
}

impl HeadScratch {
    /// Memory for so many rows of `vocab` logits.
    ///
    /// # Errors
    /// [`CudaError::Memory`], or [`CudaError::Unsupported`] for rows that are too wide.
    pub fn new(gpu: &Gpu, outputs_max: usize, vocab: usize) -> Result<Self, CudaError> {
        let chunks = vocab.div_ceil(CHUNK);
        if vocab == 0 || chunks > ROW_THREADS as usize {
            let most = CHUNK * ROW_THREADS as usize;
            return Err(CudaError::Unsupported { what: format!("rows of {vocab} logits; there may be 1 to {most}") });
        }
        let what = "reductions of logits";
        Ok(HeadScratch {
            outputs_max,
            vocab,
            parts: Array::new(gpu, what, outputs_max * chunks * PART_WORDS)?,
            runs: Array::new(gpu, what, outputs_max * chunks * CHUNK)?,
            work: Array::new(gpu, what, outputs_max * vocab)?,
            sums: Array::new(gpu, what, outputs_max * chunks * SUMS)?,
        })
    }

    /// Partial sums of weights of the last draws, and how many there are for each output. Those of outputs that needed none
    /// are not defined.
    pub fn sums(&self) -> (&Array<f64>, usize) {
        (&self.sums, self.vocab.div_ceil(CHUNK) * SUMS)
    }

    /// Bytes of [`HeadScratch::new`].
    pub fn bytes(outputs_max: usize, vocab: usize) -> u64 {
        let chunks = vocab.div_ceil(CHUNK);
        (outputs_max * (chunks * 8 * (PART_WORDS + CHUNK + SUMS) + vocab * 4)) as u64
    }
}

/// Rows of logits, what is asked about them, and where the answers go.
#[derive(Clone, Copy, Debug)]
pub struct HeadArgs<'a> {
    /// `[outputs, vocab]`
    pub logits: View<f32>,
    /// Rows, padding included.
    pub outputs: usize,
    /// What is asked and how tokens are drawn; no list is asked for that is longer than `TOP_MAX`.
    pub step: &'a StepMemory,
    /// Where the answers go.
    pub answers: &'a AnswerMemory,
    /// Scratch.
    pub scratch: &'a HeadScratch,
}

impl HeadArgs<'_> {
    /// # Panics
    /// If sizes do not fit.
    fn check(&self) {
        let HeadArgs { logits, outputs, step, answers, scratch } = *self;
        assert!(outputs <= scratch.outputs_max && outputs <= step.limits().rows, "{outputs} outputs");
        assert!(outputs <= answers.answers().len(), "{outputs} answers");
        assert!(logits.len() >= outputs * scratch.vocab, "{outputs} rows of logits");
        assert!(step.limits().vocab as usize == scratch.vocab, "width of the rows of logits");
    }

    fn chunks(&self) -> usize {
        self.scratch.vocab.div_ceil(CHUNK)
    }

    fn of_chunks(&self) -> Launch {
        Launch { grid: (self.chunks() as u32, self.outputs as u32, 1), block: CHUNK_THREADS, shared: 0 }
    }

    fn of_rows(&self) -> Launch {
        Launch::blocks(self.outputs as u32, ROW_THREADS)
    }
}

impl HeadKernels {
    /// Compiles or finds them.
    ///
    /// # Errors
    /// [`CudaError`] of the compiler or the driver.
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let (reduce, sample) = (gpu.module(&REDUCE)?, gpu.module(&SAMPLE)?);
        Ok(HeadKernels {
            read: reduce.function("head_read")?,
            answer: reduce.function("head_answer")?,
            adjust: sample.function("sample_adjust")?,
            weigh: sample.function("sample_weigh")?,
            draw: sample.function("sample_draw")?,
        })
    }

    /// Answers what is asked about the rows. The value of `column` goes to the answer and minus infinity takes its place in
    /// the logits, unless it is NaN or plus infinity.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn reduce(&self, stream: &Stream, args: &HeadArgs<'_>, column: Option<u32>) -> Result<(), CudaError> {
        args.check();
        let HeadArgs { logits, step, answers, scratch, .. } = *args;
        let read = Args::new()
            .view(logits)
            .view(step.asks())
            .view(answers.answers())
            .view(scratch.parts.view())
            .view(scratch.runs.view())
            .size(scratch.vocab)
            .u32(column.unwrap_or(NONE));
        let answer = Args::new()
            .view(logits)
            .view(step.asks())
            .view(scratch.parts.view())
            .view(scratch.runs.view())
            .view(answers.answers())
            .view(answers.tops())
            .view(answers.real_tops())
            .size(scratch.vocab)
            .size(args.chunks());
        // SAFETY: sizes were checked; a block writes the parts, runs and answer of its own chunk or row, lists have TOP_MAX
        // places and are not asked to be longer, and the arrays belong to the step, which waits for the stream.
        unsafe {
            self.read.launch(stream, args.of_chunks(), read)?;
            self.answer.launch(stream, args.of_rows(), answer)
        }
    }

    /// Draws the tokens of rows that have been reduced.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn draw(&self, stream: &Stream, args: &HeadArgs<'_>) -> Result<(), CudaError> {
        args.check();
        let HeadArgs { logits, step, answers, scratch, .. } = *args;
        let adjust = Args::new()
            .view(logits)
            .view(step.asks())
            .view(step.draws())
            .view(step.edits())
            .view(step.masks())
            .view(answers.answers())
            .view(scratch.work.view())
            .view(scratch.parts.view())
            .view(scratch.runs.view())
            .size(scratch.vocab);
        let weigh = Args::new()
            .view(step.asks())
            .view(step.draws())
            .view(answers.answers())
            .view(scratch.work.view())
            .view(scratch.parts.view())
            .view(scratch.sums.view())
            .size(scratch.vocab);
        let draw = Args::new()
            .view(logits)
            .view(step.asks())
            .view(step.draws())
            .view(scratch.work.view())
            .view(scratch.parts.view())
            .view(scratch.runs.view())
            .view(scratch.sums.view())
            .view(answers.answers())
            .size(scratch.vocab)
            .size(args.chunks());
        // SAFETY: as in `reduce`; edits and masks of a draw lie in their arrays, and ids are below the width of a row, as
        // the step was checked when it was staged.
        unsafe {
            self.adjust.launch(stream, args.of_chunks(), adjust)?;
            self.weigh.launch(stream, args.of_chunks(), weigh)?;
            self.draw.launch(stream, args.of_rows(), draw)
        }
    }
}
