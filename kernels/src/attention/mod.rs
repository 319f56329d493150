//! Attention over a paged KV cache: grouped-query, causal, for a ragged batch of sequences.
//!
//! Owner: an executor owns one [`KvCache`] and says which pages belong to whom ([`Segment::pages`]); pages are not
//! counted here. Invariant: the output of a query at position p is a function of the query and of keys and values
//! 0..=p of its sequence, taken in blocks of [`BLOCK`] positions in ascending order. How a prompt was cut into chunks,
//! and what else is in the batch, changes no bit.

mod cache;
pub mod cuda;
mod flash;
mod format;

use crate::Pool;
use crate::memory::Disjoint;
use crate::simd::value::{BF16, F16, F32, I8};
use crate::simd::{self};
pub use cache::{KvCache, KvRows, KvShape, PAGE_TOKENS, write_kv};
pub use format::KvFormat;

/// Positions that share one step of the running softmax.
pub const BLOCK: usize = 4 * PAGE_TOKENS;
/// Queries that a task handles.
const QUERIES: usize = 8;

/// Consecutive tokens of one sequence. The rows of a batch are those of its segments, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// Rows of this segment in the batch.
    pub rows: usize,
    /// Absolute position of its first row.
    pub position: usize,
    /// Pages of the sequence: page i holds positions `16 i .. 16 i + 16`. Pages beyond the last row may follow.
    pub pages: &'a [u32],
}

impl Segment<'_> {
    /// Positions that must have a page: all up to the last row.
    pub fn positions(&self) -> usize {
        self.position + self.rows
    }

    fn check(&self, pages: usize) {
        let needed = self.positions().div_ceil(PAGE_TOKENS);
        assert!(needed <= self.pages.len(), "{} positions in {} pages", self.positions(), self.pages.len());
        assert!(self.pages[..needed].iter().all(|&p| (p as usize) < pages), "a page beyond the cache of {pages}");
    }
}

/// The queries of one layer.
pub struct Attend<'a> {
    /// Layer of the cache, into which the keys and values of all rows were written.
    pub layer: usize,
    /// Query heads; a multiple of the cache's heads, which consecutive query heads share.
    pub heads: usize,
    /// Multiplies queries; usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// `[rows, heads * head_dim]`.
    pub q: &'a [f32],
    /// Sequences of the batch.
    pub segments: &'a [Segment<'a>],
    /// Result, `[rows, heads * head_dim]`.
    pub out: &'a mut [f32],
}

/// For each row at position p and each head: the mean of values 0..=p weighted by `softmax(scale q . k)`.
///
/// # Panics
/// If sizes do not fit, or a page is missing or outside of the cache.
pub fn attend(pool: &Pool, cache: &KvCache, attend: Attend<'_>) {
    let shape = cache.shape();
    let rows: usize = attend.segments.iter().map(|s| s.rows).sum();
    let width = attend.heads * shape.head_dim;
    assert!(attend.layer < shape.layers, "layer {} of {}", attend.layer, shape.layers);
    assert!(attend.heads > 0 && attend.heads.is_multiple_of(shape.kv_heads), "query heads per key head");
    assert!(attend.q.len() == rows * width && attend.out.len() == rows * width, "queries and output");
    attend.segments.iter().for_each(|s| s.check(shape.pages));
    let group = attend.heads / shape.kv_heads;
    let tiles = |s: &Segment<'_>| (s.rows * group).div_ceil(QUERIES);
    let total: usize = attend.segments.iter().map(tiles).sum();
    let out = Disjoint::new(attend.out);
    let (q, layer, scale) = (attend.q, attend.layer, attend.scale);
    pool.run(total * shape.kv_heads, &|task| {
        // Key heads are the outer loop, so that neighbours in time read different keys only between heads.
        let (head, mut tile) = (task / total, task % total);
        let mut first_row = 0;
        for segment in attend.segments {
            if tile < tiles(segment) {
                let count = segment.rows * group;
                let queries = tile * count / tiles(segment)..(tile + 1) * count / tiles(segment);
                let tile = flash::Tile { cache, layer, head, group, scale, q, first_row, segment, queries, out: &out };
                match shape.format {
                    KvFormat::F16 => simd::run(pool.isa(), flash::Typed::<F16>::new(tile)),
                    KvFormat::BF16 => simd::run(pool.isa(), flash::Typed::<BF16>::new(tile)),
                    KvFormat::F32 => simd::run(pool.isa(), flash::Typed::<F32>::new(tile)),
                    KvFormat::Q8 => simd::run(pool.isa(), flash::Typed::<I8>::new(tile)),
                }
                return;
            }
            tile -= tiles(segment);
            first_row += segment.rows;
        }
    });
}

#[cfg(test)]
mod tests;
