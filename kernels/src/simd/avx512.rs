//! AVX-512 with VNNI: a vector is one register.

use super::{Kernel, Simd};
use std::arch::x86_64::*;

/// Proof that the machine has AVX-512 F, BW, DQ, VL and VNNI; made by [`run`] alone.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// Runs a kernel compiled for this instruction set.
///
/// # Safety
/// The machine has it ([`crate::sys::Isa::available`]).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

/// Defines the methods. Each body runs under the proof that `self` is, and touches memory only through array
/// references, whose sizes are those of the vectors.
macro_rules! methods {
    ($(fn $name:ident $(<const $n:ident: u32>)? ($($arg:ident: $type:ty),*) $(-> $out:ty)? $body:block)*) => {
        $(#[inline(always)]
        fn $name $(<const $n: u32>)? (self, $($arg: $type),*) $(-> $out)? {
            // SAFETY: `self` exists, so the machine has the instructions; loads and stores go through references to
            // arrays of exactly the size that is read or written.
            unsafe { $body }
        })*
    };
}

const ROUND_EVEN: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    const ROWS: usize = 8;
    const FLOAT_ROWS: usize = 8;

    methods! {
        fn splat(v: f32) -> __m512 { _mm512_set1_ps(v) }
        fn load(v: &[f32; 16]) -> __m512 { _mm512_loadu_ps(v.as_ptr()) }
        fn store(v: __m512, to: &mut [f32; 16]) { _mm512_storeu_ps(to.as_mut_ptr(), v) }
        fn load_f32(v: &[u8; 64]) -> __m512 { _mm512_loadu_ps(v.as_ptr().cast()) }
        fn load_f16(v: &[u8; 32]) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(v.as_ptr().cast())) }
        fn load_bf16(v: &[u8; 32]) -> __m512 {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(v.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
        fn load_u8(v: &[u8; 16]) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(v.as_ptr().cast())))
        }
        fn load_i8(v: &[u8; 16]) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(v.as_ptr().cast())))
        }
        fn store_i8(v: __m512, to: &mut [i8; 16]) {
            let wide = _mm512_cvt_roundps_epi32::<ROUND_EVEN>(v);
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(wide))
        }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn abs(a: __m512) -> __m512 { _mm512_abs_ps(a) }
        fn round(a: __m512) -> __m512 { _mm512_roundscale_ps::<ROUND_EVEN>(a) }
        fn exp2(n: __m512) -> __m512 {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
        fn select_lt(a_b: (__m512, __m512), x: __m512, y: __m512) -> __m512 {
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a_b.0, a_b.1), y, x)
        }
        fn mask_gt(a: __m512, b: __m512) -> u16 { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) }
        fn sum(a: __m512) -> f32 {
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
        }
        fn largest(a: __m512) -> f32 {
            let a = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
        }

        fn zero_i() -> __m512i { _mm512_setzero_si512() }
        fn dot7(acc: __m512i, codes: __m512i, values: [i8; 4]) -> __m512i {
            _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(i32::from_le_bytes(values.map(|v| v as u8))))
        }
        fn dot8(acc: __m512i, codes: __m512i, values: [i8; 4]) -> __m512i {
            _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(i32::from_le_bytes(values.map(|v| v as u8))))
        }
        fn to_f(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }

        fn load_b(v: &[u8; 64]) -> __m512i { _mm512_loadu_si512(v.as_ptr().cast()) }
        fn and_b(a: __m512i, mask: u8) -> __m512i { _mm512_and_si512(a, _mm512_set1_epi8(mask as i8)) }
        fn or_b(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn shr_b<const N: u32>(a: __m512i, mask: u8) -> __m512i {
            let mask = mask & (0xffu8 >> N);
            _mm512_and_si512(_mm512_srli_epi16::<N>(a), _mm512_set1_epi8(mask as i8))
        }
        fn shl_b<const N: u32>(a: __m512i, mask: u8) -> __m512i {
            let mask = mask & (0xffu8 << N);
            _mm512_and_si512(_mm512_slli_epi16::<N>(a), _mm512_set1_epi8(mask as i8))
        }
        fn prefetch(from: &[u8], ahead: usize) {
            _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(ahead).cast())
        }
    }
}
