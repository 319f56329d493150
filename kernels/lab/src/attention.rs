//! Attention over pages of KV memory, for all sizes of heads and both formats. Owner: `main`. Invariant: every context is
//! longer than a chunk, pages are out of order, and a few rows of each result are compared with the definition in f64.

use crate::bench::{Lab, Run, worst};
use cust::memory::DeviceBuffer;
use half::{bf16, f16};
use tokenrouter_kernels::attention::cuda::sources;

const PAGE: usize = 16;
const KV_HEADS: usize = 4;
/// Query heads of a key head.
const GROUP: usize = 4;
const HEADS: usize = KV_HEADS * GROUP;
const THREADS: u32 = 128;
/// Queries of a tile.
const TILE: usize = 16;
/// Chunks of a context where results are joined.
const SPLITS: usize = 4;
/// Rows that are compared.
const COMPARED: usize = 8;

/// All of them.
pub fn all(lab: &mut Lab) -> Result<(), String> {
    for source in sources() {
        // attention_FORMAT_DIM.cu
        let mut parts = source.name.trim_end_matches(".cu").rsplit('_');
        let dim: usize = parts.next().and_then(|dim| dim.parse().ok()).ok_or("a source without a size of heads")?;
        let f16 = parts.next() == Some("f16");
        let context = lab.options.context.next_multiple_of(PAGE);
        let decode = Shape { dim, f16, spans: lab.options.rows, len: 1, context };
        let prefill = Shape { spans: 1, len: 64, ..decode };
        lab.case((source, "attend_1"), |lab| attend(lab, decode, 1))?;
        if dim <= 128 {
            lab.case((source, "attend_2"), |lab| attend(lab, prefill, 2))?;
        }
        lab.case((source, "join"), |lab| join(lab, decode))?;
    }
    Ok(())
}

/// Requests, each with its newest tokens at the end of a context of its own.
#[derive(Clone, Copy)]
struct Shape {
    dim: usize,
    f16: bool,
    spans: usize,
    len: usize,
    context: usize,
}

/// Inputs, here and on the device.
struct Input {
    shape: Shape,
    q: Vec<f32>,
    /// Keys, values: `[page][kv_heads][PAGE][dim]`
    kv: [Vec<u16>; 2],
    pages: Vec<u32>,
    at_q: DeviceBuffer<f32>,
    at_kv: [DeviceBuffer<u16>; 2],
    at_spans: DeviceBuffer<u32>,
    at_pages: DeviceBuffer<u32>,
    out: DeviceBuffer<f32>,
}

impl Input {
    fn new(lab: &mut Lab, shape: Shape) -> Result<Input, String> {
        let Shape { dim, f16, spans, len, context } = shape;
        let count = spans * context / PAGE;
        let encode = |x: f32| if f16 { f16::from_f32(x).to_bits() } else { bf16::from_f32(x).to_bits() };
        let kv = [(); 2].map(|()| {
            let values = lab.random.values(count * KV_HEADS * PAGE * dim);
            values.into_iter().map(encode).collect::<Vec<u16>>()
        });
        let mut pages: Vec<u32> = (0..count as u32).collect();
        (1..count).rev().for_each(|at| pages.swap(at, lab.random.below(at + 1)));
        let table = context / PAGE;
        let span = |i: usize| [i * len, len, context - len, i * table].map(|x| x as u32);
        let table_of_spans: Vec<u32> = (0..spans).flat_map(span).collect();
        let q: Vec<f32> = lab.random.values(spans * len * HEADS * dim).iter().map(|x| 2.0 * x).collect();
        let out = lab.empty(q.len())?;
        let at_kv = [lab.put(&kv[0])?, lab.put(&kv[1])?];
        let (at_q, at_spans, at_pages) = (lab.put(&q)?, lab.put(&table_of_spans)?, lab.put(&pages)?);
        Ok(Input { shape, q, kv, pages, at_q, at_kv, at_spans, at_pages, out })
    }

    /// Bytes of queries, results, keys and values.
    fn bytes(&self) -> usize {
        let Shape { dim, spans, context, .. } = self.shape;
        8 * self.q.len() + 4 * spans * context * KV_HEADS * dim
    }

