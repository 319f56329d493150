//! Matrix products of activations with weights: `y[m, n] = x[m, ..] . w[n, ..]` for 1 to many rows `m`.
//!
//! Owner: a model owns its [`Matrix`] values (weights stay where they were read from, plus a repacked copy); an
//! executor owns the [`QuantizedRows`] scratch. Invariant: `y[m, n]` is the reduction that `reference.rs` spells out,
//! one term after the other in the order of the columns, so it does not depend on the number of rows, their place, the
//! tiling, the threads or the instruction set.
//!
//! Quantised weights are multiplied as integers: each activation row is quantised once to int8 in blocks of 32 with an
//! f32 scale (finer than the 256 of ggml's K formats, and the same for every format, so that all matrices that read
//! the same input share it). Sums within a block are exact; blocks are added in f32. Float weights (F32, F16, BF16)
//! are multiplied with the unquantised activations in f32.
//!
//! Repacking ([`Matrix::prepare`]) interleaves 16 weight rows, so that one vector holds 4 columns of 16 outputs. Each
//! output owns a lane: no horizontal sums, and one pass over the weights serves all rows of a step.

pub mod cuda;
mod float;
mod int8;
mod layout;
mod pack;
mod quantize;
mod reference;

use crate::memory::{Buffer, Bytes, Disjoint};
use crate::quant::{Format, dequantize_row};
use crate::simd::Simd;
use crate::{KernelError, Pool};
pub use quantize::QuantizedRows;
use smallvec::SmallVec;
use std::ops::Range;

/// Outputs per tile: the rows of a matrix that are interleaved.
pub(crate) const TILE: usize = 16;
/// Activation rows that one pass over a tile serves; larger inputs take several passes.
pub(crate) const ROWS_PER_PASS: usize = 64;

/// Weights `[rows, cols]` (outputs, inputs), row-major in one format.
#[derive(Debug)]
pub struct Matrix {
    format: Format,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    source: Bytes,
    packed: Option<Packed>,
}

/// Repacked weights: the tiles one after the other, scales and codes apart.
#[derive(Debug)]
struct Packed {
    scales: Buffer,
    codes: Buffer,
}

impl Matrix {
    /// Weights over their bytes as stored.
    ///
    /// Errors: a shape that the format cannot have, or a number of bytes that does not fit the shape.
    pub fn new(format: Format, rows: usize, cols: usize, source: Bytes) -> Result<Matrix, KernelError> {
        let expected = format.tensor_bytes(rows, cols)?;
        let found = source.as_slice().len();
        if found != expected {
            return Err(KernelError::ByteLength { format: format.name(), rows, cols, expected, found });
        }
        Ok(Matrix { format, rows, cols, row_bytes: format.row_bytes(cols)?, source, packed: None })
    }

    /// Repacks the weights for the fast kernels. Without it a product takes the slow reference. Calling it again does
    /// nothing.
    ///
    /// Errors: memory for the copy (about the size of the weights) is refused.
    pub fn prepare(&mut self, pool: &Pool) -> Result<(), KernelError> {
        if self.packed.is_none() {
            self.packed = Some(pack::pack(self, pool)?);
        }
        Ok(())
    }

    /// Format of the weights.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of memory that the repacked copy takes; 0 before [`Matrix::prepare`].
    pub fn packed_bytes(&self) -> usize {
        self.packed.as_ref().map_or(0, |p| p.scales.bytes() + p.codes.bytes())
    }

    /// Bytes of the weights as stored.
    pub fn stored_bytes(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// Bytes that a product reads.
    pub fn weight_bytes(&self) -> usize {
        self.packed.as_ref().map_or(self.stored_bytes(), |p| p.scales.len() + p.codes.len())
    }

    /// Decodes one row, for example the embedding of a token.
    ///
    /// # Panics
    /// If there is no such row, or `out` does not hold `cols` values.
    pub fn row(&self, index: usize, out: &mut [f32]) {
        assert!(index < self.rows && out.len() == self.cols, "row {index} of {} x {}", self.rows, self.cols);
        let decoded = dequantize_row(self.format, self.row_source(index), out);
        debug_assert!(decoded.is_ok(), "sizes were checked in `new`");
    }

    fn row_source(&self, index: usize) -> &[u8] {
        &self.source.as_slice()[index * self.row_bytes..][..self.row_bytes]
    }

    fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }
}

/// Activation rows that several matrices multiply; made by [`QuantizedRows::input`].
#[derive(Clone, Copy)]
pub struct Input<'a> {
    x: &'a [f32],
    rows: usize,
    cols: usize,
    codes: Option<&'a QuantizedRows>,
}

impl Input<'_> {
    /// Activation rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row.
    pub fn cols(&self) -> usize {
        self.cols
    }
}

/// One product of a call to [`linear`].
pub struct Linear<'a> {
    /// Weights; `cols` must be that of the input.
    pub matrix: &'a Matrix,
    /// Added to every row: one value per output.
    pub bias: Option<&'a [f32]>,
    /// Result, `[input rows, matrix rows]`.
    pub y: &'a mut [f32],
}

