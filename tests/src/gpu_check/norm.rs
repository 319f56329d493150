//! Norms of rows, against f64, and against themselves row by row.

use super::{Finding, Random, bits, same, text};
use tokenrouter_kernels::cuda::{Array, CudaError, Gpu, Stream};
use tokenrouter_kernels::norm::cuda::{AddRmsNormArgs, LayerNormArgs, NormKernels, RmsNormArgs};

/// Widths: of heads and models, odd ones, and more than a block keeps in registers.
const WIDTHS: [usize; 13] = [1, 3, 4, 31, 64, 255, 896, 1000, 1024, 2053, 5120, 8192, 9000];

/// Runs all checks.
///
/// # Errors
/// What differs where everything must be equal, or what the device says.
pub fn check(gpu: &Gpu, seed: u64) -> Result<Vec<Finding>, String> {
    let mut random = Random::new(seed);
    let stream = Stream::new(gpu, 0).map_err(text)?;
    let kernels = NormKernels::load(gpu).map_err(text)?;
    // Sums of n squares in f32, a few roundings more; f64 in layer norms.
    let mut rms = Finding::new("norm: rms", 1e-6);
    let mut layer = Finding::new("norm: layer", 1e-6);
    for width in WIDTHS {
        let rows = 1 + random.below(if width > 2000 { 3 } else { 9 });
        let case = Case::new(&mut random, rows, width);
        let out = case.rms_norm(&stream, &kernels).map_err(text)?;
        rms.note_rows((&out, &case.rms_reference(&case.x)), width);
        let (sum, fused) = case.add_rms_norm(&stream, &kernels).map_err(text)?;
        let expected: Vec<f32> = case.x.iter().zip(&case.delta).map(|(x, delta)| x + delta).collect();
        same(&format!("norm: sum of {rows} x {width}"), &bits(&sum), &bits(&expected))?;
        rms.note_rows((&fused, &case.rms_reference(&sum)), width);
        layer.note_rows((&case.layer_norm(&stream, &kernels).map_err(text)?, &case.layer_reference()), width);
        let last = case.last_row();
        let start = (rows - 1) * width;
        let (_, alone) = last.add_rms_norm(&stream, &kernels).map_err(text)?;
        same(&format!("norm: a row alone, {rows} x {width}"), &bits(&alone), &bits(&fused[start..]))?;
        let alone = last.rms_norm(&stream, &kernels).map_err(text)?;
        same(&format!("norm: a row alone, {rows} x {width}"), &bits(&alone), &bits(&out[start..]))?;
    }
    Ok(vec![rms, layer])
}

struct Case {
    rows: usize,
    eps: f32,
    x: Vec<f32>,
    delta: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Case {
    fn new(random: &mut Random, rows: usize, width: usize) -> Case {
        let (scale, shift) = (random.of(&[1e-3, 1.0, 300.0]), random.of(&[0.0, 0.5]));
        let n = rows * width;
        Case {
            rows,
            eps: random.of(&[1e-5, 1e-6]),
            x: (0..n).map(|_| (random.normal() + shift) * scale).collect(),
            delta: (0..n).map(|_| random.normal() * scale).collect(),
            weight: random.normals(width),
            bias: random.normals(width),
        }
    }

    fn last_row(&self) -> Case {
        let start = (self.rows - 1) * self.weight.len();
        Case {
            rows: 1,
            eps: self.eps,
            x: self.x[start..].to_vec(),
            delta: self.delta[start..].to_vec(),
            weight: self.weight.clone(),
            bias: self.bias.clone(),
        }
    }

    /// Arrays of x, delta, weight, bias and the result.
    fn arrays(&self, stream: &Stream) -> Result<[Array<f32>; 5], CudaError> {
        let put = |values: &[f32]| Array::from_host(stream, "a check", values);
        let out = Array::new(stream.gpu(), "a check", self.x.len())?;
        Ok([put(&self.x)?, put(&self.delta)?, put(&self.weight)?, put(&self.bias)?, out])
    }

    fn rms_norm(&self, stream: &Stream, kernels: &NormKernels) -> Result<Vec<f32>, CudaError> {
        let [x, _, weight, _, out] = self.arrays(stream)?;
        let (x, weight, rows, eps) = (x.view(), weight.view(), self.rows, self.eps);
        kernels.rms_norm(stream, &RmsNormArgs { x, weight, out: out.view(), rows, eps })?;
        out.to_host(stream)
    }

    fn add_rms_norm(&self, stream: &Stream, kernels: &NormKernels) -> Result<(Vec<f32>, Vec<f32>), CudaError> {
        let [x, delta, weight, _, out] = self.arrays(stream)?;
        let (delta, weight, rows, eps) = (delta.view(), weight.view(), self.rows, self.eps);
        kernels.add_rms_norm(stream, &AddRmsNormArgs { sum: x.view(), delta, weight, out: out.view(), rows, eps })?;
        Ok((x.to_host(stream)?, out.to_host(stream)?))
    }

    fn layer_norm(&self, stream: &Stream, kernels: &NormKernels) -> Result<Vec<f32>, CudaError> {
        let [x, _, weight, bias, out] = self.arrays(stream)?;
        let (x, weight, bias) = (x.view(), weight.view(), bias.view());
        let (rows, eps) = (self.rows, self.eps);
        kernels.layer_norm(stream, &LayerNormArgs { x, weight, bias, out: out.view(), rows, eps })?;
        out.to_host(stream)
    }

    fn rms_reference(&self, x: &[f32]) -> Vec<f64> {
        let row = |x: &[f32]| {
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean + f64::from(self.eps)).sqrt();
            x.iter().zip(&self.weight).map(|(x, w)| f64::from(*x) * scale * f64::from(*w)).collect::<Vec<f64>>()
        };
        x.chunks(self.weight.len()).flat_map(row).collect()
    }

    fn layer_reference(&self) -> Vec<f64> {
        let row = |x: &[f32]| {
            let count = x.len() as f64;
            let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
            let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / count;
            let scale = 1.0 / (variance + f64::from(self.eps)).sqrt();
            let factors = self.weight.iter().zip(&self.bias);
            let normed =
                x.iter().zip(factors).map(|(x, (w, b))| (f64::from(*x) - mean) * scale * f64::from(*w) + f64::from(*b));
            normed.collect::<Vec<f64>>()
        };
        self.x.chunks(self.weight.len()).flat_map(row).collect()
    }
}
