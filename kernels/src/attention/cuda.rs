//! Attention and KV memory on a CUDA device.
//!
//! Owner: a model has one [`KvMemory`]; its operations keep [`AttentionKernels`]. Invariant: launches depend on the shape
//! of a step alone. With [`Splits::Fixed`] the result of a query is bit for bit the same in any batch and however its
//! prompt was cut; with [`Splits::Fill`] it depends on the number of splits and on the length of its own context.

use super::{KvFormat, KvShape, PAGE_TOKENS};
use crate::cuda::{Args, Array, CudaError, Function, Gpu, Launch, Source, StepMemory, Stream, View};
use std::mem::size_of;

/// Largest head.
pub const HEAD_DIM_MAX: usize = 256;
/// Threads of a block, as in the source.
const THREADS: u32 = 128;
/// Rows of a tile of queries, and of the larger one.
const TILE: usize = 16;
/// Rows that a block folds: one a warp.
const JOINED: usize = 4;
/// Positions that the warps of a block take at once; splits are multiples of it.
pub const SPLIT_UNIT: usize = 4 * PAGE_TOKENS;
/// Blocks per multiprocessor that splits aim at.
const BLOCKS: usize = 4;
/// Most splits that [`AttentionKernels::fill`] chooses.
const SPLITS_MAX: usize = 64;
/// Up to so many rows of queries, splits of fixed size get blocks of their own; then there are blocks enough without.
const FIXED_ROWS_MAX: usize = 2048;

const HEADERS: &[(&str, &str)] =
    &[("attention.cu", include_str!("attention.cu")), ("fragments.cuh", include_str!("fragments.cuh"))];

macro_rules! source {
    ($dim:literal, $format:literal, $f16:literal) => {
        Source {
            name: concat!("attention_", $format, "_", $dim, ".cu"),
            text: concat!("#define DIM ", $dim, "u\n#define KV_F16 ", $f16, "\n#include \"attention.cu\"\n"),
            headers: HEADERS,
            exact: true,
        }
    };
}

macro_rules! variants {
    ($($dim:literal),*) => {
        [$(($dim, [source!($dim, "bf16", 0), source!($dim, "f16", 1)])),*]
    };
}

/// Sizes that heads are padded to, with the kernels for BF16 and for F16.
static VARIANTS: [(usize, [Source; 2]); 12] = variants![16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256];

/// The kernels of all head sizes and formats.
pub fn sources() -> impl Iterator<Item = &'static Source> {
    VARIANTS.iter().flat_map(|(_, sources)| sources)
}

/// The padded size of a head, and its kernels.
fn variant(head_dim: usize, format: KvFormat) -> Result<(usize, &'static Source), CudaError> {
    let refuse = |what| Err(CudaError::Unsupported { what });
    let index = match format {
        KvFormat::BF16 => 0,
        KvFormat::F16 => 1,
        KvFormat::F32 | KvFormat::Q8 => {
            let name = format.name();
            return refuse(format!("kv_format = \"{name}\" has no CUDA kernels; set it to \"bf16\" or \"f16\""));
        }
    };
    match VARIANTS.iter().find(|(dim, _)| *dim >= head_dim) {
        Some((dim, sources)) if head_dim > 0 => Ok((*dim, &sources[index])),
        _ => refuse(format!("heads of {head_dim} values; CUDA kernels take 1 to {HEAD_DIM_MAX}, set device = \"cpu\"")),
    }
}

/// Keys and values of all sequences of a model on a device: for each layer the pages of keys, then those of values; a page
/// is `[kv_heads][16][padded head]`, zeros behind the values of a head.
#[derive(Debug)]
pub struct KvMemory {
    shape: KvShape,
    padded: usize,
    array: Array<u16>,
}

