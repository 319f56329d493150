//! How near steps are to what the machine gives: the ceilings, measured by the kernels' own instructions, and the shares
//! of them. Owner: the command. Invariant: a floor takes the larger of two times, that of the bytes that must be read and
//! that of the products that must be made; both come from medians of samples taken before and after the steps.

use serde::Serialize;
use std::fmt::Write;
use tokenrouter_gpu::load::ModelInfo;
use tokenrouter_gpu::work::{Products, StepWork, Work};
use tokenrouter_kernels::roofline::{Ceilings, Probe};
use tokenrouter_kernels::sys::Isa;
use tokenrouter_kernels::{KernelError, Pool, PoolConfig};

/// Bytes of the buffers: larger than the caches of today's machines, and within the last level of most of them.
const MEMORY_BYTES: usize = 512 << 20;
const CACHE_BYTES: usize = 8 << 20;
/// Samples before the steps, and as many after them.
const SAMPLES: usize = 5;

/// What the machine gives at most, for several numbers of threads.
#[derive(Debug, Serialize)]
pub struct Roofline {
    isa: &'static str,
    /// 1, 2, 4, ... threads and as many as the model has, ascending.
    ceilings: Vec<Ceiling>,
}

/// Medians over all samples.
#[derive(Debug, Default, Serialize)]
struct Ceiling {
    threads: usize,
    memory_gb_per_s: f64,
    cache_gb_per_s: f64,
    int8_gmac_per_s: f64,
    f32_gmac_per_s: f64,
    #[serde(skip)]
    samples: Vec<Ceilings>,
}

impl Roofline {
    /// Without samples yet.
    pub fn new(threads: usize) -> Roofline {
        let counts = (0..).map(|power| 1 << power).take_while(|&count| count < threads).chain([threads]);
        let ceilings = counts.map(|threads| Ceiling { threads, ..Ceiling::default() }).collect();
        Roofline { isa: Isa::detect().name(), ceilings }
    }

    /// Takes some more samples.
    ///
    /// # Errors
    /// The machine refuses memory or threads.
    pub fn sample(&mut self) -> Result<(), KernelError> {
        let pool = |threads| Pool::new(&PoolConfig { threads, ..PoolConfig::default() });
        let most = self.ceilings.last().map_or(1, |ceiling| ceiling.threads);
        let probe = Probe::new(&pool(most)?, MEMORY_BYTES, CACHE_BYTES)?;
        for ceiling in &mut self.ceilings {
            let pool = pool(ceiling.threads)?;
            // The first one warms up.
            ceiling.samples.extend((0..=SAMPLES).map(|_| probe.sample(&pool)).skip(1));
            ceiling.take_medians();
        }
        Ok(())
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = format!("\nceilings ({}, medians)\n", self.isa);
        let heads = ["threads", "memory GB/s", "cache GB/s", "int8 GMAC/s", "f32 GMAC/s"];
        let _ = writeln!(out, "{:>8} {:>12} {:>12} {:>12} {:>12}", heads[0], heads[1], heads[2], heads[3], heads[4]);
        for ceiling in &self.ceilings {
            let Ceiling { threads, memory_gb_per_s: memory, cache_gb_per_s: cache, .. } = ceiling;
            let (int8, f32) = (ceiling.int8_gmac_per_s, ceiling.f32_gmac_per_s);
            let _ = writeln!(out, "{threads:>8} {memory:>12.1} {cache:>12.1} {int8:>12.1} {f32:>12.1}");
        }
        out
    }

