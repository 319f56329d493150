//! What this machine gives at most: bytes read per second and products per second, by the instructions that the kernels
//! use.
//!
//! Owner: whoever wants to know how far a step is from the limit holds a [`Probe`] for as long as it samples.
//! Invariant: a probe reads every byte of its buffers and makes every product that it counts; the tests check what
//! comes out.

use crate::matmul::{AHEAD, prefetch};
use crate::memory::{Buffer, Disjoint};
use crate::simd::{self, Kernel, LANES, Simd, for_row_groups, unrolled};
use crate::sys::Isa;
use crate::{KernelError, Pool};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Bytes that one round of reading takes.
const BLOCK: usize = 512;
/// Vectors that a round of products takes from memory.
const GROUPS: usize = 8;
/// Rounds of products in a sample: some milliseconds with wide vectors.
const ROUNDS: usize = 200_000;
/// Times the small buffer is read in a sample.
const CACHE_PASSES: usize = 32;

/// What one sample found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ceilings {
    /// Bytes per second from a buffer larger than the caches.
    pub memory_bytes_per_s: f64,
    /// Bytes per second from a buffer that the last-level cache holds.
    pub cache_bytes_per_s: f64,
    /// Products of 8-bit codes with 8-bit values, added to 32-bit sums, per second.
    pub int8_macs_per_s: f64,
    /// Fused multiply-adds of f32 per second.
    pub f32_macs_per_s: f64,
}

/// Buffers to read from.
#[derive(Debug)]
pub struct Probe {
    memory: Buffer,
    cache: Buffer,
}

impl Probe {
    /// Takes and fills the buffers: `memory_bytes` should exceed the last-level cache several times, `cache_bytes`
    /// should fit into it but not into the caches of the cores.
    ///
    /// # Errors
    /// [`KernelError::Memory`] when the system refuses them.
    pub fn new(pool: &Pool, memory_bytes: usize, cache_bytes: usize) -> Result<Probe, KernelError> {
        Ok(Probe { memory: filled(pool, memory_bytes)?, cache: filled(pool, cache_bytes)? })
    }

    /// Measures each ceiling once, with the threads and the instruction set of `pool`.
    pub fn sample(&self, pool: &Pool) -> Ceilings {
        let products = (pool.threads() * ROUNDS) as f64 * simd::run(pool.isa(), ProductsPerRound) as f64;
        let cached = (self.cache.len() * CACHE_PASSES) as f64;
        let each = |kernel: &(dyn Fn(Isa) -> f32 + Sync)| {
            pool.run(pool.threads(), &|_| {
                black_box(kernel(pool.isa()));
            });
        };
        Ceilings {
            memory_bytes_per_s: self.memory.len() as f64 / seconds(|| _ = black_box(read(pool, &self.memory))),
            cache_bytes_per_s: cached
                / seconds(|| (0..CACHE_PASSES).for_each(|_| _ = black_box(read(pool, &self.cache)))),
            int8_macs_per_s: 4.0 * products / seconds(|| each(&|isa| simd::run(isa, Int8(ROUNDS)))),
            f32_macs_per_s: products / seconds(|| each(&|isa| simd::run(isa, Float(ROUNDS)))),
        }
    }
}

fn seconds(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().as_secs_f64()
}

/// Whole blocks of ones. They are written, for pages that nobody wrote to are all the same one.
fn filled(pool: &Pool, bytes: usize) -> Result<Buffer, KernelError> {
    let mut buffer = Buffer::zeroed(bytes.next_multiple_of(BLOCK), "the bandwidth probe")?;
    let blocks = buffer.len() / BLOCK;
    let parts = Disjoint::new(&mut buffer[..]);
    pool.run_ranges(blocks, 1, &|range| {
        // SAFETY: the ranges of one job do not overlap.
        unsafe { parts.part(range.start * BLOCK..range.end * BLOCK) }.fill(1);
    });
    Ok(buffer)
}

/// Reads whole blocks once with all threads; the number of ranges that hold a bit.
fn read(pool: &Pool, bytes: &[u8]) -> usize {
    let found = AtomicUsize::new(0);
    pool.run_ranges(bytes.len() / BLOCK, 1, &|range| {
        let any = simd::run(pool.isa(), Read(&bytes[range.start * BLOCK..range.end * BLOCK]));
        found.fetch_add(usize::from(any), Ordering::Relaxed);
    });
    found.into_inner()
}

/// Whether any bit of some whole blocks is set.
struct Read<'a>(&'a [u8]);

