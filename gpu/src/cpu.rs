//! The operations on the CPU, by the kernels crate. Owner: a runner owns a `Cpu`, which owns worker threads and scratch.
//! Invariant: after the first step of a size, a step allocates nothing here; results do not depend on threads.

mod head;

use crate::batch::Batch;
use crate::heads::math;
use crate::ops::{
    Activation, AttentionRows, DrawAt, GateUp, GatedRows, HeadInput, HeadNorms, HeadOutput, KvShape, LayerNorm, Linear,
    Norm, Ops, OpsError, Qkv, Residual, Shape, Site, Tail,
};
use crate::sampling::Sampler;
use crate::weights::{Rope, RopeLayout, Tensor};
use smallvec::SmallVec;
use std::thread::ThreadId;
use tokenrouter_core::executor::{ExecutorError, ExecutorLimits};
use tokenrouter_kernels::attention::{self, Attend, KvCache, KvRows, Segment};
use tokenrouter_kernels::matmul::{self, Matrix, QuantizedRows};
use tokenrouter_kernels::norm::{self, RmsNorm};
use tokenrouter_kernels::rope::{self, RopeRows, RopeTable};
use tokenrouter_kernels::{KernelError, Pool, PoolConfig, activation, quant, sys};

/// Heads in KV memory are padded with zeros to a multiple of this, which attention kernels want; zeros change no result.
const HEAD_ALIGNMENT: usize = 16;

/// Requests of a step that need no allocation: as many as a runner takes unless it is told otherwise.
const SEGMENTS_INLINE: usize = 64;

/// Threads of a CPU device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads, the caller of a step included; 0 = one per usable core.
    pub threads: usize,
    /// Cores they are pinned to; empty = the system places them.
    pub cores: Vec<usize>,
}

/// A CPU device.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    codes: QuantizedRows,
    cores: Vec<usize>,
    pinned: Option<ThreadId>,
    padded: Padded,
    head: head::Scratch,
}

/// Copies of q, k, v and the attention result with padded heads; empty for models whose heads need no padding.
#[derive(Debug, Default)]
struct Padded {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
}

/// A rotation with its tables.
#[derive(Debug)]
pub struct CpuRope {
    table: RopeTable,
    layout: rope::RopeLayout,
    head_dim: usize,
}

/// KV memory.
#[derive(Debug)]
pub struct CpuKv {
    cache: KvCache,
    heads: usize,
    head_dim: usize,
}

/// Activation rows in memory.
#[derive(Debug)]
pub struct CpuRows {
    data: Vec<f32>,
    width: usize,
    rows: usize,
}

impl CpuRows {
    /// The rows it holds now, one after another.
    pub fn values(&self) -> &[f32] {
        &self.data[..self.rows * self.width]
    }

    fn values_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.rows * self.width]
    }

    /// Takes rows from memory: `values` is `[rows, width]`.
    ///
    /// # Panics
    /// If there are more than it has room for.
    pub fn fill(&mut self, values: &[f32]) {
        let rows = values.len() / self.width;
        self.resize(rows).copy_from_slice(values);
    }

    fn row(&self, index: usize) -> &[f32] {
        &self.values()[index * self.width..][..self.width]
    }

    /// Takes another number of rows and hands them out for writing.
    fn resize(&mut self, rows: usize) -> &mut [f32] {
        self.rows = rows;
        self.values_mut()
    }
}

impl Cpu {
    /// Starts the worker threads.
    ///
    /// # Errors
    /// [`OpsError::Device`] for cores this process may not use and for refused threads.
    pub fn new(options: &CpuOptions) -> Result<Self, OpsError> {
        let config = PoolConfig { threads: options.threads, cores: options.cores.clone(), isa: None };
        let pool = Pool::new(&config)?;
        let cores = options.cores.clone();
        Ok(Cpu {
            pool,
            cores,
            codes: QuantizedRows::default(),
            pinned: None,
            padded: Padded::default(),
            head: head::Scratch::default(),
        })
    }
}

