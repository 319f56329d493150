//! Products of repacked F32, F16 and BF16 weights with f32 activations.

use super::{AHEAD, Output, Packed, TILE, Work, prefetch};
use crate::quant::Format;
use crate::simd::value::{BF16, F16, F32, Value};
use crate::simd::{self, Kernel, Simd, for_row_groups, unrolled};
use crate::sys::Isa;
use std::marker::PhantomData;

pub(super) fn multiply(isa: Isa, output: &Output<'_>, packed: &Packed, work: Work<'_>) {
    match output.matrix.format {
        Format::F32 => simd::run(isa, Product::<F32> { output, packed, work, value: PhantomData }),
        Format::F16 => simd::run(isa, Product::<F16> { output, packed, work, value: PhantomData }),
        Format::BF16 => simd::run(isa, Product::<BF16> { output, packed, work, value: PhantomData }),
        other => unreachable!("{} weights are multiplied as integers", other.name()),
    }
}

struct Product<'a, V> {
    output: &'a Output<'a>,
    packed: &'a Packed,
    work: Work<'a>,
    value: PhantomData<V>,
}

impl<V: Value> Kernel for Product<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let bytes = self.output.matrix.cols * TILE * V::BYTES;
        for tile in self.work.tiles.clone() {
            let weights = &self.packed.codes[tile * bytes..][..bytes];
            for_row_groups!(S::FLOAT_ROWS, self.work.rows, |row, N| self.rows::<S, N>(s, (tile, row), weights));
        }
    }
}

impl<V: Value> Product<'_, V> {
    /// One tile for `R` activation rows: even and odd columns in sums of their own.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(&self, s: S, (tile, row): (usize, usize), weights: &[u8]) {
        let cols = self.output.matrix.cols;
        let mut x: [&[f32]; R] = [&[]; R];
        for r in 0..R {
            x[r] = &self.work.input.x[(row + r) * cols..][..cols];
        }
        let mut even = [s.splat(0.0); R];
        let mut odd = [s.splat(0.0); R];
        let mut pairs = weights.chunks_exact(2 * TILE * V::BYTES);
        for (pair, weights) in (&mut pairs).enumerate() {
            prefetch(s, weights, AHEAD);
            let (a, b) = (V::load(s, weights), V::load(s, &weights[TILE * V::BYTES..]));
            unrolled!(R, |r| {
                even[r] = s.fma(a, s.splat(x[r][2 * pair]), even[r]);
                odd[r] = s.fma(b, s.splat(x[r][2 * pair + 1]), odd[r]);
            });
        }
        if !pairs.remainder().is_empty() {
            let a = V::load(s, pairs.remainder());
            for r in 0..R {
                even[r] = s.fma(a, s.splat(x[r][cols - 1]), even[r]);
            }
        }
        for r in 0..R {
            let mut values = [0.0; TILE];
            s.store(s.add(even[r], odd[r]), &mut values);
            self.output.put(row + r, tile, &values);
        }
    }
}
