//! Launches of `rows.cu`: embeddings, gathers, and what large products and measurements need. Owner:
//! [`MatmulKernels`]. Invariant: sizes are compared here, so kernels stay inside of their arrays; rows that do not exist
//! read as zeros.

use super::matrix::{DeviceMatrix, Layout};
use super::{COLS_PER_BLOCK, MatmulKernels, THREADS, functions};
use crate::cuda::{Answer, Args, Array, CudaError, Function, Launch, Module, Stream, View};
use std::sync::Arc;

/// Most blocks of kernels that step through an array.
const STEPPING_BLOCKS_MAX: usize = 4096;
/// 4-byte words of an [`Answer`].
const ANSWER_WORDS: usize = size_of::<Answer>() / 4;

/// Kernels that make or move rows.
#[derive(Clone, Debug)]
pub(super) struct RowKernels {
    /// By layout.
    embed: [Function; 5],
    gather: Function,
    /// To bf16, to f16.
    halves: [Function; 2],
    /// From q8, from q4.
    widen: [Function; 2],
    add_bias: Function,
    random_bf16: Function,
    random_words: Function,
    fill_words: Function,
}

/// Where token ids come from.
#[derive(Clone, Copy, Debug)]
pub enum Ids {
    /// An array of them.
    Tokens(View<u32>),
    /// The tokens of answers.
    Answers(View<Answer>),
}

/// One lookup: `out[i, ..] = table[ids[i], ..]`.
#[derive(Debug)]
pub struct EmbedArgs<'a> {
    /// Rows to choose from.
    pub table: &'a DeviceMatrix,
    /// Which; one that the table has not gives zeros.
    pub ids: Ids,
    /// How many.
    pub count: usize,
    /// `[count, table cols]`, possibly with more behind.
    pub out: &'a mut Array<f32>,
}

/// One choice of rows: `out[i, ..] = x[index[i], ..]`.
#[derive(Debug)]
pub struct GatherArgs<'a> {
    /// `[rows, cols]`
    pub x: &'a Array<f32>,
    /// Values per row.
    pub cols: usize,
    /// Which rows; one that `x` has not gives zeros. `out` gets as many.
    pub index: View<u32>,
    /// `[index.len(), cols]`, possibly with more behind.
    pub out: &'a mut Array<f32>,
}

/// Blocks for rows of `cols` values.
fn by_row(rows: usize, cols: usize) -> Launch {
    Launch { grid: (rows as u32, cols.div_ceil(COLS_PER_BLOCK) as u32, 1), block: THREADS, shared: 0 }
}

/// Blocks for an array of `count` values.
fn stepping(count: usize) -> Launch {
    Launch::blocks(count.div_ceil(THREADS as usize).min(STEPPING_BLOCKS_MAX) as u32, THREADS)
}

impl RowKernels {
    pub(super) fn load(module: &Arc<Module>) -> Result<Self, CudaError> {
        let [gather, add_bias, random_bf16, random_words, fill_words] =
            functions(module, ["gather_rows", "add_bias", "random_bf16", "random_words", "fill_words"])?;
        Ok(RowKernels {
            embed: functions(module, ["embed_f32", "embed_f16", "embed_bf16", "embed_q8", "embed_q4"])?,
            gather,
            halves: functions(module, ["to_bf16", "to_f16"])?,
            widen: functions(module, ["widen_q8", "widen_q4"])?,
            add_bias,
            random_bf16,
            random_words,
            fill_words,
        })
    }

    /// `out[m, ..] = x[m, ..] * scale` in 16 bits, rows `pitch` apart.
    pub(super) fn to_halves(
        &self,
        stream: &Stream,
        (f16, scale, pitch): (bool, f32, usize),
        (x, rows, cols, out): (&Array<f32>, usize, usize, &Array<u16>),
    ) -> Result<(), CudaError> {
        assert!(x.len() >= rows * cols && out.len() >= rows * pitch && pitch >= cols, "16-bit activations");
        let args = Args::new().view(x.view()).f32(scale).view(out.view()).size(cols).size(pitch);
        // SAFETY: the arguments are those of the kernel, and the sizes were compared.
        unsafe { self.halves[usize::from(f16)].launch(stream, by_row(rows, pitch), args) }
    }

