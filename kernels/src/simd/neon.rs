//! NEON, with or without dot products of bytes: a vector is four registers of 128 bits, lanes 0..4, 4..8 and so on.
//!
//! Three instructions have no stable intrinsic (widening f16, `sdot`, prefetch); they are written as assembly.

use super::{Kernel, Simd};
use std::arch::aarch64::*;
use std::arch::asm;

/// Proof that the machine has NEON, and `dotprod` if `DOT`; made by [`run`] and [`run_dot`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Neon<const DOT: bool>(());

/// Runs a kernel compiled for this instruction set.
///
/// # Safety
/// The machine has it ([`crate::sys::Isa::available`]).
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<false>(()))
}

/// As [`run`].
///
/// # Safety
/// As [`run`].
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn run_dot<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon::<true>(()))
}

type F = [float32x4_t; 4];
type I = [int32x4_t; 4];
type B = [uint8x16_t; 4];

/// The same operation on each register.
macro_rules! each {
    ($i:ident => $value:expr) => {
        [
            {
                const $i: usize = 0;
                $value
            },
            {
                const $i: usize = 1;
                $value
            },
            {
                const $i: usize = 2;
                $value
            },
            {
                const $i: usize = 3;
                $value
            },
        ]
    };
}

/// 4 f16 to f32.
#[inline]
#[target_feature(enable = "neon")]
fn widen_f16(half: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: reads and writes registers alone; the instruction is part of NEON.
    unsafe {
        asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = lateout(vreg) wide, half = in(vreg) half,
            options(pure, nomem, nostack, preserves_flags));
    }
    wide
}

