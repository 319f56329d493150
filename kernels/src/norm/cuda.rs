//! Norms on a CUDA device. Owner: the operations of a model keep [`NormKernels`]. Invariant: a row's result depends on that
//! row alone; launches depend on the number of rows and their width alone.

use crate::cuda::{Args, CudaError, Function, Gpu, Launch, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "norm.cu", text: include_str!("norm.cu"), headers: &[], exact: true };

/// Threads of a block, as in the source.
const THREADS: u32 = 256;

/// Compiled kernels.
#[derive(Clone, Debug)]
pub struct NormKernels {
    rms_norm: Function,
    add_rms_norm: Function,
    layer_norm: Function,
}

/// `out = x / sqrt(mean(x^2) + eps) * weight` for each row.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormArgs {
    /// `[rows, width]`
    pub x: View<f32>,
    /// `[width]`
    pub weight: View<f32>,
    /// `[rows, width]`
    pub out: View<f32>,
    /// Rows.
    pub rows: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// `sum += delta`, then `out` is the norm of `sum`.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNormArgs {
    /// `[rows, width]`
    pub sum: View<f32>,
    /// `[rows, width]`
    pub delta: View<f32>,
    /// `[width]`
    pub weight: View<f32>,
    /// `[rows, width]`
    pub out: View<f32>,
    /// Rows.
    pub rows: usize,
    /// Added to the mean square.
    pub eps: f32,
}

/// `out = (x - mean) / sqrt(variance + eps) * weight + bias` for each row.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormArgs {
    /// `[rows, width]`
    pub x: View<f32>,
    /// `[width]`
    pub weight: View<f32>,
    /// `[width]`
    pub bias: View<f32>,
    /// `[rows, width]`
    pub out: View<f32>,
    /// Rows.
    pub rows: usize,
    /// Added to the variance.
    pub eps: f32,
}

impl NormKernels {
    /// Compiles or finds them.
    ///
    /// # Errors
    /// [`CudaError`] of the compiler or the driver.
    pub fn load(gpu: &Gpu) -> Result<Self, CudaError> {
        let module = gpu.module(&SOURCE)?;
        Ok(NormKernels {
            rms_norm: module.function("rms_norm")?,
            add_rms_norm: module.function("add_rms_norm")?,
            layer_norm: module.function("layer_norm")?,
        })
    }

    /// Root mean square norm.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn rms_norm(&self, stream: &Stream, norm: &RmsNormArgs) -> Result<(), CudaError> {
        let RmsNormArgs { x, weight, out, rows, eps } = *norm;
        check([x, weight, out], rows, weight.len());
        let args = Args::new().view(x).view(weight).view(out).size(weight.len()).f32(eps);
        // SAFETY: the arguments are those of the kernel, which stays inside of `rows` rows, of which there are enough.
        unsafe { self.rms_norm.launch(stream, Launch::blocks(rows as u32, THREADS), args) }
    }

    /// The same after a sum.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn add_rms_norm(&self, stream: &Stream, norm: &AddRmsNormArgs) -> Result<(), CudaError> {
        let AddRmsNormArgs { sum, delta, weight, out, rows, eps } = *norm;
        check([sum, weight, out], rows, weight.len());
        check([delta, weight, out], rows, weight.len());
        let args = Args::new().view(sum).view(delta).view(weight).view(out).size(weight.len()).f32(eps);
        // SAFETY: as above.
        unsafe { self.add_rms_norm.launch(stream, Launch::blocks(rows as u32, THREADS), args) }
    }

    /// Layer norm.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn layer_norm(&self, stream: &Stream, norm: &LayerNormArgs) -> Result<(), CudaError> {
        let LayerNormArgs { x, weight, bias, out, rows, eps } = *norm;
        check([x, weight, out], rows, weight.len());
        assert_eq!(weight.len(), bias.len(), "weight and bias of a norm");
        let args = Args::new().view(x).view(weight).view(bias).view(out).size(weight.len()).f32(eps);
        // SAFETY: as above.
        unsafe { self.layer_norm.launch(stream, Launch::blocks(rows as u32, THREADS), args) }
    }
}

/// Input, weight and output of a norm over `rows` rows of `width` values.
fn check([x, weight, out]: [View<f32>; 3], rows: usize, width: usize) {
    let needed = rows * width;
    assert!(width > 0 && x.len() >= needed && out.len() >= needed, "{rows} rows of {width} in a norm");
    let aligned = [x, weight, out].iter().all(|view| view.pointer().is_multiple_of(16));
    assert!(aligned || !width.is_multiple_of(4), "rows of a norm start at multiples of 16 bytes");
}
