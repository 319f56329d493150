//! Matrix products on a CUDA device, embeddings and gathers.
//!
//! Owner: an executor keeps one [`MatmulKernels`] and a [`MatmulScratch`], a model its [`DeviceMatrix`] values. Few rows
//! are multiplied by the kernels of `matmul.cu`, which read the weights as they lie in memory; many rows by cuBLASLt
//! where it is installed. Invariant: with [`MatmulKernels::fixed_order`], or up to [`ROWS_FEW`] rows, a row of the result
//! depends on the weights and its own row of the input alone, bit for bit. cuBLASLt rounds the input to the 16-bit type
//! of the weights and picks its order of sums by the number of rows.
//!
//! Launches depend on shapes alone; a step allocates nothing.

mod blas;
mod matrix;
mod repack;
mod rows;

use crate::cuda::{Args, Array, CudaError, Function, Gpu, Launch, Module, Source, Stream};
use blas::{Blas, Operands, Plans};
pub use matrix::{DeviceMatrix, Layout, Weights, device_bytes};
use rows::RowKernels;
pub use rows::{EmbedArgs, GatherArgs, Ids};
use std::sync::Arc;

/// What the sources include.
const HEADERS: &[(&str, &str)] =
    &[("weights.cuh", include_str!("weights.cuh")), ("layouts.cuh", include_str!("layouts.cuh"))];

/// Products of few rows.
pub static MATMUL: Source =
    Source { name: "matmul.cu", text: include_str!("matmul.cu"), headers: HEADERS, exact: false };

/// Rows of matrices and conversions.
pub static ROWS: Source =
    Source { name: "rows.cu", text: include_str!("rows.cu"), headers: HEADERS.split_at(1).0, exact: false };

/// Most rows that the kernels multiply in one pass over the weights.
pub const ROWS_FEW: usize = 16;
/// Rows from which on it pays to widen quantised weights for cuBLASLt.
const ROWS_WIDEN: usize = 64;
/// Most products of a launch.
const TOGETHER: usize = 3;
/// Threads of all blocks.
const THREADS: u32 = 256;
/// Outputs of a tile.
const TILE_ROWS: usize = 16;
/// Columns of a block in the kernels of `rows.cu`.
const COLS_PER_BLOCK: usize = 1024;
/// What activations are multiplied with before they become f16, so that large ones fit.
const F16_SCALE: f32 = 1.0 / 16.0;
/// Rows of quantised weights that are widened at a time are a multiple of this: their results begin at multiples of the 256
/// bytes that cuBLASLt counts on.
const SLAB_ROWS: usize = 64;
/// Bytes of quantised weights widened at a time.
const SLAB_BYTES: usize = 64 << 20;
/// Bytes that cuBLASLt may use besides.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Kernels for 16 outputs and 8 rows, 16 outputs and 16 rows, 32 outputs and 8 rows in a block.
macro_rules! names {
    ($layout:literal) => {
        [
            concat!("linear_", $layout, "_16_8"),
            concat!("linear_", $layout, "_16_16"),
            concat!("linear_", $layout, "_32_8"),
        ]
    };
}

/// By layout, then by kind of scales, in the order of [`DeviceMatrix::kernel`].
const NAMES: [[&str; 3]; 12] = [
    names!("f32"),
    names!("f16"),
    names!("bf16"),
    names!("q8_halves"),
    names!("q8_halves_min"),
    names!("q8_factors_32"),
    names!("q8_factors_16"),
    names!("q4_halves"),
    names!("q4_halves_min"),
    names!("q4_factors_32"),
    names!("q4_factors_16"),
    names!("q4_factors_16_min"),
];

/// Compiled kernels.
#[derive(Clone, Debug)]
pub struct MatmulKernels {
    /// As [`NAMES`].
    linear: Vec<[Function; 3]>,
    rows: RowKernels,
    blas: Option<Arc<Blas>>,
    fixed_order: bool,
    multiprocessors: usize,
}

/// One product: `y[m, n] = x[m, ..] . w[n, ..] (+ bias[n])`.
#[derive(Debug)]
pub struct LinearArgs<'a> {
    /// Weights.
    pub matrix: &'a DeviceMatrix,
    /// One value per output.
    pub bias: Option<&'a Array<f32>>,
    /// `[rows, matrix cols]`, possibly with more behind.
    pub x: &'a Array<f32>,
    /// Rows of `x` and `y`.
    pub rows: usize,
    /// `[rows, matrix rows]`, possibly with more behind.
    pub y: &'a mut Array<f32>,
}

/// One of several products of the same rows.
#[derive(Debug)]
pub struct Product<'a> {
    /// Weights.
    pub matrix: &'a DeviceMatrix,
    /// One value per output.
    pub bias: Option<&'a Array<f32>>,
    /// `[rows, matrix rows]`, possibly with more behind.
    pub y: &'a mut Array<f32>,
}

/// Rows that are multiplied: `[rows, cols]`, possibly with more behind.
#[derive(Clone, Copy, Debug)]
struct Input<'a> {
    x: &'a Array<f32>,
    rows: usize,
    cols: usize,
}