impl KvMemory {
    /// Memory whose contents are not defined. The shape's heads need no padding.
    ///
    /// # Errors
    /// As [`KvMemory::bytes_per_page`], [`CudaError::Unsupported`] for no pages or more than slots can number, and
    /// [`CudaError::Memory`].
    pub fn new(gpu: &Gpu, shape: KvShape) -> Result<Self, CudaError> {
        let padded = variant(shape.head_dim, shape.format)?.0;
        let bytes = Self::bytes_per_page(&shape)?;
        let pages_max = u32::MAX as usize / PAGE_TOKENS;
        if shape.pages == 0 || shape.pages > pages_max {
            let what = format!("{} pages of kv memory; there may be 1 to {pages_max}", shape.pages);
            return Err(CudaError::Unsupported { what });
        }
        let len = (bytes as usize / size_of::<u16>()).saturating_mul(shape.pages);
        Ok(KvMemory { shape, padded, array: Array::new(gpu, "kv memory", len)? })
    }

    /// Bytes that a page takes over all layers.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for a format or a head that the kernels do not take, or an empty shape.
    pub fn bytes_per_page(shape: &KvShape) -> Result<u64, CudaError> {
        let padded = variant(shape.head_dim, shape.format)?.0;
        let KvShape { layers, kv_heads, .. } = *shape;
        if layers == 0 || kv_heads == 0 {
            let what = format!("kv memory of {layers} layers with {kv_heads} heads; the model file is damaged");
            return Err(CudaError::Unsupported { what });
        }
        Ok((layers as u64 * kv_heads as u64).saturating_mul((2 * PAGE_TOKENS * padded * size_of::<u16>()) as u64))
    }

    /// Its shape.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Values of a head with its padding.
    pub fn padded(&self) -> usize {
        self.padded
    }

    /// All of it.
    pub fn array(&self) -> &Array<u16> {
        &self.array
    }

    /// All of it, to be written from the host.
    pub fn array_mut(&mut self) -> &mut Array<u16> {
        &mut self.array
    }

    /// Pages of keys and of values of a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn layer(&self, layer: usize) -> (View<u16>, View<u16>) {
        let KvShape { layers, pages, kv_heads, .. } = self.shape;
        assert!(layer < layers, "layer {layer} of {layers}");
        let side = pages * kv_heads * PAGE_TOKENS * self.padded;
        (self.array.part(2 * layer * side, side), self.array.part((2 * layer + 1) * side, side))
    }
}

/// How contexts are cut, so that blocks share the work on one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Splits {
    /// Equal shares of the context of each request.
    Fill {
        /// Shares.
        count: usize,
    },
    /// Always the same positions, so that results do not depend on the rest of the batch.
    Fixed {
        /// Positions of a split, a multiple of [`SPLIT_UNIT`].
        positions: usize,
    },
}

/// Size of a step, padding included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttendShape {
    /// Rows.
    pub tokens: usize,
    /// Requests.
    pub spans: usize,
    /// Tokens of the longest request.
    pub longest: usize,
    /// Positions that a context may have.
    pub context: usize,
}

/// The queries of a step.
#[derive(Clone, Copy, Debug)]
pub struct AttendArgs<'a> {
    /// `[tokens, heads * head_dim]`
    pub q: View<f32>,
    /// Result, `[tokens, heads * head_dim]`; rows of padding stay as they are.
    pub out: View<f32>,
    /// Query heads, a multiple of the key heads, which consecutive query heads share.
    pub heads: usize,
    /// Layer of KV memory, in which the keys and values of all tokens are.
    pub layer: usize,
    /// Keys and values.
    pub kv: &'a KvMemory,
    /// Requests, positions and page tables.
    pub step: &'a StepMemory,
    /// Size of the step: no request has more tokens or a longer context.
    pub shape: AttendShape,
    /// How contexts are cut.
    pub splits: Splits,
    /// At least [`AttentionKernels::scratch_len`] values.
    pub scratch: View<f32>,
}

/// Compiled kernels for heads of one size.
#[derive(Clone, Debug)]
pub struct AttentionKernels {
    attend_1: Function,
    /// Two tiles of queries a block, where there are registers for it.
    attend_2: Option<Function>,
    join: Function,
    head_dim: usize,
    padded: usize,
    format: KvFormat,
    multiprocessors: usize,
}

