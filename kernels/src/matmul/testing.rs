//! Random weights for tests: any codes, with scales that real models could have.

use crate::quant::Format;
use crate::testing::Random;
use half::{bf16, f16};

/// `rows` stored rows of `cols` values. All code and sub-scale bits are random; f16 scales are small and finite.
pub(crate) fn random_rows(format: Format, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let len = format.tensor_bytes(rows, cols).unwrap();
    let mut bytes = random.bytes(len);
    let halves: &[usize] = match format {
        Format::F32 => {
            bytes = random.normals(rows * cols).iter().flat_map(|v| v.to_le_bytes()).collect();
            &[]
        }
        Format::F16 => {
            bytes = random.normals(rows * cols).iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
            &[]
        }
        Format::BF16 => {
            bytes = random.normals(rows * cols).iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
            &[]
        }
        Format::Q8_0 | Format::Q4_0 | Format::Q5_0 => &[0],
        Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => &[0, 2],
        Format::Q2_K => &[80, 82],
        Format::Q3_K => &[108],
        Format::Q6_K => &[208],
    };
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        for at in halves {
            block[*at..at + 2].copy_from_slice(&f16::from_f32(random.normal() * 0.01).to_le_bytes());
        }
    }
    bytes
}