    /// Rows of a quantised matrix in bf16, `pitch` apart.
    pub(super) fn widen(
        &self,
        stream: &Stream,
        matrix: &DeviceMatrix,
        (first, count, pitch): (usize, usize, usize),
        out: &Array<u16>,
    ) -> Result<(), CudaError> {
        assert!(matrix.layout().is_quantized() && out.len() >= count * pitch, "room for {count} rows of {pitch}");
        let args = matrix.push_to(Args::new()).size(first).view(out.view()).size(pitch);
        let which = usize::from(matrix.layout() == Layout::Q4);
        // SAFETY: the arguments are those of the kernel; it reads rows that exist only, and there is room for the result.
        unsafe { self.widen[which].launch(stream, by_row(count, pitch), args) }
    }

    /// `y[m, n] += bias[n]`.
    pub(super) fn add_bias(
        &self,
        stream: &Stream,
        (y, rows): (&Array<f32>, usize),
        bias: &Array<f32>,
    ) -> Result<(), CudaError> {
        assert!(y.len() >= rows * bias.len(), "{rows} rows of {} values", bias.len());
        let args = Args::new().view(y.view()).view(bias.view()).size(bias.len());
        // SAFETY: the arguments are those of the kernel, and the sizes were compared.
        unsafe { self.add_bias.launch(stream, by_row(rows, bias.len()), args) }
    }

    /// Uniform bf16 values in -limit..limit.
    pub(super) fn random_bf16(
        &self,
        stream: &Stream,
        out: &Array<u8>,
        (seed, limit): (u64, f32),
    ) -> Result<(), CudaError> {
        let args = Args::new().view(out.view()).u64(out.len() as u64 / 2).u64(seed).f32(limit);
        // SAFETY: the arguments are those of the kernel, which stays below the count.
        unsafe { self.random_bf16.launch(stream, stepping(out.len() / 2), args) }
    }

    pub(super) fn random_words(&self, stream: &Stream, out: &Array<u8>, seed: u64) -> Result<(), CudaError> {
        let args = Args::new().view(out.view()).u64(out.len() as u64 / 4).u64(seed);
        // SAFETY: as above.
        unsafe { self.random_words.launch(stream, stepping(out.len() / 4), args) }
    }

    pub(super) fn fill_words(&self, stream: &Stream, out: &Array<u32>, word: u32) -> Result<(), CudaError> {
        let args = Args::new().view(out.view()).u64(out.len() as u64).u32(word);
        // SAFETY: as above.
        unsafe { self.fill_words.launch(stream, stepping(out.len()), args) }
    }
}

impl MatmulKernels {
    /// Looks rows of a table up, decoded bit for bit as [`crate::quant::dequantize_row`] does.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn embed(&self, stream: &Stream, args: EmbedArgs<'_>) -> Result<(), CudaError> {
        let EmbedArgs { table, ids, count, out } = args;
        assert!(out.len() >= count * table.cols(), "{count} rows of {} values in {}", table.cols(), out.len());
        let args = table.push_to(Args::new());
        let args = match ids {
            Ids::Tokens(view) => {
                assert!(view.len() >= count, "{count} ids in {}", view.len());
                args.view(view).u32(1).u32(0)
            }
            Ids::Answers(view) => {
                assert!(view.len() >= count, "{count} answers in {}", view.len());
                args.view(view).size(ANSWER_WORDS).size(std::mem::offset_of!(Answer, token) / 4)
            }
        };
        let args = args.view(out.view());
        // SAFETY: the arguments are those of the kernel, and the sizes were compared.
        unsafe { self.rows.embed[table.layout() as usize].launch(stream, by_row(count, table.cols()), args) }
    }

    /// Copies chosen rows.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn gather_rows(&self, stream: &Stream, args: GatherArgs<'_>) -> Result<(), CudaError> {
        let GatherArgs { x, cols, index, out } = args;
        assert!(cols > 0 && out.len() >= index.len() * cols, "{} rows of {cols} values in {}", index.len(), out.len());
        let args = Args::new().view(x.view()).size(x.len() / cols).size(cols).view(index).view(out.view());
        // SAFETY: the arguments are those of the kernel, and the sizes were compared.
        unsafe { self.rows.gather.launch(stream, by_row(index.len(), cols), args) }
    }
}
