//! From quantised rows as stored to the tiles of `weights.cuh`. Owner: [`super::DeviceMatrix::upload`]. Invariant: what a
//! kernel decodes from codes and records is the value of [`crate::quant::dequantize_row`], bit for bit: codes are those
//! of its blocks, scales and minima the f16 numbers and factors they are made of.

use super::TILE_ROWS;
use super::matrix::Layout;
use crate::quant::{Format, block, scale_min_k4, scales_q3k};
use half::f16;

/// Columns of a group, as two blocks of 32.
const GROUP_BLOCKS: usize = 2;

/// How a record of scales is read; the numbers are those of `weights.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Two f16 scales.
    Halves,
    /// Two f16 scales, two f16 minima.
    HalvesMin,
    /// Factors for 32 columns each; f16 d and dmin.
    Factors32,
    /// Factors for 16 columns each; f16 d.
    Factors16,
    /// Factors of scale and minimum for 16 columns each; f16 d and dmin.
    Factors16Min,
}

impl Kind {
    /// Words of a record.
    pub(super) fn words(self) -> usize {
        if self == Kind::Halves { 1 } else { 2 }
    }
}

/// How a format lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packing {
    pub(super) layout: Layout,
    pub(super) kind: Kind,
    /// Subtracted from codes.
    pub(super) zero: u32,
}

impl Packing {
    pub(super) fn of(format: Format) -> Packing {
        let (kind, zero) = match format {
            Format::F32 | Format::F16 | Format::BF16 | Format::Q8_0 | Format::Q5_0 => (Kind::Halves, 0),
            Format::Q4_0 => (Kind::Halves, 8),
            Format::Q4_1 | Format::Q5_1 => (Kind::HalvesMin, 0),
            Format::Q4_K | Format::Q5_K => (Kind::Factors32, 0),
            Format::Q3_K => (Kind::Factors16, 4),
            Format::Q6_K => (Kind::Factors16, 32),
            Format::Q2_K => (Kind::Factors16Min, 0),
        };
        Packing { layout: Layout::of(format), kind, zero }
    }
}

/// Repacks rows from a first of a tile on: codes and records of the tiles that they fill, the last possibly in part.
pub(super) fn tiles(format: Format, cols: usize, rows: &[u8], (codes, records): (&mut [u8], &mut [u32])) {
    let Packing { layout, kind, .. } = Packing::of(format);
    let row_bytes = cols / format.block_values() * format.block_bytes();
    let groups = cols.div_ceil(32 * GROUP_BLOCKS);
    let (tile_codes, tile_words) = (groups * layout.group_bytes(), groups * TILE_ROWS * kind.words());
    let count = codes.len() / tile_codes;
    let threads = crate::sys::default_threads().clamp(1, count);
    let each = count.div_ceil(threads);
    let parts = codes
        .chunks_mut(each * tile_codes)
        .zip(records.chunks_mut(each * tile_words))
        .zip(rows.chunks(each * TILE_ROWS * row_bytes));
    std::thread::scope(|scope| {
        for ((codes, records), rows) in parts {
            scope.spawn(move || {
                let tiles = codes.chunks_exact_mut(tile_codes).zip(records.chunks_exact_mut(tile_words));
                for ((codes, records), rows) in tiles.zip(rows.chunks(TILE_ROWS * row_bytes)) {
                    codes.fill(0);
                    records.fill(0);
                    for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
                        pack_row(format, row, lane, (codes, records));
                    }
                }
            });
        }
    });
}

/// Puts a row into its place in a tile.
fn pack_row(format: Format, row: &[u8], lane: usize, (codes, records): (&mut [u8], &mut [u32])) {
    let Packing { layout, kind, .. } = Packing::of(format);
    // Codes that fill 8 bits are signed; those of other kinds leave the sign bit free.
    let signed_from = match format {
        Format::Q8_0 => 128,
        Format::Q5_0 => 16,
        _ => 0,
    };
    let blocks = row.len() / format.block_bytes() * (format.block_values() / 32);
    for index in 0..blocks {
        let block = block(format, row, index);
        let (group, part) = (index / GROUP_BLOCKS, index % GROUP_BLOCKS);
        let to = &mut codes[group * layout.group_bytes()..][..layout.group_bytes()];
        for (i, four) in block.codes.as_chunks::<4>().0.iter().enumerate() {
            // Four columns of unit `unit`, for lane `quad` of the quad.
            let (unit, quad) = (2 * part + i / 4, i % 4);
            let [a, b, c, d] = *four;
            match layout {
                Layout::Q8 => {
                    let at = lane / 8 * 512 + (4 * (lane % 8) + quad) * 16 + 4 * unit;
                    to[at..at + 4].copy_from_slice(&[a, c, b, d].map(|code| code.wrapping_sub(signed_from)));
                }
                _ => {
                    let at = (4 * (lane % 8) + quad) * 16 + (2 * (lane / 8) + unit / 2) * 4 + unit % 2;
                    to[at] = a | c << 4;
                    to[at + 2] = b | d << 4;
                }
            }
        }
        let record = &mut records[(group * TILE_ROWS + lane) * kind.words()..][..kind.words()];
        write_record((format, kind), (row, index), (block.d[0], block.m[0]), record);
    }
}

