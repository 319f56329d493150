//! Plain Rust: what every other implementation must equal.

use super::Simd;
use half::{bf16, f16};

/// Lanes as arrays; the compiler vectorises what it can.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

type F = [f32; 16];

#[inline(always)]
fn map(a: F, f: impl Fn(f32) -> f32) -> F {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip(a: F, b: F, f: impl Fn(f32, f32) -> f32) -> F {
    std::array::from_fn(|i| f(a[i], b[i]))
}

#[inline(always)]
fn fold(mut a: F, f: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            a[i] = f(a[i], a[i + half]);
        }
    }
    a[0]
}

impl Simd for Portable {
    type F = F;
    type I = [i32; 16];
    type B = [u8; 64];
    const ROWS: usize = 2;
    const FLOAT_ROWS: usize = 2;

    #[inline(always)]
    fn splat(self, v: f32) -> F {
        [v; 16]
    }
    #[inline(always)]
    fn load(self, v: &[f32; 16]) -> F {
        *v
    }
    #[inline(always)]
    fn store(self, v: F, to: &mut [f32; 16]) {
        *to = v;
    }
    #[inline(always)]
    fn load_f32(self, v: &[u8; 64]) -> F {
        std::array::from_fn(|i| f32::from_le_bytes(v.as_chunks().0[i]))
    }
    #[inline(always)]
    fn load_f16(self, v: &[u8; 32]) -> F {
        std::array::from_fn(|i| f16::from_le_bytes(v.as_chunks().0[i]).to_f32())
    }
    #[inline(always)]
    fn load_bf16(self, v: &[u8; 32]) -> F {
        std::array::from_fn(|i| bf16::from_le_bytes(v.as_chunks().0[i]).to_f32())
    }
    #[inline(always)]
    fn load_u8(self, v: &[u8; 16]) -> F {
        v.map(f32::from)
    }
    #[inline(always)]
    fn load_i8(self, v: &[u8; 16]) -> F {
        v.map(|b| f32::from(b as i8))
    }
    #[inline(always)]
    fn store_i8(self, v: F, to: &mut [i8; 16]) {
        *to = v.map(|x| x.round_ties_even() as i8);
    }
    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: F) -> F {
        map(a, f32::abs)
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        map(a, f32::round_ties_even)
    }
    #[inline(always)]
    fn exp2(self, n: F) -> F {
        map(n, |n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn select_lt(self, (a, b): (F, F), x: F, y: F) -> F {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn mask_gt(self, a: F, b: F) -> u16 {
        (0..16).fold(0, |mask, i| mask | (u16::from(a[i] > b[i]) << i))
    }
    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        fold(a, |a, b| a + b)
    }
    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        fold(a, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn zero_i(self) -> [i32; 16] {
        [0; 16]
    }
    #[inline(always)]
    fn dot7(self, acc: [i32; 16], codes: [u8; 64], values: [i8; 4]) -> [i32; 16] {
        self.dot8(acc, codes, values)
    }
    #[inline(always)]
    fn dot8(self, acc: [i32; 16], codes: [u8; 64], values: [i8; 4]) -> [i32; 16] {
        std::array::from_fn(|i| (0..4).fold(acc[i], |sum, j| sum + i32::from(codes[4 * i + j]) * i32::from(values[j])))
    }
    #[inline(always)]
    fn to_f(self, a: [i32; 16]) -> F {
        a.map(|v| v as f32)
    }

    #[inline(always)]
    fn load_b(self, v: &[u8; 64]) -> [u8; 64] {
        *v
    }
    #[inline(always)]
    fn and_b(self, a: [u8; 64], mask: u8) -> [u8; 64] {
        a.map(|v| v & mask)
    }
    #[inline(always)]
    fn or_b(self, a: [u8; 64], b: [u8; 64]) -> [u8; 64] {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    fn shr_b<const N: u32>(self, a: [u8; 64], mask: u8) -> [u8; 64] {
        a.map(|v| (v >> N) & mask)
    }
    #[inline(always)]
    fn shl_b<const N: u32>(self, a: [u8; 64], mask: u8) -> [u8; 64] {
        a.map(|v| (v << N) & mask)
    }
    #[inline(always)]
    fn prefetch(self, _from: &[u8], _ahead: usize) {}
}
