//! Attention against an f64 definition, and against itself when the same tokens arrive in other ways.

use super::*;
use crate::testing::{Random, bits, isas, pool, pools};
use half::{bf16, f16};

/// A sequence with all its queries, keys and values, `[tokens, heads * dim]`.
struct Sequence {
    tokens: usize,
    pages: Vec<u32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

struct Case {
    shape: KvShape,
    heads: usize,
    sequences: Vec<Sequence>,
}

fn case(random: &mut Random, format: KvFormat) -> Case {
    let kv_heads = 1 + random.below(3);
    let heads = kv_heads * (1 + random.below(9));
    let head_dim = 16 * (1 + random.below(8));
    let mut free: Vec<u32> = (0..64).collect();
    let sequences = (0..1 + random.below(3))
        .map(|_| {
            let tokens = 1 + random.below(150);
            let pages = (0..tokens.div_ceil(PAGE_TOKENS)).map(|_| free.swap_remove(random.below(free.len()))).collect();
            let (q, kv) = (tokens * heads * head_dim, tokens * kv_heads * head_dim);
            Sequence { tokens, pages, q: random.normals(q), k: random.normals(kv), v: random.normals(kv) }
        })
        .collect();
    Case { shape: KvShape { layers: 2, pages: 64, kv_heads, head_dim, format }, heads, sequences }
}

impl Case {
    /// A cache whose unwritten slots would spoil any result.
    fn cache(&self) -> KvCache {
        let mut cache = KvCache::new(self.shape).unwrap();
        let pages: Vec<u32> = (0..64).collect();
        let rows = 64 * PAGE_TOKENS;
        let poison = vec![f32::NAN; rows * self.shape.kv_heads * self.shape.head_dim];
        for layer in 0..2 {
            let segments = &[Segment { rows, position: 0, pages: &pages }];
            write_kv(
                &pool(2, crate::sys::Isa::detect()),
                &mut cache,
                KvRows { layer, k: &poison, v: &poison, segments },
            );
        }
        cache
    }

    fn scale(&self) -> f32 {
        (self.shape.head_dim as f32).sqrt().recip()
    }

