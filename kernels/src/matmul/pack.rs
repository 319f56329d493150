//! Repacking of weights at load: 16 rows interleaved, in the layouts of [`super::layout`].

use super::layout::{Codes, Groups, Scales, with_layout};
use super::{Matrix, Packed, TILE};
use crate::memory::{Buffer, Disjoint};
use crate::quant::block;
use crate::simd::{self, Kernel, Simd};
use crate::{KernelError, Pool};
use std::marker::PhantomData;

const WHAT: &str = "repacked weights";

pub(super) fn pack(matrix: &Matrix, pool: &Pool) -> Result<Packed, KernelError> {
    if matrix.format.is_quantized() {
        with_layout!(matrix.format, pack_quantized(matrix, pool))
    } else {
        pack_float(matrix, pool)
    }
}

/// Bytes of the scales and of the codes of one tile.
pub(super) fn tile_bytes<C: Codes, Sc: Scales>(cols: usize) -> (usize, usize) {
    let blocks = cols / 32;
    (blocks / Sc::BLOCKS * Sc::BYTES, blocks * C::BYTES)
}

fn pack_quantized<C: Codes, Sc: Scales>(matrix: &Matrix, pool: &Pool) -> Result<Packed, KernelError> {
    let (scale_bytes, code_bytes) = tile_bytes::<C, Sc>(matrix.cols);
    let mut scales = Buffer::zeroed(scale_bytes * matrix.tiles(), WHAT)?;
    let mut codes = Buffer::zeroed(code_bytes * matrix.tiles(), WHAT)?;
    let (to_scales, to_codes) = (Disjoint::new(&mut scales), Disjoint::new(&mut codes));
    pool.run(matrix.tiles(), &|tile| {
        let part = |bytes: usize| tile * bytes..(tile + 1) * bytes;
        // SAFETY: each tile is one task.
        let (scales, codes) = unsafe { (to_scales.part(part(scale_bytes)), to_codes.part(part(code_bytes))) };
        simd::run(pool.isa(), Tile::<C, Sc> { matrix, tile, scales, codes, layout: PhantomData });
    });
    Ok(Packed { scales, codes })
}

struct Tile<'a, C, Sc> {
    matrix: &'a Matrix,
    tile: usize,
    scales: &'a mut [u8],
    codes: &'a mut [u8],
    layout: PhantomData<(C, Sc)>,
}

/// A kernel only so that the compiler may use all vector instructions of the machine for the plain loops.
impl<C: Codes, Sc: Scales> Kernel for Tile<'_, C, Sc> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let Matrix { format, rows, .. } = *self.matrix;
        let first = self.tile * TILE;
        let lanes = TILE.min(rows - first);
        let mut sources: [&[u8]; TILE] = [&[]; TILE];
        for (lane, source) in sources[..lanes].iter_mut().enumerate() {
            *source = self.matrix.row_source(first + lane);
        }
        for (index, to) in self.codes.chunks_exact_mut(C::BYTES).enumerate() {
            let mut groups: Groups = [[0; 64]; 8];
            for lane in 0..lanes {
                let block = block(format, sources[lane], index);
                for (group, four) in groups.iter_mut().zip(block.codes.as_chunks::<4>().0) {
                    group[4 * lane..4 * lane + 4].copy_from_slice(four);
                }
            }
            C::store(&groups, to);
        }
        for lane in 0..lanes {
            let stored = sources[lane].chunks_exact(format.block_bytes());
            for (run, raw) in self.scales.chunks_exact_mut(Sc::BYTES).zip(stored) {
                Sc::store(raw, lane, run);
            }
        }
    }
}

/// Column by column, the 16 values of a tile.
fn pack_float(matrix: &Matrix, pool: &Pool) -> Result<Packed, KernelError> {
    let size = matrix.format.block_bytes();
    let tile_bytes = matrix.cols * TILE * size;
    let mut codes = Buffer::zeroed(tile_bytes * matrix.tiles(), WHAT)?;
    let to_codes = Disjoint::new(&mut codes);
    pool.run(matrix.tiles(), &|tile| {
        // SAFETY: each tile is one task.
        let to = unsafe { to_codes.part(tile * tile_bytes..(tile + 1) * tile_bytes) };
        let first = tile * TILE;
        for lane in 0..TILE.min(matrix.rows - first) {
            for (col, value) in matrix.row_source(first + lane).chunks_exact(size).enumerate() {
                to[(col * TILE + lane) * size..][..size].copy_from_slice(value);
            }
        }
    });
    Ok(Packed { scales: Buffer::zeroed(0, WHAT)?, codes })
}