/// The launches of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    /// Tiles of queries per block.
    tiles: usize,
    /// Blocks for the queries of a request and key head.
    blocks: usize,
    /// Splits with blocks of their own.
    chunks: usize,
    /// Positions of a split, or 0.
    fixed: usize,
    /// Shares of a context, where splits are not fixed.
    count: usize,
}

impl AttentionKernels {
    /// Compiles or finds them.
    ///
    /// # Errors
    /// [`CudaError`] of the compiler or the driver, or [`CudaError::Unsupported`] as for [`KvMemory::bytes_per_page`].
    pub fn load(gpu: &Gpu, head_dim: usize, format: KvFormat) -> Result<Self, CudaError> {
        let (padded, source) = variant(head_dim, format)?;
        let module = gpu.module(source)?;
        // The compiler spills two tiles of heads above 64 on Blackwell: tests/fixtures/cuda/registers.tsv.
        let widest = if gpu.facts().capability.0 >= 10 { 64 } else { 128 };
        let attend_2 = if padded <= widest { Some(module.function("attend_2")?) } else { None };
        Ok(AttentionKernels {
            attend_1: module.function("attend_1")?,
            attend_2,
            join: module.function("join")?,
            head_dim,
            padded,
            format,
            multiprocessors: gpu.facts().multiprocessors as usize,
        })
    }

    /// As many splits as fill the device at this shape: `heads` are those of queries and of keys.
    pub fn fill(&self, heads: (usize, usize), shape: AttendShape) -> Splits {
        let blocks = self.plan(heads, shape, Splits::Fill { count: 1 }).blocks * shape.spans * heads.1;
        let useful = shape.context.div_ceil(SPLIT_UNIT).clamp(1, SPLITS_MAX);
        Splits::Fill { count: (BLOCKS * self.multiprocessors).div_ceil(blocks.max(1)).min(useful) }
    }

    /// Values of scratch that a step of this shape needs: `heads` are those of queries and of keys.
    pub fn scratch_len(&self, heads: (usize, usize), shape: AttendShape, splits: Splits) -> usize {
        match self.plan(heads, shape, splits).chunks {
            1 => 0,
            chunks => chunks * shape.tokens * heads.0 * (self.padded + 2),
        }
    }

    fn plan(&self, (heads, kv_heads): (usize, usize), shape: AttendShape, splits: Splits) -> Plan {
        let queries = shape.longest * (heads / kv_heads);
        let tiles = if self.attend_2.is_some() && queries > TILE { 2 } else { 1 };
        let (chunks, fixed, count) = match splits {
            Splits::Fill { count } => {
                assert!(count > 0, "splits of a context");
                (count, 0, count)
            }
            Splits::Fixed { positions } => {
                assert!(positions > 0 && positions.is_multiple_of(SPLIT_UNIT), "splits of {positions} positions");
                let all = shape.context.div_ceil(positions).max(1);
                (if shape.tokens * heads <= FIXED_ROWS_MAX { all } else { 1 }, positions, 0)
            }
        };
        Plan { tiles, blocks: queries.div_ceil(TILE * tiles), chunks, fixed, count }
    }

