//! Rotation and storage of keys and values: against the operations of the processor, bit by bit where no norm comes first.

use super::{Finding, Random, bits, same, text};
use tokenrouter_kernels::attention::cuda::KvMemory;
use tokenrouter_kernels::attention::{KvFormat, KvShape, PAGE_TOKENS};
use tokenrouter_kernels::cuda::{Array, CudaError, Gpu, NONE, Span, StepInput, StepLimits, StepMemory, Stream};
use tokenrouter_kernels::norm::{RmsNorm, rms_norm_in_place};
use tokenrouter_kernels::rope::cuda::{CudaRope, HeadNormArgs, RopeKernels, RotateArgs};
use tokenrouter_kernels::rope::{RopeLayout, RopeRows, RopeTable, rope};
use tokenrouter_kernels::{Pool, PoolConfig};

const PAGES: usize = 9;
const POSITIONS: usize = PAGES * PAGE_TOKENS;
const EPS: (f32, f32) = (1e-6, 1e-5);
/// What rounding may do to a head that is normalised and rotated, of its largest value.
const NORMED: f64 = 2e-6;

/// Runs all checks.
///
/// # Errors
/// What differs where everything must be equal, or what the device says.
pub fn check(gpu: &Gpu, seed: u64) -> Result<Vec<Finding>, String> {
    let mut random = Random::new(seed);
    let pool = Pool::new(&PoolConfig { threads: 1, ..PoolConfig::default() }).map_err(text)?;
    let bench =
        Bench { stream: Stream::new(gpu, 0).map_err(text)?, kernels: RopeKernels::load(gpu).map_err(text)?, pool };
    let mut q = Finding::new("rope: queries after norms", NORMED);
    let mut kv = Finding::new("rope: stored keys and values, in halves of their last bit", 1.02);
    for (head_dim, pairs) in [(64, 32), (128, 64), (80, 40), (96, 24), (100, 50), (256, 128), (2, 1)] {
        for round in 0..4 {
            let layout = [RopeLayout::Halves, RopeLayout::Interleaved][round % 2];
            let normed = round / 2 == 1;
            let case = Case::new(&mut random, (head_dim, pairs), (layout, normed));
            bench.case(&case, (&mut q, &mut kv)).map_err(|error| format!("{error}, {}", case.name()))?;
        }
    }
    Ok(vec![q, kv])
}

struct Bench {
    stream: Stream,
    kernels: RopeKernels,
    pool: Pool,
}

struct Case {
    heads: usize,
    shape: KvShape,
    layout: RopeLayout,
    table: RopeTable,
    norms: Option<(Vec<f32>, Vec<f32>)>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
}

impl Case {
    fn new(random: &mut Random, (head_dim, pairs): (usize, usize), (layout, normed): (RopeLayout, bool)) -> Case {
        let (kv_heads, tokens) = (1 + random.below(3), 1 + random.below(20));
        let heads = kv_heads * random.of(&[1, 2, 7]);
        let format = random.of(&[KvFormat::BF16, KvFormat::F16]);
        let frequencies: Vec<f32> = (0..pairs).map(|i| 10_000f32.powf(-(i as f32) / pairs as f32)).collect();
        let table = RopeTable::new(&frequencies, POSITIONS, random.of(&[1.0, 1.25]));
        let mut free: Vec<u32> = (0..POSITIONS as u32).collect();
        let mut slots: Vec<u32> = (0..tokens).map(|_| free.swap_remove(random.below(free.len()))).collect();
        let mut positions: Vec<u32> = (0..tokens).map(|_| random.below(POSITIONS) as u32).collect();
        // The last rows are padding, and one token is not stored.
        if tokens > 2 {
            (positions[tokens - 1], slots[tokens - 1], slots[0]) = (NONE, NONE, NONE);
        }
        let scale = random.of(&[1.0, 1e5]);
        let mut values =
            |heads: usize| (0..tokens * heads * head_dim).map(|_| random.normal() * scale).collect::<Vec<f32>>();
        let (q, k, v) = (values(heads), values(kv_heads), values(kv_heads));
        Case {
            heads,
            shape: KvShape { layers: 2, pages: PAGES, kv_heads, head_dim, format },
            layout,
            table: table.unwrap_or_else(|error| panic!("{error}")),
            norms: normed.then(|| (random.normals(head_dim), random.normals(head_dim))),
            q,
            k,
            v,
            positions,
            slots,
        }
    }

    fn name(&self) -> String {
        let (tokens, norms) = (self.positions.len(), self.norms.is_some());
        format!("{:?}, {:?}, {tokens} tokens, {} heads, norms {norms}", self.shape, self.layout, self.heads)
    }

    /// What the processor makes of q and k.
    fn reference(&self, pool: &Pool) -> (Vec<f32>, Vec<f32>) {
        let (mut q, mut k) = (self.q.clone(), self.k.clone());
        if let Some((q_weight, k_weight)) = &self.norms {
            rms_norm_in_place(pool, RmsNorm { weight: q_weight, eps: EPS.0 }, &mut q);
            rms_norm_in_place(pool, RmsNorm { weight: k_weight, eps: EPS.1 }, &mut k);
        }
        // Rows of padding are rotated as well here, and not looked at.
        let positions: Vec<u32> = self.positions.iter().map(|&p| if p == NONE { 0 } else { p }).collect();
        let head_dim = self.shape.head_dim;
        for x in [&mut q[..], &mut k[..]] {
            rope(pool, &self.table, self.layout, RopeRows { x, head_dim, positions: &positions });
        }
        (q, k)
    }

