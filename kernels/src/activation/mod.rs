//! Elementwise operations of a decoder block.
//!
//! Owner: none, pure functions. Invariant: each value is computed by itself.

pub mod cuda;

use crate::Pool;
use crate::memory::Disjoint;
use crate::simd::math::exp;
use crate::simd::{self, Kernel, LANES, Simd};

/// Values per task.
const GRAIN: usize = 2 * 1024;

/// SwiGLU: `gate = gate / (1 + e^-gate) * up`.
///
/// # Panics
/// If the lengths differ.
pub fn silu_mul(pool: &Pool, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    let len = gate.len();
    let gate = Disjoint::new(gate);
    pool.run_ranges(len, GRAIN, &|range| {
        // SAFETY: the ranges of one job are disjoint.
        let gate = unsafe { gate.part(range.clone()) };
        simd::run(pool.isa(), SiluMul { gate, up: &up[range] });
    });
}

/// `x += y`, for residual connections that no norm follows.
///
/// # Panics
/// If the lengths differ.
pub fn add(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "summands");
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// `x *= factor`.
pub fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (gates, gate_rest) = self.gate.as_chunks_mut::<LANES>();
        let (ups, up_rest) = self.up.as_chunks::<LANES>();
        for (gate, up) in gates.iter_mut().zip(ups) {
            silu_mul_16(s, gate, up);
        }
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        gate[..gate_rest.len()].copy_from_slice(gate_rest);
        up[..up_rest.len()].copy_from_slice(up_rest);
        silu_mul_16(s, &mut gate, &up);
        gate_rest.copy_from_slice(&gate[..gate_rest.len()]);
    }
}

#[inline(always)]
fn silu_mul_16<S: Simd>(s: S, gate: &mut [f32; LANES], up: &[f32; LANES]) {
    let g = s.load(gate);
    let sigmoid_inverse = s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), g)));
    s.store(s.mul(s.div(g, sigmoid_inverse), s.load(up)), gate);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, bits, pools};

    #[test]
    fn silu_is_accurate_and_the_same_everywhere() {
        let mut random = Random::new(12);
        for len in [1, 15, 16, 17, 1000, 70_001] {
            let gate: Vec<f32> = (0..len).map(|_| random.normal() * 20.0).collect();
            let up = random.normals(len);
            let mut first: Option<Vec<u32>> = None;
            for pool in pools() {
                let mut y = gate.clone();
                silu_mul(&pool, &mut y, &up);
                assert_eq!(*first.get_or_insert(bits(&y)), bits(&y), "{pool:?} {len}");
                for ((g, u), y) in gate.iter().zip(&up).zip(&y) {
                    let (g, u) = (f64::from(*g), f64::from(*u));
                    let exact = g / (1.0 + (-g).exp()) * u;
                    assert!((f64::from(*y) - exact).abs() <= 1e-6 * exact.abs() + 1e-35, "silu({g}) * {u} = {y}");
                }
            }
        }
    }

    #[test]
    fn extremes_of_silu() {
        for pool in pools() {
            let mut y = [f32::NAN, 1e30, -1e30, 0.0, -100.0];
            silu_mul(&pool, &mut y, &[1.0; 5]);
            assert!(y[0].is_nan());
            assert_eq!((y[1], y[3]), (1e30, 0.0));
            assert!(y[2].abs() < 1e-6 && y[4].abs() < 1e-30);
        }
    }

    #[test]
    fn sums_and_multiples() {
        let mut x = [1.0, 2.0];
        add(&mut x, &[0.5, -2.0]);
        scale(&mut x, 2.0);
        assert_eq!(x, [3.0, 0.0]);
    }
}