/// Puts scales of block `index` of a row into the record of its group.
fn write_record((format, kind): (Format, Kind), (row, index): (&[u8], usize), (d, m): (f32, f32), record: &mut [u32]) {
    let (part, sub) = (index % GROUP_BLOCKS, index % 8);
    let half = |value: f32| u32::from(f16::from_f32(value).to_bits()) << (16 * part);
    let per_block = format.block_values() / 32;
    let raw = &row[index / per_block * format.block_bytes()..][..format.block_bytes()];
    let word = |at: usize| u32::from(raw[at]) | u32::from(raw[at + 1]) << 8;
    match kind {
        Kind::Halves => record[0] |= half(d),
        Kind::HalvesMin => {
            record[0] |= half(d);
            record[1] |= half(m);
        }
        Kind::Factors32 => {
            let (scale, minimum) = scale_min_k4(&raw[4..16], sub);
            record[0] |= u32::from(scale) << (8 * part) | u32::from(minimum) << (16 + 8 * part);
            record[1] = word(0) | word(2) << 16;
        }
        Kind::Factors16 | Kind::Factors16Min => {
            let (factors, scales) = match format {
                Format::Q6_K => ([raw[192 + 2 * sub], raw[193 + 2 * sub]], word(208)),
                Format::Q3_K => {
                    let scales = scales_q3k(&raw[96..108]);
                    ([scales[2 * sub] as u8, scales[2 * sub + 1] as u8], word(108))
                }
                _ => ([raw[2 * sub], raw[2 * sub + 1]], word(80) | word(82) << 16),
            };
            record[0] |= u32::from(u16::from_le_bytes(factors)) << (16 * part);
            record[1] = scales;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matmul::testing::random_rows;
    use crate::quant::dequantize_row;
    use crate::testing::{Random, bits};

    /// Decodes as `weights.cuh` describes it.
    fn decode(packing: Packing, tile: (&[u8], &[u32]), (lane, col): (usize, usize)) -> f32 {
        let Packing { layout, kind, zero } = packing;
        let (group, unit, quad, slot) = (col / 64, col / 16 % 4, col / 4 % 4, col % 4);
        let at = group * layout.group_bytes();
        let code = if layout == Layout::Q8 {
            let byte = [0, 2, 1, 3][slot];
            let code = tile.0[at + 512 * (lane / 8) + 16 * (4 * (lane % 8) + quad) + 4 * unit + byte];
            assert!(kind == Kind::Halves || code < 128, "the sign bit is used");
            f32::from(code as i8) - zero as f32
        } else {
            let word = at + 16 * (4 * (lane % 8) + quad) + 4 * (2 * (lane / 8) + unit / 2);
            let word = u32::from_le_bytes(tile.0[word..word + 4].try_into().unwrap());
            let nibble = 2 * (unit % 2) + slot / 2 + 4 * (slot % 2);
            (word >> (4 * nibble) & 15) as f32 - zero as f32
        };
        let record = &tile.1[(group * 16 + lane) * kind.words()..][..kind.words()];
        let half = |word: u32, i: usize| f16::from_bits((word >> (16 * i)) as u16).to_f32();
        let byte = |i: usize| (record[0] >> (8 * i)) as u8;
        let (scale, minimum) = match kind {
            Kind::Halves => (half(record[0], unit / 2), 0.0),
            Kind::HalvesMin => (half(record[0], unit / 2), half(record[1], unit / 2)),
            Kind::Factors32 => {
                let (d, dmin) = (half(record[1], 0), half(record[1], 1));
                (d * f32::from(byte(unit / 2)), dmin * f32::from(byte(2 + unit / 2)))
            }
            Kind::Factors16 => (half(record[1], 0) * f32::from(byte(unit) as i8), 0.0),
            Kind::Factors16Min => {
                let (d, dmin) = (half(record[1], 0), half(record[1], 1));
                (d * f32::from(byte(unit) & 15), dmin * f32::from(byte(unit) >> 4))
            }
        };
        scale * code - minimum
    }

    #[test]
    fn tiles_hold_the_values_of_the_rows() {
        let mut random = Random::new(41);
        for format in Format::ALL.into_iter().filter(|format| format.is_quantized()) {
            let packing = Packing::of(format);
            let (rows, cols) = (16 + random.below(40), format.block_values() * (1 + random.below(3)));
            let stored = random_rows(format, rows, cols, &mut random);
            let groups = cols.div_ceil(64);
            let (codes, words) = (groups * packing.layout.group_bytes(), groups * 16 * packing.kind.words());
            let tile_count = rows.div_ceil(16);
            let mut packed = (vec![0xa5; tile_count * codes], vec![0xa5a5_a5a5; tile_count * words]);
            tiles(format, cols, &stored, (&mut packed.0, &mut packed.1));
            let mut expected = vec![0.0; cols];
            for row in 0..tile_count * 16 {
                let tile = (&packed.0[row / 16 * codes..][..codes], &packed.1[row / 16 * words..][..words]);
                let found: Vec<f32> = (0..cols).map(|col| decode(packing, tile, (row % 16, col))).collect();
                if row < rows {
                    let bytes = stored.len() / rows;
                    dequantize_row(format, &stored[row * bytes..][..bytes], &mut expected).unwrap();
                    assert_eq!(bits(&found), bits(&expected), "{} row {row}", format.name());
                } else {
                    assert!(found.iter().all(|value| *value == 0.0), "{} padding", format.name());
                }
            }
        }
    }
}