/// What a [`MatmulScratch`] must be enough for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchSize {
    /// Most rows of a product.
    pub rows: usize,
    /// Most columns of a matrix.
    pub cols: usize,
    /// Whether a matrix is quantised.
    pub quantized: bool,
}

impl ScratchSize {
    /// 16-bit activations, widened weights, bytes of workspace.
    fn parts(self) -> [usize; 3] {
        if self.rows <= ROWS_FEW {
            return [0; 3];
        }
        let widen = self.quantized && self.rows > ROWS_WIDEN;
        let pitch = Layout::Bf16.pitch(self.cols);
        [self.rows * pitch, if widen { (SLAB_BYTES / 2).max(SLAB_ROWS * pitch) } else { 0 }, WORKSPACE_BYTES]
    }

    /// Bytes on the device.
    pub fn bytes(self) -> u64 {
        let [halves, slab, workspace] = self.parts();
        (2 * (halves + slab) + workspace) as u64
    }
}

/// Memory for products of many rows, and what cuBLASLt chose for their shapes.
#[derive(Debug)]
pub struct MatmulScratch {
    halves: Array<u16>,
    slab: Array<u16>,
    workspace: Array<u8>,
    plans: Plans,
}

impl MatmulScratch {
    /// Memory for products of that size and smaller ones. Larger ones work too, more slowly.
    ///
    /// # Errors
    /// [`CudaError::Memory`].
    pub fn new(gpu: &Gpu, size: ScratchSize) -> Result<Self, CudaError> {
        let what = "products of many rows";
        let [halves, slab, workspace] = size.parts();
        Ok(MatmulScratch {
            halves: Array::new(gpu, what, halves)?,
            slab: Array::new(gpu, what, slab)?,
            workspace: Array::new(gpu, what, workspace)?,
            plans: Plans::default(),
        })
    }
}

