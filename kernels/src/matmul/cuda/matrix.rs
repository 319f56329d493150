//! Weights on a device. Owner: the model that loaded them. Invariant: arrays have the sizes that the layout says, padding
//! included, so kernels need no checks beyond the shape. Every format keeps its values: floats stay as they are,
//! quantised formats keep codes, factors and scales as stored, in another order; nothing is rounded.

use super::repack::{self, Packing};
use super::{MatmulKernels, TILE_ROWS};
use crate::cuda::{Args, Array, CudaError, Gpu, Stream, View};
use crate::quant::Format;
use half::f16;

/// Columns of a group of quantised weights.
const GROUP_COLS: usize = 64;
/// Most tiles of 16 outputs: what a grid of blocks may have.
const TILES_MAX: usize = 65_535;
/// Bytes repacked on the host at a time.
const UPLOAD_BYTES: usize = 32 << 20;

/// How weights lie on the device; `weights.cuh` has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row-major.
    F32,
    /// Row-major.
    F16,
    /// Row-major.
    Bf16,
    /// Signed 8-bit codes.
    Q8,
    /// 4-bit codes.
    Q4,
}

impl Layout {
    /// The layout of a format.
    pub fn of(format: Format) -> Layout {
        match format {
            Format::F32 => Layout::F32,
            Format::F16 => Layout::F16,
            Format::BF16 => Layout::Bf16,
            Format::Q8_0 | Format::Q5_0 | Format::Q5_1 | Format::Q5_K | Format::Q6_K => Layout::Q8,
            Format::Q4_0 | Format::Q4_1 | Format::Q4_K | Format::Q3_K | Format::Q2_K => Layout::Q4,
        }
    }

    /// Whether weights are codes with scales.
    pub fn is_quantized(self) -> bool {
        matches!(self, Layout::Q8 | Layout::Q4)
    }

    /// Bytes of a value of a float layout.
    fn value_bytes(self) -> usize {
        if self == Layout::F32 { 4 } else { 2 }
    }

    /// Values from one row to the next in a float layout: rows start at multiples of 16 bytes.
    pub(super) fn pitch(self, cols: usize) -> usize {
        cols.next_multiple_of(16 / self.value_bytes())
    }

    /// Bytes of codes of a tile and group.
    pub(super) fn group_bytes(self) -> usize {
        if self == Layout::Q8 { 1024 } else { 512 }
    }
}

/// Weights as they are stored.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// Their format.
    pub format: Format,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Row by row.
    pub bytes: &'a [u8],
}

/// Weights `[rows, cols]` (outputs, inputs) on a device.
#[derive(Debug)]
pub struct DeviceMatrix {
    format: Format,
    packing: Packing,
    rows: usize,
    cols: usize,
    codes: Array<u8>,
    scales: Option<Array<u32>>,
}

/// Bytes of codes and words of scales.
fn sizes(packing: Packing, rows: usize, cols: usize) -> (usize, usize) {
    let Packing { layout, kind, .. } = packing;
    if !layout.is_quantized() {
        return (rows * layout.pitch(cols) * layout.value_bytes(), 0);
    }
    let groups = rows.div_ceil(TILE_ROWS) * cols.div_ceil(GROUP_COLS);
    (groups * layout.group_bytes(), groups * TILE_ROWS * kind.words())
}

/// Bytes that a matrix takes on the device.
pub fn device_bytes(format: Format, rows: usize, cols: usize) -> u64 {
    let (codes, scales) = sizes(Packing::of(format), rows, cols);
    (codes + 4 * scales) as u64
}

impl DeviceMatrix {
    /// Room for weights; what they are is not defined.
    fn empty(gpu: &Gpu, format: Format, (rows, cols): (usize, usize)) -> Result<Self, CudaError> {
        if rows.div_ceil(TILE_ROWS) > TILES_MAX || u32::try_from(cols).is_err() {
            let what = format!("a matrix of {rows} x {cols} is too large; there may be {} rows", TILES_MAX * TILE_ROWS);
            return Err(CudaError::Unsupported { what });
        }
        let packing = Packing::of(format);
        let (codes, scales) = sizes(packing, rows, cols);
        let codes = Array::new(gpu, "weights", codes)?;
        let scales = if scales > 0 { Some(Array::new(gpu, "weights", scales)?) } else { None };
        Ok(DeviceMatrix { format, packing, rows, cols, codes, scales })
    }

    /// Copies weights to the device, in its layout; done by the time this returns.
    ///
    /// # Errors
    /// [`CudaError::Memory`]; [`CudaError::Unsupported`] for a shape that the format cannot have or that does not fit the
    /// bytes.
    pub fn upload(stream: &Stream, weights: Weights<'_>) -> Result<Self, CudaError> {
        let Weights { format, rows, cols, bytes } = weights;
        let unsupported = |what: String| CudaError::Unsupported { what };
        let expected = format.tensor_bytes(rows, cols).map_err(|error| unsupported(error.to_string()))?;
        if bytes.len() != expected {
            let found = bytes.len();
            let error = crate::KernelError::ByteLength { format: format.name(), rows, cols, expected, found };
            return Err(unsupported(error.to_string()));
        }
        let mut matrix = DeviceMatrix::empty(stream.gpu(), format, (rows, cols))?;
        match matrix.packing.layout {
            Layout::Q8 | Layout::Q4 => matrix.write_codes(stream, bytes)?,
            layout if layout.pitch(cols) == cols => matrix.codes.write(stream, 0, bytes)?,
            layout => {
                let (from, to) = (cols * layout.value_bytes(), layout.pitch(cols) * layout.value_bytes());
                let rows_at_once = (UPLOAD_BYTES / to).max(1);
                for (index, part) in bytes.chunks(rows_at_once * from).enumerate() {
                    let mut padded = vec![0; part.len() / from * to];
                    for (to, from) in padded.chunks_exact_mut(to).zip(part.chunks_exact(from)) {
                        to[..from.len()].copy_from_slice(from);
                    }
                    matrix.codes.write(stream, index * rows_at_once * to, &padded)?;
                }
            }
        }
        Ok(matrix)
    }

