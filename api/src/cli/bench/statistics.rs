//! Means, quantiles and confidence intervals. Pure.

use schemars::JsonSchema;
use serde::Serialize;

/// 97.5 % points of Student's t distribution for 1 to 30 degrees of freedom; beyond, the normal distribution's.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
const NORMAL: f64 = 1.960;

/// A mean of repetitions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Mean {
    /// The mean.
    pub mean: f64,
    /// Half of its 95 % confidence interval (Student's t); none for a single repetition.
    pub ci95: Option<f64>,
    /// What it is the mean of, one for each round.
    pub rounds: Vec<f64>,
}

impl Mean {
    /// The mean of these.
    pub fn of(rounds: Vec<f64>) -> Mean {
        let n = rounds.len() as f64;
        let mean = rounds.iter().sum::<f64>() / n.max(1.0);
        let freedom = rounds.len().saturating_sub(1);
        let ci95 = (freedom > 0).then(|| {
            let variance = rounds.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / freedom as f64;
            T.get(freedom - 1).unwrap_or(&NORMAL) * (variance / n).sqrt()
        });
        Mean { mean, ci95, rounds }
    }

    /// With its interval, for people.
    pub fn shown(&self, digits: usize) -> String {
        match self.ci95 {
            Some(half) => format!("{:.digits$} ± {half:.digits$}", self.mean),
            None => format!("{:.digits$}", self.mean),
        }
    }
}

/// How values are distributed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// How many there are.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Their median.
    pub p50: f64,
    /// 99 % lie below.
    pub p99: f64,
}

impl Spread {
    /// The spread of these; zeros when there are none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let at = |part: f64| values.get((part * count.saturating_sub(1) as f64).round() as usize).copied();
        let mean = values.iter().sum::<f64>() / count.max(1) as f64;
        Spread { count, mean, p50: at(0.5).unwrap_or_default(), p99: at(0.99).unwrap_or_default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_follow_student() {
        let mean = Mean::of(vec![10.0, 12.0, 14.0]);
        assert!((mean.mean - 12.0).abs() < 1e-12);
        // s = 2, n = 3, t(2) = 4.303
        assert!((mean.ci95.expect("three rounds") - 4.303 * 2.0 / 3.0_f64.sqrt()).abs() < 1e-9);
        assert_eq!(Mean::of(vec![5.0]).ci95, None);
        assert_eq!(Mean::of(vec![5.0; 40]).ci95, Some(0.0));
    }

    #[test]
    fn quantiles_are_values_that_occur() {
        let spread = Spread::of((1..=101).rev().map(f64::from).collect());
        assert_eq!((spread.count, spread.mean, spread.p50, spread.p99), (101, 51.0, 51.0, 100.0));
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }
}