impl Cpu {
    /// Multiplies `x` with up to three matrices in one job.
    fn products<const N: usize>(&mut self, x: &CpuRows, products: [(&Matrix, Option<&Vec<f32>>, &mut CpuRows); N]) {
        let matrices: [&Matrix; N] = std::array::from_fn(|index| products[index].0);
        let input = self.codes.input(&self.pool, x.values(), &matrices);
        let mut products = products.map(|(matrix, bias, out)| matmul::Linear {
            matrix,
            bias: bias.map(Vec::as_slice),
            y: out.resize(x.rows),
        });
        matmul::linear(&self.pool, &input, &mut products);
    }
}

fn kernel_norm(norm: &Norm<Vec<f32>>) -> RmsNorm<'_> {
    RmsNorm { weight: &norm.weight, eps: norm.eps }
}

fn segments(batch: &Batch) -> SmallVec<[Segment<'_>; SEGMENTS_INLINE]> {
    let segment = |span: &crate::batch::Span| Segment {
        rows: span.len as usize,
        position: span.start as usize,
        pages: span.table(batch),
    };
    batch.spans.iter().map(segment).collect()
}

fn kernel_shape(shape: &KvShape, pages: u32) -> attention::KvShape {
    attention::KvShape {
        layers: shape.layers,
        pages: pages as usize,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim.next_multiple_of(HEAD_ALIGNMENT),
        format: shape.format,
    }
}

/// Copies heads of `width` values to heads of `padded` values, zeros behind; nothing to do when they are equal.
fn pad<'a>(values: &'a [f32], (width, padded): (usize, usize), scratch: &'a mut Vec<f32>) -> &'a [f32] {
    if width == padded {
        return values;
    }
    scratch.clear();
    scratch.resize(values.len() / width * padded, 0.0);
    for (from, to) in values.chunks_exact(width).zip(scratch.chunks_exact_mut(padded)) {
        to[..width].copy_from_slice(from);
    }
    scratch
}

impl Ops for Cpu {
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Rope = CpuRope;
    type Rows = CpuRows;
    type Kv = CpuKv;
    type Answers = Sampler;

    fn matrix(&mut self, tensor: Tensor) -> Result<Matrix, OpsError> {
        let (rows, cols) = (tensor.rows(), tensor.cols());
        let fault = |reason| OpsError::Tensor { tensor: tensor.name.clone(), reason };
        let mut matrix = Matrix::new(tensor.format, rows, cols, tensor.bytes.clone()).map_err(fault)?;
        matrix.prepare(&self.pool).map_err(fault)?;
        Ok(matrix)
    }

    fn vector(&mut self, tensor: Tensor) -> Result<Vec<f32>, OpsError> {
        let mut values = vec![0.0; tensor.cols()];
        quant::dequantize_row(tensor.format, tensor.bytes.as_slice(), &mut values)
            .map_err(|reason| OpsError::Tensor { tensor: tensor.name.clone(), reason })?;
        Ok(values)
    }

    fn rope(&mut self, rope: &Rope, head_dim: usize, positions: usize) -> Result<CpuRope, OpsError> {
        let frequencies = rope.frequencies();
        let table = RopeTable::new(&frequencies.inverse, positions, frequencies.scale)?;
        let layout = match rope.layout {
            RopeLayout::HalfSplit => rope::RopeLayout::Halves,
            RopeLayout::Interleaved => rope::RopeLayout::Interleaved,
        };
        Ok(CpuRope { table, layout, head_dim })
    }

    fn rows(&mut self, rows_max: usize, width: usize) -> Result<CpuRows, OpsError> {
        let len = rows_max.saturating_mul(width);
        let mut data = Vec::new();
        let refused = |_| KernelError::Memory { what: "activations", bytes: len.saturating_mul(size_of::<f32>()) };
        data.try_reserve_exact(len).map_err(refused)?;
        data.resize(len, 0.0);
        Ok(CpuRows { data, width, rows: 0 })
    }

    fn kv_page_bytes(shape: &KvShape) -> Result<u64, OpsError> {
        Ok(kernel_shape(shape, 1).page_bytes()? as u64)
    }

