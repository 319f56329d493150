//! How repacked tiles look, one type for each part: scales ([`Scales`]) and codes ([`Codes`]).
//!
//! Owner: [`super::pack`] writes them, [`super::int8`] reads them; both through the traits here, so that the bytes are
//! described once. A tile interleaves 16 weight rows. Its codes for one block of 32 columns are 8 groups of 64 bytes:
//! group g holds columns 4g..4g + 4 of row 0, then of row 1, and so on.

use super::TILE;
use crate::quant::{Format, scale_min_k4, scales_q3k};
use crate::simd::Simd;

/// 8 groups of the codes of a block.
pub(super) type Groups = [[u8; 64]; 8];

/// How the codes of one block of 16 rows are stored.
pub(super) trait Codes {
    /// Bytes per block.
    const BYTES: usize;
    /// Codes above 127 occur.
    const WIDE: bool = false;
    fn store(groups: &Groups, to: &mut [u8]);
    fn load<S: Simd>(s: S, from: &[u8]) -> [S::B; 8];
}

#[inline(always)]
fn vector<S: Simd>(s: S, from: &[u8], index: usize) -> S::B {
    s.load_b(&from.as_chunks().0[index])
}

/// 8 bits: the groups as they are.
pub(super) struct C8;

impl Codes for C8 {
    const BYTES: usize = 512;
    const WIDE: bool = true;

    #[inline(always)]
    fn store(groups: &Groups, to: &mut [u8]) {
        to.copy_from_slice(groups.as_flattened());
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[u8]) -> [S::B; 8] {
        let from = &from[..Self::BYTES];
        std::array::from_fn(
            #[inline(always)]
            |g| vector(s, from, g),
        )
    }
}

/// 4 bits: group g in the low nibbles and group g + 4 in the high nibbles of vector g.
pub(super) struct C4;

impl Codes for C4 {
    const BYTES: usize = 256;

    #[inline(always)]
    fn store(groups: &Groups, to: &mut [u8]) {
        for (i, byte) in to[..256].iter_mut().enumerate() {
            *byte = groups[i / 64][i % 64] & 0x0f | groups[i / 64 + 4][i % 64] << 4;
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[u8]) -> [S::B; 8] {
        let from = &from[..Self::BYTES];
        let (a, b, c, d) = (vector(s, from, 0), vector(s, from, 1), vector(s, from, 2), vector(s, from, 3));
        [
            s.and_b(a, 0x0f),
            s.and_b(b, 0x0f),
            s.and_b(c, 0x0f),
            s.and_b(d, 0x0f),
            s.shr_b::<4>(a, 0x0f),
            s.shr_b::<4>(b, 0x0f),
            s.shr_b::<4>(c, 0x0f),
            s.shr_b::<4>(d, 0x0f),
        ]
    }
}

/// 5 bits: the low four as [`C4`], then a vector whose bytes hold the fifth bit of group g at bit g.
pub(super) struct C5;

impl Codes for C5 {
    const BYTES: usize = 256 + 64;

    #[inline(always)]
    fn store(groups: &Groups, to: &mut [u8]) {
        C4::store(groups, to);
        for (i, byte) in to[256..].iter_mut().enumerate() {
            *byte = (0..8).fold(0, |bits, g| bits | (groups[g][i] >> 4 & 1) << g);
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[u8]) -> [S::B; 8] {
        let [a, b, c, d, e, f, g, h] = C4::load(s, from);
        let high = vector(s, &from[..Self::BYTES], 4);
        [
            s.or_b(a, s.shl_b::<4>(high, 0x10)),
            s.or_b(b, s.shl_b::<3>(high, 0x10)),
            s.or_b(c, s.shl_b::<2>(high, 0x10)),
            s.or_b(d, s.shl_b::<1>(high, 0x10)),
            s.or_b(e, s.and_b(high, 0x10)),
            s.or_b(f, s.shr_b::<1>(high, 0x10)),
            s.or_b(g, s.shr_b::<2>(high, 0x10)),
            s.or_b(h, s.shr_b::<3>(high, 0x10)),
        ]
    }
}

/// 6 bits: the low four as [`C4`], then the high two of groups 0..4 and of groups 4..8, group j at bits 2j.
pub(super) struct C6;

impl Codes for C6 {
    const BYTES: usize = 256 + 128;

