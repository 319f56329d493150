//! AVX2 with FMA and F16C, with or without VNNI: a vector is two registers, lanes 0..8 and 8..16.

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// Proof that the machine has AVX2, FMA and F16C, and `avx_vnni` if `VNNI`; made by [`run`] and [`run_vnni`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool>(());

/// Runs a kernel compiled for this instruction set.
///
/// # Safety
/// The machine has it ([`crate::sys::Isa::available`]).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<false>(()))
}

/// As [`run`].
///
/// # Safety
/// As [`run`].
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
pub(super) unsafe fn run_vnni<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2::<true>(()))
}

type F = [__m256; 2];
type I = [__m256i; 2];

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

const ROUND_EVEN: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type F = F;
    type I = I;
    type B = I;
    const ROWS: usize = 4;
    const FLOAT_ROWS: usize = 2;

    methods! {
        fn splat(v: f32) -> F { [_mm256_set1_ps(v); 2] }
        fn load(v: &[f32; 16]) -> F { [_mm256_loadu_ps(v.as_ptr()), _mm256_loadu_ps(v.as_ptr().add(8))] }
        fn store(v: F, to: &mut [f32; 16]) {
            _mm256_storeu_ps(to.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), v[1]);
        }
        fn load_f32(v: &[u8; 64]) -> F {
            [_mm256_loadu_ps(v.as_ptr().cast()), _mm256_loadu_ps(v.as_ptr().add(32).cast())]
        }
        fn load_f16(v: &[u8; 32]) -> F {
            let p = v.as_ptr();
            [
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast())),
            ]
        }
        fn load_bf16(v: &[u8; 32]) -> F {
            let p = v.as_ptr();
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
        fn load_u8(v: &[u8; 16]) -> F {
            let bytes = _mm_loadu_si128(v.as_ptr().cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))),
            ]
        }
        fn load_i8(v: &[u8; 16]) -> F {
            let bytes = _mm_loadu_si128(v.as_ptr().cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))),
            ]
        }
        fn store_i8(v: F, to: &mut [i8; 16]) {
            // Rounds by the current mode, which is to nearest even unless somebody changed it.
            let low = _mm256_cvtps_epi32(v[0]);
            let high = _mm256_cvtps_epi32(v[1]);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes)
        }
        fn add(a: F, b: F) -> F { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
        fn sub(a: F, b: F) -> F { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
        fn mul(a: F, b: F) -> F { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
        fn div(a: F, b: F) -> F { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
        fn fma(a: F, b: F, c: F) -> F {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        fn max(a: F, b: F) -> F { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
        fn abs(a: F) -> F {
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        }
        fn round(a: F) -> F { [_mm256_round_ps::<ROUND_EVEN>(a[0]), _mm256_round_ps::<ROUND_EVEN>(a[1])] }
        fn exp2(n: F) -> F {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_cvtps_epi32(n[0]), bias);
            let high = _mm256_add_epi32(_mm256_cvtps_epi32(n[1]), bias);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            ]
        }
        fn select_lt(a_b: (F, F), x: F, y: F) -> F {
            [
                _mm256_blendv_ps(y[0], x[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a_b.0[0], a_b.1[0])),
                _mm256_blendv_ps(y[1], x[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a_b.0[1], a_b.1[1])),
            ]
        }
        fn mask_gt(a: F, b: F) -> u16 {
            let low = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a[0], b[0]));
            let high = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a[1], b[1]));
            (low | (high << 8)) as u16
        }
        fn sum(a: F) -> f32 {
            let a = _mm256_add_ps(a[0], a[1]);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
        }
        fn largest(a: F) -> f32 {
            let a = _mm256_max_ps(a[0], a[1]);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
        }

        fn zero_i() -> I { [_mm256_setzero_si256(); 2] }
        fn dot7(acc: I, codes: I, values: [i8; 4]) -> I {
            let x = _mm256_set1_epi32(i32::from_le_bytes(values.map(|v| v as u8)));
            if VNNI {
                return [
                    _mm256_dpbusd_avx_epi32(acc[0], codes[0], x),
                    _mm256_dpbusd_avx_epi32(acc[1], codes[1], x),
                ];
            }
            let ones = _mm256_set1_epi16(1);
            // Pairs of products stay within 2 * 127 * 127 < 2^15.
            let low = _mm256_madd_epi16(_mm256_maddubs_epi16(codes[0], x), ones);
            let high = _mm256_madd_epi16(_mm256_maddubs_epi16(codes[1], x), ones);
            [_mm256_add_epi32(acc[0], low), _mm256_add_epi32(acc[1], high)]
        }
        fn to_f(a: I) -> F { [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])] }

        fn load_b(v: &[u8; 64]) -> I {
            [_mm256_loadu_si256(v.as_ptr().cast()), _mm256_loadu_si256(v.as_ptr().add(32).cast())]
        }
        fn and_b(a: I, mask: u8) -> I {
            let mask = _mm256_set1_epi8(mask as i8);
            [_mm256_and_si256(a[0], mask), _mm256_and_si256(a[1], mask)]
        }
        fn or_b(a: I, b: I) -> I { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
        fn shr_b<const N: u32>(a: I, mask: u8) -> I {
            let count = _mm_cvtsi32_si128(N as i32);
            let shifted = [_mm256_srl_epi16(a[0], count), _mm256_srl_epi16(a[1], count)];
            Avx2::<VNNI>(()).and_b(shifted, mask & (0xffu8 >> N))
        }
        fn shl_b<const N: u32>(a: I, mask: u8) -> I {
            let count = _mm_cvtsi32_si128(N as i32);
            let shifted = [_mm256_sll_epi16(a[0], count), _mm256_sll_epi16(a[1], count)];
            Avx2::<VNNI>(()).and_b(shifted, mask & (0xffu8 << N))
        }
        fn prefetch(from: &[u8], ahead: usize) {
            _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(ahead).cast())
        }
    }

    #[inline(always)]
    fn dot8(self, acc: I, codes: I, values: [i8; 4]) -> I {
        if VNNI {
            return self.dot7(acc, codes, values);
        }
        // The low seven bits and the top bit by themselves, so that no pair of products saturates (2 * 128 * 127 < 2^15).
        let acc = self.dot7(acc, self.and_b(codes, 0x7f), values);
        self.dot7(acc, self.and_b(codes, 0x80), values)
    }
}
