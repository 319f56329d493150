//! The operations on a CUDA device, by the kernels crate. Owner: a runner owns a `Cuda`, which owns a stream, the arrays of
//! a step and recorded graphs; models on one device share its context. Invariant: operations queue work and never wait; the
//! first that fails keeps the others from being given, and [`Ops::finish`] says so. A step is one copy to the device, one
//! graph or a few hundred launches, and one copy back; it allocates nothing.

mod answers;
pub mod draws;
mod graphs;
mod memory;
pub mod model;
mod options;
pub mod plan;
pub mod random;
pub mod staging;

use crate::batch::Batch;
use crate::ops::{
    Activation, AttentionRows, DrawAt, GateUp, GatedRows, HeadInput, HeadNorms, HeadOutput, KvShape, LayerNorm, Linear,
    Norm, Ops, OpsError, Qkv, Residual, Shape, Site, Tail,
};
use crate::weights::{Rope, RopeLayout, Tensor};
use answers::CudaAnswers;
pub use graphs::GraphGrid;
use graphs::{Graphs, Key};
pub use memory::{CudaKv, CudaRows};
use memory::{Kernels, attention_scratch, kernel_shape};
pub use options::{CudaOptions, CudaSizes};
use staging::Staged;
use std::sync::Arc;
use tokenrouter_core::executor::{ExecutorError, ExecutorLimits};
use tokenrouter_kernels::activation::cuda::{PlaceArgs, TopRowsArgs};
use tokenrouter_kernels::attention;
use tokenrouter_kernels::attention::cuda::{AttendShape, AttentionKernels, KvMemory};
use tokenrouter_kernels::cuda::{Array, CudaError, Gpu, StepInput, StepMemory, Stream, TOP_MAX};
use tokenrouter_kernels::head::cuda::HeadArgs;
use tokenrouter_kernels::matmul::cuda::{DeviceMatrix, EmbedArgs, GatherArgs, Ids, MatmulScratch, Product, Weights};
use tokenrouter_kernels::norm::cuda::{AddRmsNormArgs, LayerNormArgs, RmsNormArgs};
use tokenrouter_kernels::quant;
use tokenrouter_kernels::rope::cuda::{CudaRope, HeadNormArgs, RotateArgs};
use tokenrouter_kernels::rope::{self, RopeTable};

/// A CUDA device.
pub struct Cuda {
    // First, so that they go before the memory they use.
    graphs: Graphs,
    key: Option<Key>,
    // Before the kernels: freeing it waits for the device, so that no kernel runs on when it is unloaded.
    products: MatmulScratch,
    kernels: Kernels,
    step: StepMemory,
    input: StepInput,
    staged: Staged,
    error: Option<CudaError>,
    host: Vec<f32>,
    deterministic: bool,
    stream: Arc<Stream>,
}

/// What is added to a product, one value per output.
type Bias<'a> = Option<&'a Array<f32>>;

/// Gives work to the device unless something has failed before.
macro_rules! give {
    ($device:ident, $work:expr) => {
        if $device.error.is_none() {
            $device.error = $work.err();
        }
    };
}

impl Cuda {
    /// Takes a stream on a device and memory for its steps.
    ///
    /// # Errors
    /// [`CudaError`] of the compiler or the driver.
    pub fn new(gpu: &Gpu, options: &CudaOptions, sizes: CudaSizes) -> Result<Self, CudaError> {
        let (low, high) = gpu.priorities()?;
        let stream = Arc::new(Stream::new(gpu, if options.high_priority { high } else { low })?);
        let kernels = Kernels::load(gpu, options.deterministic)?;
        Ok(Cuda {
            graphs: Graphs::new(options.graphs.clone()),
            key: None,
            kernels,
            products: MatmulScratch::new(gpu, sizes.products)?,
            step: StepMemory::new(&stream, sizes.step)?,
            input: StepInput::default(),
            staged: Staged::default(),
            error: None,
            host: Vec::new(),
            deterministic: options.deterministic,
            stream,
        })
    }

    /// Its stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Whether cuBLASLt was found for products of many rows.
    pub fn has_blas(&self) -> bool {
        self.kernels.matmul.has_blas()
    }

    /// Shapes that have been recorded.
    pub fn recorded(&self) -> usize {
        self.graphs.len()
    }