    #[inline(always)]
    fn store(groups: &Groups, to: &mut [u8]) {
        C4::store(groups, to);
        for (i, byte) in to[256..].iter_mut().enumerate() {
            *byte = (0..4).fold(0, |bits, j| bits | (groups[i / 64 * 4 + j][i % 64] >> 4 & 3) << (2 * j));
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, from: &[u8]) -> [S::B; 8] {
        let mut groups = C4::load(s, from);
        let high = &from[256..Self::BYTES];
        for half in 0..2 {
            let v = vector(s, high, half);
            let g = 4 * half;
            groups[g] = s.or_b(groups[g], s.shl_b::<4>(v, 0x30));
            groups[g + 1] = s.or_b(groups[g + 1], s.shl_b::<2>(v, 0x30));
            groups[g + 2] = s.or_b(groups[g + 2], s.and_b(v, 0x30));
            groups[g + 3] = s.or_b(groups[g + 3], s.shr_b::<2>(v, 0x30));
        }
        groups
    }
}

/// How the scales of a tile are stored: `BYTES` for each run of `BLOCKS` blocks.
pub(super) trait Scales {
    /// Blocks of 32 columns that share a run.
    const BLOCKS: usize;
    /// Bytes of a run for 16 rows.
    const BYTES: usize;
    /// Scales per block: 1, or 2 for formats with a scale for each 16 columns.
    const HALVES: usize;
    /// Writes the scales of one weight row. `raw` is the stored block (of 32 columns, or of 256).
    fn store(raw: &[u8], lane: usize, run: &mut [u8]);
    /// Scale and offset of block `sub` of a run, for one half: `value = d * code - m`.
    fn load<S: Simd>(s: S, run: &[u8], sub: usize, half: usize) -> (S::F, S::F);
}

#[inline(always)]
fn lanes<const N: usize>(run: &[u8], at: usize) -> &[u8; N] {
    &run[at..at + N].as_chunks::<N>().0[0]
}

#[inline(always)]
fn put_half(run: &mut [u8], at: usize, lane: usize, raw: &[u8]) {
    run[at + 2 * lane..][..2].copy_from_slice(&raw[..2]);
}

/// f16 d at the start of each stored block; m = d * ZERO.
pub(super) struct D<const ZERO: u8>;

impl<const ZERO: u8> Scales for D<ZERO> {
    const BLOCKS: usize = 1;
    const BYTES: usize = 2 * TILE;
    const HALVES: usize = 1;

    #[inline(always)]
    fn store(raw: &[u8], lane: usize, run: &mut [u8]) {
        put_half(run, 0, lane, raw);
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, run: &[u8], _sub: usize, _half: usize) -> (S::F, S::F) {
        let d = s.load_f16(lanes(run, 0));
        (d, s.mul(d, s.splat(f32::from(ZERO))))
    }
}

/// f16 d and f16 minimum at the start of each stored block; m is minus the minimum.
pub(super) struct DMin;

impl Scales for DMin {
    const BLOCKS: usize = 1;
    const BYTES: usize = 4 * TILE;
    const HALVES: usize = 1;

    #[inline(always)]
    fn store(raw: &[u8], lane: usize, run: &mut [u8]) {
        put_half(run, 0, lane, raw);
        put_half(run, 32, lane, &raw[2..]);
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, run: &[u8], _sub: usize, _half: usize) -> (S::F, S::F) {
        (s.load_f16(lanes(run, 0)), s.mul(s.load_f16(lanes(run, 32)), s.splat(-1.0)))
    }
}

/// Q4_K and Q5_K: f16 d, f16 dmin, then 8 scales and 8 mins of 6 bits, here a byte each.
pub(super) struct K45;

impl Scales for K45 {
    const BLOCKS: usize = 8;
    const BYTES: usize = 4 * TILE + 16 * TILE;
    const HALVES: usize = 1;