    fn input(&self) -> StepInput {
        let tokens = self.positions.len();
        StepInput {
            tokens: vec![0; tokens],
            positions: self.positions.clone(),
            slots: self.slots.clone(),
            row_of: vec![0; tokens],
            spans: vec![Span::default()],
            ..StepInput::default()
        }
    }
}

impl Bench {
    fn case(&self, case: &Case, (q_finding, kv_finding): (&mut Finding, &mut Finding)) -> Result<(), String> {
        let memory = KvMemory::new(self.stream.gpu(), case.shape).map_err(text)?;
        let before = memory.array().to_host(&self.stream).map_err(text)?;
        let (q, k) = self.run(case, &memory).map_err(text)?;
        same("rope: keys stay", &bits(&k), &bits(&case.k))?;
        let after = memory.array().to_host(&self.stream).map_err(text)?;
        let (q_reference, k_reference) = case.reference(&self.pool);
        let width = case.heads * case.shape.head_dim;
        for (token, position) in case.positions.iter().enumerate() {
            let row = token * width..(token + 1) * width;
            let (found, expected) = (&q[row.clone()], &q_reference[row.clone()]);
            if *position == NONE {
                same("rope: queries of padding", &bits(found), &bits(&case.q[row]))?;
            } else if case.norms.is_none() {
                same("rope: queries", &bits(found), &bits(expected))?;
            } else {
                let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
                q_finding.note_rows((found, &expected), case.shape.head_dim);
            }
        }
        self.stored(case, (&before, &after, &k_reference), kv_finding)
    }

    fn run(&self, case: &Case, memory: &KvMemory) -> Result<(Vec<f32>, Vec<f32>), CudaError> {
        let stream = &self.stream;
        let tokens = case.positions.len();
        let limits = StepLimits { tokens, rows: 1, row_pages: PAGES, pages: PAGES as u32, vocab: 1 };
        let mut step = StepMemory::new(stream, limits)?;
        step.upload(stream, &case.input())?;
        let put = |values: &[f32]| Array::from_host(stream, "a check", values);
        let (q, k, v) = (put(&case.q)?, put(&case.k)?, put(&case.v)?);
        let table = CudaRope::new(stream, &case.table, case.layout)?;
        let weights = match &case.norms {
            Some((q, k)) => Some((put(q)?, put(k)?)),
            None => None,
        };
        let norms = weights.as_ref().map(|(q, k)| HeadNormArgs { q: q.view(), k: k.view(), eps: EPS });
        self.kernels.rotate_and_store(
            stream,
            &RotateArgs {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                tokens,
                heads: case.heads,
                layer: 1,
                kv: memory,
                step: &step,
                rope: &table,
                norms,
            },
        )?;
        Ok((q.to_host(stream)?, k.to_host(stream)?))
    }

    /// All of KV memory: slots that were written, and everything else as it was.
    fn stored(
        &self,
        case: &Case,
        (before, after, k): (&[u16], &[u16], &[f32]),
        finding: &mut Finding,
    ) -> Result<(), String> {
        let KvShape { kv_heads, head_dim, format, .. } = case.shape;
        let padded = before.len() / (2 * 2 * PAGES * kv_heads * PAGE_TOKENS);
        let side = before.len() / 4;
        let mut expected = before.to_vec();
        for (token, slot) in case.slots.iter().enumerate().filter(|(_, slot)| **slot != NONE) {
            let slot = *slot as usize;
            for head in 0..kv_heads {
                let row = (token * kv_heads + head) * head_dim;
                let place = ((slot / PAGE_TOKENS * kv_heads + head) * PAGE_TOKENS + slot % PAGE_TOKENS) * padded;
                // Layer 1: its keys are the third quarter, its values the last.
                for (from, at) in [(k, 2 * side + place), (&case.v[..], 3 * side + place)] {
                    // After a norm, floats of the head have been rounded on both sides before.
                    let own = &from[row..row + head_dim];
                    let most = own.iter().fold(0.0, |most: f64, x| most.max(f64::from(x.abs())));
                    let lost = if case.norms.is_some() { NORMED * most } else { 0.0 };
                    for (i, &x) in own.iter().enumerate() {
                        let (value, unit) = rounded(format, x);
                        finding.note(decode(format, after[at + i]), value, unit + lost);
                        expected[at + i] = after[at + i];
                    }
                    expected[at + head_dim..at + padded].fill(0);
                }
            }
        }
        same("rope: kv memory beside the slots", after, &expected)
    }
}

/// What a format can hold of a number, and half the distance of its neighbours there.
fn rounded(format: KvFormat, x: f32) -> (f64, f64) {
    let (bits, least, most) = match format {
        KvFormat::F16 => (11, -14, 65504.0),
        _ => (8, -126, f64::from(f32::from_bits(0x7f7f_0000))),
    };
    let value = f64::from(x).clamp(-most, most);
    let exponent = if value == 0.0 { least } else { (value.abs().log2().floor() as i32).max(least) };
    (value, 2f64.powi(exponent - bits))
}

/// The number that bits of a format mean.
pub(super) fn decode(format: KvFormat, bits: u16) -> f32 {
    if format != KvFormat::F16 {
        return f32::from_bits(u32::from(bits) << 16);
    }
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let size = match exponent {
        31 => {
            if fraction == 0.0 {
                f32::INFINITY
            } else {
                f32::NAN
            }
        }
        0 => fraction * 2f32.powi(-24),
        _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -size } else { size }
}
