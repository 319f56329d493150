//! Weight formats: their block layouts as in GGUF files, and the plain decoder that defines their values.
//!
//! Owner: loaders ask for sizes; [`crate::matmul`] decodes blocks when it repacks weights. Invariant: every quantised
//! format is read through `Block`, a logical block of 32 codes with scales, so dequantisation, the reference product
//! and the repacked kernels cannot disagree about a value.
//!
//! Layouts and formulas: ggml, `ggml-common.h` and `ggml-quants.c` (`dequantize_row_*`).

mod blocks;

use crate::KernelError;
pub(crate) use blocks::{block, scale_min_k4, scales_q3k};
use half::{bf16, f16};

/// Format of a weight tensor.
#[allow(missing_docs)]
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 13] = [
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::Q8_0,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q2_K,
        Format::Q3_K,
        Format::Q4_K,
        Format::Q5_K,
        Format::Q6_K,
    ];

    /// The format of a `ggml_type` number in a GGUF file; `None` for types that are not supported.
    pub fn from_ggml(number: u32) -> Option<Format> {
        Some(match number {
            0 => Format::F32,
            1 => Format::F16,
            2 => Format::Q4_0,
            3 => Format::Q4_1,
            6 => Format::Q5_0,
            7 => Format::Q5_1,
            8 => Format::Q8_0,
            10 => Format::Q2_K,
            11 => Format::Q3_K,
            12 => Format::Q4_K,
            13 => Format::Q5_K,
            14 => Format::Q6_K,
            30 => Format::BF16,
            _ => return None,
        })
    }

    /// Name as GGUF tools print it.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "F32",
            Format::F16 => "F16",
            Format::BF16 => "BF16",
            Format::Q8_0 => "Q8_0",
            Format::Q4_0 => "Q4_0",
            Format::Q4_1 => "Q4_1",
            Format::Q5_0 => "Q5_0",
            Format::Q5_1 => "Q5_1",
            Format::Q2_K => "Q2_K",
            Format::Q3_K => "Q3_K",
            Format::Q4_K => "Q4_K",
            Format::Q5_K => "Q5_K",
            Format::Q6_K => "Q6_K",
        }
    }

    /// Values per block.
    pub fn block_values(self) -> usize {
        match self {
            Format::F32 | Format::F16 | Format::BF16 => 1,
            Format::Q8_0 | Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1 => 32,
            Format::Q2_K | Format::Q3_K | Format::Q4_K | Format::Q5_K | Format::Q6_K => 256,
        }
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::F16 | Format::BF16 => 2,
            Format::Q8_0 => 34,
            Format::Q4_0 => 18,
            Format::Q4_1 => 20,
            Format::Q5_0 => 22,
            Format::Q5_1 => 24,
            Format::Q2_K => 84,
            Format::Q3_K => 110,
            Format::Q4_K => 144,
            Format::Q5_K => 176,
            Format::Q6_K => 210,
        }
    }

    /// Whether codes are multiplied as integers (true) or values as floats.
    pub fn is_quantized(self) -> bool {
        self.block_values() > 1
    }

    /// Bytes of a row of `cols` values.
    ///
    /// Errors: `cols` is 0, not a multiple of the block, or too large.
    pub fn row_bytes(self, cols: usize) -> Result<usize, KernelError> {
        let max = isize::MAX as usize / 64;
        if cols == 0 || cols > max {
            return Err(KernelError::Size { what: "a row length", size: cols, max });
        }
        if !cols.is_multiple_of(self.block_values()) {
            return Err(KernelError::RowLength { format: self.name(), block: self.block_values(), cols });
        }
        Ok(cols / self.block_values() * self.block_bytes())
    }

    /// Bytes of a tensor of `rows` rows of `cols` values.
    ///
    /// Errors: as [`Format::row_bytes`], or a size that overflows.
    pub fn tensor_bytes(self, rows: usize, cols: usize) -> Result<usize, KernelError> {
        let row = self.row_bytes(cols)?;
        let max = isize::MAX as usize / row;
        match row.checked_mul(rows).filter(|_| (1..=max).contains(&rows)) {
            Some(bytes) => Ok(bytes),
            None => Err(KernelError::Size { what: "a row count", size: rows, max }),
        }
    }
}

/// Decodes one row to f32, bit for bit as ggml does.
///
/// Errors: a length of `bytes` that is not that of a row of `out.len()` values.
pub fn dequantize_row(format: Format, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    let expected = format.row_bytes(out.len())?;
    if bytes.len() != expected {
        let (cols, found) = (out.len(), bytes.len());
        return Err(KernelError::ByteLength { format: format.name(), rows: 1, cols, expected, found });
    }
    match format {
        Format::F32 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*raw);
            }
        }
        Format::F16 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*raw).to_f32();
            }
        }
        Format::BF16 => {
            for (value, raw) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*raw).to_f32();
            }
        }
        _ => {
            for (index, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                block(format, bytes, index).dequantize(values);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
