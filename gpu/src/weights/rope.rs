//! Rotary position embedding as plain numbers: layout, base, scaling, and the frequencies they give.
//! Owner: the model configuration. Invariant: whatever the file format, the same model gives the same frequencies.

/// Which two components of a head rotate together.
///
/// Files in the HF layout pair component `i` with `i + dims/2` ("rotate half"); GGUF files of architecture `llama` have
/// their q and k rows permuted so that neighbours `2i`, `2i + 1` pair up. The weights stay as they are: the rotation follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Component `i` with `i + dims/2` (GPT-NeoX).
    HalfSplit,
    /// Component `2i` with `2i + 1` (GPT-J).
    Interleaved,
}

/// How the frequencies are stretched for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor` (position interpolation).
    Linear {
        /// Context length over the trained one.
        factor: f32,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, smooth in between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f32,
        /// Wavelengths above `original_context / low_freq_factor` are long.
        low_freq_factor: f32,
        /// Wavelengths below `original_context / high_freq_factor` are short.
        high_freq_factor: f32,
        /// Context length of the first training, tokens.
        original_context: usize,
    },
    /// YaRN (arXiv 2309.00071): a ramp over dimensions between interpolation and extrapolation, and a scale on q and k.
    Yarn {
        /// Context length over the trained one.
        factor: f32,
        /// Context length of the first training, tokens.
        original_context: usize,
        /// Rotations above which a dimension is extrapolated.
        beta_fast: f32,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f32,
        /// Scale of the rotated vectors; `None` = `0.1 ln(factor) + 1`.
        attention_factor: Option<f32>,
    },
    /// One divisor per pair, stored in the file (GGUF `rope_freqs.weight`).
    Divisors(Vec<f32>),
}

/// Rotary position embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Pairing of components.
    pub layout: RopeLayout,
    /// Base of the geometric series of wavelengths.
    pub theta: f32,
    /// Rotated components per head (even, at most the head's width).
    pub dims: usize,
    /// Stretching for long contexts.
    pub scaling: RopeScaling,
}

/// What a rotation kernel needs: the angle of pair `i` at position `p` is `p * inverse[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeFrequencies {
    /// Radians per position, one per pair: `dims / 2` values.
    pub inverse: Vec<f32>,
    /// Multiplies the cosines and sines (1 except for YaRN).
    pub scale: f32,
}

