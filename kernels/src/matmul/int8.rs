//! Products of repacked quantised weights with int8 activations.

use super::layout::{Codes, Scales, with_layout};
use super::pack::tile_bytes;
use super::quantize::BlockMeta;
use super::{AHEAD, Output, Packed, QuantizedRows, TILE, Work, prefetch};
use crate::simd::{self, Kernel, Simd, for_row_groups, unrolled};
use crate::sys::Isa;
use std::marker::PhantomData;

pub(super) fn multiply(isa: Isa, output: &Output<'_>, packed: &Packed, work: Work<'_>) {
    with_layout!(output.matrix.format, multiply_as(isa, output, packed, work))
}

fn multiply_as<C: Codes, Sc: Scales>(isa: Isa, output: &Output<'_>, packed: &Packed, work: Work<'_>) {
    let Some(x) = work.input.codes else { unreachable!("`linear` checked that the input has codes") };
    simd::run(isa, Product::<C, Sc> { output, packed, work, x, layout: PhantomData });
}

struct Product<'a, C, Sc> {
    output: &'a Output<'a>,
    packed: &'a Packed,
    work: Work<'a>,
    x: &'a QuantizedRows,
    layout: PhantomData<(C, Sc)>,
}

impl<C: Codes, Sc: Scales> Kernel for Product<'_, C, Sc> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (scale_bytes, code_bytes) = tile_bytes::<C, Sc>(self.output.matrix.cols);
        for tile in self.work.tiles.clone() {
            let scales = &self.packed.scales[tile * scale_bytes..][..scale_bytes];
            let codes = &self.packed.codes[tile * code_bytes..][..code_bytes];
            for_row_groups!(S::ROWS, self.work.rows, |row, N| self.rows::<S, N>(s, (tile, row), (scales, codes)));
        }
    }
}

impl<C: Codes, Sc: Scales> Product<'_, C, Sc> {
    /// One tile for `R` activation rows.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(&self, s: S, (tile, row): (usize, usize), (scales, codes): (&[u8], &[u8])) {
        let blocks = codes.len() / C::BYTES;
        let mut x: [(&[[i8; 32]], &[BlockMeta]); R] = [(&[], &[]); R];
        for r in 0..R {
            let (codes, meta) = self.x.row(row + r);
            x[r] = (&codes[..blocks], &meta[..blocks]);
        }
        let mut acc = [s.splat(0.0); R];
        let runs = scales.chunks_exact(Sc::BYTES).zip(codes.chunks_exact(C::BYTES * Sc::BLOCKS));
        for (index, (run, codes)) in runs.enumerate() {
            prefetch(s, run, AHEAD / 8);
            for sub in 0..Sc::BLOCKS {
                let block = index * Sc::BLOCKS + sub;
                let codes = &codes[sub * C::BYTES..][..C::BYTES];
                prefetch(s, codes, AHEAD);
                let groups = C::load(s, codes);
                for half in 0..Sc::HALVES {
                    let (d, m) = Sc::load(s, run, sub, half);
                    let span = 8 / Sc::HALVES;
                    unrolled!(R, |r| {
                        let (codes, meta) = (&x[r].0[block], &x[r].1[block]);
                        let mut sum = s.zero_i();
                        for g in half * span..(half + 1) * span {
                            let values = codes.as_chunks::<4>().0[g];
                            sum = if C::WIDE { s.dot8(sum, groups[g], values) } else { s.dot7(sum, groups[g], values) };
                        }
                        let minus_sum = if Sc::HALVES == 2 { meta.minus_half_sums[half] } else { meta.minus_sum };
                        acc[r] = s.fma(s.to_f(sum), s.mul(d, s.splat(meta.scale)), acc[r]);
                        acc[r] = s.fma(m, s.splat(minus_sum), acc[r]);
                    });
                }
            }
        }
        for r in 0..R {
            let mut values = [0.0; TILE];
            s.store(acc[r], &mut values);
            self.output.put(row + r, tile, &values);
        }
    }
}
