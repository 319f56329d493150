//! Activations as int8.
//!
//! Owner: scratch of an executor, reused from product to product. Invariant: the codes of a row depend on that row
//! alone.

use super::{Input, Matrix};
use crate::Pool;
use crate::memory::Disjoint;
use crate::simd::{self, Kernel, Simd};

/// Below this, a block counts as zero: 127 divided by it would overflow.
const SMALLEST: f32 = 1e-30;
/// Values per task when rows are quantised in parallel.
const GRAIN: usize = 2 * 1024;

/// Scale and sums of 32 codes. The sums carry a minus sign because products subtract them (times a weight offset).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct BlockMeta {
    /// Value of one step of the codes: the largest magnitude of the block over 127.
    pub(crate) scale: f32,
    /// Minus `scale` times the sum of all codes.
    pub(crate) minus_sum: f32,
    /// The same for the first and the second 16.
    pub(crate) minus_half_sums: [f32; 2],
}

/// Activation rows quantised to int8 in blocks of 32: `x = scale * code`, codes in -127..=127, rounded to nearest even.
///
/// A block with a NaN or an infinity gets the scale NaN, so that what depends on it becomes NaN too.
#[derive(Debug, Clone, Default)]
pub struct QuantizedRows {
    rows: usize,
    cols: usize,
    codes: Vec<[i8; 32]>,
    meta: Vec<BlockMeta>,
}

impl QuantizedRows {
    /// Makes `x` (`[rows, cols]`) ready for these matrices, which have the same `cols`: quantises it if any of them is
    /// quantised. The result borrows this scratch, which grows to the largest input and then allocates no more.
    ///
    /// # Panics
    /// If the matrices differ in `cols`, there are none, or `x` is not whole rows.
    pub fn input<'a>(&'a mut self, pool: &Pool, x: &'a [f32], matrices: &[&Matrix]) -> Input<'a> {
        let cols = matrices.first().map_or(0, |m| m.cols);
        assert!(cols > 0 && matrices.iter().all(|m| m.cols == cols), "matrices of one input have the same columns");
        assert!(x.len().is_multiple_of(cols), "{} values are not whole rows of {cols}", x.len());
        let quantized = matrices.iter().any(|m| m.format.is_quantized());
        if quantized {
            self.quantize(pool, x, cols);
        }
        Input { x, rows: x.len() / cols, cols, codes: quantized.then_some(&*self) }
    }

    fn quantize(&mut self, pool: &Pool, x: &[f32], cols: usize) {
        let (blocks, rest) = x.as_chunks::<32>();
        assert!(rest.is_empty() && cols.is_multiple_of(32), "quantised formats have blocks of 32");
        (self.rows, self.cols) = (x.len() / cols, cols);
        self.codes.resize(blocks.len(), [0; 32]);
        self.meta.resize(blocks.len(), BlockMeta::default());
        let (codes, meta) = (Disjoint::new(&mut self.codes), Disjoint::new(&mut self.meta));
        pool.run_ranges(blocks.len(), GRAIN / 32, &|range| {
            // SAFETY: ranges of one job are disjoint.
            let (codes, meta) = unsafe { (codes.part(range.clone()), meta.part(range.clone())) };
            simd::run(pool.isa(), Quantize { x: &blocks[range], codes, meta });
        });
    }

    /// Blocks of one row.
    pub(crate) fn row(&self, row: usize) -> (&[[i8; 32]], &[BlockMeta]) {
        let blocks = self.cols / 32;
        (&self.codes[row * blocks..][..blocks], &self.meta[row * blocks..][..blocks])
    }
}

struct Quantize<'a> {
    x: &'a [[f32; 32]],
    codes: &'a mut [[i8; 32]],
    meta: &'a mut [BlockMeta],
}

impl Kernel for Quantize<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for ((x, codes), meta) in self.x.iter().zip(self.codes).zip(self.meta) {
            let halves = x.as_chunks::<16>().0;
            let (a, b) = (s.load(&halves[0]), s.load(&halves[1]));
            let largest = s.largest(s.max(s.abs(a), s.abs(b)));
            // 0 unless there is a NaN or an infinity.
            let probe = s.sum(s.fma(a, s.splat(0.0), s.mul(b, s.splat(0.0))));
            if largest < SMALLEST || probe != 0.0 {
                *codes = [0; 32];
                let scale = if probe == 0.0 { 0.0 } else { f32::NAN };
                *meta = BlockMeta { scale, minus_sum: 0.0, minus_half_sums: [0.0; 2] };
                continue;
            }
            let inverse = s.splat(127.0 / largest);
            let to = codes.as_chunks_mut::<16>().0;
            s.store_i8(s.mul(a, inverse), &mut to[0]);
            s.store_i8(s.mul(b, inverse), &mut to[1]);
            *meta = describe(largest / 127.0, codes);
        }
    }
}

/// Scale and sums of a block.
#[inline(always)]
fn describe(scale: f32, codes: &[i8; 32]) -> BlockMeta {
    let sum = |codes: &[i8]| codes.iter().map(|&c| i32::from(c)).sum::<i32>();
    let (first, second) = (sum(&codes[..16]), sum(&codes[16..]));
    let minus = |sum: i32| -(scale * sum as f32);
    BlockMeta { scale, minus_sum: minus(first + second), minus_half_sums: [minus(first), minus(second)] }
}

/// The definition, one block at a time in plain Rust.
#[cfg(test)]
pub(super) fn quantize_block_reference(x: &[f32; 32]) -> ([i8; 32], BlockMeta) {
    let largest = x.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
    if x.iter().any(|v| !v.is_finite()) {
        return ([0; 32], BlockMeta { scale: f32::NAN, ..Default::default() });
    }
    if largest < SMALLEST {
        return ([0; 32], BlockMeta::default());
    }
    let codes = x.map(|v| (v * (127.0 / largest)).round_ties_even() as i8);
    (codes, describe(largest / 127.0, &codes))
}
