//! Elementary functions from the operations of [`Simd`], so that they agree on every instruction set.

use super::Simd;

/// Below this, `exp` is 0 (the result would be denormal); above the other, it stays at its value there.
const EXP_MIN: f32 = -87.336_55;
const EXP_MAX: f32 = 88.0;

/// `e^x` within 2 units in the last place for -87.3 <= x <= 88; exactly 0 below (also for -inf), exactly 1 at 0.
/// NaN stays NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2 (two-part ln 2, Cody and Waite), then the polynomial of Cephes `expf`.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5];
    let low = s.splat(EXP_MIN);
    let high = s.splat(EXP_MAX);
    // In this order NaN passes both.
    let clamped = s.max(low, s.select_lt((high, x), high, x));
    let n = s.round(s.mul(clamped, s.splat(LOG2_E)));
    let r = s.fma(n, s.splat(-LN2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let mut p = s.splat(POLYNOMIAL[0]);
    for c in &POLYNOMIAL[1..] {
        p = s.fma(p, r, s.splat(*c));
    }
    let y = s.fma(s.mul(r, r), p, s.add(r, s.splat(1.0)));
    s.select_lt((x, low), s.splat(0.0), s.mul(y, s.exp2(n)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, run};
    use crate::testing::{Random, isas};

    struct Exp([f32; 16]);

    impl Kernel for Exp {
        type Output = [f32; 16];
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [f32; 16] {
            let mut out = [0.0; 16];
            s.store(exp(s, s.load(&self.0)), &mut out);
            out
        }
    }

    #[test]
    fn exp_is_accurate_and_the_same_on_every_instruction_set() {
        let mut random = Random::new(1);
        for round in 0..20_000 {
            let span = [1.0, 20.0, 88.0][round % 3];
            let x: [f32; 16] = std::array::from_fn(|_| (random.unit() * 2.0 - 1.0) * span);
            let expected = run(crate::sys::Isa::Portable, Exp(x));
            for (x, y) in x.iter().zip(expected) {
                let exact = f64::from(*x).exp();
                if *x >= -87.3 && *x < 88.0 {
                    assert!((f64::from(y) - exact).abs() <= 2.4e-7 * exact, "exp({x}) = {y}, not {exact}");
                }
            }
            for isa in isas() {
                assert_eq!(run(isa, Exp(x)).map(f32::to_bits), expected.map(f32::to_bits), "{isa:?}");
            }
        }
        let edges = run(crate::sys::Isa::detect(), Exp([f32::NEG_INFINITY; 16]));
        assert_eq!(edges, [0.0; 16]);
        let edges = run(crate::sys::Isa::detect(), Exp([0.0; 16]));
        assert_eq!(edges, [1.0; 16]);
        for isa in isas() {
            assert!(run(isa, Exp([f32::NAN; 16])).iter().all(|v| v.is_nan()));
        }
    }
}