    fn run(&self, scratch: Option<(&DeviceBuffer<f32>, &DeviceBuffer<f32>)>, tiles: usize) -> Run {
        let Shape { dim, spans, len, .. } = self.shape;
        let chunks = if scratch.is_some() { SPLITS } else { 1 };
        let blocks = (len * GROUP).div_ceil(TILE * tiles) * spans * KV_HEADS;
        let run = Run::new((blocks, chunks), THREADS).at(&self.at_q).at(&self.at_kv[0]).at(&self.at_kv[1]);
        let run = run.at(&self.at_spans).at(&self.at_pages).at(&self.out);
        let run = match scratch {
            Some((partial, sums)) => run.at(partial).at(sums),
            None => run.null().null(),
        };
        let scale = std::f32::consts::LOG2_E / (dim as f32).sqrt();
        let run = run.size(spans).size(KV_HEADS).size(GROUP).size(dim).size(spans * len).float(scale);
        run.size(0).size(chunks).moves(self.bytes())
    }

    /// A key or a value.
    fn stored(&self, side: usize, (span, position, head): (usize, usize, usize)) -> impl Iterator<Item = f64> {
        let Shape { dim, f16, context, .. } = self.shape;
        let page = self.pages[span * (context / PAGE) + position / PAGE] as usize;
        let at = ((page * KV_HEADS + head) * PAGE + position % PAGE) * dim;
        let decode = move |x: &u16| if f16 { f16::from_bits(*x).to_f64() } else { bf16::from_bits(*x).to_f64() };
        self.kv[side][at..at + dim].iter().map(decode)
    }

    /// What a row `[token, head]` of the result is.
    fn expected(&self, row: usize) -> Vec<f64> {
        let Shape { dim, len, context, .. } = self.shape;
        let (token, head) = (row / HEADS, row % HEADS / GROUP);
        let (span, seen) = (token / len, context - len + token % len + 1);
        let q = &self.q[row * dim..(row + 1) * dim];
        let score = |position: usize| -> f64 {
            let key = self.stored(0, (span, position, head));
            key.zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>() / (dim as f64).sqrt()
        };
        let scores: Vec<f64> = (0..seen).map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
        let mut out = vec![0.0; dim];
        for (position, score) in scores.iter().enumerate() {
            let weight = (score - most).exp() / sum;
            let value = self.stored(1, (span, position, head));
            out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
        }
        out
    }

    /// The worst of a few rows, and what it may be: queries and weights have 15 to 22 bits.
    fn compare(&self, lab: &mut Lab, found: &[f32]) -> (f64, f64) {
        let Shape { dim, f16, .. } = self.shape;
        let rows = self.q.len() / dim;
        let error = (0..COMPARED).fold(0.0_f64, |error, _| {
            let row = lab.random.below(rows);
            error.max(worst(found[row * dim..(row + 1) * dim].to_vec(), self.expected(row), 1.0))
        });
        (error, if f16 { 2e-5 } else { 2e-4 })
    }
}

/// `attend_TILES`, all chunks in turn.
fn attend(lab: &mut Lab, shape: Shape, tiles: usize) -> Result<(f64, f64), String> {
    let input = Input::new(lab, shape)?;
    let run = input.run(None, tiles);
    let found = lab.first(&run, &input.out)?;
    lab.time(&run)?;
    Ok(input.compare(lab, &found))
}

/// The sum of chunks, after `attend_1` has made them.
fn join(lab: &mut Lab, shape: Shape) -> Result<(f64, f64), String> {
    let Shape { dim, spans, len, context, .. } = shape;
    let input = Input::new(lab, shape)?;
    let rows = spans * len * HEADS;
    let (partial, sums) = (lab.empty::<f32>(SPLITS * rows * dim)?, lab.empty::<f32>(SPLITS * rows * 2)?);
    lab.launch("attend_1", &input.run(Some((&partial, &sums)), 1))?;
    let positions: Vec<u32> = (0..spans * len).map(|token| (context - len + token % len) as u32).collect();
    let row_of: Vec<u32> = (0..spans * len).map(|token| (token / len) as u32).collect();
    let (at_positions, at_row_of) = (lab.put(&positions)?, lab.put(&row_of)?);
    let run = Run::new((rows.div_ceil(4), 1), THREADS).at(&partial).at(&sums).at(&input.at_spans);
    let run = run.at(&at_positions).at(&at_row_of).at(&input.out);
    let run = run.size(spans * len).size(HEADS).size(dim).size(0).size(SPLITS);
    let run = run.moves(4 * rows * ((SPLITS + 1) * dim + 2 * SPLITS));
    let found = lab.first(&run, &input.out)?;
    lab.time(&run)?;
    Ok(input.compare(lab, &found))
}
