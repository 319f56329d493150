//! Elementwise operations and the small operations of learned heads on a CUDA device.
//!
//! Owner: the operations of a model keep [`ActivationKernels`]. Invariant: each value, or row of a softmax, is computed by
//! itself; launches depend on sizes alone.

use crate::cuda::{AnswerMemory, Args, CudaError, Function, Gpu, Launch, Source, Stream, TOP_MAX, View};

/// The kernels.
pub static SOURCE: Source =
    Source { name: "activation.cu", text: include_str!("activation.cu"), headers: &[], exact: true };

/// Threads of a block, as in the source.
const THREADS: u32 = 256;
/// Values that a block of an elementwise operation takes.
const VALUES: usize = 4 * THREADS as usize;
/// Rows that a block of a softmax takes: one a warp.
const ROWS: usize = 8;

/// Compiled kernels.
#[derive(Clone, Debug)]
pub struct ActivationKernels {
    silu_mul: Function,
    add: Function,
    gelu: Function,
    relu: Function,
    place: Function,
    softmax: Function,
    top_rows: Function,
    scores: Function,
}

/// Rows side by side with others.
#[derive(Clone, Copy, Debug)]
pub struct PlaceArgs {
    /// `[rows, width]`
    pub part: View<f32>,
    /// Width of a row of it.
    pub width: usize,
    /// `[rows, out_width]`
    pub out: View<f32>,
    /// Width of a row of it.
    pub out_width: usize,
    /// Where the columns of `part` start in `out`.
    pub column: usize,
    /// Rows.
    pub rows: usize,
}

/// Highest logits of outputs as rows.
#[derive(Clone, Copy, Debug)]
pub struct TopRowsArgs<'a> {
    /// Where the lists of whole rows of logits are.
    pub answers: &'a AnswerMemory,
    /// `[rows, width]`: the logits of the list, minus infinity behind its end.
    pub out: View<f32>,
    /// Rows: the first outputs.
    pub rows: usize,
    /// Entries of a list to take.
    pub width: usize,
    /// Whether the softmax of the row takes its place.
    pub softmax: bool,
}