    /// Feeds `chunks[i]` more tokens of each sequence per round and returns all outputs, sequence by sequence.
    fn run(&self, pool: &Pool, chunks: &mut dyn FnMut(usize) -> usize) -> Vec<Vec<f32>> {
        let mut cache = self.cache();
        let mut done = vec![0; self.sequences.len()];
        let mut outputs = vec![Vec::new(); self.sequences.len()];
        let (qw, kw) = (self.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim);
        while self.sequences.iter().zip(&done).any(|(s, d)| *d < s.tokens) {
            let (mut segments, mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
            for (i, s) in self.sequences.iter().enumerate() {
                let rows = chunks(i).min(s.tokens - done[i]);
                let range = done[i]..done[i] + rows;
                q.extend_from_slice(&s.q[range.start * qw..range.end * qw]);
                k.extend_from_slice(&s.k[range.start * kw..range.end * kw]);
                v.extend_from_slice(&s.v[range.start * kw..range.end * kw]);
                segments.push(Segment { rows, position: done[i], pages: &s.pages });
            }
            let mut out = vec![f32::NAN; q.len()];
            write_kv(pool, &mut cache, KvRows { layer: 1, k: &k, v: &v, segments: &segments });
            let (heads, scale) = (self.heads, self.scale());
            attend(pool, &cache, Attend { layer: 1, heads, scale, q: &q, segments: &segments, out: &mut out });
            let mut out = &out[..];
            for (i, segment) in segments.iter().enumerate() {
                let (own, rest) = out.split_at(segment.rows * qw);
                outputs[i].extend_from_slice(own);
                done[i] += segment.rows;
                out = rest;
            }
        }
        outputs
    }

    fn reference(&self, s: &Sequence) -> Vec<f64> {
        let (dim, group) = (self.shape.head_dim, self.heads / self.shape.kv_heads);
        let stored = |x: f32| match self.shape.format {
            KvFormat::F16 => f64::from(f16::from_f32(x).to_f32()),
            KvFormat::BF16 => f64::from(bf16::from_f32(x).to_f32()),
            KvFormat::F32 => f64::from(x),
        };
        let mut out = Vec::new();
        for p in 0..s.tokens {
            for h in 0..self.heads {
                let q = &s.q[(p * self.heads + h) * dim..][..dim];
                let row = |x: &[f32], t: usize| {
                    let start = (t * self.shape.kv_heads + h / group) * dim;
                    x[start..start + dim].iter().map(|v| stored(*v)).collect::<Vec<f64>>()
                };
                let score = |t: usize| -> f64 {
                    row(&s.k, t).iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>() * f64::from(self.scale())
                };
                let scores: Vec<f64> = (0..=p).map(score).collect();
                let largest = scores.iter().fold(f64::NEG_INFINITY, |m, v| m.max(*v));
                let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                let mut mean = vec![0.0; dim];
                for (t, score) in scores.iter().enumerate() {
                    let weight = (score - largest).exp() / sum;
                    mean.iter_mut().zip(row(&s.v, t)).for_each(|(m, v)| *m += weight * v);
                }
                out.extend(mean);
            }
        }
        out
    }
}

#[test]
fn attention_equals_its_definition() {
    let mut random = Random::new(20);
    for round in 0..6 {
        let case = case(&mut random, [KvFormat::F16, KvFormat::BF16, KvFormat::F32][round % 3]);
        let expected: Vec<Vec<f64>> = case.sequences.iter().map(|s| case.reference(s)).collect();
        let mut first: Option<Vec<Vec<u32>>> = None;
        for pool in pools() {
            let found = case.run(&pool, &mut |_| usize::MAX);
            let found_bits: Vec<Vec<u32>> = found.iter().map(|f| bits(f)).collect();
            assert_eq!(*first.get_or_insert(found_bits.clone()), found_bits, "{pool:?} {:?}", case.shape);
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                assert!((f64::from(*found) - expected).abs() < 3e-6, "{found} {expected} {pool:?} {:?}", case.shape);
            }
        }
    }
}

#[test]
fn chunks_and_batches_change_no_bit() {
    let mut random = Random::new(21);
    for round in 0..3 {
        let case = case(&mut random, [KvFormat::F16, KvFormat::BF16, KvFormat::F32][round % 3]);
        for isa in isas() {
            let whole = case.run(&pool(1, isa), &mut |_| usize::MAX);
            let decode = case.run(&pool(2, isa), &mut |_| 1);
            let mixed = case.run(&pool(3, isa), &mut |i| if i % 2 == 0 { 1 } else { 7 });
            let random_cuts = case.run(&pool(3, isa), &mut |_| random.below(40));
            for (i, whole) in whole.iter().enumerate() {
                for other in [&decode[i], &mixed[i], &random_cuts[i]] {
                    assert_eq!(bits(whole), bits(other), "{isa:?} {:?}", case.shape);
                }
            }
        }
    }
}

#[test]
fn a_copied_page_serves_like_the_first() {
    let mut random = Random::new(22);
    let case = case(&mut random, KvFormat::F16);
    let s = &case.sequences[0];
    let pool = pool(1, crate::sys::Isa::detect());
    let mut cache = case.cache();
    for layer in 0..2 {
        let segments = &[Segment { rows: s.tokens, position: 0, pages: &s.pages }];
        write_kv(&pool, &mut cache, KvRows { layer, k: &s.k, v: &s.v, segments });
    }
    let mut copy = s.pages.clone();
    let target = (0..64).find(|p| !s.pages.contains(p)).unwrap();
    cache.copy_page(copy[0], target);
    copy[0] = target;
    let attend_with = |pages: &[u32], layer| {
        let mut out = vec![f32::NAN; s.q.len()];
        let segments = &[Segment { rows: s.tokens, position: 0, pages }];
        let (heads, scale) = (case.heads, case.scale());
        attend(&pool, &cache, Attend { layer, heads, scale, q: &s.q, segments, out: &mut out });
        bits(&out)
    };
    for layer in 0..2 {
        assert_eq!(attend_with(&s.pages, layer), attend_with(&copy, layer));
    }
}

#[test]
fn large_values_saturate() {
    assert_eq!(mean_of_one(KvFormat::F16, 1e6), [65504.0; 16]);
    assert_eq!(mean_of_one(KvFormat::BF16, f32::MAX), [bf16::MAX.to_f32(); 16]);
    assert_eq!(mean_of_one(KvFormat::F32, f32::MAX), [f32::MAX; 16]);
}

/// What attention makes of a single value.
fn mean_of_one(format: KvFormat, v: f32) -> [f32; 16] {
    let shape = KvShape { layers: 1, pages: 1, kv_heads: 1, head_dim: 16, format };
    let mut cache = KvCache::new(shape).unwrap();
    let pool = pool(1, crate::sys::Isa::detect());
    let segments = &[Segment { rows: 1, position: 0, pages: &[0] }];
    write_kv(&pool, &mut cache, KvRows { layer: 0, k: &[1.0; 16], v: &[v; 16], segments });
    let mut out = [0.0; 16];
    attend(&pool, &cache, Attend { layer: 0, heads: 1, scale: 1.0, q: &[1.0; 16], segments, out: &mut out });
    out
}

#[test]
fn impossible_shapes_are_refused() {
    let shape = KvShape { layers: 1, pages: 1, kv_heads: 1, head_dim: 64, format: KvFormat::F16 };
    assert_eq!(shape.page_bytes(), Ok(64 * 16 * 2 * 2));
    assert!(KvCache::new(KvShape { head_dim: 40, ..shape }).is_err());
    assert!(KvCache::new(KvShape { head_dim: 272, ..shape }).is_err());
    assert!(KvCache::new(KvShape { pages: 0, ..shape }).is_err());
    assert!(KvCache::new(KvShape { pages: usize::MAX, ..shape }).is_err());
}