    fn kv(&mut self, shape: &KvShape, pages: u32) -> Result<CpuKv, OpsError> {
        let cache = KvCache::new(kernel_shape(shape, pages))?;
        Ok(CpuKv { cache, heads: shape.heads, head_dim: shape.head_dim })
    }

    fn answers(&mut self, _: usize, (vocab, real_vocab): (usize, usize)) -> Result<Sampler, OpsError> {
        Ok(Sampler::new(vocab, real_vocab))
    }

    fn shapes(&self, _: &ExecutorLimits) -> Vec<Shape> {
        Vec::new()
    }

    fn stage_shape(&mut self, _: Shape, _: &Tail) {}

    fn stage(&mut self, _: &Batch, _: &Tail) {
        let thread = std::thread::current().id();
        if let (Some(&core), true) = (self.cores.first(), self.pinned != Some(thread)) {
            if let Err(error) = sys::pin_current_thread(&[core]) {
                tracing::warn!(%error, "the executor thread stays where the system puts it");
            }
            self.pinned = Some(thread);
        }
    }

    fn pass(&mut self, give: &mut dyn FnMut(&mut Self)) {
        give(self);
    }

    fn finish(&mut self, _: &mut HeadOutput<Self>) -> Result<(), ExecutorError> {
        Ok(())
    }

    fn embed(&mut self, table: &Matrix, batch: &Batch, out: &mut CpuRows) {
        let (width, tokens) = (out.width, &batch.tokens);
        for (&token, row) in tokens.iter().zip(out.resize(tokens.len()).chunks_exact_mut(width)) {
            table.row(token as usize, row);
        }
    }

    fn rms_norm(&mut self, x: &CpuRows, norm: &Norm<Vec<f32>>, out: &mut CpuRows) {
        norm::rms_norm(&self.pool, kernel_norm(norm), x.values(), out.resize(x.rows));
    }

    fn add_rms_norm(&mut self, residual: &mut Residual<CpuRows>, norm: &Norm<Vec<f32>>, out: &mut CpuRows) {
        let Residual { sum, delta } = residual;
        let out = out.resize(sum.rows);
        norm::add_rms_norm(&self.pool, kernel_norm(norm), (sum.values_mut(), delta.values()), out);
    }

    fn linear(&mut self, x: &CpuRows, linear: &Linear<Matrix, Vec<f32>>, out: &mut CpuRows) {
        self.products(x, [(&linear.weight, linear.bias.as_ref(), out)]);
    }

    fn qkv(&mut self, x: &CpuRows, qkv: &Qkv<Matrix, Vec<f32>>, out: &mut AttentionRows<CpuRows>) {
        let Qkv { q, k, v } = qkv;
        let (q_bias, k_bias, v_bias) = (q.bias.as_ref(), k.bias.as_ref(), v.bias.as_ref());
        let (q, k, v) = (&q.weight, &k.weight, &v.weight);
        self.products(x, [(q, q_bias, &mut out.q), (k, k_bias, &mut out.k), (v, v_bias, &mut out.v)]);
    }

    fn rotate_and_store(&mut self, site: &Site<'_, Self>, rows: &mut AttentionRows<CpuRows>, kv: &mut CpuKv) {
        if let Some(HeadNorms { q, k }) = site.head_norms {
            norm::rms_norm_in_place(&self.pool, kernel_norm(q), rows.q.values_mut());
            norm::rms_norm_in_place(&self.pool, kernel_norm(k), rows.k.values_mut());
        }
        let (head_dim, positions) = (site.rope.head_dim, &site.batch.positions[..]);
        for x in [rows.q.values_mut(), rows.k.values_mut()] {
            rope::rope(&self.pool, &site.rope.table, site.rope.layout, RopeRows { x, head_dim, positions });
        }
        let widths = (head_dim, kv.cache.shape().head_dim);
        let k = pad(rows.k.values(), widths, &mut self.padded.k);
        let v = pad(rows.v.values(), widths, &mut self.padded.v);
        let new = KvRows { layer: site.layer, k, v, segments: &segments(site.batch) };
        attention::write_kv(&self.pool, &mut kv.cache, new);
    }