impl ActivationKernels {
    /// Compiles or finds them.
    ///
    /// # Errors
    /// [`CudaError`] of the compiler or the driver.
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let module = gpu.module(&SOURCE)?;
        Ok(ActivationKernels {
            silu_mul: module.function("silu_mul")?,
            add: module.function("add")?,
            gelu: module.function("gelu")?,
            relu: module.function("relu")?,
            place: module.function("place")?,
            softmax: module.function("softmax")?,
            top_rows: module.function("top_rows")?,
            scores: module.function("scores")?,
        })
    }

    /// `gate = gate / (1 + e^-gate) * up`
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn silu_mul(&self, stream: &Stream, gate: View<f32>, up: View<f32>) -> Result<(), CudaError> {
        pairs(&self.silu_mul, stream, gate, up)
    }

    /// `sum += delta`
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn add(&self, stream: &Stream, sum: View<f32>, delta: View<f32>) -> Result<(), CudaError> {
        pairs(&self.add, stream, sum, delta)
    }

    /// `x = x / 2 * (1 + erf(x / sqrt 2))`
    ///
    /// # Errors
    /// What the driver says.
    pub fn gelu(&self, stream: &Stream, x: View<f32>) -> Result<(), CudaError> {
        each(&self.gelu, stream, x)
    }

    /// `x = max(x, 0)`
    ///
    /// # Errors
    /// What the driver says.
    pub fn relu(&self, stream: &Stream, x: View<f32>) -> Result<(), CudaError> {
        each(&self.relu, stream, x)
    }

    /// Writes rows into columns of others.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn place(&self, stream: &Stream, place: &PlaceArgs) -> Result<(), CudaError> {
        let PlaceArgs { part, width, out, out_width, column, rows } = *place;
        assert!(width > 0 && column + width <= out_width, "columns {column}.. of {out_width} for {width}");
        assert!(part.len() >= rows * width && out.len() >= rows * out_width, "{rows} rows to place");
        let args = Args::new().view(part).view(out).size(rows * width).size(width).size(column).size(out_width);
        let blocks = (rows * width).div_ceil(THREADS as usize);
        // SAFETY: the arguments are those of the kernel, which stays inside of `rows` rows, of which there are enough.
        unsafe { self.place.launch(stream, Launch::blocks(blocks as u32, THREADS), args) }
    }

    /// Softmax of rows of `width` values in place.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the values are not whole rows.
    pub fn softmax(&self, stream: &Stream, x: View<f32>, width: usize) -> Result<(), CudaError> {
        assert!(width > 0 && x.len().is_multiple_of(width), "{} values are not whole rows of {width}", x.len());
        let rows = x.len() / width;
        let args = Args::new().view(x).size(rows).size(width);
        // SAFETY: the arguments are those of the kernel, which stays inside of its rows.
        unsafe { self.softmax.launch(stream, Launch::blocks(rows.div_ceil(ROWS) as u32, THREADS), args) }
    }

    /// Highest logits of outputs as rows, and perhaps their softmax.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn top_rows(&self, stream: &Stream, top: &TopRowsArgs<'_>) -> Result<(), CudaError> {
        let TopRowsArgs { answers, out, rows, width, softmax } = *top;
        assert!(rows <= answers.answers().len() && (1..=TOP_MAX).contains(&width), "{rows} lists of {width}");
        assert!(out.len() >= rows * width, "{rows} rows of {width}");
        let args = Args::new()
            .view(answers.answers())
            .view(answers.tops())
            .view(out)
            .size(rows)
            .size(width)
            .u32(u32::from(softmax));
        // SAFETY: the arguments are those of the kernel, which stays inside of `rows` answers, lists and rows.
        unsafe { self.top_rows.launch(stream, Launch::blocks(rows.div_ceil(ROWS) as u32, THREADS), args) }
    }

    /// The logistic function of one number per output becomes its score.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If there are more numbers than answers.
    pub fn scores(&self, stream: &Stream, x: View<f32>, answers: &AnswerMemory) -> Result<(), CudaError> {
        assert!(x.len() <= answers.answers().len(), "{} scores for {} answers", x.len(), answers.answers().len());
        let args = Args::new().view(x).view(answers.answers()).size(x.len());
        let blocks = x.len().div_ceil(THREADS as usize);
        // SAFETY: the arguments are those of the kernel, which stays inside of so many numbers and answers.
        unsafe { self.scores.launch(stream, Launch::blocks(blocks as u32, THREADS), args) }
    }
}

fn pairs(function: &Function, stream: &Stream, x: View<f32>, y: View<f32>) -> Result<(), CudaError> {
    assert_eq!(x.len(), y.len(), "values of {}", function.name());
    check([x, y], function);
    let args = Args::new().view(x).view(y).size(x.len());
    // SAFETY: the arguments are those of the kernel, which stays inside of so many values.
    unsafe { function.launch(stream, blocks(x), args) }
}

fn each(function: &Function, stream: &Stream, x: View<f32>) -> Result<(), CudaError> {
    check([x, x], function);
    let args = Args::new().view(x).size(x.len());
    // SAFETY: as above.
    unsafe { function.launch(stream, blocks(x), args) }
}

fn check(views: [View<f32>; 2], function: &Function) {
    let aligned = views.iter().all(|view| view.pointer().is_multiple_of(16));
    assert!(aligned, "values of {} start at a multiple of 16 bytes", function.name());
    assert!(views[0].len() <= u32::MAX as usize - VALUES, "values of {}", function.name());
}

fn blocks(x: View<f32>) -> Launch {
    Launch::blocks(x.len().div_ceil(VALUES) as u32, THREADS)
}
