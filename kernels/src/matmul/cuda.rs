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
const HEADERS: &[(&str, &str)] = &[("weights.cuh", include_str!("weights.cuh"))];

/// Products of few rows.
pub static MATMUL: Source =
    Source { name: "matmul.cu", text: include_str!("matmul.cu"), headers: HEADERS, exact: false };

/// Rows of matrices and conversions.
pub static ROWS: Source = Source { name: "rows.cu", text: include_str!("rows.cu"), headers: HEADERS, exact: false };

/// Most rows that the kernels multiply in one pass over the weights.
pub const ROWS_FEW: usize = 16;
/// Rows from which on it pays to widen quantised weights for cuBLASLt.
const ROWS_WIDEN: usize = 64;
/// Threads of all blocks.
const THREADS: u32 = 256;
/// Outputs of a tile.
const TILE_ROWS: usize = 16;
/// Columns of a block in the kernels of `rows.cu`.
const COLS_PER_BLOCK: usize = 1024;
/// What activations are multiplied with before they become f16, so that large ones fit.
const F16_SCALE: f32 = 1.0 / 16.0;
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
        [self.rows * pitch, if widen { (SLAB_BYTES / 2).max(TILE_ROWS * pitch) } else { 0 }, WORKSPACE_BYTES]
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
        let LinearArgs { matrix, bias, x, rows, y } = &args;
        assert!(x.len() >= rows * matrix.cols(), "{rows} rows of {} values in {}", matrix.cols(), x.len());
        assert!(y.len() >= rows * matrix.rows(), "{rows} rows of {} values in {}", matrix.rows(), y.len());
        assert!(bias.is_none_or(|bias| bias.len() == matrix.rows()), "one bias for each of {} outputs", matrix.rows());
        let layout = matrix.layout();
        let few = if layout.is_quantized() { ROWS_WIDEN } else { ROWS_FEW };
        let pitch = Layout::Bf16.pitch(matrix.cols());
        let fits =
            scratch.halves.len() >= rows * pitch && (!layout.is_quantized() || scratch.slab.len() >= TILE_ROWS * pitch);
        match &self.blas {
            Some(blas) if !self.fixed_order && *rows > few && layout != Layout::F32 && fits => {
                self.linear_many(stream, blas, (args, scratch))
            }
            _ => self.linear_few(stream, &args),
        }
    }

    /// By the kernels: each 8 or 16 rows are a pass over the weights, neighbours in time, so that passes but the first
    /// find them in the cache.
    fn linear_few(&self, stream: &Stream, args: &LinearArgs<'_>) -> Result<(), CudaError> {
        let LinearArgs { matrix, bias, x, rows, y } = args;
        let tiles = matrix.rows().div_ceil(TILE_ROWS);
        // 32 outputs per block need fewer reads of x, 16 make more blocks.
        let (which, per_block, rows_at_once) = if *rows > 8 {
            (1, 1, ROWS_FEW)
        } else if tiles.div_ceil(2) >= self.multiprocessors {
            (2, 2, 8)
        } else {
            (0, 1, 8)
        };
        let function = &self.linear[matrix.kernel()][which];
        let grid = (rows.div_ceil(rows_at_once) as u32, tiles.div_ceil(per_block) as u32, 1);
        let args =
            matrix.push_to(Args::new()).option(bias.map(|bias| bias.view())).view(x.view()).size(*rows).view(y.view());
        // SAFETY: the arguments are those of the kernel; sizes were compared in `linear`, and those of the matrix when it
        // was made. The arrays belong to whoever owns the stream's work.
        unsafe { function.launch(stream, Launch { grid, block: THREADS, shared: 0 }, args) }
    }

    /// By cuBLASLt, on 16-bit activations.
    fn linear_many(
        &self,
        stream: &Stream,
        blas: &Blas,
        (args, scratch): (LinearArgs<'_>, &mut MatmulScratch),
    ) -> Result<(), CudaError> {
        let LinearArgs { matrix, bias, x, rows, y } = args;
        let (outputs, pitch) = (matrix.rows(), Layout::Bf16.pitch(matrix.cols()));
        let f16 = matrix.layout() == Layout::F16;
        let scale = if f16 { F16_SCALE } else { 1.0 };
        self.rows.to_halves(stream, (f16, scale, pitch), (x, rows, matrix.cols(), &scratch.halves))?;
        let step =
            if matrix.layout().is_quantized() { scratch.slab.len() / pitch / TILE_ROWS * TILE_ROWS } else { outputs };
        for first in (0..outputs).step_by(step) {
            let count = step.min(outputs - first);
            let weights = if matrix.layout().is_quantized() {
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
                scale: 1.0 / scale,
            };
            blas.multiply(stream, &operands, (&mut scratch.plans, &scratch.workspace))?;
        }
        bias.map_or(Ok(()), |bias| self.rows.add_bias(stream, (y, rows), bias))
    }
}
