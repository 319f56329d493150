//! Reductions of logits: largest entry, normaliser, entropy, and the largest k.
//!
//! Owner: an executor owns one [`Reducer`] (scratch). Invariant: a row is cut into chunks of 4096 entries whose
//! results are merged in order, so a row's outcome depends neither on the batch nor on the threads. Ties go to the
//! lowest id. A row that is no distribution is an error, never a number.

use crate::Pool;
use crate::memory::Disjoint;
use crate::simd::math::exp;
use crate::simd::{self, Kernel, LANES, Simd};

/// Entries per chunk.
const CHUNK: usize = 4096;
/// What minus infinity counts as, relative to the largest entry: `exp` is 0 there and products stay finite.
const FAR: f32 = -200.0;

/// A row of logits that is no distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadLogits {
    /// At least one entry is NaN or plus infinity.
    #[error("logits contain nan or infinity; the weights of the model are damaged or overflow")]
    NotFinite,
    /// Every entry is minus infinity.
    #[error("every logit is minus infinity; the logit bias leaves no token")]
    Empty,
}

/// What one pass over a row of logits tells.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowStats {
    /// Id of the largest entry; the lowest id among equals.
    pub argmax: u32,
    /// The largest entry.
    pub max: f32,
    /// ln of the sum of `e^x`.
    pub logsumexp: f32,
    /// Entropy of the softmax in nats; an entry with probability 0 adds 0.
    pub entropy: f32,
}

/// An entry of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Column.
    pub id: u32,
    /// Value.
    pub logit: f32,
}

/// Scratch for reductions; grows to the largest batch and then allocates no more.
#[derive(Debug, Default)]
pub struct Reducer {
    chunks: Vec<Chunk>,
}

/// Outcome of one chunk, relative to its own largest entry.
#[derive(Debug, Clone, Copy, Default)]
struct Chunk {
    finite: bool,
    max: f32,
    argmax: u32,
    /// Sum of `e^(x - max)`.
    sum: f32,
    /// Sum of `(x - max) e^(x - max)`.
    weighted: f32,
}

impl Reducer {
    /// Statistics of each row of `logits` (`[rows, cols]`), in `out`, which is cleared first.
    ///
    /// # Panics
    /// If `logits` is not whole rows.
    pub fn stats(&mut self, pool: &Pool, (logits, cols): (&[f32], usize), out: &mut Vec<Result<RowStats, BadLogits>>) {
        self.reduce(pool, (logits, cols), Chunk::of::<true>);
        out.clear();
        out.extend(self.chunks.chunks(cols.div_ceil(CHUNK)).map(merge));
    }

    /// The largest entry of each row, in `out`, which is cleared first. Cheaper than [`Reducer::stats`].
    ///
    /// # Panics
    /// If `logits` is not whole rows.
    pub fn argmax(
        &mut self,
        pool: &Pool,
        (logits, cols): (&[f32], usize),
        out: &mut Vec<Result<Candidate, BadLogits>>,
    ) {
        self.reduce(pool, (logits, cols), Chunk::of::<false>);
        out.clear();
        out.extend(self.chunks.chunks(cols.div_ceil(CHUNK)).map(largest));
    }

    fn reduce(&mut self, pool: &Pool, (logits, cols): (&[f32], usize), chunk_of: fn(&Pool, &[f32], usize) -> Chunk) {
        assert!(cols > 0 && cols <= u32::MAX as usize && logits.len().is_multiple_of(cols), "logits are whole rows");
        let per_row = cols.div_ceil(CHUNK);
        self.chunks.clear();
        self.chunks.resize(logits.len() / cols * per_row, Chunk::default());
        let count = self.chunks.len();
        let chunks = Disjoint::new(&mut self.chunks);
        pool.run_ranges(count, 4, &|range| {
            for index in range {
                let first = index % per_row * CHUNK;
                let row = &logits[index / per_row * cols..][..cols];
                // SAFETY: the ranges of one job are disjoint.
                let to = unsafe { chunks.part(index..index + 1) };
                to[0] = chunk_of(pool, &row[first..(first + CHUNK).min(cols)], first);
            }
        });
    }
}

