//! One tile of queries against all positions they see, with a running softmax (Milakov and Gimelshein, 2018; Dao et
//! al., 2022).
//!
//! Owner: one task of [`super::attend`]. Invariant: what happens to a query does not depend on the others of its tile:
//! dot products sum even and odd dimensions apart (with scales: for each group of dimensions, then the groups in order);
//! positions come in ascending blocks of 64; sums of weights keep a lane per position modulo 16.

use super::cache::{HEAD_DIM_MAX, PAGE_TOKENS};
use super::format::{GROUP, SCALE_BYTES};
use super::{BLOCK, KvCache, QUERIES, Segment};
use crate::memory::Disjoint;
use crate::simd::math::exp;
use crate::simd::value::Value;
use crate::simd::{Kernel, LANES, Simd, for_row_groups, unrolled};
use std::marker::PhantomData;
use std::ops::Range;

const PAGES: usize = BLOCK / PAGE_TOKENS;
const LANE: [f32; LANES] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// Queries that share a key head: numbers `row * group + head in group` of one segment.
pub(super) struct Tile<'a> {
    pub(super) cache: &'a KvCache,
    pub(super) layer: usize,
    /// Key head.
    pub(super) head: usize,
    /// Query heads per key head.
    pub(super) group: usize,
    pub(super) scale: f32,
    pub(super) q: &'a [f32],
    /// Row of the batch where the segment starts.
    pub(super) first_row: usize,
    pub(super) segment: &'a Segment<'a>,
    pub(super) queries: Range<usize>,
    pub(super) out: &'a Disjoint<'a, f32>,
}

/// A tile over a cache that stores `V`.
pub(super) struct Typed<'a, V> {
    tile: Tile<'a>,
    value: PhantomData<V>,
}

impl<'a, V: Value> Typed<'a, V> {
    pub(super) fn new(tile: Tile<'a>) -> Typed<'a, V> {
        assert!(tile.queries.len() <= QUERIES);
        Typed { tile, value: PhantomData }
    }
}

/// What is known of `R` queries after some blocks.
struct Running<S: Simd, const R: usize> {
    /// Scaled queries.
    q: [[f32; HEAD_DIM_MAX]; R],
    /// Positions each query sees: its own and all before.
    visible: [usize; R],
    /// Largest score so far.
    largest: [f32; R],
    /// Sums of `e^(score - largest)`, by lane.
    weight: [S::F; R],
    /// Sums of weights times values.
    value: [[f32; HEAD_DIM_MAX]; R],
    /// `e^(score - largest)` for the positions of the current block; 0 where a query does not see.
    weights: [[[f32; PAGE_TOKENS]; R]; PAGES],
}

impl<V: Value> Kernel for Typed<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for_row_groups!(S::FLOAT_ROWS, self.tile.queries, |first, N| self.queries::<S, N>(s, first));
    }
}

