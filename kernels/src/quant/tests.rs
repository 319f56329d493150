//! The block decoder against formulas written the way ggml writes them, value by value.

use super::*;
use crate::testing::Random;

fn f16_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// `dequantize_row_*` of ggml for one block, transcribed loop by loop.
fn ggml(format: Format, b: &[u8]) -> Vec<f32> {
    let mut y = vec![0.0; format.block_values()];
    let qh = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    match format {
        Format::F32 => y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        Format::F16 => y[0] = f16_at(b, 0),
        Format::BF16 => y[0] = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16),
        Format::Q8_0 => (0..32).for_each(|j| y[j] = f32::from(b[2 + j] as i8) * f16_at(b, 0)),
        Format::Q4_0 => {
            for j in 0..16 {
                y[j] = (i32::from(b[2 + j] & 0x0f) - 8) as f32 * f16_at(b, 0);
                y[j + 16] = (i32::from(b[2 + j] >> 4) - 8) as f32 * f16_at(b, 0);
            }
        }
        Format::Q4_1 => {
            for j in 0..16 {
                y[j] = f32::from(b[4 + j] & 0x0f) * f16_at(b, 0) + f16_at(b, 2);
                y[j + 16] = f32::from(b[4 + j] >> 4) * f16_at(b, 0) + f16_at(b, 2);
            }
        }
        Format::Q5_0 => {
            for j in 0..16 {
                let (h0, h1) = (((qh(2) >> j) << 4) as u8 & 0x10, (qh(2) >> (j + 12)) as u8 & 0x10);
                y[j] = (i32::from((b[6 + j] & 0x0f) | h0) - 16) as f32 * f16_at(b, 0);
                y[j + 16] = (i32::from((b[6 + j] >> 4) | h1) - 16) as f32 * f16_at(b, 0);
            }
        }
        Format::Q5_1 => {
            for j in 0..16 {
                let (h0, h1) = (((qh(4) >> j) << 4) as u8 & 0x10, (qh(4) >> (j + 12)) as u8 & 0x10);
                y[j] = f32::from((b[8 + j] & 0x0f) | h0) * f16_at(b, 0) + f16_at(b, 2);
                y[j + 16] = f32::from((b[8 + j] >> 4) | h1) * f16_at(b, 0) + f16_at(b, 2);
            }
        }
        Format::Q2_K => ggml_q2_k(b, &mut y),
        Format::Q3_K => ggml_q3_k(b, &mut y),
        Format::Q4_K | Format::Q5_K => ggml_q45_k(format, b, &mut y),
        Format::Q6_K => ggml_q6_k(b, &mut y),
    }
    y
}

fn ggml_q2_k(b: &[u8], y: &mut [f32]) {
    let (d, min) = (f16_at(b, 80), f16_at(b, 82));
    let (mut is, mut out) = (0, 0);
    for n in 0..2 {
        for j in 0..4 {
            for part in 0..2 {
                let sc = b[is];
                is += 1;
                for l in 0..16 {
                    let q = (b[16 + 32 * n + 16 * part + l] >> (2 * j)) & 3;
                    y[out] = d * f32::from(sc & 0x0f) * f32::from(q) - min * f32::from(sc >> 4);
                    out += 1;
                }
            }
        }
    }
}

fn ggml_q3_k(b: &[u8], y: &mut [f32]) {
    const K1: u32 = 0x0303_0303;
    const K2: u32 = 0x0f0f_0f0f;
    let word = |i: usize| u32::from_le_bytes([b[96 + 4 * i], b[97 + 4 * i], b[98 + 4 * i], b[99 + 4 * i]]);
    let (a0, a1, tmp) = (word(0), word(1), word(2));
    let aux = [
        (a0 & K2) | ((tmp & K1) << 4),
        (a1 & K2) | (((tmp >> 2) & K1) << 4),
        ((a0 >> 4) & K2) | (((tmp >> 4) & K1) << 4),
        ((a1 >> 4) & K2) | (((tmp >> 6) & K1) << 4),
    ];
    let scales: Vec<i8> = aux.iter().flat_map(|w| w.to_le_bytes()).map(|s| s as i8).collect();
    let d = f16_at(b, 108);
    let (mut is, mut out, mut m) = (0, 0, 1u8);
    for n in 0..2 {
        for j in 0..4 {
            for part in 0..2 {
                let dl = d * f32::from(scales[is] - 32);
                is += 1;
                for l in 0..16 {
                    let q = i32::from((b[32 + 32 * n + 16 * part + l] >> (2 * j)) & 3);
                    let high = if b[16 * part + l] & m != 0 { 0 } else { 4 };
                    y[out] = dl * (q - high) as f32;
                    out += 1;
                }
            }
            m = m.wrapping_shl(1);
        }
    }
}

fn ggml_q45_k(format: Format, b: &[u8], y: &mut [f32]) {
    let (d, min) = (f16_at(b, 0), f16_at(b, 2));
    let q = &b[4..16];
    let pair = |j: usize| {
        if j < 4 {
            (q[j] & 63, q[j + 4] & 63)
        } else {
            ((q[j + 4] & 0xf) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4))
        }
    };
    let codes = if format == Format::Q4_K { &b[16..] } else { &b[48..] };
    let mut u = 1u8;
    for i in 0..4 {
        for nibble in 0..2 {
            let (sc, mn) = pair(2 * i + nibble);
            for l in 0..32 {
                let high = if format == Format::Q5_K && b[16 + l] & u != 0 { 16 } else { 0 };
                let code = ((codes[32 * i + l] >> (4 * nibble)) & 0xf) + high;
                y[64 * i + 32 * nibble + l] = d * f32::from(sc) * f32::from(code) - min * f32::from(mn);
            }
            u = u.wrapping_shl(1);
        }
    }
}

