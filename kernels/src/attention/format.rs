//! How keys and values are stored: what writing does to a number, and where it goes.
//!
//! Owner: [`super::KvCache`] lays its pages out by this, `flash.rs` reads them. Invariant: one side (keys or values) of a
//! head in a page is its numbers, then, for [`KvFormat::Q8`], the scales `[groups][16]` of its 16 tokens: a vector of them
//! for each group of dimensions. What is stored depends on the token's own numbers alone.

use super::cache::PAGE_TOKENS;
use half::{bf16, f16};
use std::str::FromStr;

/// Dimensions of a head that share a scale. With 32 a Qwen2.5 model loses accuracy that it keeps with 16:
/// docs/kv-cache.md has the figures.
pub(super) const GROUP: usize = 16;
/// Bytes of a scale.
pub(super) const SCALE_BYTES: usize = 2;
/// Largest code.
const CODE_MAX: f32 = 127.0;
/// Largest magnitude of a number with a scale, 2^127: 127 times its scale, which is rounded up, is finite.
const SCALED_MAX: f32 = f32::from_bits(254 << 23);

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvFormat {
    /// 2 bytes, rounded to nearest; magnitudes beyond 65504 become 65504.
    #[default]
    F16,
    /// 2 bytes with the range of f32, rounded to nearest.
    BF16,
    /// 4 bytes, as computed.
    F32,
    /// A byte, and 2 bytes for each 16 dimensions of a head and token: codes in -127..=127 times a scale, off by half of
    /// it at most. The scale is a bf16, which has the range of f32, rounded up, so that no code is cut off. Magnitudes
    /// beyond 2^127 become that; a NaN makes NaN of its 16.
    Q8,
}

impl KvFormat {
    /// Every format.
    pub const ALL: [KvFormat; 4] = [KvFormat::F16, KvFormat::BF16, KvFormat::F32, KvFormat::Q8];

    /// Name as in launch files.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F16 => "f16",
            KvFormat::BF16 => "bf16",
            KvFormat::F32 => "f32",
            KvFormat::Q8 => "q8",
        }
    }

    /// Bytes of the key (or the value) of one token in one head, scales included.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            KvFormat::F16 | KvFormat::BF16 => 2 * head_dim,
            KvFormat::F32 => 4 * head_dim,
            KvFormat::Q8 => head_dim + head_dim.div_ceil(GROUP) * SCALE_BYTES,
        }
    }

    /// Stores the numbers of one token in one side of a head; number `i` is the one at `place(i)` there.
    #[inline(always)]
    pub(super) fn write(self, numbers: &[f32], (slot, side): (usize, &mut [u8]), place: impl Fn(usize) -> usize) {
        match self {
            KvFormat::F16 => {
                let bound = f16::MAX.to_f32();
                let stored = |v: f32| f16::from_f32(v.clamp(-bound, bound)).to_le_bytes();
                put(numbers, side, place, stored);
            }
            KvFormat::BF16 => {
                let bound = bf16::MAX.to_f32();
                let stored = |v: f32| bf16::from_f32(v.clamp(-bound, bound)).to_le_bytes();
                put(numbers, side, place, stored);
            }
            KvFormat::F32 => put(numbers, side, place, f32::to_le_bytes),
            KvFormat::Q8 => {
                let (codes, scales) = side.split_at_mut(numbers.len() * PAGE_TOKENS);
                for (group, numbers) in numbers.chunks(GROUP).enumerate() {
                    let scale = scale(numbers);
                    scales[(group * PAGE_TOKENS + slot) * SCALE_BYTES..][..SCALE_BYTES]
                        .copy_from_slice(&scale.to_le_bytes());
                    let scale = scale.to_f32();
                    // Where the scale is 0 or NaN the quotient is NaN and the code 0.
                    let code = |v: f32| [(v.clamp(-SCALED_MAX, SCALED_MAX) / scale).round_ties_even() as i8 as u8];
                    put(numbers, codes, |i| place(group * GROUP + i), code);
                }
            }
        }
    }
}

impl FromStr for KvFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<KvFormat, String> {
        let known = KvFormat::ALL.map(KvFormat::name).join(", ");
        let found = KvFormat::ALL.into_iter().find(|format| format.name() == text);
        found.ok_or_else(|| format!("{text:?} is no format of keys and values; choose one of {known}"))
    }
}

