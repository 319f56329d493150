//! Functions of learned heads on host values. Owner: the operations of a CPU device. Invariant: a row is reduced in one
//! fixed order, sums in f64, so its result depends on that row alone.

use crate::ops::{Activation, LayerNorm};

/// `out = (x - mean) / sqrt(variance + eps) * weight + bias`, as `torch.nn.LayerNorm` (biased variance).
pub fn layer_norm(x: &[f32], norm: &LayerNorm<Vec<f32>>, out: &mut [f32]) {
    let count = x.len().max(1) as f64;
    let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
    let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / count;
    let scale = 1.0 / (variance + f64::from(norm.eps)).sqrt();
    for (((y, &v), &weight), &bias) in out.iter_mut().zip(x).zip(&norm.weight).zip(&norm.bias) {
        *y = ((f64::from(v) - mean) * scale) as f32 * weight + bias;
    }
}

/// Applies the function to every value.
pub fn activate(values: &mut [f32], activation: Activation) {
    match activation {
        Activation::Gelu => values.iter_mut().for_each(|x| *x = gelu(*x)),
        // A comparison, because `max` would turn NaN into 0.
        Activation::Relu => values.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x }),
    }
}

/// `x / 2 * (1 + erf(x / sqrt 2))`, the default of `torch.nn.GELU`. (Hendrycks and Gimpel, 2016.)
pub fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// The logistic function `1 / (1 + e^-x)`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Softmax in place.
pub fn softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = row.iter().map(|&v| f64::from((v - max).exp())).sum();
    row.iter_mut().for_each(|v| *v = (f64::from((*v - max).exp()) / total) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::rng::{Stream, unit};

    /// The error function by its Maclaurin series in f64, good for |x| up to 5.
    fn erf(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    #[test]
    fn gelu_is_the_exact_one() {
        for index in 0..2000 {
            let x = (unit(3, index, Stream::Token) * 12.0 - 6.0) as f32;
            let exact = 0.5 * f64::from(x) * (1.0 + erf(f64::from(x) / std::f64::consts::SQRT_2));
            assert!((f64::from(gelu(x)) - exact).abs() <= 1e-6 * exact.abs() + 4e-7, "{x} {} {exact}", gelu(x));
        }
        // The tanh approximation gives 0.841192.
        assert!((gelu(1.0) - 0.841_344_7).abs() < 1e-6);
        assert!(gelu(f32::NAN).is_nan());
        assert_eq!(gelu(40.0), 40.0);
    }

    #[test]
    fn layer_norm_takes_the_mean_away() {
        let norm = LayerNorm { weight: vec![1.0, 2.0, 1.0, 1.0], bias: vec![0.0, 0.0, 0.5, 0.0], eps: 1e-5 };
        let mut out = [0.0; 4];
        layer_norm(&[101.0, 103.0, 101.0, 103.0], &norm, &mut out);
        let one = 1.0 / 1.000_01f64.sqrt() as f32;
        for (found, expected) in out.iter().zip([-one, 2.0 * one, 0.5 - one, one]) {
            assert!((found - expected).abs() < 1e-6, "{out:?}");
        }
    }

    #[test]
    fn small_functions() {
        let mut values = [-1.0, 2.0, f32::NAN];
        activate(&mut values, Activation::Relu);
        assert_eq!(values[..2], [0.0, 2.0]);
        assert!(values[2].is_nan());
        assert_eq!((sigmoid(0.0), sigmoid(f32::NEG_INFINITY), sigmoid(f32::INFINITY)), (0.5, 0.0, 1.0));
        let mut row = [1000.0, 1000.0, f32::NEG_INFINITY];
        softmax(&mut row);
        assert_eq!(row, [0.5, 0.5, 0.0]);
    }
}
