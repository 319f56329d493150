//! Root mean square normalisation: `y = x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, 2019).
//!
//! Owner: none, pure functions over rows. Invariant: a row is summed in one fixed order, so its result depends on that
//! row alone.

pub mod cuda;

use crate::Pool;
use crate::memory::Disjoint;
use crate::simd::{self, Kernel, LANES, Simd};

/// Values per task when rows are normalised in parallel.
const GRAIN: usize = 4 * 1024;

/// A learned scale per value, and the constant that keeps the division finite.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    /// One value per column; its length is the length of a row.
    pub weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// Normalises the rows of `x` into `out`.
///
/// # Panics
/// If the lengths differ or are not whole rows.
pub fn rms_norm(pool: &Pool, norm: RmsNorm<'_>, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "input and output of a norm");
    let out = Disjoint::new(out);
    for_rows(pool, norm, x.len(), &|values| {
        // SAFETY: the ranges of one job are disjoint.
        let out = unsafe { out.part(values.clone()) };
        simd::run(pool.isa(), Rows { norm, from: From::Other(&x[values]), out });
    });
}

/// Normalises rows where they are. With a weight of one head this is the per-head norm of queries and keys, whose
/// heads are rows of `[tokens, heads * head_dim]`.
///
/// # Panics
/// If `x` is not whole rows.
pub fn rms_norm_in_place(pool: &Pool, norm: RmsNorm<'_>, x: &mut [f32]) {
    let len = x.len();
    let x = Disjoint::new(x);
    for_rows(pool, norm, len, &|values| {
        // SAFETY: the ranges of one job are disjoint.
        let out = unsafe { x.part(values) };
        simd::run(pool.isa(), Rows { norm, from: From::Itself, out });
    });
}

/// Adds `delta` to the residual stream and normalises the sum: `residual += delta`, `out = norm(residual)`.
///
/// # Panics
/// If the lengths differ or are not whole rows.
pub fn add_rms_norm(pool: &Pool, norm: RmsNorm<'_>, (residual, delta): (&mut [f32], &[f32]), out: &mut [f32]) {
    assert!(residual.len() == delta.len() && delta.len() == out.len(), "residual, delta and output of a norm");
    let len = delta.len();
    let (residual, out) = (Disjoint::new(residual), Disjoint::new(out));
    for_rows(pool, norm, len, &|values| {
        // SAFETY: the ranges of one job are disjoint.
        let (residual, out) = unsafe { (residual.part(values.clone()), out.part(values.clone())) };
        for (r, d) in residual.iter_mut().zip(&delta[values]) {
            *r += d;
        }
        simd::run(pool.isa(), Rows { norm, from: From::Other(residual), out });
    });
}

/// Splits `len` values into ranges of whole rows.
fn for_rows(pool: &Pool, norm: RmsNorm<'_>, len: usize, work: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
    let cols = norm.weight.len();
    assert!(cols > 0 && len.is_multiple_of(cols), "{len} values are not whole rows of {cols}");
    pool.run_ranges(len / cols, GRAIN.div_ceil(cols), &|rows| work(rows.start * cols..rows.end * cols));
}

enum From<'a> {
    Itself,
    Other(&'a [f32]),
}

struct Rows<'a> {
    norm: RmsNorm<'a>,
    from: From<'a>,
    out: &'a mut [f32],
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.norm.weight.len();
        for (index, out) in self.out.chunks_exact_mut(cols).enumerate() {
            match self.from {
                From::Other(x) => {
                    let x = &x[index * cols..][..cols];
                    let scale = inverse_rms(s, x, self.norm.eps);
                    for ((y, x), w) in out.iter_mut().zip(x).zip(self.norm.weight) {
                        *y = x * scale * w;
                    }
                }
                From::Itself => {
                    let scale = inverse_rms(s, out, self.norm.eps);
                    for (y, w) in out.iter_mut().zip(self.norm.weight) {
                        *y = *y * scale * w;
                    }
                }
            }
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`; vector i of the row goes to sum i % 4, the tail is padded with zeros.
#[inline(always)]
fn inverse_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    let (quads, rest) = x.as_chunks::<{ 4 * LANES }>();
    for quad in quads {
        let vectors = quad.as_chunks::<LANES>().0;
        for i in 0..4 {
            let v = s.load(&vectors[i]);
            sums[i] = s.fma(v, v, sums[i]);
        }
    }
    for (i, chunk) in rest.chunks(LANES).enumerate() {
        let mut padded = [0.0; LANES];
        padded[..chunk.len()].copy_from_slice(chunk);
        let v = s.load(&padded);
        sums[i] = s.fma(v, v, sums[i]);
    }
    let sum = s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])));
    1.0 / (sum / x.len() as f32 + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, bits, pools, rounds};

    fn reference(norm: RmsNorm<'_>, x: &[f32]) -> Vec<f64> {
        let row = |x: &[f32]| {
            let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean + f64::from(norm.eps)).sqrt();
            x.iter().zip(norm.weight).map(|(x, w)| f64::from(*x) * scale * f64::from(*w)).collect::<Vec<f64>>()
        };
        x.chunks(norm.weight.len()).flat_map(row).collect()
    }

    #[test]
    fn norms_are_exact_to_rounding_and_the_same_everywhere() {
        let mut random = Random::new(10);
        for _ in 0..rounds(20) {
            let (rows, cols) = (1 + random.below(rounds(40)), 1 + random.below(700));
            let weight = random.normals(cols);
            let norm = RmsNorm { weight: &weight, eps: 1e-5 };
            let (x, delta) = (random.normals(rows * cols), random.normals(rows * cols));
            let sum: Vec<f32> = x.iter().zip(&delta).map(|(a, b)| a + b).collect();
            let mut first: Option<Vec<u32>> = None;
            for pool in pools() {
                let mut out = vec![f32::NAN; x.len()];
                rms_norm(&pool, norm, &x, &mut out);
                for (a, b) in out.iter().zip(reference(norm, &x)) {
                    assert!((f64::from(*a) - b).abs() <= 2e-6 * b.abs() + 1e-30, "{a} {b}");
                }
                assert_eq!(*first.get_or_insert(bits(&out)), bits(&out), "{pool:?} {rows} x {cols}");
                let mut in_place = x.clone();
                rms_norm_in_place(&pool, norm, &mut in_place);
                assert_eq!(bits(&in_place), bits(&out));
                let (mut residual, mut fused) = (x.clone(), vec![f32::NAN; x.len()]);
                add_rms_norm(&pool, norm, (&mut residual, &delta), &mut fused);
                assert_eq!(bits(&residual), bits(&sum));
                rms_norm(&pool, norm, &sum, &mut out);
                assert_eq!(bits(&fused), bits(&out));
                // The last row by itself.
                let mut alone = vec![f32::NAN; cols];
                rms_norm(&pool, norm, &sum[(rows - 1) * cols..], &mut alone);
                assert_eq!(bits(&alone), bits(&out[(rows - 1) * cols..]));
            }
        }
    }
}