    fn write_codes(&mut self, stream: &Stream, bytes: &[u8]) -> Result<(), CudaError> {
        let (codes, words) = sizes(self.packing, TILE_ROWS, self.cols);
        let tiles_at_once = (UPLOAD_BYTES / codes).clamp(1, self.rows.div_ceil(TILE_ROWS));
        let mut slab = (vec![0u8; tiles_at_once * codes], vec![0u32; tiles_at_once * words]);
        let tile_bytes = bytes.len() / self.rows * TILE_ROWS;
        for (index, part) in bytes.chunks(tiles_at_once * tile_bytes).enumerate() {
            let (tiles, first) = (part.len().div_ceil(tile_bytes), index * tiles_at_once);
            let (to_codes, to_words) = (&mut slab.0[..tiles * codes], &mut slab.1[..tiles * words]);
            repack::tiles(self.format, self.cols, part, (to_codes, to_words));
            self.codes.write(stream, first * codes, to_codes)?;
            if let Some(scales) = &mut self.scales {
                scales.write(stream, first * words, to_words)?;
            }
        }
        Ok(())
    }

    /// Weights of random values with a variance of 1 / cols, made on the device: for measuring at real sizes.
    ///
    /// # Errors
    /// [`CudaError::Memory`]; [`CudaError::Unsupported`] for formats other than BF16, Q8_0 and Q4_0.
    pub fn random(
        stream: &Stream,
        kernels: &MatmulKernels,
        format: Format,
        (rows, cols, seed): (usize, usize, u64),
    ) -> Result<Self, CudaError> {
        // Variance of what is multiplied with the scale: of -1..1, of signed bytes, of -8..8.
        let variance = match format {
            Format::BF16 => 1.0 / 3.0,
            Format::Q8_0 => (256.0 * 256.0 - 1.0) / 12.0 + 0.25,
            Format::Q4_0 => (16.0 * 16.0 - 1.0) / 12.0 + 0.25,
            other => {
                let what = format!("random {} weights; there are BF16, Q8_0 and Q4_0", other.name());
                return Err(CudaError::Unsupported { what });
            }
        };
        let scale = (1.0 / (variance * cols as f32)).sqrt();
        let matrix = DeviceMatrix::empty(stream.gpu(), format, (rows, cols))?;
        match &matrix.scales {
            None => kernels.rows.random_bf16(stream, &matrix.codes, (seed, scale))?,
            Some(scales) => {
                let half = u32::from(f16::from_f32(scale).to_bits());
                kernels.rows.random_words(stream, &matrix.codes, seed)?;
                kernels.rows.fill_words(stream, scales, half | half << 16)?;
            }
        }
        Ok(matrix)
    }

    /// Format that the weights were stored in.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Layout that they have here.
    pub fn layout(&self) -> Layout {
        self.packing.layout
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes on the device, which a product reads.
    pub fn bytes(&self) -> u64 {
        (self.codes.len() + 4 * self.scales.as_ref().map_or(0, Array::len)) as u64
    }

    pub(super) fn codes(&self) -> View<u8> {
        self.codes.view()
    }

    /// Which row of the table of kernels multiplies it.
    pub(super) fn kernel(&self) -> usize {
        let Packing { layout, kind, .. } = self.packing;
        match layout {
            Layout::F32 | Layout::F16 | Layout::Bf16 => layout as usize,
            Layout::Q8 => 3 + kind as usize,
            Layout::Q4 => 7 + kind as usize,
        }
    }

    pub(super) fn scales(&self) -> Option<View<u32>> {
        self.scales.as_ref().map(Array::view)
    }

    /// Subtracted from codes.
    pub(super) fn zero(&self) -> u32 {
        self.packing.zero
    }

    /// The arguments that stand for the matrix in the kernels of `rows.cu`.
    pub(super) fn push_to(&self, args: Args) -> Args {
        let Packing { kind, zero, .. } = self.packing;
        args.view(self.codes()).option(self.scales()).size(self.rows).size(self.cols).u32(kind as u32).u32(zero)
    }
}

#[cfg(test)]
mod tests {
    use super::super::repack::Kind;
    use super::*;

    #[test]
    fn codes_stay_quantised() {
        let (rows, cols) = (1024, 5120);
        for format in Format::ALL {
            let stored = format.tensor_bytes(rows, cols).unwrap() as f64;
            let ratio = device_bytes(format, rows, cols) as f64 / stored;
            // 5-bit and 6-bit codes take a byte, 2-bit and 3-bit codes 4 bits.
            let most = match format {
                Format::Q2_K => 2.0,
                Format::Q5_0 | Format::Q5_1 | Format::Q5_K => 1.65,
                Format::Q3_K | Format::Q6_K => 1.5,
                Format::Q4_K => 1.12,
                _ => 1.0,
            };
            assert!((1.0..=most).contains(&ratio), "{}: {ratio} of the file", format.name());
        }
        assert_eq!(device_bytes(Format::BF16, 3, 9), 3 * 16 * 2, "rows start at 16 bytes");
        assert_eq!(Packing::of(Format::Q4_0).kind, Kind::Halves);
    }
}
