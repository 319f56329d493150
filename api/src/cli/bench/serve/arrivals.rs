//! When requests of an open loop are sent. Pure. Invariant: a seed gives the same times everywhere; a known number of
//! requests takes exactly as long as the rate says.

use tokenrouter_core::rng;

/// Random numbers one after the other.
#[derive(Clone, Debug)]
pub struct Draws(u64);

impl Draws {
    /// Those of a seed.
    pub fn new(seed: u64) -> Draws {
        Draws(rng::mix(seed))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        rng::mix(self.0)
    }

    /// A number above 0 and up to 1.
    fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// From the normal distribution (Box and Muller 1958).
    fn normal(&mut self) -> f64 {
        let (radius, angle) = ((-2.0 * self.unit().ln()).sqrt(), std::f64::consts::TAU * self.unit());
        radius * angle.cos()
    }

    /// From the gamma distribution with this shape and mean 1 (Marsaglia and Tsang 2000).
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let boost = self.unit().powf(1.0 / shape);
            return self.gamma_above_one(shape + 1.0) * boost / shape;
        }
        self.gamma_above_one(shape) / shape
    }

    fn gamma_above_one(&mut self, shape: f64) -> f64 {
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.unit().ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrivals {
    /// Requests a second.
    pub rate: f64,
    /// Shape of the distribution of the gaps: 1 = Poisson.
    pub burstiness: f64,
    /// What the gaps are drawn from.
    pub seed: u64,
}

impl Arrivals {
    /// Seconds from the start at which so many requests are sent. As in vllm's tool the times are stretched so that the
    /// last one comes when the rate says; a run of few requests would otherwise have a rate of its own.
    pub fn of(self, requests: u32) -> Vec<f64> {
        let mut times = self.drawn(requests as usize);
        let stretch = times.last().map_or(1.0, |last| f64::from(requests) / self.rate / last);
        times.iter_mut().for_each(|time| *time *= stretch);
        times
    }

    /// Those within so many seconds.
    pub fn within(self, seconds: f64) -> Vec<f64> {
        let mut times = Vec::new();
        let mut draws = Draws::new(self.seed);
        let mut at = 0.0;
        loop {
            at += draws.gamma(self.burstiness) / self.rate;
            if at >= seconds {
                return times;
            }
            times.push(at);
        }
    }

    fn drawn(self, requests: usize) -> Vec<f64> {
        let mut draws = Draws::new(self.seed);
        let mut at = 0.0;
        let next = |_| {
            at += draws.gamma(self.burstiness) / self.rate;
            at
        };
        (0..requests).map(next).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and variance of gaps are those of the gamma distribution: 1 / rate and 1 / (burstiness x rate²).
    #[test]
    fn gaps_have_the_moments_of_the_distribution() {
        for (burstiness, seed) in [(0.25, 1), (1.0, 2), (4.0, 3)] {
            let times = Arrivals { rate: 5.0, burstiness, seed }.drawn(60_000);
            let gaps: Vec<f64> = times.windows(2).map(|two| two[1] - two[0]).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((mean * 5.0 - 1.0).abs() < 0.03, "{burstiness}: mean {mean}");
            assert!((variance * 25.0 * burstiness - 1.0).abs() < 0.06, "{burstiness}: variance {variance}");
        }
    }

    #[test]
    fn numbers_and_times_are_kept() {
        let arrivals = Arrivals { rate: 50.0, burstiness: 0.3, seed: 9 };
        let times = arrivals.of(200);
        assert_eq!(times.len(), 200);
        assert!(times.is_sorted() && (times[199] - 4.0).abs() < 1e-9);
        assert_eq!(times, arrivals.of(200), "the same seed gives the same times");
        let within = arrivals.within(10.0);
        assert!(within.iter().all(|time| *time < 10.0) && (300..700).contains(&within.len()), "{}", within.len());
        assert_eq!(arrivals.of(0), Vec::<f64>::new());
    }
}