/// Adds to each lane the dot product of 4 signed bytes of `a` with 4 of `b`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut acc = acc;
    // SAFETY: reads and writes registers alone; the caller has the instruction.
    unsafe {
        asm!("sdot {acc:v}.4s, {a:v}.16b, {b:v}.16b", acc = inlateout(vreg) acc, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// As [`sdot`], by widening products.
#[inline]
#[target_feature(enable = "neon")]
fn dot_by_products(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    let high = vpaddlq_s16(vmull_high_s8(a, b));
    vaddq_s32(acc, vpaddq_s32(low, high))
}

/// `if a > b { a } else { b }` in each lane; `vmaxq_f32` would return NaN for NaN.
#[inline]
#[target_feature(enable = "neon")]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vbslq_f32(vcgtq_f32(a, b), a, b)
}

/// As in `avx512.rs`: each body runs under the proof that `self` is.
macro_rules! methods {
    ($(fn $name:ident $(<const $n:ident: u32>)? ($($arg:ident: $type:ty),*) $(-> $out:ty)? $body:block)*) => {
        $(#[inline(always)]
        fn $name $(<const $n: u32>)? (self, $($arg: $type),*) $(-> $out)? {
            // SAFETY: `self` exists, so the machine has the instructions; loads and stores go through references to
            // arrays, at offsets inside of them.
            unsafe { $body }
        })*
    };
}

impl<const DOT: bool> Neon<DOT> {
    /// Dot products of signed bytes.
    #[inline(always)]
    fn dot(self, acc: I, a: [int8x16_t; 4], b: int8x16_t) -> I {
        // SAFETY: `self` exists, so the machine has the instructions.
        unsafe { if DOT { each!(R => sdot(acc[R], a[R], b)) } else { each!(R => dot_by_products(acc[R], a[R], b)) } }
    }
}

impl<const DOT: bool> Simd for Neon<DOT> {
    type F = F;
    type I = I;
    type B = B;
    const ROWS: usize = 4;
    const FLOAT_ROWS: usize = 2;

    methods! {
        fn splat(v: f32) -> F { [vdupq_n_f32(v); 4] }
        fn load(v: &[f32; 16]) -> F { each!(R => vld1q_f32(v.as_ptr().add(4 * R))) }
        fn store(v: F, to: &mut [f32; 16]) {
            for (r, v) in v.into_iter().enumerate() {
                vst1q_f32(to.as_mut_ptr().add(4 * r), v);
            }
        }
        fn load_f32(v: &[u8; 64]) -> F { each!(R => vreinterpretq_f32_u8(vld1q_u8(v.as_ptr().add(16 * R)))) }
        fn load_f16(v: &[u8; 32]) -> F { each!(R => widen_f16(vreinterpret_u16_u8(vld1_u8(v.as_ptr().add(8 * R))))) }
        fn load_bf16(v: &[u8; 32]) -> F {
            each!(R => vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(v.as_ptr().add(8 * R))))))
        }
        fn load_u8(v: &[u8; 16]) -> F {
            let bytes = vld1q_u8(v.as_ptr());
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            [
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
                vcvtq_f32_u32(vmovl_high_u16(low)),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                vcvtq_f32_u32(vmovl_high_u16(high)),
            ]
        }
        fn load_i8(v: &[u8; 16]) -> F {
            let bytes = vreinterpretq_s8_u8(vld1q_u8(v.as_ptr()));
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        }
        fn store_i8(v: F, to: &mut [i8; 16]) {
            let wide = each!(R => vmovn_s32(vcvtnq_s32_f32(v[R])));
            let low = vmovn_s16(vcombine_s16(wide[0], wide[1]));
            let high = vmovn_s16(vcombine_s16(wide[2], wide[3]));
            vst1q_s8(to.as_mut_ptr(), vcombine_s8(low, high))
        }
        fn add(a: F, b: F) -> F { each!(R => vaddq_f32(a[R], b[R])) }
        fn sub(a: F, b: F) -> F { each!(R => vsubq_f32(a[R], b[R])) }
        fn mul(a: F, b: F) -> F { each!(R => vmulq_f32(a[R], b[R])) }
        fn div(a: F, b: F) -> F { each!(R => vdivq_f32(a[R], b[R])) }
        fn fma(a: F, b: F, c: F) -> F { each!(R => vfmaq_f32(c[R], a[R], b[R])) }
        fn max(a: F, b: F) -> F { each!(R => larger(a[R], b[R])) }
        fn abs(a: F) -> F { each!(R => vabsq_f32(a[R])) }
        fn round(a: F) -> F { each!(R => vrndnq_f32(a[R])) }
        fn exp2(n: F) -> F {
            let bias = vdupq_n_s32(127);
            each!(R => vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(n[R]), bias))))
        }
        fn select_lt(a_b: (F, F), x: F, y: F) -> F { each!(R => vbslq_f32(vcltq_f32(a_b.0[R], a_b.1[R]), x[R], y[R])) }
        fn mask_gt(a: F, b: F) -> u16 {
            let bit = vld1q_u32([1, 2, 4, 8].as_ptr());
            let bits = each!(R => vaddvq_u32(vandq_u32(vcgtq_f32(a[R], b[R]), bit)));
            (bits[0] | bits[1] << 4 | bits[2] << 8 | bits[3] << 12) as u16
        }
        fn sum(a: F) -> f32 {
            let a = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            let a = vadd_f32(vget_low_f32(a), vget_high_f32(a));
            vget_lane_f32::<0>(a) + vget_lane_f32::<1>(a)
        }
        fn largest(a: F) -> f32 {
            let a = larger(larger(a[0], a[2]), larger(a[1], a[3]));
            let a = larger(a, vextq_f32::<2>(a, a));
            vgetq_lane_f32::<0>(larger(a, vextq_f32::<1>(a, a)))
        }

        fn zero_i() -> I { [vdupq_n_s32(0); 4] }
        fn dot7(acc: I, codes: B, values: [i8; 4]) -> I {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(i32::from_le_bytes(values.map(|v| v as u8))));
            Neon::<DOT>(()).dot(acc, each!(R => vreinterpretq_s8_u8(codes[R])), x)
        }
        fn dot8(acc: I, codes: B, values: [i8; 4]) -> I {
            // The low seven bits, and the top bit, which as a signed byte is -128: times minus the value.
            let x = vreinterpretq_s8_s32(vdupq_n_s32(i32::from_le_bytes(values.map(|v| v as u8))));
            let (low, top) = (vdupq_n_u8(0x7f), vdupq_n_u8(0x80));
            let s = Neon::<DOT>(());
            let acc = s.dot(acc, each!(R => vreinterpretq_s8_u8(vandq_u8(codes[R], low))), x);
            s.dot(acc, each!(R => vreinterpretq_s8_u8(vandq_u8(codes[R], top))), vnegq_s8(x))
        }
        fn to_f(a: I) -> F { each!(R => vcvtq_f32_s32(a[R])) }

        fn load_b(v: &[u8; 64]) -> B { each!(R => vld1q_u8(v.as_ptr().add(16 * R))) }
        fn and_b(a: B, mask: u8) -> B { each!(R => vandq_u8(a[R], vdupq_n_u8(mask))) }
        fn or_b(a: B, b: B) -> B { each!(R => vorrq_u8(a[R], b[R])) }
        fn shr_b<const N: u32>(a: B, mask: u8) -> B {
            let (count, mask) = (vdupq_n_s8(-(N as i8)), vdupq_n_u8(mask));
            each!(R => vandq_u8(vshlq_u8(a[R], count), mask))
        }
        fn shl_b<const N: u32>(a: B, mask: u8) -> B {
            let (count, mask) = (vdupq_n_s8(N as i8), vdupq_n_u8(mask));
            each!(R => vandq_u8(vshlq_u8(a[R], count), mask))
        }
        fn prefetch(from: &[u8], ahead: usize) {
            // A hint: an address that cannot be read has no effect.
            asm!("prfm pldl1keep, [{}]", in(reg) from.as_ptr().wrapping_add(ahead),
                options(readonly, nostack, preserves_flags));
        }
    }
}