    /// Multiplies `x` with up to three matrices in one launch, where their formats allow it.
    fn multiply<const N: usize>(&mut self, x: &CudaRows, products: [(&DeviceMatrix, Bias<'_>, &mut CudaRows); N]) {
        let mut products = products.map(|(matrix, bias, out)| {
            out.rows = x.rows;
            Product { matrix, bias, y: &mut out.data }
        });
        let (matmul, rows) = (&self.kernels.matmul, (&x.data, x.rows));
        give!(self, matmul.linear_together(&self.stream, rows, &mut products, &mut self.products));
    }

    /// Lays a step out and copies it to the device.
    fn stage_as(&mut self, batch: &Batch, tail: &Tail, shape: Option<Shape>) {
        let vocab = self.step.limits().vocab;
        staging::fill(&mut self.input, (batch, tail), (shape, vocab), &mut self.staged);
        let longest = tail.asks.iter().map(|ask| ask.top_k.max(ask.real_top_k)).max().unwrap_or(0);
        if longest > TOP_MAX {
            let what =
                format!("a list of the {longest} highest logits; CUDA devices list up to {TOP_MAX}, ask for fewer");
            self.error.get_or_insert(CudaError::Unsupported { what });
        }
        give!(
            self,
            self.step.reserve(&self.stream, &self.input).map(|moved| {
                if moved {
                    self.graphs.clear();
                }
            })
        );
        give!(self, self.step.upload(&self.stream, &self.input));
    }

    fn attend_shape(&self) -> AttendShape {
        let Staged { tokens, spans, longest, .. } = self.staged;
        AttendShape { tokens, spans, longest, context: self.step.limits().row_pages * attention::PAGE_TOKENS }
    }

    fn head_args<'a>(&'a self, out: &'a HeadOutput<Self>) -> HeadArgs<'a> {
        HeadArgs {
            logits: out.logits.view(),
            outputs: self.staged.outputs,
            step: &self.step,
            answers: &out.answers.memory,
            scratch: &out.answers.scratch,
        }
    }
}

impl Ops for Cuda {
    type Matrix = DeviceMatrix;
    type Vector = Array<f32>;
    type Rope = CudaRope;
    type Rows = CudaRows;
    type Kv = CudaKv;
    type Answers = CudaAnswers;

    fn matrix(&mut self, tensor: Tensor) -> Result<DeviceMatrix, OpsError> {
        let weights =
            Weights { format: tensor.format, rows: tensor.rows(), cols: tensor.cols(), bytes: tensor.bytes.as_slice() };
        Ok(DeviceMatrix::upload(&self.stream, weights)?)
    }

    fn vector(&mut self, tensor: Tensor) -> Result<Array<f32>, OpsError> {
        let mut values = vec![0.0; tensor.cols()];
        quant::dequantize_row(tensor.format, tensor.bytes.as_slice(), &mut values)
            .map_err(|reason| OpsError::Tensor { tensor: tensor.name.clone(), reason })?;
        Ok(Array::from_host(&self.stream, "weights", &values)?)
    }

    fn rope(&mut self, rope: &Rope, _: usize, positions: usize) -> Result<CudaRope, OpsError> {
        let frequencies = rope.frequencies();
        let table = RopeTable::new(&frequencies.inverse, positions, frequencies.scale)?;
        let layout = match rope.layout {
            RopeLayout::HalfSplit => rope::RopeLayout::Halves,
            RopeLayout::Interleaved => rope::RopeLayout::Interleaved,
        };
        Ok(CudaRope::new(&self.stream, &table, layout)?)
    }

    fn rows(&mut self, rows_max: usize, width: usize) -> Result<CudaRows, OpsError> {
        let data = Array::new(self.stream.gpu(), "activations", rows_max.saturating_mul(width))?;
        Ok(CudaRows { data, width, rows: 0 })
    }

    fn kv_page_bytes(shape: &KvShape) -> Result<u64, OpsError> {
        Ok(KvMemory::bytes_per_page(&kernel_shape(shape, 1))?)
    }

    fn kv(&mut self, shape: &KvShape, pages: u32) -> Result<CudaKv, OpsError> {
        let (gpu, kv) = (self.stream.gpu(), kernel_shape(shape, pages));
        let multiprocessors = gpu.facts().multiprocessors as usize;
        let scratch = attention_scratch(&kv, shape.heads, (multiprocessors, self.deterministic), self.step.limits());
        Ok(CudaKv {
            kernels: AttentionKernels::load(gpu, shape.head_dim, shape.format)?,
            scratch: Array::new(gpu, "attention", scratch)?,
            memory: KvMemory::new(gpu, kv)?,
            heads: shape.heads,
        })
    }

    fn answers(&mut self, rows_max: usize, (vocab, _): (usize, usize)) -> Result<CudaAnswers, OpsError> {
        Ok(CudaAnswers::new(&self.stream, rows_max, vocab)?)
    }

    fn shapes(&self, limits: &ExecutorLimits) -> Vec<Shape> {
        self.graphs.shapes(limits)
    }

    fn stage_shape(&mut self, shape: Shape, tail: &Tail) {
        self.stage_as(&Batch::default(), &Tail::default(), Some(shape));
        self.key = Some(Key { shape, scored: !tail.scored.is_empty() });
    }

    fn stage(&mut self, batch: &Batch, tail: &Tail) {
        // Questions about targets or former outputs come in several passes, which are not recorded.
        let whole = batch.targets.is_empty() && !tail.draws.is_empty();
        let longest = batch.spans.iter().map(|span| span.len as usize).max().unwrap_or(0);
        let shape = if whole { self.graphs.shape_for(batch.spans.len(), longest, self.step.limits()) } else { None };
        self.stage_as(batch, tail, shape);
        self.key = shape.map(|shape| Key { shape, scored: !tail.scored.is_empty() });
    }

    fn pass(&mut self, give: &mut dyn FnMut(&mut Self)) {
        let Some(key) = self.key else { return give(self) };
        if !self.graphs.contains(key) {
            // What the driver loads at a first launch must not be loaded while recording. A step may run twice: it writes
            // the same to the same places.
            give(self);
            if self.error.is_some() {
                return;
            }
            let stream = self.stream.clone();
            match stream.capture(|| {
                give(self);
                self.error.take().map_or(Ok(()), Err)
            }) {
                Ok(graph) => self.error = self.graphs.insert(key, graph, &stream).err(),
                Err(error) => self.error = Some(error),
            }
        }
        give!(self, self.graphs.launch(key, &self.stream));
    }

    fn finish(&mut self, out: &mut HeadOutput<Self>) -> Result<(), ExecutorError> {
        if self.staged.asked() > 0 {
            give!(self, out.answers.memory.download(&self.stream, self.staged.lists()));
        }
        give!(self, self.stream.synchronize());
        match self.error.take() {
            None => {
                answers::decode(&self.staged, out);
                Ok(())
            }
            Some(error) => Err(answers::failed(&self.stream, error)),
        }
    }

    fn embed(&mut self, table: &DeviceMatrix, _: &Batch, out: &mut CudaRows) {
        out.rows = self.staged.tokens;
        let ids = Ids::Tokens(self.step.tokens());
        let args = EmbedArgs { table, ids, count: out.rows, out: &mut out.data };
        give!(self, self.kernels.matmul.embed(&self.stream, args));
    }

    fn rms_norm(&mut self, x: &CudaRows, norm: &Norm<Array<f32>>, out: &mut CudaRows) {
        out.rows = x.rows;
        let (weight, eps, rows) = (norm.weight.view(), norm.eps, x.rows);
        let args = RmsNormArgs { x: x.view(), weight, out: out.view(), rows, eps };
        give!(self, self.kernels.norm.rms_norm(&self.stream, &args));
    }

    fn add_rms_norm(&mut self, residual: &mut Residual<CudaRows>, norm: &Norm<Array<f32>>, out: &mut CudaRows) {
        let Residual { sum, delta } = residual;
        out.rows = sum.rows;
        let (weight, eps, rows) = (norm.weight.view(), norm.eps, sum.rows);
        let args = AddRmsNormArgs { sum: sum.view(), delta: delta.view(), weight, out: out.view(), rows, eps };
        give!(self, self.kernels.norm.add_rms_norm(&self.stream, &args));
    }

    fn linear(&mut self, x: &CudaRows, linear: &Linear<DeviceMatrix, Array<f32>>, out: &mut CudaRows) {
        self.multiply(x, [(&linear.weight, linear.bias.as_ref(), out)]);
    }

    fn qkv(&mut self, x: &CudaRows, qkv: &Qkv<DeviceMatrix, Array<f32>>, out: &mut AttentionRows<CudaRows>) {
        let Qkv { q, k, v } = qkv;
        let (q_bias, k_bias, v_bias) = (q.bias.as_ref(), k.bias.as_ref(), v.bias.as_ref());
        let (q, k, v) = (&q.weight, &k.weight, &v.weight);
        self.multiply(x, [(q, q_bias, &mut out.q), (k, k_bias, &mut out.k), (v, v_bias, &mut out.v)]);
    }

    fn rotate_and_store(&mut self, site: &Site<'_, Self>, rows: &mut AttentionRows<CudaRows>, kv: &mut CudaKv) {
        let norms = site.head_norms.map(|HeadNorms { q, k }| HeadNormArgs {
            q: q.weight.view(),
            k: k.weight.view(),
            eps: (q.eps, k.eps),
        });
        let args = RotateArgs {
            q: rows.q.view(),
            k: rows.k.view(),
            v: rows.v.view(),
            tokens: self.staged.tokens,
            heads: kv.heads,
            layer: site.layer,
            kv: &kv.memory,
            step: &self.step,
            rope: site.rope,
            norms,
        };
        give!(self, self.kernels.rope.rotate_and_store(&self.stream, &args));
    }

    fn attend(&mut self, site: &Site<'_, Self>, rows: &mut AttentionRows<CudaRows>, kv: &CudaKv) {
        rows.out.rows = rows.q.rows;
        let (layer, shape) = (site.layer, self.attend_shape());
        give!(self, kv.attend((&self.stream, &self.step), rows, (layer, shape, self.deterministic)));
    }

    fn gate_up(&mut self, x: &CudaRows, pair: &GateUp<DeviceMatrix, Array<f32>>, out: &mut GatedRows<CudaRows>) {
        let GateUp { gate, up } = pair;
        let (gate_bias, up_bias) = (gate.bias.as_ref(), up.bias.as_ref());
        self.multiply(x, [(&gate.weight, gate_bias, &mut out.gate), (&up.weight, up_bias, &mut out.up)]);
        give!(self, self.kernels.activation.silu_mul(&self.stream, out.gate.view(), out.up.view()));
    }

    fn select(&mut self, x: &CudaRows, _: &[u32], out: &mut CudaRows) {
        out.rows = self.staged.outputs;
        let index = self.step.outputs().first(out.rows);
        let args = GatherArgs { x: &x.data, cols: x.width, index, out: &mut out.data };
        give!(self, self.kernels.matmul.gather_rows(&self.stream, args));
    }

    fn head(&mut self, input: HeadInput<'_, Self>, out: &mut HeadOutput<Self>) {
        self.multiply(input.hidden, [(input.matrix, None, &mut out.logits)]);
        give!(self, self.kernels.head.reduce(&self.stream, &self.head_args(out), input.column));
    }

    fn draw(&mut self, _: &[DrawAt], out: &mut HeadOutput<Self>) {
        give!(self, self.kernels.head.draw(&self.stream, &self.head_args(out)));
    }

    fn scored(&mut self, x: &CudaRows, _: &[u32], out: &mut CudaRows) {
        self.place(x, 0, out);
    }

    fn embed_drawn(&mut self, table: &DeviceMatrix, (from, _): (&HeadOutput<Self>, &[u32]), out: &mut CudaRows) {
        out.rows = self.staged.outputs;
        let ids = Ids::Answers(from.answers.memory.answers());
        let args = EmbedArgs { table, ids, count: out.rows, out: &mut out.data };
        give!(self, self.kernels.matmul.embed(&self.stream, args));
    }

    fn top_logits(&mut self, (from, _): (&HeadOutput<Self>, &[u32]), softmax: bool, out: &mut CudaRows) {
        out.rows = self.staged.outputs;
        let (answers, rows, width) = (&from.answers.memory, out.rows, out.width);
        let args = TopRowsArgs { answers, out: out.view(), rows, width, softmax };
        give!(self, self.kernels.activation.top_rows(&self.stream, &args));
    }

    fn score(&mut self, x: &CudaRows, _: &[u32], out: &mut HeadOutput<Self>) {
        give!(self, self.kernels.activation.scores(&self.stream, x.view(), &out.answers.memory));
    }

    fn place(&mut self, part: &CudaRows, column: usize, out: &mut CudaRows) {
        out.rows = part.rows;
        let (width, out_width, rows) = (part.width, out.width, part.rows);
        let args = PlaceArgs { part: part.view(), width, out: out.view(), out_width, column, rows };
        give!(self, self.kernels.activation.place(&self.stream, &args));
    }

    fn layer_norm(&mut self, x: &CudaRows, norm: &LayerNorm<Array<f32>>, out: &mut CudaRows) {
        out.rows = x.rows;
        let (weight, bias, eps) = (norm.weight.view(), norm.bias.view(), norm.eps);
        let args = LayerNormArgs { x: x.view(), weight, bias, out: out.view(), rows: x.rows, eps };
        give!(self, self.kernels.norm.layer_norm(&self.stream, &args));
    }

    fn activate(&mut self, rows: &mut CudaRows, activation: Activation) {
        give!(
            self,
            match activation {
                Activation::Gelu => self.kernels.activation.gelu(&self.stream, rows.view()),
                Activation::Relu => self.kernels.activation.relu(&self.stream, rows.view()),
            }
        );
    }

    fn add(&mut self, sum: &mut CudaRows, delta: &CudaRows) {
        give!(self, self.kernels.activation.add(&self.stream, sum.view(), delta.view()));
    }

    fn row<'a>(&'a mut self, rows: &'a CudaRows, index: usize) -> Result<&'a [f32], ExecutorError> {
        let values = rows.data.read(&self.stream, index * rows.width, rows.width);
        self.host = values.map_err(|error| answers::failed(&self.stream, error))?;
        Ok(&self.host)
    }
}
