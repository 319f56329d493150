//! One decoder per quantised format: raw bytes to 32 codes and their scales.

use super::Format;
use half::f16;

/// 32 consecutive values of a row: `value = d * (code - zero) - m`, with one `d` and `m` for each half of 16.
///
/// `zero` or `m` is 0. All products are exact in f32 (11-bit significands times at most 13 bits of scale and code), so
/// the only rounding is that of the subtraction of `m`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Block {
    pub(crate) codes: [u8; 32],
    pub(crate) zero: u8,
    pub(crate) d: [f32; 2],
    pub(crate) m: [f32; 2],
}

impl Block {
    pub(crate) fn dequantize(&self, out: &mut [f32; 32]) {
        for (i, (value, code)) in out.iter_mut().zip(self.codes).enumerate() {
            let scaled = self.d[i / 16] * f32::from(i16::from(code) - i16::from(self.zero));
            *value = if self.zero > 0 { scaled } else { scaled - self.m[i / 16] };
        }
    }

    /// The same scale for both halves.
    fn symmetric(codes: [u8; 32], zero: u8, d: f32) -> Block {
        Block { codes, zero, d: [d; 2], m: [0.0; 2] }
    }

    fn affine(codes: [u8; 32], d: f32, m: f32) -> Block {
        Block { codes, zero: 0, d: [d; 2], m: [m; 2] }
    }
}

/// Logical block `index` (values `32 * index..`) of a row of a quantised format.
///
/// # Panics
/// If the row is too short, or the format is not quantised.
#[inline(always)]
pub(crate) fn block(format: Format, row: &[u8], index: usize) -> Block {
    let per_block = format.block_values() / 32;
    let start = index / per_block * format.block_bytes();
    let raw = &row[start..start + format.block_bytes()];
    let sub = index % per_block;
    match format {
        Format::Q8_0 => q8_0(raw),
        Format::Q4_0 => Block::symmetric(nibbles(&raw[2..18]), 8, half_at(raw, 0)),
        Format::Q4_1 => Block::affine(nibbles(&raw[4..20]), half_at(raw, 0), -half_at(raw, 2)),
        Format::Q5_0 => Block::symmetric(fives(&raw[2..22]), 16, half_at(raw, 0)),
        Format::Q5_1 => Block::affine(fives(&raw[4..24]), half_at(raw, 0), -half_at(raw, 2)),
        Format::Q2_K => q2_k(raw, sub),
        Format::Q3_K => q3_k(raw, sub),
        Format::Q4_K => q4_k(raw, sub),
        Format::Q5_K => q5_k(raw, sub),
        Format::Q6_K => q6_k(raw, sub),
        Format::F32 | Format::F16 | Format::BF16 => unreachable!("{} has no blocks", format.name()),
    }
}

#[inline(always)]
fn half_at(raw: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([raw[at], raw[at + 1]]).to_f32()
}

/// Low nibbles of 16 bytes, then their high nibbles.
#[inline(always)]
fn nibbles(raw: &[u8]) -> [u8; 32] {
    let mut codes = [0; 32];
    for (i, byte) in raw[..16].iter().enumerate() {
        codes[i] = byte & 0x0f;
        codes[i + 16] = byte >> 4;
    }
    codes
}

/// 4 bytes of fifth bits, then nibbles.
#[inline(always)]
fn fives(raw: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
    let mut codes = nibbles(&raw[4..]);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> i & 1) as u8) << 4;
    }
    codes
}

/// f16 d; 32 signed codes, here shifted by 128.
#[inline(always)]
fn q8_0(raw: &[u8]) -> Block {
    let mut codes = [0; 32];
    for (code, byte) in codes.iter_mut().zip(&raw[2..34]) {
        *code = byte ^ 0x80;
    }
    Block::symmetric(codes, 128, half_at(raw, 0))
}

/// 16 bytes of scales (low nibble) and mins (high nibble), one for each 16 values; 64 bytes of codes; f16 d, f16 dmin.
/// Codes of values 128 * h + 32 * j + l are bits 2j..2j+2 of byte 32 * h + l.
#[inline(always)]
fn q2_k(raw: &[u8], sub: usize) -> Block {
    let (d, dmin) = (half_at(raw, 80), half_at(raw, 82));
    let mut codes = [0; 32];
    for (code, byte) in codes.iter_mut().zip(&raw[16 + sub / 4 * 32..][..32]) {
        *code = byte >> (2 * (sub % 4)) & 3;
    }
    let scales = [raw[2 * sub], raw[2 * sub + 1]];
    Block { codes, zero: 0, d: scales.map(|s| d * f32::from(s & 0x0f)), m: scales.map(|s| dmin * f32::from(s >> 4)) }
}