impl<V: Value> Typed<'_, V> {
    /// Where query number `index` of the segment starts in `q` and `out`.
    #[inline(always)]
    fn at(&self, index: usize) -> usize {
        let tile = &self.tile;
        let shape = tile.cache.shape();
        let row = tile.first_row + index / tile.group;
        let head = tile.head * tile.group + index % tile.group;
        (row * shape.kv_heads * tile.group + head) * shape.head_dim
    }

    #[inline(always)]
    fn queries<S: Simd, const R: usize>(&self, s: S, first: usize) {
        let dim = self.tile.cache.shape().head_dim;
        let mut state = Running::<S, R> {
            q: [[0.0; HEAD_DIM_MAX]; R],
            visible: [0; R],
            largest: [f32::NEG_INFINITY; R],
            weight: [s.splat(0.0); R],
            value: [[0.0; HEAD_DIM_MAX]; R],
            weights: [[[0.0; PAGE_TOKENS]; R]; PAGES],
        };
        for r in 0..R {
            let q = &self.tile.q[self.at(first + r)..][..dim];
            for (to, q) in state.q[r].iter_mut().zip(q) {
                *to = q * self.tile.scale;
            }
            state.visible[r] = self.tile.segment.position + (first + r) / self.tile.group + 1;
        }
        // Queries are in ascending order of position, so the last sees most.
        for start in (0..state.visible[R - 1]).step_by(BLOCK) {
            self.block(s, start, &mut state);
        }
        for r in 0..R {
            let at = self.at(first + r);
            // SAFETY: each query belongs to one task of the job.
            let out = unsafe { self.tile.out.part(at..at + dim) };
            let inverse = 1.0 / s.sum(state.weight[r]);
            for (out, v) in out.iter_mut().zip(&state.value[r]) {
                *out = v * inverse;
            }
        }
    }

    /// Positions `start..start + 64`, as far as they are visible.
    #[inline(always)]
    fn block<S: Simd, const R: usize>(&self, s: S, start: usize, state: &mut Running<S, R>) {
        let minus_infinity = s.splat(f32::NEG_INFINITY);
        let pages = (state.visible[R - 1] - start).div_ceil(PAGE_TOKENS).min(PAGES);
        let mut scores = [[minus_infinity; PAGES]; R];
        for page in 0..pages {
            let found = self.scores(s, start / PAGE_TOKENS + page, &state.q);
            for r in 0..R {
                let seen = state.visible[r].saturating_sub(start + page * PAGE_TOKENS);
                scores[r][page] = s.select_lt((s.load(&LANE), s.splat(seen as f32)), found[r], minus_infinity);
            }
        }
        for r in 0..R {
            if state.visible[r] <= start {
                continue;
            }
            let [a, b, c, d] = scores[r];
            let largest = s.largest(s.max(s.max(a, b), s.max(c, d)));
            if largest > state.largest[r] {
                let shrink = s.splat(state.largest[r] - largest);
                let mut factor = [0.0; LANES];
                s.store(exp(s, shrink), &mut factor);
                state.largest[r] = largest;
                state.weight[r] = s.mul(state.weight[r], s.load(&factor));
                for v in &mut state.value[r][..self.tile.cache.shape().head_dim] {
                    *v *= factor[0];
                }
            }
            let largest = s.splat(state.largest[r]);
            for page in 0..pages {
                let weight = exp(s, s.sub(scores[r][page], largest));
                state.weight[r] = s.add(state.weight[r], weight);
                s.store(weight, &mut state.weights[page][r]);
            }
        }
        for page in 0..pages {
            self.values(s, start / PAGE_TOKENS + page, state);
        }
    }

    /// `q . k` for the 16 positions of a page.
    #[inline(always)]
    fn scores<S: Simd, const R: usize>(&self, s: S, page: usize, q: &[[f32; HEAD_DIM_MAX]; R]) -> [S::F; R] {
        let tile = &self.tile;
        let (keys, _) = tile.cache.keys_and_values(tile.layer, tile.segment.pages[page], tile.head);
        if !V::SCALED {
            return self.dot(s, keys, (q, 0));
        }
        let (codes, scales) = keys.split_at(tile.cache.shape().head_dim * LANES * V::BYTES);
        let mut scores = [s.splat(0.0); R];
        for (group, codes) in codes.chunks(GROUP * LANES * V::BYTES).enumerate() {
            let (found, scale) = (self.dot(s, codes, (q, group * GROUP)), group_scales(s, scales, group));
            unrolled!(R, |r| scores[r] = s.fma(found[r], scale, scores[r]));
        }
        scores
    }

    /// `q . k` over the dimensions of `keys`, the first of which is `first`.
    #[inline(always)]
    fn dot<S: Simd, const R: usize>(
        &self,
        s: S,
        keys: &[u8],
        (q, first): (&[[f32; HEAD_DIM_MAX]; R], usize),
    ) -> [S::F; R] {
        let mut even = [s.splat(0.0); R];
        let mut odd = [s.splat(0.0); R];
        // The head size is a multiple of 16, so dimensions come in pairs.
        for (pair, keys) in keys.chunks_exact(2 * LANES * V::BYTES).enumerate().take(HEAD_DIM_MAX / 2) {
            let (a, b) = (V::load(s, keys), V::load(s, &keys[LANES * V::BYTES..]));
            // Never beyond the end; the remainder only shows that to the compiler.
            let dim = (first + 2 * pair) % HEAD_DIM_MAX;
            unrolled!(R, |r| {
                even[r] = s.fma(a, s.splat(q[r][dim]), even[r]);
                odd[r] = s.fma(b, s.splat(q[r][(dim + 1) % HEAD_DIM_MAX]), odd[r]);
            });
        }
        for r in 0..R {
            even[r] = s.add(even[r], odd[r]);
        }
        even
    }

    /// Adds weight times value for each position of a page, in order. Positions that a query does not see are left out:
    /// their values may be those of another time.
    #[inline(always)]
    fn values<S: Simd, const R: usize>(&self, s: S, page: usize, state: &mut Running<S, R>) {
        let tile = &self.tile;
        let dim = tile.cache.shape().head_dim;
        let (_, values) = tile.cache.keys_and_values(tile.layer, tile.segment.pages[page], tile.head);
        let (values, scales) = values.split_at(dim * LANES * V::BYTES);
        let Running { visible, value, weights, .. } = state;
        let weights = &weights[page % PAGES];
        let mut scaled = [[0.0; PAGE_TOKENS]; R];
        let seen = |r: usize| visible[r].saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS);
        // The first query of a tile sees least.
        let all = seen(0);
        for chunk in 0..dim / LANES {
            if V::SCALED && (chunk * LANES).is_multiple_of(GROUP) {
                let scale = group_scales(s, scales, chunk * LANES / GROUP);
                for r in 0..R {
                    s.store(s.mul(s.load(&weights[r]), scale), &mut scaled[r]);
                }
            }
            let weights = if V::SCALED { &scaled } else { weights };
            let row = |slot: usize| V::load(s, &values[(slot * dim + chunk * LANES) * V::BYTES..]);
            let mut acc = [s.splat(0.0); R];
            for r in 0..R {
                acc[r] = s.load(&value[r].as_chunks::<LANES>().0[chunk]);
            }
            for slot in 0..all {
                let v = row(slot);
                unrolled!(R, |r| acc[r] = s.fma(v, s.splat(weights[r][slot]), acc[r]));
            }
            for r in 0..R {
                for slot in all..seen(r) {
                    acc[r] = s.fma(row(slot), s.splat(weights[r][slot]), acc[r]);
                }
                s.store(acc[r], &mut value[r].as_chunks_mut::<LANES>().0[chunk]);
            }
        }
    }
}

/// Scales of a group of dimensions for the 16 positions of a page.
#[inline(always)]
fn group_scales<S: Simd>(s: S, scales: &[u8], group: usize) -> S::F {
    s.load_bf16(&scales[group * LANES * SCALE_BYTES..].as_chunks().0[0])
}