impl Rope {
    /// The frequencies of this embedding (formulas: RoPE arXiv 2104.09864 eq. 15, and the sources named at
    /// [`RopeScaling`]).
    pub fn frequencies(&self) -> RopeFrequencies {
        let pairs = self.dims / 2;
        let base = |pair: usize| f64::from(self.theta).powf(-((2 * pair) as f64) / self.dims as f64);
        let plain = (0..pairs).map(base);
        let inverse: Vec<f64> = match &self.scaling {
            RopeScaling::None => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / f64::from(*factor)).collect(),
            RopeScaling::Divisors(divisors) => plain.zip(divisors).map(|(f, &d)| f / f64::from(d)).collect(),
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => plain
                .map(|f| {
                    let rotations = original_context as f64 * f / std::f64::consts::TAU;
                    let (low, high) = (f64::from(low_freq_factor), f64::from(high_freq_factor));
                    let kept = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
                    f * (kept + (1.0 - kept) / f64::from(factor))
                })
                .collect(),
            &RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, .. } => {
                let dim_of = |rotations: f32| {
                    let wavelength = original_context as f64 / (f64::from(rotations) * std::f64::consts::TAU);
                    self.dims as f64 * wavelength.ln() / (2.0 * f64::from(self.theta).ln())
                };
                let low = dim_of(beta_fast).floor().max(0.0);
                let high = dim_of(beta_slow).ceil().min(self.dims as f64 - 1.0);
                let width = if high > low { high - low } else { 0.001 };
                plain
                    .enumerate()
                    .map(|(pair, f)| {
                        let interpolated = ((pair as f64 - low) / width).clamp(0.0, 1.0);
                        f * (1.0 - interpolated) + f / f64::from(factor) * interpolated
                    })
                    .collect()
            }
        };
        let scale = match self.scaling {
            RopeScaling::Yarn { factor, attention_factor, .. } => {
                attention_factor.unwrap_or_else(|| if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 })
            }
            _ => 1.0,
        };
        RopeFrequencies { inverse: inverse.into_iter().map(|f| f as f32).collect(), scale }
    }

    /// The first thing that makes this embedding impossible, in words, or nothing.
    pub(super) fn fault(&self, head_dim: usize) -> Option<String> {
        let positive = |name: &str, value: f32| {
            (!(value.is_finite() && value > 0.0)).then(|| format!("{name} is {value}; it must be a positive number"))
        };
        if self.dims == 0 || !self.dims.is_multiple_of(2) || self.dims > head_dim {
            return Some(format!(
                "{} rotated components do not fit heads of {head_dim}; use an even number",
                self.dims
            ));
        }
        if self.theta <= 1.0 || !self.theta.is_finite() {
            return Some(format!("theta is {}; it must be a number above 1", self.theta));
        }
        match &self.scaling {
            RopeScaling::None => None,
            RopeScaling::Linear { factor } => positive("factor", *factor),
            RopeScaling::Divisors(divisors) if divisors.len() != self.dims / 2 => {
                Some(format!("{} frequency divisors for {} pairs", divisors.len(), self.dims / 2))
            }
            RopeScaling::Divisors(divisors) => divisors.iter().find_map(|&d| positive("a frequency divisor", d)),
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("factor", factor)
                    .or_else(|| positive("low_freq_factor", low_freq_factor))
                    .or_else(|| positive("high_freq_factor minus low_freq_factor", high_freq_factor - low_freq_factor))
                    .or_else(|| positive("original context", original_context as f32))
            }
            &RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor } => {
                positive("factor", factor)
                    .or_else(|| positive("beta_fast", beta_fast))
                    .or_else(|| positive("beta_slow", beta_slow))
                    .or_else(|| positive("attention_factor", attention_factor.unwrap_or(1.0)))
                    .or_else(|| positive("original context", original_context as f32))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { layout: RopeLayout::HalfSplit, theta: 10_000.0, dims: 128, scaling }
    }

    #[test]
    fn plain_frequencies_are_a_geometric_series() {
        let plain = rope(RopeScaling::None).frequencies();
        assert_eq!(plain.inverse.len(), 64);
        assert_eq!(plain.inverse[0], 1.0);
        for pair in plain.inverse.windows(2) {
            assert!((pair[1] / pair[0] - 10_000f32.powf(-1.0 / 64.0)).abs() < 1e-6);
        }
        let half = rope(RopeScaling::Linear { factor: 2.0 }).frequencies();
        assert!(plain.inverse.iter().zip(&half.inverse).all(|(p, h)| (p / 2.0 - h).abs() < 1e-9));
    }

    #[test]
    fn llama3_keeps_short_and_divides_long_wavelengths() {
        let plain = rope(RopeScaling::None).frequencies().inverse;
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
        let scaled = rope(scaling).frequencies().inverse;
        for (p, s) in plain.iter().zip(&scaled) {
            let wavelength = std::f32::consts::TAU / p;
            let divisor = p / s;
            if wavelength < 8192.0 / 4.0 {
                assert_eq!(p, s);
            } else if wavelength > 8192.0 {
                assert!((divisor - 8.0).abs() < 1e-4);
            } else {
                assert!((1.0..=8.0).contains(&divisor));
            }
        }
        let divisors: Vec<f32> = plain.iter().zip(&scaled).map(|(p, s)| p / s).collect();
        let stored = rope(RopeScaling::Divisors(divisors)).frequencies().inverse;
        assert!(stored.iter().zip(&scaled).all(|(a, b)| (a - b).abs() <= b * 1e-6));
    }

    #[test]
    fn yarn_keeps_the_first_and_divides_the_last_pair() {
        let yarn = |factor| RopeScaling::Yarn {
            factor,
            original_context: 32_768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
        };
        let plain = rope(RopeScaling::None).frequencies();
        let scaled = rope(yarn(4.0)).frequencies();
        assert_eq!(scaled.inverse[0], plain.inverse[0]);
        assert!((plain.inverse[63] / scaled.inverse[63] - 4.0).abs() < 1e-5);
        assert!((scaled.scale - 1.138_629).abs() < 1e-5);
        assert_eq!(rope(yarn(1.0)).frequencies(), plain);
    }

    #[test]
    fn impossible_values_are_named() {
        let fault = |scaling| rope(scaling).fault(128).unwrap_or_default();
        assert_eq!(fault(RopeScaling::None), "");
        assert!(fault(RopeScaling::Linear { factor: f32::NAN }).contains("factor"));
        assert!(fault(RopeScaling::Divisors(vec![1.0; 3])).contains("64 pairs"));
        assert!(rope(RopeScaling::None).fault(64).is_some());
    }
}