    fn limit(&self, work: StepWork, median_ms: f64) -> Option<Limit> {
        let ceiling = self.ceilings.last().filter(|ceiling| !ceiling.samples.is_empty())?;
        let (bytes, seconds) = (work.weight_bytes + work.kv_bytes, 1e-3 * median_ms.max(1e-9));
        let cached = bytes <= CACHE_BYTES as u64;
        let bandwidth = 1e9 * if cached { ceiling.cache_gb_per_s } else { ceiling.memory_gb_per_s };
        let (int8, f32) = (1e9 * ceiling.int8_gmac_per_s, 1e9 * ceiling.f32_gmac_per_s);
        let memory_s = bytes as f64 / bandwidth;
        let compute_s = work.int8_macs as f64 / int8 + work.float_macs as f64 / f32;
        let floor_s = memory_s.max(compute_s);
        Some(Limit {
            bandwidth_share: memory_s / seconds,
            int8_share: work.int8_macs as f64 / int8 / seconds,
            compute_share: compute_s / seconds,
            floor_ms: 1e3 * floor_s,
            times_floor: seconds / floor_s,
        })
    }
}

impl Ceiling {
    fn take_medians(&mut self) {
        let median = |of: fn(&Ceilings) -> f64| {
            let mut values: Vec<f64> = self.samples.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or_default() / 1e9
        };
        self.memory_gb_per_s = median(|sample| sample.memory_bytes_per_s);
        self.cache_gb_per_s = median(|sample| sample.cache_bytes_per_s);
        self.int8_gmac_per_s = median(|sample| sample.int8_macs_per_s);
        self.f32_gmac_per_s = median(|sample| sample.f32_macs_per_s);
    }
}

/// What a step moved and multiplied, and how fast.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rates {
    weight_bytes: u64,
    kv_bytes: u64,
    int8_macs: u64,
    float_macs: u64,
    weight_gb_per_s: f64,
    int8_gmac_per_s: f64,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    limit: Option<Limit>,
}

/// How near a step is to its floor.
#[derive(Clone, Copy, Debug, Serialize)]
struct Limit {
    /// Time for the bytes at the measured bandwidth, over the time it took.
    bandwidth_share: f64,
    /// Time for the 8-bit products at their peak, over the time it took.
    int8_share: f64,
    /// The same for all products.
    compute_share: f64,
    /// The larger of the time for the bytes and the time for the products.
    floor_ms: f64,
    /// The time it took, over the floor.
    times_floor: f64,
}

impl Rates {
    /// Of a step that took this long.
    pub fn of(work: StepWork, median_ms: f64, roofline: Option<&Roofline>) -> Rates {
        let per_s = |count: u64| count as f64 / (1e-3 * median_ms.max(1e-9)) / 1e9;
        Rates {
            weight_bytes: work.weight_bytes,
            kv_bytes: work.kv_bytes,
            int8_macs: work.int8_macs,
            float_macs: work.float_macs,
            weight_gb_per_s: per_s(work.weight_bytes),
            int8_gmac_per_s: per_s(work.int8_macs),
            limit: roofline.and_then(|roofline| roofline.limit(work, median_ms)),
        }
    }

    /// Heads of the columns of [`Rates::cells`].
    pub fn heads(with_limit: bool) -> String {
        let limit = if with_limit { "  bandwidth    int8  floor ms  x floor" } else { "" };
        format!("{:>10} {:>10} {:>12}{limit}", "weights MB", "GB/s", "int8 GMAC/s")
    }

    /// For people.
    pub fn cells(&self) -> String {
        let (megabytes, gb, gmac) = (self.weight_bytes as f64 / 1e6, self.weight_gb_per_s, self.int8_gmac_per_s);
        let limit = self.limit.map_or_else(String::new, |limit| {
            let (bandwidth, int8) = (100.0 * limit.bandwidth_share, 100.0 * limit.int8_share);
            format!("  {bandwidth:>7.0} % {int8:>5.0} %  {:>8.3}  {:>7.2}", limit.floor_ms, limit.times_floor)
        });
        format!("{megabytes:>10.1} {gb:>10.1} {gmac:>12.1}{limit}")
    }
}

/// The model, as far as it matters for speed.
#[derive(Debug, Serialize)]
pub struct ModelReport {
    name: String,
    architecture: String,
    parameters: u64,
    /// The matrices of all layers, for one token.
    layers: Matrices,
    /// The output head, for one row that draws.
    head: Matrices,
    attention_macs_per_position: u64,
    kv_bytes_per_token: u64,
}