#[inline(always)]
fn put<const N: usize>(
    numbers: &[f32],
    to: &mut [u8],
    place: impl Fn(usize) -> usize,
    stored: impl Fn(f32) -> [u8; N],
) {
    for (i, number) in numbers.iter().enumerate() {
        to[place(i) * N..][..N].copy_from_slice(&stored(*number));
    }
}

/// The largest magnitude over 127, rounded up; NaN where a number is.
#[inline(always)]
fn scale(numbers: &[f32]) -> bf16 {
    if numbers.iter().any(|v| v.is_nan()) {
        return bf16::NAN;
    }
    let largest = numbers.iter().fold(0.0_f32, |largest, v| largest.max(v.abs()));
    let exact = largest.min(SCALED_MAX) / CODE_MAX;
    bf16::from_bits((exact.to_bits().next_multiple_of(1 << 16) >> 16) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, rounds};

    /// What a side holds of a token that was written to `slot` of it, read as the layout says.
    fn round_trip(format: KvFormat, numbers: &[f32], slot: usize) -> (Vec<f64>, Vec<f64>) {
        let dim = numbers.len();
        let mut side = vec![0xff; PAGE_TOKENS * format.row_bytes(dim)];
        format.write(numbers, (slot, &mut side), |i| i * PAGE_TOKENS + slot);
        let (codes, scales) = side.split_at(dim * PAGE_TOKENS);
        let scale = |i: usize| {
            let at = (i / GROUP * PAGE_TOKENS + slot) * SCALE_BYTES;
            bf16::from_le_bytes([scales[at], scales[at + 1]]).to_f64()
        };
        let scales: Vec<f64> = (0..dim).map(scale).collect();
        let code = |i: usize| f64::from(codes[i * PAGE_TOKENS + slot] as i8);
        ((0..dim).map(|i| code(i) * scales[i]).collect(), scales)
    }

    #[test]
    fn codes_are_off_by_half_a_scale_at_most() {
        let mut random = Random::new(23);
        for _ in 0..rounds(2000) {
            let dim = 16 * (1 + random.below(16));
            // From subnormal to the largest.
            let size = 2f32.powi(random.below(250) as i32 - 135);
            let numbers: Vec<f32> = (0..dim).map(|_| random.normal() * size).collect();
            let (found, scales) = round_trip(KvFormat::Q8, &numbers, random.below(PAGE_TOKENS));
            for (i, (found, scale)) in found.iter().zip(&scales).enumerate() {
                let number = f64::from(numbers[i]);
                // The quotient is rounded to 24 bits before it is rounded to a code.
                assert!((found - number).abs() <= scale * (0.5 + 127.0 * 2f64.powi(-24)), "{found} {number} {scale}");
                let group = &numbers[i / GROUP * GROUP..dim.min(i / GROUP * GROUP + GROUP)];
                let largest = group.iter().fold(0.0, |m: f64, v| m.max(f64::from(v.abs())));
                // A bf16 has 8 bits, or fewer below the smallest normal one.
                let unit = f64::max(largest / 127.0 / 127.0, bf16::MIN_POSITIVE.to_f64() / 127.0);
                assert!(*scale >= largest / 127.0 * 0.999_999 && *scale <= largest / 127.0 + unit, "{scale} {largest}");
            }
        }
    }

    #[test]
    fn zeros_nans_and_infinities_with_a_scale() {
        let mut numbers = vec![0.0; 3 * GROUP];
        assert_eq!(round_trip(KvFormat::Q8, &numbers, 3).0, vec![0.0; 3 * GROUP]);
        numbers[1] = f32::NEG_INFINITY;
        numbers[GROUP + 5] = f32::NAN;
        numbers[2 * GROUP] = -2.5;
        let (found, _) = round_trip(KvFormat::Q8, &numbers, 15);
        assert!((found[1] / f64::from(-SCALED_MAX) - 1.0).abs() < 0.01 && found[0] == 0.0, "{found:?}");
        assert!(found[GROUP..2 * GROUP].iter().all(|v| v.is_nan()), "{found:?}");
        assert!((found[2 * GROUP] + 2.5).abs() < 0.01, "{found:?}");
    }

    #[test]
    fn names_read_back() {
        for format in KvFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        let error = "f8".parse::<KvFormat>().unwrap_err();
        assert_eq!(error, "\"f8\" is no format of keys and values; choose one of f16, bf16, f32, q8");
    }

    #[test]
    fn bytes_count_scales() {
        assert_eq!(KvFormat::ALL.map(|format| format.row_bytes(64)), [128, 128, 256, 72]);
        assert_eq!(KvFormat::Q8.row_bytes(80), 90);
    }
}