impl Chunk {
    fn of<const SUMS: bool>(pool: &Pool, x: &[f32], first: usize) -> Chunk {
        let mut chunk = simd::run(pool.isa(), Scan::<SUMS>(x));
        chunk.argmax += first as u32;
        chunk
    }
}

/// The largest entry over the chunks of a row.
fn largest(chunks: &[Chunk]) -> Result<Candidate, BadLogits> {
    let mut best = Candidate { id: 0, logit: f32::NEG_INFINITY };
    for chunk in chunks {
        if !chunk.finite {
            return Err(BadLogits::NotFinite);
        }
        if chunk.max > best.logit {
            best = Candidate { id: chunk.argmax, logit: chunk.max };
        }
    }
    if best.logit == f32::NEG_INFINITY { Err(BadLogits::Empty) } else { Ok(best) }
}

/// With M the largest entry, Z the sum of `e^(x - M)` and W that of `(x - M) e^(x - M)`: logsumexp is `M + ln Z` and
/// the entropy `ln Z - W / Z`.
fn merge(chunks: &[Chunk]) -> Result<RowStats, BadLogits> {
    let Candidate { id, logit } = largest(chunks)?;
    let (mut sum, mut weighted) = (0.0_f64, 0.0_f64);
    for chunk in chunks.iter().filter(|c| c.max > f32::NEG_INFINITY) {
        let shift = f64::from(chunk.max) - f64::from(logit);
        let factor = shift.exp();
        if factor > 0.0 {
            sum += factor * f64::from(chunk.sum);
            weighted += factor * (f64::from(chunk.weighted) + shift * f64::from(chunk.sum));
        }
    }
    let logsumexp = (f64::from(logit) + sum.ln()) as f32;
    let entropy = (sum.ln() - weighted / sum).max(0.0) as f32;
    Ok(RowStats { argmax: id, max: logit, logsumexp, entropy })
}

/// One chunk: largest entry, and with `SUMS` also the sums.
struct Scan<'a, const SUMS: bool>(&'a [f32]);

impl<const SUMS: bool> Kernel for Scan<'_, SUMS> {
    type Output = Chunk;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Chunk {
        let (vectors, rest) = self.0.as_chunks::<LANES>();
        let mut tail = [f32::NEG_INFINITY; LANES];
        tail[..rest.len()].copy_from_slice(rest);
        let (zero, infinity) = (s.splat(0.0), s.splat(f32::NEG_INFINITY));
        // Negative entries count as 0 in the probe, which stays 0 unless there is a NaN or plus infinity.
        let (mut max, mut probe) = (infinity, zero);
        for v in vectors.iter().chain([&tail]) {
            let v = s.load(v);
            max = s.max(v, max);
            probe = s.fma(s.select_lt((v, zero), zero, v), zero, probe);
        }
        if s.sum(probe) != 0.0 {
            return Chunk::default();
        }
        let max = s.largest(max);
        let mut chunk = Chunk { finite: true, max, argmax: 0, sum: 0.0, weighted: 0.0 };
        if max == f32::NEG_INFINITY {
            return chunk;
        }
        // Every entry is at most `max`, so the first that `max` does not exceed is the one.
        let m = s.splat(max);
        for (index, v) in vectors.iter().chain([&tail]).enumerate() {
            let equal = !s.mask_gt(m, s.load(v));
            if equal != 0 {
                chunk.argmax = (index * LANES) as u32 + equal.trailing_zeros();
                break;
            }
        }
        if SUMS {
            let far = s.splat(FAR);
            let (mut sum, mut weighted) = (zero, zero);
            for v in vectors.iter().chain([&tail]) {
                let shift = s.max(s.sub(s.load(v), m), far);
                let p = exp(s, shift);
                sum = s.add(sum, p);
                weighted = s.fma(p, shift, weighted);
            }
            (chunk.sum, chunk.weighted) = (s.sum(sum), s.sum(weighted));
        }
        chunk
    }
}