    fn attend(&mut self, site: &Site<'_, Self>, rows: &mut AttentionRows<CpuRows>, kv: &CpuKv) {
        let (width, padded) = (kv.head_dim, kv.cache.shape().head_dim);
        let out = rows.out.resize(rows.q.rows);
        let q = pad(rows.q.values(), (width, padded), &mut self.padded.q);
        let segments = &segments(site.batch)[..];
        let (layer, heads, scale) = (site.layer, kv.heads, 1.0 / (width as f32).sqrt());
        if width == padded {
            attention::attend(&self.pool, &kv.cache, Attend { layer, heads, scale, q, segments, out });
            return;
        }
        let wide = &mut self.padded.out;
        wide.resize(q.len(), 0.0);
        attention::attend(&self.pool, &kv.cache, Attend { layer, heads, scale, q, segments, out: wide });
        for (from, to) in wide.chunks_exact(padded).zip(out.chunks_exact_mut(width)) {
            to.copy_from_slice(&from[..width]);
        }
    }

    fn gate_up(&mut self, x: &CpuRows, pair: &GateUp<Matrix, Vec<f32>>, out: &mut GatedRows<CpuRows>) {
        let GateUp { gate, up } = pair;
        let (gate_bias, up_bias) = (gate.bias.as_ref(), up.bias.as_ref());
        self.products(x, [(&gate.weight, gate_bias, &mut out.gate), (&up.weight, up_bias, &mut out.up)]);
        activation::silu_mul(&self.pool, out.gate.values_mut(), out.up.values());
    }

    fn select(&mut self, x: &CpuRows, rows: &[u32], out: &mut CpuRows) {
        let width = x.width;
        for (&row, to) in rows.iter().zip(out.resize(rows.len()).chunks_exact_mut(width)) {
            to.copy_from_slice(&x.values()[row as usize * width..][..width]);
        }
    }

    fn head(&mut self, input: HeadInput<'_, Self>, out: &mut HeadOutput<Self>) {
        self.head_rows(input, out);
    }

    fn draw(&mut self, draws: &[DrawAt], out: &mut HeadOutput<Self>) {
        Self::draw_rows(draws, out);
    }

    fn scored(&mut self, x: &CpuRows, scored: &[u32], out: &mut CpuRows) {
        self.select(x, scored, out);
    }

    fn embed_drawn(&mut self, table: &Matrix, from: (&HeadOutput<Self>, &[u32]), out: &mut CpuRows) {
        Self::drawn_rows(table, from, out);
    }

    fn top_logits(&mut self, from: (&HeadOutput<Self>, &[u32]), softmax: bool, out: &mut CpuRows) {
        Self::top_rows(from, softmax, out);
    }

    fn score(&mut self, x: &CpuRows, scored: &[u32], out: &mut HeadOutput<Self>) {
        out.scores.clear();
        out.scores.resize(out.reduced.len(), 0.0);
        for (&output, &value) in scored.iter().zip(x.values()) {
            out.scores[output as usize] = math::sigmoid(value);
        }
    }

    fn place(&mut self, part: &CpuRows, column: usize, out: &mut CpuRows) {
        let (from, to) = (part.width, out.width);
        for (part, row) in part.values().chunks_exact(from).zip(out.resize(part.rows).chunks_exact_mut(to)) {
            row[column..column + from].copy_from_slice(part);
        }
    }

    fn layer_norm(&mut self, x: &CpuRows, norm: &LayerNorm<Vec<f32>>, out: &mut CpuRows) {
        let width = x.width;
        for (x, out) in x.values().chunks_exact(width).zip(out.resize(x.rows).chunks_exact_mut(width)) {
            math::layer_norm(x, norm, out);
        }
    }

    fn activate(&mut self, rows: &mut CpuRows, activation: Activation) {
        math::activate(rows.values_mut(), activation);
    }

    fn add(&mut self, sum: &mut CpuRows, delta: &CpuRows) {
        activation::add(sum.values_mut(), delta.values());
    }

    fn row<'a>(&'a mut self, rows: &'a CpuRows, index: usize) -> Result<&'a [f32], ExecutorError> {
        Ok(rows.row(index))
    }
}