/// Multiplies the input with each matrix in one job: `y[m, n] = x[m, ..] . w[n, ..] (+ bias[n])`.
///
/// # Panics
/// If sizes do not fit, or `input` was made for other matrices and lacks the codes that a quantised one needs.
pub fn linear(pool: &Pool, input: &Input<'_>, products: &mut [Linear<'_>]) {
    for product in products.iter() {
        let matrix = product.matrix;
        check(matrix, input);
        assert_eq!(product.y.len(), input.rows * matrix.rows, "output size");
        assert!(product.bias.is_none_or(|bias| bias.len() == matrix.rows), "bias size");
    }
    let outputs: SmallVec<[Output<'_>; 4]> = products.iter_mut().map(Output::new).collect();
    let tiles: usize = outputs.iter().map(|o| o.matrix.tiles()).sum();
    let passes = input.rows.div_ceil(ROWS_PER_PASS).max(1);
    pool.run_ranges(tiles * passes, 1, &|range| {
        for pass in range.start / tiles..range.end.div_ceil(tiles) {
            let rows = pass * ROWS_PER_PASS..((pass + 1) * ROWS_PER_PASS).min(input.rows);
            let within = range.start.max(pass * tiles) - pass * tiles..range.end.min((pass + 1) * tiles) - pass * tiles;
            let mut before = 0;
            for output in &outputs {
                let own = within.start.clamp(before, before + output.matrix.tiles()) - before
                    ..within.end.clamp(before, before + output.matrix.tiles()) - before;
                before += output.matrix.tiles();
                if !own.is_empty() {
                    output.multiply(pool, Work { input, rows: rows.clone(), tiles: own });
                }
            }
        }
    });
}

/// The outputs of some tiles for some activation rows: `y[m - rows.start, n - TILE * tiles.start]`, rows `stride` apart.
/// What lies between the rows is left alone.
///
/// # Panics
/// If sizes do not fit, or `input` lacks the codes that a quantised matrix needs.
pub(crate) fn tiles(pool: &Pool, matrix: &Matrix, part: Part<'_>) {
    let Part { input, rows, tiles, y, stride } = part;
    check(matrix, input);
    assert!(rows.len() <= ROWS_PER_PASS && rows.end <= input.rows && tiles.end <= matrix.tiles(), "part of a product");
    let place = Place { row: rows.start, output: tiles.start * TILE, stride };
    let output = Output { matrix, bias: None, y: Disjoint::new(y), place };
    output.multiply(pool, Work { input, rows, tiles });
}

/// What [`tiles`] computes and where it goes.
pub(crate) struct Part<'a> {
    pub(crate) input: &'a Input<'a>,
    /// At most [`ROWS_PER_PASS`].
    pub(crate) rows: Range<usize>,
    pub(crate) tiles: Range<usize>,
    pub(crate) y: &'a mut [f32],
    pub(crate) stride: usize,
}

fn check(matrix: &Matrix, input: &Input<'_>) {
    assert_eq!(matrix.cols, input.cols, "matrix columns and input columns");
    assert!(!matrix.format.is_quantized() || input.codes.is_some(), "input was made without int8 codes");
}

/// Part of a product: some tiles for some activation rows.
struct Work<'a> {
    input: &'a Input<'a>,
    rows: Range<usize>,
    tiles: Range<usize>,
}

/// A product whose result is written by several workers, each to its own columns.
struct Output<'a> {
    matrix: &'a Matrix,
    bias: Option<&'a [f32]>,
    y: Disjoint<'a, f32>,
    place: Place,
}

/// Which part of the whole product `y` is: its first activation row and output, and how far apart its rows are.
struct Place {
    row: usize,
    output: usize,
    stride: usize,
}

impl<'a> Output<'a> {
    fn new<'b>(product: &'a mut Linear<'b>) -> Output<'a> {
        let place = Place { row: 0, output: 0, stride: product.matrix.rows };
        Output { matrix: product.matrix, bias: product.bias, y: Disjoint::new(product.y), place }
    }

    fn multiply(&self, pool: &Pool, work: Work<'_>) {
        match (&self.matrix.packed, self.matrix.format.is_quantized()) {
            (None, _) => reference::multiply(self, work),
            (Some(packed), true) => int8::multiply(pool.isa(), self, packed, work),
            (Some(packed), false) => float::multiply(pool.isa(), self, packed, work),
        }
    }

    /// Writes one activation row of one tile.
    #[inline(always)]
    fn put(&self, row: usize, tile: usize, values: &[f32; TILE]) {
        let first = tile * TILE;
        let count = TILE.min(self.matrix.rows - first);
        let start = (row - self.place.row) * self.place.stride + first - self.place.output;
        // SAFETY: each (row, tile) belongs to one task of the job.
        let to = unsafe { self.y.part(start..start + count) };
        to.copy_from_slice(&values[..count]);
        if let Some(bias) = self.bias {
            for (y, b) in to.iter_mut().zip(&bias[first..]) {
                *y += b;
            }
        }
    }
}

/// Bytes of weights that are requested ahead of their use: what memory delivers in its latency. The processor's own
/// prefetching falls behind when several activation rows keep it busy with each block.
pub(crate) const AHEAD: usize = 8192;

/// Requests the lines that lie `ahead` of these.
#[inline(always)]
pub(crate) fn prefetch<S: Simd>(s: S, bytes: &[u8], ahead: usize) {
    for line in (0..bytes.len()).step_by(64) {
        s.prefetch(bytes, ahead + line);
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