/// The functions of names in a module.
fn functions<const N: usize>(module: &Arc<Module>, names: [&'static str; N]) -> Result<[Function; N], CudaError> {
    let found: Result<Vec<Function>, CudaError> = names.into_iter().map(|name| module.function(name)).collect();
    found.map(|found| found.try_into().unwrap_or_else(|_| unreachable!("as many as there are names")))
}

impl MatmulKernels {
    /// Compiles or finds the kernels, and opens cuBLASLt if it is installed.
    ///
    /// # Errors
    /// As [`Gpu::module`]; what cuBLASLt says.
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let module = gpu.module(&MATMUL)?;
        Ok(MatmulKernels {
            linear: NAMES.into_iter().map(|names| functions(&module, names)).collect::<Result<_, _>>()?,
            rows: RowKernels::load(&gpu.module(&ROWS)?)?,
            blas: Blas::open(gpu)?.map(Arc::new),
            fixed_order: false,
            multiprocessors: gpu.facts().multiprocessors as usize,
        })
    }

    /// The same kernels, without cuBLASLt: slower for many rows, but every row is summed in the same order whatever is
    /// with it.
    pub fn fixed_order(mut self) -> Self {
        self.fixed_order = true;
        self
    }

    /// Whether cuBLASLt was found. Without it the kernels multiply many rows as well, more slowly.
    pub fn has_blas(&self) -> bool {
        self.blas.is_some()
    }

    /// Multiplies.
    ///
    /// # Errors
    /// What the driver or cuBLASLt says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn linear(&self, stream: &Stream, args: LinearArgs<'_>, scratch: &mut MatmulScratch) -> Result<(), CudaError> {
        let LinearArgs { matrix, bias, x, rows, y } = args;
        self.linear_together(stream, (x, rows), &mut [Product { matrix, bias, y }], scratch)
    }

    /// Multiplies the same rows with several matrices: one launch for up to three neighbours of the same format. Each
    /// result is that of [`MatmulKernels::linear`].
    ///
    /// # Errors
    /// What the driver or cuBLASLt says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn linear_together(
        &self,
        stream: &Stream,
        (x, rows): (&Array<f32>, usize),
        products: &mut [Product<'_>],
        scratch: &mut MatmulScratch,
    ) -> Result<(), CudaError> {
        let Some(first) = products.first() else { return Ok(()) };
        let input = Input { x, rows, cols: first.matrix.cols() };
        assert!(x.len() >= rows * input.cols, "{rows} rows of {} values in {}", input.cols, x.len());
        for Product { matrix, bias, y } in products.iter() {
            let outputs = matrix.rows();
            assert_eq!(matrix.cols(), input.cols, "matrices for the same rows");
            assert!(y.len() >= rows * outputs, "{rows} rows of {outputs} values in {}", y.len());
            assert!(bias.is_none_or(|bias| bias.len() == outputs), "one bias for each of {outputs} outputs");
        }
        // Type of the activations in the scratch.
        let mut staged = None;
        for alike in
            products.chunk_by(|a, b| (a.matrix.kernel(), a.matrix.zero()) == (b.matrix.kernel(), b.matrix.zero()))
        {
            match self.blas_for(alike[0].matrix, rows, scratch) {
                Some(blas) => {
                    for product in alike {
                        self.stage(stream, (input, product.matrix), (scratch, &mut staged))?;
                        self.linear_many(stream, blas, ((rows, product), scratch))?;
                    }
                }
                None => {
                    for few in alike.chunks(TOGETHER) {
                        self.linear_few(stream, input, few)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// cuBLASLt, if it is the way for so many rows.
    fn blas_for(&self, matrix: &DeviceMatrix, rows: usize, scratch: &MatmulScratch) -> Option<&Blas> {
        let (layout, pitch) = (matrix.layout(), Layout::Bf16.pitch(matrix.cols()));
        let few = if layout.is_quantized() { ROWS_WIDEN } else { ROWS_FEW };
        let slab = if layout.is_quantized() { SLAB_ROWS * pitch } else { 0 };
        let fits = scratch.halves.len() >= rows * pitch && scratch.slab.len() >= slab;
        let wanted = !self.fixed_order && rows > few && layout != Layout::F32 && fits;
        self.blas.as_deref().filter(|_| wanted)
    }

    /// By the kernels: each 8 or 16 rows are a pass over the weights, neighbours in time, so that passes but the first
    /// find them in the cache.
    fn linear_few(&self, stream: &Stream, input: Input<'_>, products: &[Product<'_>]) -> Result<(), CudaError> {
        let Input { x, rows, cols } = input;
        let blocks = |tiles_per_block: usize| -> usize {
            products.iter().map(|product| product.matrix.rows().div_ceil(TILE_ROWS * tiles_per_block)).sum()
        };
        // 32 outputs per block need fewer reads of x, 16 make more blocks.
        let (which, tiles_per_block, rows_at_once) = match (rows > 8, blocks(2) >= self.multiprocessors) {
            (true, _) => (1, 1, ROWS_FEW),
            (false, true) => (2, 2, 8),
            (false, false) => (0, 1, 8),
        };
        let matrix = products[0].matrix;
        let mut args = Args::new().view(x.view()).size(rows).size(cols).u32(matrix.zero());
        for index in 0..TOGETHER {
            args = match products.get(index) {
                Some(Product { matrix, bias, y }) => {
                    let args = args.view(matrix.codes()).option(matrix.scales()).size(matrix.rows());
                    args.option(bias.map(Array::view)).view(y.view())
                }
                None => args.u64(0).u64(0).u32(0).u64(0).u64(0),
            };
        }
        let grid = (rows.div_ceil(rows_at_once) as u32, blocks(tiles_per_block) as u32, 1);
        let function = &self.linear[matrix.kernel()][which];
        // SAFETY: the arguments are those of the kernel; sizes were compared in `linear_together`, and those of matrices
        // when they were made. The arrays belong to whoever owns the stream's work.
        unsafe { function.launch(stream, Launch { grid, block: THREADS, shared: 0 }, args) }
    }

    /// Puts 16-bit activations into the scratch, unless those are there.
    fn stage(
        &self,
        stream: &Stream,
        (input, matrix): (Input<'_>, &DeviceMatrix),
        (scratch, staged): (&MatmulScratch, &mut Option<bool>),
    ) -> Result<(), CudaError> {
        let f16 = matrix.layout() == Layout::F16;
        if *staged == Some(f16) {
            return Ok(());
        }
        *staged = Some(f16);
        let (Input { x, rows, cols }, scale) = (input, if f16 { F16_SCALE } else { 1.0 });
        self.rows.to_halves(stream, (f16, scale, Layout::Bf16.pitch(cols)), (x, rows, cols, &scratch.halves))
    }

    /// By cuBLASLt, on the 16-bit activations in the scratch.
    fn linear_many(
        &self,
        stream: &Stream,
        blas: &Blas,
        ((rows, product), scratch): ((usize, &Product<'_>), &mut MatmulScratch),
    ) -> Result<(), CudaError> {
        let Product { matrix, bias, y } = product;
        let (outputs, pitch, layout) = (matrix.rows(), Layout::Bf16.pitch(matrix.cols()), matrix.layout());
        let f16 = layout == Layout::F16;
        let step = if layout.is_quantized() { scratch.slab.len() / pitch / SLAB_ROWS * SLAB_ROWS } else { outputs };
        for first in (0..outputs).step_by(step) {
            let count = step.min(outputs - first);
            let weights = if layout.is_quantized() {
                self.rows.widen(stream, matrix, (first, count, pitch), &scratch.slab)?;
                scratch.slab.view().pointer()
            } else {
                matrix.codes().pointer()
            };
            let operands = Operands {
                f16,
                outputs: count,
                rows,
                pitch,
                stride: outputs,
                weights,
                x: scratch.halves.view().pointer(),
                y: y.part(first, y.len() - first).pointer(),
                scale: if f16 { 1.0 / F16_SCALE } else { 1.0 },
            };
            blas.multiply(stream, &operands, (&mut scratch.plans, &scratch.workspace))?;
        }
        bias.map_or(Ok(()), |bias| self.rows.add_bias(stream, (y, rows), bias))
    }
}