    /// For each row at position p and each head: the mean of values `0..=p`, weighted by the softmax of
    /// `q . k / sqrt(head_dim)`.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If sizes do not fit.
    pub fn attend(&self, stream: &Stream, attend: &AttendArgs<'_>) -> Result<(), CudaError> {
        self.check(attend);
        let AttendArgs { q, out, heads, layer, kv, step, shape, splits, scratch } = *attend;
        let kv_heads = kv.shape().kv_heads;
        let plan = self.plan((heads, kv_heads), shape, splits);
        let (k, v) = kv.layer(layer);
        // Results of chunks, then their sums; not read by a kernel that takes all chunks in turn.
        let results = (plan.chunks * shape.tokens * heads * self.padded * size_of::<f32>()) as u64;
        let (partial, sums) = if plan.chunks == 1 { (0, 0) } else { (scratch.pointer(), scratch.pointer() + results) };
        let scale = std::f32::consts::LOG2_E / (self.head_dim as f32).sqrt();
        let args = Args::new()
            .view(q)
            .view(k)
            .view(v)
            .view(step.spans())
            .view(step.pages())
            .view(out)
            .u64(partial)
            .u64(sums)
            .size(shape.spans)
            .size(kv_heads)
            .size(heads / kv_heads)
            .size(self.head_dim)
            .size(shape.tokens)
            .f32(scale)
            .size(plan.fixed)
            .size(plan.count);
        let blocks = plan.blocks * shape.spans * kv_heads;
        let launch = Launch { grid: (blocks as u32, plan.chunks as u32, 1), block: THREADS, shared: 0 };
        let kernel = self.attend_2.as_ref().filter(|_| plan.tiles == 2).unwrap_or(&self.attend_1);
        // SAFETY: the arguments are those of the kernel. Its accesses stay inside of rows, pages and tables because the
        // step was checked against its limits, and these against the arrays; scratch was checked.
        unsafe { kernel.launch(stream, launch, args)? };
        if plan.chunks == 1 {
            return Ok(());
        }
        let args = Args::new()
            .u64(partial)
            .u64(sums)
            .view(step.spans())
            .view(step.positions())
            .view(step.row_of())
            .view(out)
            .size(shape.tokens)
            .size(heads)
            .size(self.head_dim)
            .size(plan.fixed)
            .size(plan.count);
        let launch = Launch::blocks((shape.tokens * heads).div_ceil(JOINED) as u32, THREADS);
        // SAFETY: as above; what it reads of scratch was written before.
        unsafe { self.join.launch(stream, launch, args) }
    }

    fn check(&self, attend: &AttendArgs<'_>) {
        let AttendArgs { q, out, heads, kv, step, shape, splits, scratch, .. } = *attend;
        let KvShape { kv_heads, head_dim, format, pages, .. } = *kv.shape();
        assert!(heads > 0 && heads.is_multiple_of(kv_heads), "{heads} query heads for {kv_heads} key heads");
        assert!(head_dim == self.head_dim && format == self.format, "kernels for other heads");
        let values = shape.tokens * heads * head_dim;
        assert!(q.len() >= values && out.len() >= values, "queries and results of {} tokens", shape.tokens);
        let limits = step.limits();
        assert!(shape.tokens <= limits.tokens && shape.spans <= limits.rows, "a step too large");
        assert!(limits.pages as usize <= pages, "a step for more pages than there are");
        let needed = self.scratch_len((heads, kv_heads), shape, splits);
        assert!(scratch.len() >= needed && scratch.pointer().is_multiple_of(16), "{needed} values of scratch");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape { layers: 3, pages: 10, kv_heads: 2, head_dim: 100, format: KvFormat::BF16 };

    #[test]
    fn heads_are_padded_to_what_kernels_take() {
        assert_eq!(KvMemory::bytes_per_page(&SHAPE), Ok(3 * 2 * 2 * 16 * 112 * 2));
        let sizes = [1, 16, 17, 64, 128, 129, 256].map(|head_dim| variant(head_dim, KvFormat::F16).unwrap().0);
        assert_eq!(sizes, [16, 16, 32, 64, 128, 160, 256]);
        assert!(KvMemory::bytes_per_page(&KvShape { head_dim: 257, ..SHAPE }).is_err());
        assert!(KvMemory::bytes_per_page(&KvShape { layers: 0, ..SHAPE }).is_err());
    }

    #[test]
    fn formats_without_kernels_are_refused_with_the_remedy() {
        for format in [KvFormat::F32, KvFormat::Q8] {
            let error = KvMemory::bytes_per_page(&KvShape { format, ..SHAPE }).unwrap_err().to_string();
            let name = format.name();
            assert_eq!(error, format!("kv_format = \"{name}\" has no CUDA kernels; set it to \"bf16\" or \"f16\""));
        }
    }

    #[test]
    fn every_source_has_a_name_and_a_head_size_of_its_own() {
        let mut names: Vec<_> = sources().map(|source| source.name).collect();
        assert!(sources().all(|source| source.text.starts_with("#define DIM ")));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 24);
        assert!(names.contains(&"attention_bf16_128.cu"));
    }
}
