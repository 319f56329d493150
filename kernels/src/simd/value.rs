//! Numbers as they are stored: weights and KV pages. 16 values are widened to f32 at a time.

use super::Simd;

/// A stored type of numbers.
pub(crate) trait Value {
    /// Bytes per value.
    const BYTES: usize;
    /// Values are codes, to be multiplied by a scale that is stored elsewhere.
    const SCALED: bool = false;
    /// The first 16 values.
    fn load<S: Simd>(s: S, from: &[u8]) -> S::F;
}

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct BF16;
pub(crate) struct I8;

impl Value for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[u8]) -> S::F {
        s.load_f32(&from.as_chunks().0[0])
    }
}

impl Value for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[u8]) -> S::F {
        s.load_f16(&from.as_chunks().0[0])
    }
}

impl Value for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[u8]) -> S::F {
        s.load_bf16(&from.as_chunks().0[0])
    }
}

impl Value for I8 {
    const BYTES: usize = 1;
    const SCALED: bool = true;
    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[u8]) -> S::F {
        s.load_i8(&from.as_chunks().0[0])
    }
}
