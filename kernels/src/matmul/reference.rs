//! The product as a definition: plain loops over the weights as stored.
//!
//! It also serves matrices that were not prepared. The order of its operations is what the fast kernels must equal
//! bit for bit.

use super::{Output, QuantizedRows, TILE, Work};
use crate::quant::{Format, block, dequantize_row};

/// `y = w . x` for one quantised weight row and one quantised activation row: for each block of 32 (each half of 16
/// for the formats that have a scale for 16) the exact integer sum of products times both scales, minus the weight
/// offset times the sum of the activations; every step one fused multiply-add.
pub(super) fn dot_quantized(format: Format, weights: &[u8], x: &QuantizedRows, row: usize) -> f32 {
    let (codes, meta) = x.row(row);
    let halves = matches!(format, Format::Q2_K | Format::Q3_K | Format::Q6_K);
    let mut acc = 0.0_f32;
    for (index, (codes, meta)) in codes.iter().zip(meta).enumerate() {
        let block = block(format, weights, index);
        let ranges = if halves { [0..16, 16..32] } else { [0..32, 32..32] };
        for (half, range) in ranges.into_iter().filter(|r| !r.is_empty()).enumerate() {
            let products = block.codes[range.clone()].iter().zip(&codes[range]);
            let sum: i32 = products.map(|(&w, &x)| i32::from(w) * i32::from(x)).sum();
            let offset = if block.zero > 0 { block.d[half] * f32::from(block.zero) } else { block.m[half] };
            let minus_sum = if halves { meta.minus_half_sums[half] } else { meta.minus_sum };
            acc = (sum as f32).mul_add(block.d[half] * meta.scale, acc);
            acc = offset.mul_add(minus_sum, acc);
        }
    }
    acc
}

/// `y = w . x` in f32: even and odd columns are summed apart, in order, each step one fused multiply-add.
pub(super) fn dot_float(weights: &[f32], x: &[f32]) -> f32 {
    let mut acc = [0.0_f32; 2];
    for (i, (w, x)) in weights.iter().zip(x).enumerate() {
        acc[i % 2] = w.mul_add(*x, acc[i % 2]);
    }
    acc[0] + acc[1]
}

pub(super) fn multiply(output: &Output<'_>, work: Work<'_>) {
    let matrix = output.matrix;
    let mut weights = vec![0.0; if matrix.format.is_quantized() { 0 } else { matrix.cols }];
    for tile in work.tiles {
        let lanes = TILE.min(matrix.rows - tile * TILE);
        let mut values = vec![[0.0; TILE]; work.rows.len()];
        for lane in 0..lanes {
            let source = matrix.row_source(tile * TILE + lane);
            if !matrix.format.is_quantized() {
                let decoded = dequantize_row(matrix.format, source, &mut weights);
                debug_assert!(decoded.is_ok(), "sizes were checked when the matrix was made");
            }
            for (row, values) in work.rows.clone().zip(&mut values) {
                values[lane] = match work.input.codes.filter(|_| matrix.format.is_quantized()) {
                    Some(codes) => dot_quantized(matrix.format, source, codes, row),
                    None => dot_float(&weights, &work.input.x[row * matrix.cols..][..matrix.cols]),
                };
            }
        }
        for (row, values) in work.rows.clone().zip(&values) {
            output.put(row, tile, values);
        }
    }
}