    #[inline(always)]
    fn store(raw: &[u8], lane: usize, run: &mut [u8]) {
        put_half(run, 0, lane, raw);
        put_half(run, 32, lane, &raw[2..]);
        for sub in 0..8 {
            let (scale, min) = scale_min_k4(&raw[4..16], sub);
            run[64 + 32 * sub + lane] = scale;
            run[64 + 32 * sub + 16 + lane] = min;
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, run: &[u8], sub: usize, _half: usize) -> (S::F, S::F) {
        let d = s.mul(s.load_f16(lanes(run, 0)), s.load_u8(lanes(run, 64 + 32 * sub)));
        let m = s.mul(s.load_f16(lanes(run, 32)), s.load_u8(lanes(run, 64 + 32 * sub + 16)));
        (d, m)
    }
}

/// Q3_K (ZERO 4) and Q6_K (ZERO 32): f16 d, then 16 signed scales.
pub(super) struct KSigned<const ZERO: u8>;

impl<const ZERO: u8> Scales for KSigned<ZERO> {
    const BLOCKS: usize = 8;
    const BYTES: usize = 2 * TILE + 16 * TILE;
    const HALVES: usize = 2;

    #[inline(always)]
    fn store(raw: &[u8], lane: usize, run: &mut [u8]) {
        // Both end with d; their scales lie before it, packed in 12 bytes or plain in 16.
        let (head, d) = raw.split_at(raw.len() - 2);
        put_half(run, 0, lane, d);
        let scales: [u8; 16] = if raw.len() == Format::Q3_K.block_bytes() {
            scales_q3k(&head[head.len() - 12..]).map(|s| s as u8)
        } else {
            std::array::from_fn(|i| head[head.len() - 16 + i])
        };
        for (i, scale) in scales.into_iter().enumerate() {
            run[32 + 16 * i + lane] = scale;
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, run: &[u8], sub: usize, half: usize) -> (S::F, S::F) {
        let d = s.mul(s.load_f16(lanes(run, 0)), s.load_i8(lanes(run, 32 + 32 * sub + 16 * half)));
        (d, s.mul(d, s.splat(f32::from(ZERO))))
    }
}

/// Q2_K: f16 d, f16 dmin, then 16 scales and 16 mins of 4 bits, here a byte each.
pub(super) struct K2;

impl Scales for K2 {
    const BLOCKS: usize = 8;
    const BYTES: usize = 4 * TILE + 32 * TILE;
    const HALVES: usize = 2;

    #[inline(always)]
    fn store(raw: &[u8], lane: usize, run: &mut [u8]) {
        put_half(run, 0, lane, &raw[80..]);
        put_half(run, 32, lane, &raw[82..]);
        for (i, both) in raw[..16].iter().enumerate() {
            run[64 + 32 * i + lane] = both & 0x0f;
            run[64 + 32 * i + 16 + lane] = both >> 4;
        }
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, run: &[u8], sub: usize, half: usize) -> (S::F, S::F) {
        let at = 64 + 64 * sub + 32 * half;
        let d = s.mul(s.load_f16(lanes(run, 0)), s.load_u8(lanes(run, at)));
        let m = s.mul(s.load_f16(lanes(run, 32)), s.load_u8(lanes(run, at + 16)));
        (d, m)
    }
}

/// Calls `$do::<Codes, Scales>$args` with the layout of a quantised format.
macro_rules! with_layout {
    ($format:expr, $do:ident $args:tt) => {{
        use $crate::matmul::layout::{C4, C5, C6, C8, D, DMin, K2, K45, KSigned};
        use $crate::quant::Format;
        match $format {
            Format::Q8_0 => $do::<C8, D<128>>$args,
            Format::Q4_0 => $do::<C4, D<8>>$args,
            Format::Q4_1 => $do::<C4, DMin>$args,
            Format::Q5_0 => $do::<C5, D<16>>$args,
            Format::Q5_1 => $do::<C5, DMin>$args,
            Format::Q2_K => $do::<C4, K2>$args,
            Format::Q3_K => $do::<C4, KSigned<4>>$args,
            Format::Q4_K => $do::<C4, K45>$args,
            Format::Q5_K => $do::<C5, K45>$args,
            Format::Q6_K => $do::<C6, KSigned<32>>$args,
            Format::F32 | Format::F16 | Format::BF16 => unreachable!("{} has no codes", $format.name()),
        }
    }};
}
pub(super) use with_layout;