/// Some matrices.
#[derive(Debug, Serialize)]
struct Matrices {
    file_bytes: u64,
    weight_bytes: u64,
    int8_macs: u64,
    float_macs: u64,
}

impl From<Products> for Matrices {
    fn from(of: Products) -> Matrices {
        let (int8_macs, float_macs) = (of.int8_macs, of.float_macs);
        Matrices { file_bytes: of.stored_bytes, weight_bytes: of.bytes, int8_macs, float_macs }
    }
}

impl ModelReport {
    /// Of this model.
    pub fn of(info: &ModelInfo, work: &Work) -> ModelReport {
        ModelReport {
            name: info.name.clone(),
            architecture: info.architecture.clone(),
            parameters: info.parameters,
            layers: work.layers.into(),
            head: work.head.into(),
            attention_macs_per_position: work.attention_macs,
            kv_bytes_per_token: work.kv_bytes,
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        let ModelReport { name, architecture, parameters, layers, head, .. } = self;
        let mut out = format!("{name}: {architecture}, {:.1} million parameters\n", *parameters as f64 / 1e6);
        let million = |number: u64| number as f64 / 1e6;
        for (what, per, of) in [("layers", "token", layers), ("head", "drawn token", head)] {
            let _ = writeln!(
                out,
                "{what:>8}: {:.1} MB of weights to read ({:.1} MB in the file), {:.1} million int8 and {:.1} million float \
                 multiply-adds for each {per}",
                million(of.weight_bytes),
                million(of.file_bytes),
                million(of.int8_macs),
                million(of.float_macs)
            );
        }
        let (macs, bytes) = (million(self.attention_macs_per_position), self.kv_bytes_per_token);
        let _ = writeln!(
            out,
            "  others: {bytes} bytes of keys and values and {macs:.3} million multiply-adds for each token of context"
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roofline(samples: &[f64]) -> Roofline {
        let mut roofline = Roofline::new(2);
        for ceiling in &mut roofline.ceilings {
            let sample = |&speed: &f64| Ceilings {
                memory_bytes_per_s: 1e9 * speed,
                cache_bytes_per_s: 4e9 * speed,
                int8_macs_per_s: 8e9 * speed,
                f32_macs_per_s: 2e9 * speed,
            };
            ceiling.samples = samples.iter().map(sample).collect();
            ceiling.take_medians();
        }
        roofline
    }

    #[test]
    fn threads_double_up_to_the_models() {
        let counts =
            |threads| Roofline::new(threads).ceilings.iter().map(|ceiling| ceiling.threads).collect::<Vec<_>>();
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(6), [1, 2, 4, 6]);
    }

    #[test]
    fn the_floor_is_the_larger_of_reading_and_multiplying() {
        let roofline = roofline(&[1.0, 100.0, 10.0]);
        // 10 GB/s, 80 int8 GMAC/s, 20 f32 GMAC/s.
        let reading =
            StepWork { weight_bytes: 90_000_000, kv_bytes: 10_000_000, int8_macs: 160_000_000, float_macs: 20_000_000 };
        let limit = roofline.limit(reading, 20.0).expect("there are samples");
        assert!((limit.floor_ms - 10.0).abs() < 1e-9 && (limit.times_floor - 2.0).abs() < 1e-9, "{limit:?}");
        assert!((limit.bandwidth_share - 0.5).abs() < 1e-9 && (limit.int8_share - 0.1).abs() < 1e-9, "{limit:?}");
        let multiplying = StepWork { int8_macs: 1_600_000_000, float_macs: 400_000_000, ..reading };
        let limit = roofline.limit(multiplying, 80.0).expect("there are samples");
        assert!((limit.floor_ms - 40.0).abs() < 1e-9 && (limit.compute_share - 0.5).abs() < 1e-9, "{limit:?}");
        let cached = StepWork { weight_bytes: 4_000_000, ..StepWork::default() };
        assert!((roofline.limit(cached, 1.0).expect("there are samples").floor_ms - 0.1).abs() < 1e-9);
        assert!(Roofline::new(1).limit(cached, 1.0).is_none(), "nothing was sampled");
    }
}
