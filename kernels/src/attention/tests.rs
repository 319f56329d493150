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

    /// Attention in f64 over what `stored` makes of the key (or value) of a token in a head.
    fn reference(&self, s: &Sequence, stored: &dyn Fn(&[f32]) -> Vec<f64>) -> Vec<f64> {
        let (dim, group) = (self.shape.head_dim, self.heads / self.shape.kv_heads);
        let mut out = Vec::new();
        for p in 0..s.tokens {
            for h in 0..self.heads {
                let q = &s.q[(p * self.heads + h) * dim..][..dim];
                let row = |x: &[f32], t: usize| {
                    let start = (t * self.shape.kv_heads + h / group) * dim;
                    stored(&x[start..start + dim])
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

/// What a format keeps of the key (or value) of a token in a head.
fn stored(format: KvFormat, row: &[f32]) -> Vec<f64> {
    let each = |f: fn(f32) -> f64| row.iter().map(|x| f(*x)).collect();
    match format {
        KvFormat::F16 => each(|x| f16::from_f32(x).to_f64()),
        KvFormat::BF16 => each(|x| bf16::from_f32(x).to_f64()),
        KvFormat::F32 => each(f64::from),
        KvFormat::Q8 => row.chunks(16).flat_map(codes_times_scale).collect(),
    }
}

fn codes_times_scale(group: &[f32]) -> Vec<f64> {
    let exact = group.iter().fold(0.0_f32, |m, x| m.max(x.abs())) / 127.0;
    let nearest = bf16::from_f32(exact);
    let scale = if nearest.to_f32() < exact { bf16::from_bits(nearest.to_bits() + 1) } else { nearest }.to_f32();
    group.iter().map(|x| f64::from((x / scale).round_ties_even()) * f64::from(scale)).collect()
}

#[test]
fn attention_equals_its_definition() {
    let mut random = Random::new(20);
    for round in 0..8 {
        let case = case(&mut random, KvFormat::ALL[round % 4]);
        let expected: Vec<Vec<f64>> =
            case.sequences.iter().map(|s| case.reference(s, &|row| stored(case.shape.format, row))).collect();
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

/// With keys off by `k` and values by `v` at most, scores are off by e = scale k sum |q|, so weights change by factors
/// between `exp(-2 e)` and `exp(2 e)`, and their mean by no more than the bound here.
#[test]
fn codes_are_as_near_as_their_scales_say() {
    let mut random = Random::new(24);
    for _ in 0..2 {
        let case = case(&mut random, KvFormat::Q8);
        let found = case.run(&pool(2, crate::sys::Isa::detect()), &mut |_| usize::MAX);
        for (s, found) in case.sequences.iter().zip(&found) {
            let exact = case.reference(s, &|row| stored(KvFormat::F32, row));
            let largest = |x: &[f32]| x.iter().fold(0.0_f64, |m, v| m.max(f64::from(v.abs())));
            let half_a_scale = |x: &[f32]| largest(x) / 127.0 * (1.0 + 1.0 / 127.0) / 2.0;
            let (k, v) = (half_a_scale(&s.k), half_a_scale(&s.v));
            for (query, (q, rows)) in s.q.chunks(case.shape.head_dim).zip(found.chunks(case.shape.head_dim)).enumerate()
            {
                let e = f64::from(case.scale()) * k * q.iter().map(|q| f64::from(q.abs())).sum::<f64>();
                let bound = ((2.0 * e).exp() - 1.0) * (largest(&s.v) + v) + v + 3e-6;
                for (found, exact) in rows.iter().zip(&exact[query * case.shape.head_dim..]) {
                    assert!((f64::from(*found) - exact).abs() < bound, "{found} {exact} {bound} {:?}", case.shape);
                }
            }
        }
    }
}

#[test]
fn chunks_and_batches_change_no_bit() {
    let mut random = Random::new(21);
    for round in 0..4 {
        let case = case(&mut random, KvFormat::ALL[round]);
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
    for format in KvFormat::ALL {
        copied_page(&case(&mut random, format));
    }
}

fn copied_page(case: &Case) {
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
    assert!(mean_of_one(KvFormat::Q8, f32::MAX).iter().all(|v| (v / 2f32.powi(127) - 1.0).abs() < 0.01));
}

#[test]
fn a_nan_stays_one() {
    for format in KvFormat::ALL {
        assert!(mean_of_one(format, f32::NAN).iter().all(|v| v.is_nan()), "{format:?}");
        let mut row = [1.0; 32];
        row[3] = f32::NAN;
        assert!(mean_of(format, &row, &[1.0; 32]).iter().all(|v| v.is_nan()), "a key, {format:?}");
        assert!(mean_of(format, &[1.0; 32], &row)[3].is_nan(), "a value, {format:?}");
    }
}

/// What attention makes of a single value.
fn mean_of_one(format: KvFormat, v: f32) -> [f32; 16] {
    mean_of(format, &[1.0; 16], &[v; 16])
}

/// What attention makes of a single token.
fn mean_of<const N: usize>(format: KvFormat, k: &[f32; N], v: &[f32; N]) -> [f32; N] {
    let shape = KvShape { layers: 1, pages: 1, kv_heads: 1, head_dim: N, format };
    let mut cache = KvCache::new(shape).unwrap();
    let pool = pool(1, crate::sys::Isa::detect());
    let segments = &[Segment { rows: 1, position: 0, pages: &[0] }];
    write_kv(&pool, &mut cache, KvRows { layer: 0, k, v, segments });
    let mut out = [0.0; N];
    attend(&pool, &cache, Attend { layer: 0, heads: 1, scale: 1.0, q: &[1.0; N], segments, out: &mut out });
    out
}

#[test]
fn impossible_shapes_are_refused() {
    let shape = KvShape { layers: 1, pages: 1, kv_heads: 1, head_dim: 64, format: KvFormat::F16 };
    assert_eq!(shape.page_bytes(), Ok(64 * 16 * 2 * 2));
    assert_eq!(KvShape { format: KvFormat::Q8, ..shape }.page_bytes(), Ok((64 + 2 * 4) * 16 * 2));
    assert!(KvCache::new(KvShape { head_dim: 40, ..shape }).is_err());
    assert!(KvCache::new(KvShape { head_dim: 272, ..shape }).is_err());
    assert!(KvCache::new(KvShape { pages: 0, ..shape }).is_err());
    assert!(KvCache::new(KvShape { pages: usize::MAX, ..shape }).is_err());
}