/// The `k` largest entries of one row in descending order, equal ones by ascending id, in `out`, which is cleared
/// first. NaN and minus infinity are left out, so there may be fewer.
///
/// # Panics
/// If the row has more than 2^32 entries.
pub fn top_k(pool: &Pool, row: &[f32], k: usize, out: &mut Vec<Candidate>) {
    assert!(row.len() <= u32::MAX as usize, "ids have 32 bits");
    out.clear();
    if k > 0 {
        simd::run(pool.isa(), TopK { row, k, out });
    }
}

struct TopK<'a> {
    row: &'a [f32],
    k: usize,
    out: &'a mut Vec<Candidate>,
}

impl TopK<'_> {
    /// Puts an entry that beats the last one in its place. Ids come in ascending order, so it goes behind its equals.
    fn insert(&mut self, id: usize, logit: f32) {
        let at = self.out.partition_point(|c| c.logit >= logit);
        if self.out.len() == self.k {
            self.out.pop();
        }
        self.out.insert(at, Candidate { id: id as u32, logit });
    }

    /// What an entry must beat.
    fn bar(&self) -> f32 {
        if self.out.len() < self.k { f32::NEG_INFINITY } else { self.out.last().map_or(f32::NEG_INFINITY, |c| c.logit) }
    }
}

