//! Vectors of 16 lanes: one small trait, its implementations with bit-identical results.
//!
//! Owner: every fast kernel is written once over [`Simd`] and run through [`run`] with the instruction set of its
//! pool. Invariant: a value of an implementation exists only where [`Isa::available`] said yes, so its methods are
//! safe to call. Each method is exactly the scalar operation on each lane (`fma` rounds once), and each reduction has
//! one fixed tree; that is what makes the instruction sets agree bit for bit.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod math;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
mod portable;
pub(crate) mod value;

use crate::sys::Isa;
pub(crate) use portable::Portable;

/// Lanes of a vector of floats.
pub(crate) const LANES: usize = 16;

/// A kernel: its arguments, and what to do with them on any instruction set. `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Cuts a range of rows into groups of nearly equal size that the registers hold (`$max`, at most 8), and runs `$body`
/// for each with its first row and its size as a constant.
macro_rules! for_row_groups {
    ($max:expr, $range:expr, |$first:ident, $N:ident| $body:expr) => {{
        let mut $first = $range.start;
        while $first < $range.end {
            let left = $range.end - $first;
            let size = left.div_ceil(left.div_ceil($max));
            for_row_groups!(@sizes $max, size, $N, $body, 1 2 3 4 5 6 7 8);
            $first += size;
        }
    }};
    (@sizes $max:expr, $size:ident, $N:ident, $body:expr, $($n:literal)*) => {
        match $size {
            $($n if $n <= $max => {
                const $N: usize = $n;
                $body
            })*
            _ => unreachable!("a group has at most {} rows", $max),
        }
    };
}
pub(crate) use for_row_groups;

/// `for $r in 0..$R` for a constant `$R` of at most 8, unrolled whatever the compiler thinks of the size: a loop that
/// stays would keep its vectors in memory.
macro_rules! unrolled {
    ($R:ident, |$r:ident| $body:expr) => {
        unrolled!(@rows $R, $r, $body, 0 1 2 3 4 5 6 7)
    };
    (@rows $R:ident, $r:ident, $body:expr, $($n:literal)*) => {
        $(if $R > $n {
            let $r = $n;
            $body
        })*
    };
}
pub(crate) use unrolled;

/// Runs a kernel. `isa` must come from a [`crate::Pool`] (or [`Isa::detect`]), which checks that the machine has it.
#[inline]
pub(crate) fn run<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    debug_assert!(isa.available());
    match isa {
        // SAFETY: pools only carry instruction sets that were detected; so for all of them.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::run(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2Vnni => unsafe { avx2::run_vnni(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512::run(kernel) },
        // SAFETY: as above.
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        Isa::Neon => unsafe { neon::run(kernel) },
        // SAFETY: as above.
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        Isa::NeonDot => unsafe { neon::run_dot(kernel) },
        _ => kernel.run(Portable),
    }
}

/// The operations. `F` holds 16 f32, `I` 16 i32, `B` 64 bytes (4 for each of 16 lanes).
pub(crate) trait Simd: Copy {
    type F: Copy;
    type I: Copy;
    type B: Copy;
    /// Rows that int8 products keep in registers at once: a vector of floats each, and one of integers.
    const ROWS: usize;
    /// Rows that float products and attention keep in registers at once: two vectors of floats each.
    const FLOAT_ROWS: usize;

    fn splat(self, v: f32) -> Self::F;
    fn load(self, v: &[f32; 16]) -> Self::F;
    fn store(self, v: Self::F, to: &mut [f32; 16]);
    /// Little-endian, unaligned; so are the loads of other types below.
    fn load_f32(self, v: &[u8; 64]) -> Self::F;
    fn load_f16(self, v: &[u8; 32]) -> Self::F;
    fn load_bf16(self, v: &[u8; 32]) -> Self::F;
    fn load_u8(self, v: &[u8; 16]) -> Self::F;
    fn load_i8(self, v: &[u8; 16]) -> Self::F;
    /// Rounds to nearest even. Values must round into -128..=127; others give an unspecified byte.
    fn store_i8(self, v: Self::F, to: &mut [i8; 16]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: `b` where either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, a: Self::F) -> Self::F;
    fn round(self, a: Self::F) -> Self::F;
    /// 2 to the power of lanes that hold integers in -126..=127.
    fn exp2(self, n: Self::F) -> Self::F;
    /// `if a < b { x } else { y }` in each lane, with `a` and `b` from the pair.
    fn select_lt(self, a_b: (Self::F, Self::F), x: Self::F, y: Self::F) -> Self::F;
    /// A bit for each lane where `a > b`, lane 0 lowest.
    fn mask_gt(self, a: Self::F, b: Self::F) -> u16;
    /// Sum by halves: lanes i and i + 8, then + 4, + 2, + 1.
    fn sum(self, a: Self::F) -> f32;
    /// Largest lane by the same tree; lanes must not be NaN.
    fn largest(self, a: Self::F) -> f32;

    fn zero_i(self) -> Self::I;
    /// Adds to each lane the dot product of its 4 codes (unsigned, at most 127) with the 4 signed values, each in
    /// -127..=127.
    fn dot7(self, acc: Self::I, codes: Self::B, values: [i8; 4]) -> Self::I;
    /// As `dot7` for codes up to 255.
    fn dot8(self, acc: Self::I, codes: Self::B, values: [i8; 4]) -> Self::I;
    fn to_f(self, a: Self::I) -> Self::F;

    fn load_b(self, v: &[u8; 64]) -> Self::B;
    fn and_b(self, a: Self::B, mask: u8) -> Self::B;
    fn or_b(self, a: Self::B, b: Self::B) -> Self::B;
    /// Each byte shifted right by `N` bits, then masked.
    fn shr_b<const N: u32>(self, a: Self::B, mask: u8) -> Self::B;
    /// Each byte shifted left by `N` bits, then masked.
    fn shl_b<const N: u32>(self, a: Self::B, mask: u8) -> Self::B;

    /// Asks for the cache line `ahead` bytes after the start of `from`, which may lie beyond its end.
    fn prefetch(self, from: &[u8], ahead: usize);
}

#[cfg(test)]
mod tests;