impl Kernel for Read<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        const CHAINS: usize = 4;
        let mut any = [s.load_b(&[0; 64]); CHAINS];
        for block in self.0.chunks_exact(BLOCK) {
            prefetch(s, block, AHEAD);
            for (index, vector) in block.as_chunks().0.iter().enumerate() {
                any[index % CHAINS] = s.or_b(any[index % CHAINS], s.load_b(vector));
            }
        }
        let sums = any.map(
            #[inline(always)]
            |any| s.sum(s.to_f(s.dot8(s.zero_i(), any, [1; 4]))),
        );
        sums.iter().sum::<f32>() > 0.0
    }
}

/// Products that a round of [`Float`] makes; a round of [`Int8`] makes four times as many.
struct ProductsPerRound;

impl Kernel for ProductsPerRound {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::ROWS * GROUPS * LANES
    }
}

/// Rounds of 8-bit products with as many independent sums as the kernels keep; the sum of all.
struct Int8(usize);

impl Kernel for Int8 {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sum = 0.0;
        for_row_groups!(S::ROWS, 0..S::ROWS, |first, N| sum += int8::<S, N>(s, self.0, first));
        sum
    }
}

/// Row `r` multiplies by `r + 1`: equal rows would be one to the compiler.
#[inline(always)]
fn int8<S: Simd, const R: usize>(s: S, rounds: usize, first: usize) -> f32 {
    let codes = [[1u8; 64]; GROUPS];
    let mut values = [[0i8; 4]; R];
    for r in 0..R {
        values[r] = [(first + r + 1) as i8; 4];
    }
    let values = black_box(values);
    let mut acc = [s.zero_i(); R];
    for _ in 0..rounds {
        // What the compiler cannot know it cannot multiply once for all rounds.
        for codes in black_box(&codes) {
            let codes = s.load_b(codes);
            unrolled!(R, |r| acc[r] = s.dot7(acc[r], codes, values[r]));
        }
    }
    let mut sum = 0.0;
    for r in 0..R {
        sum += s.sum(s.to_f(acc[r]));
    }
    sum
}

/// As [`Int8`], with fused multiply-adds of f32.
struct Float(usize);

impl Kernel for Float {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sum = 0.0;
        for_row_groups!(S::ROWS, 0..S::ROWS, |first, N| sum += float::<S, N>(s, self.0, first));
        sum
    }
}

#[inline(always)]
fn float<S: Simd, const R: usize>(s: S, rounds: usize, first: usize) -> f32 {
    let x = [[1.0f32; LANES]; GROUPS];
    let mut factors = [0.0; R];
    for r in 0..R {
        factors[r] = (first + r + 1) as f32;
    }
    let factors = black_box(factors);
    let mut acc = [s.splat(0.0); R];
    for _ in 0..rounds {
        for x in black_box(&x) {
            let x = s.load(x);
            unrolled!(R, |r| acc[r] = s.fma(x, s.splat(factors[r]), acc[r]));
        }
    }
    let mut sum = 0.0;
    for r in 0..R {
        sum += s.sum(acc[r]);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{isas, pool};

    #[test]
    fn every_product_is_made() {
        for isa in isas() {
            let rows = simd::run(isa, ProductsPerRound) / GROUPS / LANES;
            let factors: usize = (1..=rows).sum();
            let expected = (3 * GROUPS * LANES * factors) as f32;
            assert_eq!(simd::run(isa, Float(3)), expected, "{isa:?}");
            assert_eq!(simd::run(isa, Int8(3)), 4.0 * expected, "{isa:?}");
        }
    }

    #[test]
    fn every_byte_is_read() {
        for isa in isas() {
            let pool = pool(2, isa);
            let mut bytes = vec![0; 20 * BLOCK];
            assert_eq!(read(&pool, &bytes), 0, "{isa:?}");
            for at in 0..bytes.len() {
                bytes[at] = 1 << (at % 8);
                assert_eq!(read(&pool, &bytes), 1, "{isa:?}: byte {at}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn samples_are_speeds() {
        let pool = pool(2, Isa::detect());
        let probe = Probe::new(&pool, (1 << 20) + 1, 1 << 16).unwrap();
        assert!(probe.memory.iter().chain(probe.cache.iter()).all(|&byte| byte == 1));
        assert_eq!((probe.memory.len(), probe.cache.len()), ((1 << 20) + BLOCK, 1 << 16));
        let Ceilings { memory_bytes_per_s, cache_bytes_per_s, int8_macs_per_s, f32_macs_per_s } = probe.sample(&pool);
        for speed in [memory_bytes_per_s, cache_bytes_per_s, int8_macs_per_s, f32_macs_per_s] {
            assert!(speed.is_finite() && speed > 1e6, "{speed}");
        }
    }
}