impl Kernel for TopK<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (vectors, rest) = self.row.as_chunks::<LANES>();
        let mut tail = [f32::NEG_INFINITY; LANES];
        tail[..rest.len()].copy_from_slice(rest);
        let mut bar = self.bar();
        for (index, v) in vectors.iter().chain([&tail]).enumerate() {
            let mut above = s.mask_gt(s.load(v), s.splat(bar));
            while above != 0 {
                let lane = above.trailing_zeros() as usize;
                above &= above - 1;
                if v[lane] > bar {
                    self.insert(index * LANES + lane, v[lane]);
                    bar = self.bar();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, bits, pools};

    fn stats(pool: &Pool, logits: &[f32], cols: usize) -> Vec<Result<RowStats, BadLogits>> {
        let (mut reducer, mut out) = (Reducer::default(), Vec::new());
        reducer.stats(pool, (logits, cols), &mut out);
        let mut best = Vec::new();
        reducer.argmax(pool, (logits, cols), &mut best);
        let expected: Vec<_> =
            out.iter().map(|s| s.map(|s: RowStats| Candidate { id: s.argmax, logit: s.max })).collect();
        assert_eq!(best, expected);
        out
    }

    fn reference(row: &[f32]) -> (u32, f64, f64) {
        let mut best = 0;
        row.iter().enumerate().for_each(|(i, x)| {
            if *x > row[best] {
                best = i
            }
        });
        let max = f64::from(row[best]);
        let sum: f64 = row.iter().map(|x| (f64::from(*x) - max).exp()).sum();
        let lse = max + sum.ln();
        let entropy = row.iter().map(|x| f64::from(*x) - lse).filter(|l| *l > -700.0).map(|l| -l.exp() * l).sum();
        (best as u32, lse, entropy)
    }

    #[test]
    fn stats_equal_their_definitions() {
        let mut random = Random::new(30);
        for round in 0..12 {
            let (rows, cols) = (1 + random.below(5), [1 + random.below(50), 1 + random.below(20_000)][round % 2]);
            let spread = [0.01, 1.0, 30.0][round % 3];
            let mut logits: Vec<f32> = random.normals(rows * cols).iter().map(|v| v * spread).collect();
            for _ in 0..random.below(cols) {
                logits[random.below(rows * cols)] = f32::NEG_INFINITY;
            }
            (0..rows).for_each(|r| logits[r * cols + random.below(cols)] = 1.5);
            let mut first: Option<Vec<[u32; 4]>> = None;
            for pool in pools() {
                let found: Vec<RowStats> = stats(&pool, &logits, cols).into_iter().map(|s| s.unwrap()).collect();
                let all: Vec<[u32; 4]> = found
                    .iter()
                    .map(|s| [s.argmax, s.max.to_bits(), s.logsumexp.to_bits(), s.entropy.to_bits()])
                    .collect();
                assert_eq!(*first.get_or_insert(all.clone()), all, "{pool:?} {rows} x {cols}");
                for (row, found) in logits.chunks(cols).zip(&found) {
                    let (argmax, lse, entropy) = reference(row);
                    assert_eq!((found.argmax, found.max), (argmax, row[argmax as usize]));
                    assert!((f64::from(found.logsumexp) - lse).abs() < 1e-6 * (1.0 + lse.abs()), "{found:?} {lse}");
                    assert!((f64::from(found.entropy) - entropy).abs() < 2e-6 * (1.0 + entropy), "{found:?} {entropy}");
                    assert_eq!(stats(&pool, row, cols)[0], Ok(*found), "alone");
                }
            }
        }
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        let mut random = Random::new(31);
        for pool in pools() {
            let cols = 10_000;
            let mut row = vec![-1.0; cols];
            let mut tied: Vec<usize> = (0..5).map(|_| random.below(cols)).collect();
            tied.iter().for_each(|&i| row[i] = 2.0);
            tied.sort_unstable();
            tied.dedup();
            assert_eq!(stats(&pool, &row, cols)[0].unwrap().argmax as usize, tied[0]);
            let mut best = Vec::new();
            top_k(&pool, &row, tied.len(), &mut best);
            assert_eq!(best.iter().map(|c| c.id as usize).collect::<Vec<_>>(), tied);
        }
    }

    #[test]
    fn bad_rows_are_errors_and_leave_others_alone() {
        let mut random = Random::new(32);
        for pool in pools() {
            let cols = 5000;
            let mut logits = random.normals(4 * cols);
            logits[cols + random.below(cols)] = f32::NAN;
            logits[2 * cols + random.below(cols)] = f32::INFINITY;
            logits[3 * cols..].fill(f32::NEG_INFINITY);
            let found = stats(&pool, &logits, cols);
            assert!(found[0].is_ok());
            assert_eq!(found[1..], [Err(BadLogits::NotFinite), Err(BadLogits::NotFinite), Err(BadLogits::Empty)]);
            // One token only: certainty.
            logits[3 * cols + 7] = 3.0;
            let sure = RowStats { argmax: 7, max: 3.0, logsumexp: 3.0, entropy: 0.0 };
            assert_eq!(stats(&pool, &logits[3 * cols..], cols), [Ok(sure)]);
        }
    }

    #[test]
    fn uniform_rows_have_the_largest_entropy() {
        for pool in pools() {
            for cols in [2, 100, 49_152] {
                let found = stats(&pool, &vec![-3.0; cols], cols)[0].unwrap();
                assert!((found.entropy - (cols as f32).ln()).abs() < 1e-5, "{cols}: {found:?}");
            }
        }
    }

    #[test]
    fn top_k_equals_a_stable_sort() {
        let mut random = Random::new(33);
        for _ in 0..20 {
            let cols = 1 + random.below(3000);
            let mut row: Vec<f32> = (0..cols).map(|_| random.below(500) as f32).collect();
            row[random.below(cols)] = f32::NEG_INFINITY;
            row[random.below(cols)] = f32::NAN;
            let mut sorted: Vec<(usize, f32)> =
                row.iter().copied().enumerate().filter(|(_, x)| *x > f32::NEG_INFINITY).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
            for k in [0, 1, 20, cols + 1] {
                let expected: Vec<Candidate> =
                    sorted.iter().take(k).map(|&(id, logit)| Candidate { id: id as u32, logit }).collect();
                for pool in pools() {
                    let mut found = Vec::new();
                    top_k(&pool, &row, k, &mut found);
                    let values = |c: &[Candidate]| bits(&c.iter().map(|c| c.logit).collect::<Vec<_>>());
                    assert_eq!(values(&found), values(&expected));
                    assert_eq!(found, expected, "{pool:?} k {k}");
                }
            }
        }
    }
}
