//! Help for tests: random inputs that are fresh in every run, and the instruction sets to compare.

use crate::sys::Isa;
use crate::{Pool, PoolConfig};

/// Xorshift64*. The seed mixes in the time, and is printed so that a failure can be repeated.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(stream: u64) -> Random {
        let seed = match std::env::var("KERNELS_TEST_SEED").ok().and_then(|s| s.parse().ok()) {
            Some(seed) => seed,
            None => std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |t| t.as_nanos() as u64),
        };
        eprintln!("KERNELS_TEST_SEED={seed}");
        let mut random = Random(seed.wrapping_add(stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1);
        (0..8).for_each(|_| {
            random.next();
        });
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In 0..n.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// In 0..1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Roughly normal.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.unit()).sum::<f32>() * 2.0_f32.sqrt() - 3.0 * 2.0_f32.sqrt()
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// `n` rounds of a test, or a few under Miri, which interprets each instruction.
pub(crate) fn rounds(n: usize) -> usize {
    if cfg!(miri) { n.min(3) } else { n }
}

/// Every instruction set of this machine.
pub(crate) fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available()).collect()
}

pub(crate) fn pool(threads: usize, isa: Isa) -> Pool {
    Pool::new(&PoolConfig { threads, cores: Vec::new(), isa: Some(isa) }).unwrap()
}

/// Every instruction set with 1 to 3 threads.
pub(crate) fn pools() -> Vec<Pool> {
    isas().into_iter().flat_map(|isa| (1..=3).map(move |threads| pool(threads, isa))).collect()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