/// 32 bytes of third bits; 64 bytes of low bits as in Q2_K; 12 bytes of scales; f16 d.
#[inline(always)]
fn q3_k(raw: &[u8], sub: usize) -> Block {
    let d = half_at(raw, 108);
    let mut codes = [0; 32];
    for (i, code) in codes.iter_mut().enumerate() {
        let low = raw[32 + sub / 4 * 32 + i] >> (2 * (sub % 4)) & 3;
        *code = low | (raw[i] >> sub & 1) << 2;
    }
    let scales = scales_q3k(&raw[96..108]);
    Block { codes, zero: 4, d: [2 * sub, 2 * sub + 1].map(|i| d * f32::from(scales[i])), m: [0.0; 2] }
}

/// The 16 signed 6-bit scales of a Q3_K block: low nibbles in bytes 0..8, high bits in bytes 8..12.
#[inline(always)]
pub(crate) fn scales_q3k(raw: &[u8]) -> [i8; 16] {
    let mut scales = [0; 16];
    for (i, scale) in scales.iter_mut().enumerate() {
        let low = if i < 8 { raw[i] & 0x0f } else { raw[i - 8] >> 4 };
        let high = raw[8 + i % 4] >> (2 * (i / 4)) & 3;
        *scale = (low | high << 4) as i8 - 32;
    }
    scales
}

/// Scale and min (6 bits each) of sub-block `j` (0..8) from the 12 bytes of a Q4_K or Q5_K block.
#[inline(always)]
pub(crate) fn scale_min_k4(raw: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (raw[j] & 63, raw[j + 4] & 63)
    } else {
        ((raw[j + 4] & 0x0f) | (raw[j - 4] >> 6) << 4, (raw[j + 4] >> 4) | (raw[j] >> 6) << 4)
    }
}

/// f16 d, f16 dmin; 12 bytes of 6-bit scales and mins; 128 bytes of nibbles: sub-blocks 2i and 2i + 1 are the low and
/// high nibbles of bytes 32i..32i + 32.
#[inline(always)]
fn q4_k(raw: &[u8], sub: usize) -> Block {
    let (scale, min) = scale_min_k4(&raw[4..16], sub);
    let mut codes = [0; 32];
    for (code, byte) in codes.iter_mut().zip(&raw[16 + sub / 2 * 32..][..32]) {
        *code = byte >> (4 * (sub % 2)) & 0x0f;
    }
    Block::affine(codes, half_at(raw, 0) * f32::from(scale), half_at(raw, 2) * f32::from(min))
}

/// As Q4_K, with 32 bytes of fifth bits (bit `sub` of byte l) before the nibbles.
#[inline(always)]
fn q5_k(raw: &[u8], sub: usize) -> Block {
    let (scale, min) = scale_min_k4(&raw[4..16], sub);
    let mut codes = [0; 32];
    for (i, code) in codes.iter_mut().enumerate() {
        let low = raw[48 + sub / 2 * 32 + i] >> (4 * (sub % 2)) & 0x0f;
        *code = low | (raw[16 + i] >> sub & 1) << 4;
    }
    Block::affine(codes, half_at(raw, 0) * f32::from(scale), half_at(raw, 2) * f32::from(min))
}

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, f16 d. In each half of 128 values, quarter
/// q has nibble q / 2 of bytes 32 * (q % 2).. and bits 2q..2q + 2 of the high bytes.
#[inline(always)]
fn q6_k(raw: &[u8], sub: usize) -> Block {
    let (half, quarter) = (sub / 4, sub % 4);
    let low = &raw[64 * half + 32 * (quarter % 2)..][..32];
    let high = &raw[128 + 32 * half..][..32];
    let mut codes = [0; 32];
    for (i, code) in codes.iter_mut().enumerate() {
        *code = (low[i] >> (4 * (quarter / 2)) & 0x0f) | (high[i] >> (2 * quarter) & 3) << 4;
    }
    let d = half_at(raw, 208);
    Block { codes, zero: 32, d: [2 * sub, 2 * sub + 1].map(|i| d * f32::from(raw[192 + i] as i8)), m: [0.0; 2] }
}
