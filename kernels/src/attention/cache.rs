//! The KV cache: pages of 16 tokens for all layers of a model.
//!
//! Owner: an executor. Invariant: a page of a layer holds for each head its keys transposed, `[head_dim][16]`, so that
//! one vector holds 16 positions, then its values, `[16][head_dim]`; the scales of a format that has them follow the
//! keys, and the values.

use super::Segment;
use super::format::KvFormat;
use crate::memory::{Buffer, Disjoint};
use crate::simd::{self, Kernel, Simd};
use crate::{KernelError, Pool};
use std::ops::Range;

/// Tokens per page.
pub const PAGE_TOKENS: usize = 16;
/// Largest head that the kernels have room for.
pub(super) const HEAD_DIM_MAX: usize = 256;

/// Size of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Pages; each holds 16 tokens in every layer.
    pub pages: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Values per head: a multiple of 16, at most 256.
    pub head_dim: usize,
    /// How values are stored.
    pub format: KvFormat,
}

impl KvShape {
    /// Bytes that one page takes over all layers.
    ///
    /// Errors: an empty or too large dimension, or a head that is not a multiple of 16.
    pub fn page_bytes(&self) -> Result<usize, KernelError> {
        let check = |what, size: usize, max| match size {
            s if (1..=max).contains(&s) => Ok(s),
            size => Err(KernelError::Size { what, size, max }),
        };
        let layers = check("a number of layers", self.layers, 1 << 16)?;
        let heads = check("a number of key heads", self.kv_heads, 1 << 16)?;
        let dim = check("a head size", self.head_dim, HEAD_DIM_MAX)?;
        if !dim.is_multiple_of(16) {
            return Err(KernelError::RowLength { format: "KV", block: 16, cols: dim });
        }
        Ok(layers * heads * self.head_bytes() * 2)
    }

    /// Bytes of the keys (or values) of one head in one page.
    fn head_bytes(&self) -> usize {
        PAGE_TOKENS * self.format.row_bytes(self.head_dim)
    }
}

/// Keys and values of all sequences of a model.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    data: Buffer,
}

impl KvCache {
    /// An empty cache. The system provides its memory as pages are first written.
    ///
    /// Errors: a shape as in [`KvShape::page_bytes`], no pages, or refused memory.
    pub fn new(shape: KvShape) -> Result<KvCache, KernelError> {
        let page = shape.page_bytes()?;
        let max = (u32::MAX as usize).min(isize::MAX as usize / page / 2);
        if shape.pages == 0 || shape.pages > max {
            return Err(KernelError::Size { what: "a number of KV pages", size: shape.pages, max });
        }
        Ok(KvCache { shape, data: Buffer::zeroed(page * shape.pages, "the KV cache")? })
    }

    /// Size of this cache.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Copies the keys and values of one page to another in every layer: a sequence that shares the start of a page
    /// with another gets a page of its own.
    ///
    /// # Panics
    /// If a page is outside of the cache.
    pub fn copy_page(&mut self, from: u32, to: u32) {
        assert!((from as usize) < self.shape.pages && (to as usize) < self.shape.pages, "copy of page {from} to {to}");
        for layer in 0..self.shape.layers {
            let source = self.head(layer, from, 0).start..self.head(layer, from, self.shape.kv_heads - 1).end;
            let target = self.head(layer, to, 0).start;
            self.data.copy_within(source, target);
        }
    }

    /// Where the keys and then the values of one head in one page lie.
    fn head(&self, layer: usize, page: u32, head: usize) -> Range<usize> {
        let bytes = 2 * self.shape.head_bytes();
        let start = ((layer * self.shape.pages + page as usize) * self.shape.kv_heads + head) * bytes;
        start..start + bytes
    }

    /// Keys `[head_dim][16]` and values `[16][head_dim]` of one head in one page, each with its scales behind.
    #[inline(always)]
    pub(super) fn keys_and_values(&self, layer: usize, page: u32, head: usize) -> (&[u8], &[u8]) {
        self.data[self.head(layer, page, head)].split_at(self.shape.head_bytes())
    }
}

/// New keys and values of one layer.
pub struct KvRows<'a> {
    /// Layer of the cache.
    pub layer: usize,
    /// Rotated keys, `[rows, kv_heads * head_dim]`.
    pub k: &'a [f32],
    /// Values, `[rows, kv_heads * head_dim]`.
    pub v: &'a [f32],
    /// Sequences of the batch; each row goes to its position.
    pub segments: &'a [Segment<'a>],
}

/// Stores the keys and values of a batch.
///
/// # Panics
/// If sizes do not fit, or a page is missing or outside of the cache.
pub fn write_kv(pool: &Pool, cache: &mut KvCache, new: KvRows<'_>) {
    let shape = cache.shape;
    let rows: usize = new.segments.iter().map(|s| s.rows).sum();
    let width = shape.kv_heads * shape.head_dim;
    assert!(new.layer < shape.layers, "layer {} of {}", new.layer, shape.layers);
    assert!(new.k.len() == rows * width && new.v.len() == rows * width, "keys and values");
    new.segments.iter().for_each(|s| s.check(shape.pages));
    let page_bytes = 2 * shape.head_bytes() * shape.kv_heads;
    let layer = cache.head(new.layer, 0, 0).start;
    let data = Disjoint::new(&mut cache.data[layer..layer + page_bytes * shape.pages]);
    // A task takes whole heads, so that rows that share a page are written by one worker.
    pool.run_ranges(shape.kv_heads, (4096 / (rows * shape.head_dim).max(1)).max(1), &|heads| {
        simd::run(pool.isa(), Write { shape, new: &new, data: &data, heads });
    });
}

/// The rows of some heads. A kernel only so that the compiler may use all vector instructions of the machine.
struct Write<'a> {
    shape: KvShape,
    new: &'a KvRows<'a>,
    /// The layer.
    data: &'a Disjoint<'a, u8>,
    heads: Range<usize>,
}

impl Kernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let Write { shape, new, data, heads } = self;
        let KvShape { kv_heads, head_dim, format, .. } = shape;
        let (width, side_bytes) = (kv_heads * head_dim, shape.head_bytes());
        for head in heads {
            let mut row = 0;
            for segment in new.segments {
                for position in segment.position..segment.positions() {
                    let page = segment.pages[position / PAGE_TOKENS] as usize;
                    let start = (page * kv_heads + head) * 2 * side_bytes;
                    // SAFETY: the ranges of different heads are disjoint, and each head belongs to one task.
                    let to = unsafe { data.part(start..start + 2 * side_bytes) };
                    let (keys, values) = to.split_at_mut(side_bytes);
                    let from = row * width + head * head_dim..row * width + (head + 1) * head_dim;
                    let slot = position % PAGE_TOKENS;
                    format.write(&new.k[from.clone()], (slot, keys), |i| i * PAGE_TOKENS + slot);
                    format.write(&new.v[from], (slot, values), |i| slot * head_dim + i);
                    row += 1;
                }
            }
        }
    }
}
