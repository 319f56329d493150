//! Rotary position embedding (Su et al., 2021) with tables that the caller's frequencies define.
//!
//! Owner: a model owns one [`RopeTable`]; scaling rules (linear, llama3, yarn) only change the frequencies and the
//! attention factor it is built from. Invariant: a token's rotation depends on its position alone.

pub mod cuda;

use crate::memory::Disjoint;
use crate::simd::{self, Kernel, Simd};
use crate::{KernelError, Pool};

/// Values per task when tokens are rotated in parallel.
const GRAIN: usize = 4 * 1024;
/// Largest table: 2^28 pairs are 2 GiB.
const PAIRS_MAX: usize = 1 << 28;

/// Which values of a head form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// `(i, i + n)` for n pairs: checkpoints on the hub, and GGUF files of Qwen ("neox").
    Halves,
    /// `(2i, 2i + 1)`: GGUF files of Llama ("norm"), whose converter permutes queries and keys.
    Interleaved,
}

/// Cosines and sines for each position and pair.
#[derive(Debug, Clone)]
pub struct RopeTable {
    pairs: usize,
    /// `[positions, pairs]` of (cos, sin).
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Angles `position * frequencies[i]` for `positions` positions, computed in f64; cosine and sine are multiplied by
    /// `attention_factor` (1 except for yarn).
    ///
    /// Errors: no frequencies, no positions, or a table of more than 2^28 pairs.
    pub fn new(frequencies: &[f32], positions: usize, attention_factor: f32) -> Result<RopeTable, KernelError> {
        let pairs = frequencies.len();
        if pairs == 0 || pairs > PAIRS_MAX {
            return Err(KernelError::Size { what: "a number of rotary frequencies", size: pairs, max: PAIRS_MAX });
        }
        let max = PAIRS_MAX / pairs;
        if positions == 0 || positions > max {
            return Err(KernelError::Size { what: "a context length", size: positions, max });
        }
        let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| p as f64 * f64::from(*f)));
        let factor = f64::from(attention_factor);
        let (cos, sin) = angles.map(|a| ((a.cos() * factor) as f32, (a.sin() * factor) as f32)).unzip();
        Ok(RopeTable { pairs, cos, sin })
    }

    /// Positions covered: `0..positions`.
    pub fn positions(&self) -> usize {
        self.cos.len() / self.pairs
    }

    /// Values of a head that are rotated, from its start.
    pub fn rotated(&self) -> usize {
        2 * self.pairs
    }
}

/// The heads to rotate.
pub struct RopeRows<'a> {
    /// `[tokens, heads * head_dim]`, changed in place.
    pub x: &'a mut [f32],
    /// Values per head; those after [`RopeTable::rotated`] stay.
    pub head_dim: usize,
    /// Absolute position of each token.
    pub positions: &'a [u32],
}

/// Rotates each pair `(a, b)` of each head to `(a cos - b sin, b cos + a sin)`.
///
/// # Panics
/// If sizes do not fit, or a position is outside of the table.
pub fn rope(pool: &Pool, table: &RopeTable, layout: RopeLayout, rows: RopeRows<'_>) {
    let tokens = rows.positions.len();
    if tokens == 0 {
        assert!(rows.x.is_empty());
        return;
    }
    let width = rows.x.len() / tokens;
    assert!(width * tokens == rows.x.len() && width.is_multiple_of(rows.head_dim), "rows are whole heads");
    assert!(table.rotated() <= rows.head_dim, "{} of {} values are rotated", table.rotated(), rows.head_dim);
    assert!(rows.positions.iter().all(|&p| (p as usize) < table.positions()), "position beyond the table");
    let x = Disjoint::new(rows.x);
    pool.run_ranges(tokens, GRAIN.div_ceil(width), &|range| {
        // SAFETY: the ranges of one job are disjoint.
        let x = unsafe { x.part(range.start * width..range.end * width) };
        let positions = &rows.positions[range];
        simd::run(pool.isa(), Rotate { table, layout, rows: RopeRows { x, head_dim: rows.head_dim, positions } });
    });
}

struct Rotate<'a> {
    table: &'a RopeTable,
    layout: RopeLayout,
    rows: RopeRows<'a>,
}

impl Kernel for Rotate<'_> {
    type Output = ();

    /// Plain loops: no reductions, so however the compiler vectorises them the result is the same.
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let pairs = self.table.pairs;
        let width = self.rows.x.len() / self.rows.positions.len();
        for (row, &position) in self.rows.x.chunks_exact_mut(width).zip(self.rows.positions) {
            let cos = &self.table.cos[position as usize * pairs..][..pairs];
            let sin = &self.table.sin[position as usize * pairs..][..pairs];
            for head in row.chunks_exact_mut(self.rows.head_dim) {
                match self.layout {
                    RopeLayout::Halves => {
                        let (first, second) = head[..2 * pairs].split_at_mut(pairs);
                        for i in 0..pairs {
                            let (a, b) = (first[i], second[i]);
                            first[i] = a * cos[i] - b * sin[i];
                            second[i] = b * cos[i] + a * sin[i];
                        }
                    }
                    RopeLayout::Interleaved => {
                        for (i, pair) in head[..2 * pairs].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                            let [a, b] = *pair;
                            *pair = [a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]];
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, bits, pools};

    #[test]
    fn both_layouts_rotate_as_complex_numbers_do() {
        let mut random = Random::new(11);
        for round in 0..20 {
            let pairs = 1 + random.below(40);
            let head_dim = 2 * pairs + random.below(2) * 6;
            let (tokens, heads) = (1 + random.below(60), 1 + random.below(5));
            let frequencies: Vec<f32> = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / pairs as f32)).collect();
            let factor = [1.0, 1.25][round % 2];
            let table = RopeTable::new(&frequencies, 500, factor).unwrap();
            let positions: Vec<u32> = (0..tokens).map(|_| random.below(500) as u32).collect();
            let x = random.normals(tokens * heads * head_dim);
            for layout in [RopeLayout::Halves, RopeLayout::Interleaved] {
                let mut first: Option<Vec<u32>> = None;
                for pool in pools() {
                    let mut y = x.clone();
                    rope(&pool, &table, layout, RopeRows { x: &mut y, head_dim, positions: &positions });
                    assert_eq!(*first.get_or_insert(bits(&y)), bits(&y));
                    for (h, (before, after)) in x.chunks(head_dim).zip(y.chunks(head_dim)).enumerate() {
                        let position = f64::from(positions[h / heads]);
                        for (i, f) in frequencies.iter().enumerate() {
                            let (a, b) = match layout {
                                RopeLayout::Halves => (i, i + pairs),
                                RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                            };
                            let (sin, cos) = (position * f64::from(*f)).sin_cos();
                            let (re, im) = (f64::from(before[a]), f64::from(before[b]));
                            let scale = f64::from(factor);
                            assert!((f64::from(after[a]) - scale * (re * cos - im * sin)).abs() < 2e-6);
                            assert!((f64::from(after[b]) - scale * (im * cos + re * sin)).abs() < 2e-6);
                        }
                        assert_eq!(before[2 * pairs..], after[2 * pairs..]);
                    }
                }
            }
        }
    }

    #[test]
    fn unusable_tables_are_refused() {
        assert!(RopeTable::new(&[], 10, 1.0).is_err());
        assert!(RopeTable::new(&[1.0], 0, 1.0).is_err());
        assert!(RopeTable::new(&[1.0; 64], usize::MAX, 1.0).is_err());
    }
}