fn ggml_q6_k(b: &[u8], y: &mut [f32]) {
    let d = f16_at(b, 208);
    for n in 0..2 {
        let (ql, qh, sc) = (&b[64 * n..], &b[128 + 32 * n..], &b[192 + 8 * n..]);
        let s = |i: usize| d * f32::from(sc[i] as i8);
        for l in 0..32 {
            let is = l / 16;
            let q = |low: u8, shift: u32| (i32::from(low | (((qh[l] >> shift) & 3) << 4)) - 32) as f32;
            y[128 * n + l] = s(is) * q(ql[l] & 0xf, 0);
            y[128 * n + l + 32] = s(is + 2) * q(ql[l + 32] & 0xf, 2);
            y[128 * n + l + 64] = s(is + 4) * q(ql[l] >> 4, 4);
            y[128 * n + l + 96] = s(is + 6) * q(ql[l + 32] >> 4, 6);
        }
    }
}

#[test]
fn every_format_decodes_as_ggml_does() {
    let mut random = Random::new(2);
    for format in Format::ALL {
        for _ in 0..200 {
            let blocks = 1 + random.below(4);
            let mut bytes = crate::matmul::testing::random_rows(format, 1, blocks * format.block_values(), &mut random);
            if random.below(4) == 0 {
                // Any bits at all; NaN is compared as such below.
                bytes = random.bytes(bytes.len());
            }
            let mut out = vec![0.0; blocks * format.block_values()];
            dequantize_row(format, &bytes, &mut out).unwrap();
            let expected: Vec<f32> = bytes.chunks(format.block_bytes()).flat_map(|b| ggml(format, b)).collect();
            for (i, (a, b)) in out.iter().zip(&expected).enumerate() {
                assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{format:?} value {i}: {a} {b}");
            }
        }
    }
}

#[test]
fn known_blocks() {
    // Q4_0: d = 0.5, first byte 0x1f: value 0 is (15 - 8) / 2, value 16 is (1 - 8) / 2.
    let mut raw = vec![0x88u8; 18];
    raw[..3].copy_from_slice(&[0x00, 0x38, 0x1f]);
    let mut out = [0.0; 32];
    dequantize_row(Format::Q4_0, &raw, &mut out).unwrap();
    assert_eq!((out[0], out[16], out[1]), (3.5, -3.5, 0.0));
    // Q8_0: d = 2.
    let mut raw = vec![0u8; 34];
    raw[..4].copy_from_slice(&[0x00, 0x40, 0xff, 0x80]);
    dequantize_row(Format::Q8_0, &raw, &mut out).unwrap();
    assert_eq!((out[0], out[1], out[2]), (-2.0, -256.0, 0.0));
}

#[test]
fn wrong_sizes_are_refused() {
    let mut out = [0.0; 33];
    assert!(matches!(
        dequantize_row(Format::Q4_0, &[0; 18], &mut out),
        Err(KernelError::RowLength { format: "Q4_0", block: 32, cols: 33 })
    ));
    assert!(matches!(
        dequantize_row(Format::Q8_0, &[0; 33], &mut out[..32]),
        Err(KernelError::ByteLength { expected: 34, found: 33, .. })
    ));
    assert!(Format::Q4_K.row_bytes(128).is_err());
    assert!(Format::F32.row_bytes(0).is_err());
    assert!(Format::F32.tensor_bytes(usize::MAX / 2, 1 << 20).is_err());
    assert_eq!(Format::Q6_K.tensor_bytes(3, 512), Ok(3 * 420));
}

#[test]
fn ggml_numbers_round_trip() {
    let found: Vec<Format> = (0..100).filter_map(Format::from_ggml).collect();
    assert_eq!(found.len(), Format::ALL.len());
    assert!(Format::ALL.iter().all(|f| found.contains(f)));
}

/// CRC-32 as in zlib.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0xedb8_8320 } else { c >> 1 })
    })
}

#[test]
fn blocks_decode_as_in_another_implementation() {
    let mut seen = Vec::new();
    for line in include_str!("fixtures/blocks.txt").lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let format = Format::ALL.into_iter().find(|f| f.name() == fields[0]).unwrap();
        let digits: Vec<u8> = fields[1].chars().map(|c| c.to_digit(16).unwrap() as u8).collect();
        let bytes: Vec<u8> = digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect();
        let mut values = vec![0.0; format.block_values()];
        dequantize_row(format, &bytes, &mut values).unwrap();
        assert_eq!(values[0], fields[3].parse::<f32>().unwrap(), "{format:?}");
        assert_eq!(values[values.len() - 1], fields[4].parse::<f32>().unwrap(), "{format:?}");
        let raw: Vec<u8> = values.iter().flat_map(|v| (v + 0.0).to_le_bytes()).collect();
        assert_eq!(format!("{:08x}", crc32(&raw)), fields[2], "{format:?}");
        seen.push(format);
    }
    assert!(Format::ALL.iter().filter(|f| f.is_quantized()).all(|f| seen.iter().filter(|s| *s == f).count() == 4));
}
