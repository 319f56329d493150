//! The arrays that describe a step to kernels. Owner: the executor stages a step, operations read. Invariant: what is
//! staged was checked against the limits, so that no kernel leaves its arrays; a step takes one copy, and another one only
//! if it changes logits.

use super::changes::Changes;
use super::error::CudaError;
use super::memory::{Array, Element, Pinned, View};
use super::stream::Stream;
use crate::attention::PAGE_TOKENS;
use std::mem::size_of;
use std::ops::Range;

/// No token, no slot, no position, no mask.
pub const NONE: u32 = u32::MAX;

/// A request's tokens in a step. The same as in `common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Index of its first token.
    pub first: u32,
    /// Tokens; 0 = padding.
    pub len: u32,
    /// Position of the first token.
    pub start: u32,
    /// Offset of its page table.
    pub table: u32,
}

/// Flags of [`Ask::flags`].
pub mod ask {
    /// The output is no padding.
    pub const PRESENT: u32 = 1;
    /// Log-sum-exp and entropy are wanted.
    pub const DISTRIBUTION: u32 = 2;
}

/// What is asked about a row of logits. The same as in `common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// See [`ask`].
    pub flags: u32,
    /// Ids below this are tokens.
    pub real_vocab: u32,
    /// Highest logits of the whole row to list.
    pub top_k: u32,
    /// Highest logits of the tokens to list.
    pub real_top_k: u32,
    /// An id whose logit is wanted, or [`NONE`].
    pub target: u32,
}

/// Flags of [`Draw::flags`].
pub mod draw {
    /// The draw is not simply the highest raw logit.
    pub const ADJUSTED: u32 = 1;
    /// The highest of the adjusted logits.
    pub const GREEDY: u32 = 2;
}

/// How the token of an output is drawn. The same as in `common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Draw {
    /// See [`draw`].
    pub flags: u32,
    /// Divides logits.
    pub temperature: f32,
    /// Logarithm of the least share of the highest probability that is drawn, -45 to 0: from the host, whose logarithm may
    /// differ from that of a device.
    pub log_min_p: f32,
    /// Share of the probability to draw from; 1 = off.
    pub top_p: f32,
    /// Tokens to draw from; 0 = off.
    pub top_k: u32,
    /// First of its edits.
    pub edit_first: u32,
    /// Number of its edits.
    pub edit_count: u32,
    /// Offset of its mask in words, or [`NONE`].
    pub mask_first: u32,
    /// A random number within 0 and 1, made from seed and position.
    pub unit: f64,
}

/// A change to one logit before a draw. The same as in `common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Edit {
    /// Which logit.
    pub id: u32,
    /// Added first.
    pub bias: f32,
    /// Divides positive logits and multiplies others; 1 = off.
    pub repetition: f32,
    /// Taken away then.
    pub minus: f32,
    /// Not 0: never drawn.
    pub ban: u32,
}

// SAFETY: numbers of 4 bytes without padding.
unsafe impl Element for Span {}
// SAFETY: as above.
unsafe impl Element for Ask {}
// SAFETY: eight numbers of 4 bytes and one of 8, without padding.
unsafe impl Element for Draw {}
// SAFETY: numbers of 4 bytes without padding.
unsafe impl Element for Edit {}

/// How large steps may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens, padding included.
    pub tokens: usize,
    /// Requests, padding included; also outputs.
    pub rows: usize,
    /// Pages of one request.
    pub row_pages: usize,
    /// Pages of KV memory.
    pub pages: u32,
    /// Ids of tokens and width of a row of logits.
    pub vocab: u32,
}

/// A step as kernels read it, padding included.
#[derive(Clone, Debug, Default)]
pub struct StepInput {
    /// Token of each row; 0 for padding.
    pub tokens: Vec<u32>,
    /// Position of each row, or [`NONE`] for padding.
    pub positions: Vec<u32>,
    /// Where its keys and values go: `page * 16 + position % 16`, or [`NONE`].
    pub slots: Vec<u32>,
    /// Its request, an index into `spans`.
    pub row_of: Vec<u32>,
    /// Requests.
    pub spans: Vec<Span>,
    /// Row of each output; 0 for padding.
    pub outputs: Vec<u32>,
    /// What is asked about each output.
    pub asks: Vec<Ask>,
    /// How the token of each output is drawn.
    pub draws: Vec<Draw>,
    /// Page tables.
    pub pages: Vec<u32>,
    /// Edits of all draws.
    pub edits: Vec<Edit>,
    /// Masks of all draws, one bit per id, whole words per mask.
    pub masks: Vec<u32>,
}

impl StepInput {
    /// Forgets the last step.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.row_of.clear();
        self.spans.clear();
        self.outputs.clear();
        self.asks.clear();
        self.draws.clear();
        self.pages.clear();
        self.edits.clear();
        self.masks.clear();
    }

    fn check(&self, limits: &StepLimits) {
        let (tokens, rows) = (self.tokens.len(), self.spans.len());
        assert!(
            tokens <= limits.tokens && rows <= limits.rows && self.outputs.len() <= limits.rows,
            "a step too large"
        );
        assert!([&self.positions, &self.slots, &self.row_of].iter().all(|list| list.len() == tokens), "rows of a step");
        assert!(self.asks.len() == self.outputs.len() && self.draws.len() == self.outputs.len(), "outputs of a step");
        assert!(self.pages.len() <= limits.rows * limits.row_pages, "page tables of a step");
        assert!(self.tokens.iter().all(|&token| token < limits.vocab), "a token outside of the vocabulary");
        let slots = u64::from(limits.pages) * PAGE_TOKENS as u64;
        assert!(self.slots.iter().all(|&slot| slot == NONE || u64::from(slot) < slots), "a slot outside of the pages");
        assert!(self.pages.iter().all(|&page| page < limits.pages), "a page that does not exist");
        assert!(self.row_of.iter().all(|&row| (row as usize) < rows.max(1)), "a row of no request");
        assert!(self.outputs.iter().all(|&row| (row as usize) < tokens.max(1)), "an output of no row");
        for span in &self.spans {
            let (first, len) = (span.first as usize, span.len as usize);
            assert!(first + len <= tokens, "a request's rows");
            let needed = if len == 0 { 0 } else { (span.start as usize + len).div_ceil(PAGE_TOKENS) };
            assert!(span.table as usize + needed <= self.pages.len(), "a request's page table");
        }
        for (ask, draw) in self.asks.iter().zip(&self.draws) {
            assert!(
                ask.real_vocab <= limits.vocab && (ask.target == NONE || ask.target < limits.vocab),
                "an ask's ids"
            );
            let edits = draw.edit_first as usize + draw.edit_count as usize;
            assert!(edits <= self.edits.len(), "edits of a draw");
            let words = limits.vocab.div_ceil(32) as usize;
            assert!(draw.mask_first == NONE || draw.mask_first as usize + words <= self.masks.len(), "mask of a draw");
        }
        assert!(self.edits.iter().all(|edit| edit.id < limits.vocab), "an edit's id");
    }
}

/// Where the arrays lie in the memory of a step.
#[derive(Clone, Debug)]
struct Layout {
    tokens: Range<usize>,
    positions: Range<usize>,
    slots: Range<usize>,
    row_of: Range<usize>,
    spans: Range<usize>,
    outputs: Range<usize>,
    asks: Range<usize>,
    draws: Range<usize>,
    /// Last, because its length is that of the step.
    pages: Range<usize>,
}

impl Layout {
    fn new(limits: &StepLimits) -> Layout {
        let mut end = 0;
        let mut place = |bytes: usize| {
            let start = end;
            end = (start + bytes).next_multiple_of(16);
            start..start + bytes
        };
        let (tokens, rows) = (limits.tokens * size_of::<u32>(), limits.rows);
        Layout {
            tokens: place(tokens),
            positions: place(tokens),
            slots: place(tokens),
            row_of: place(tokens),
            spans: place(rows * size_of::<Span>()),
            outputs: place(rows * size_of::<u32>()),
            asks: place(rows * size_of::<Ask>()),
            draws: place(rows * size_of::<Draw>()),
            pages: place(rows * limits.row_pages * size_of::<u32>()),
        }
    }
}

/// A step in the memory of a device.
#[derive(Debug)]
pub struct StepMemory {
    limits: StepLimits,
    layout: Layout,
    staging: Pinned,
    device: Array<u8>,
    changes: Changes,
}

impl StepMemory {
    /// Room for steps of this size, for a mask of each request and few other changes to logits: there will be more when a step
    /// needs it.
    ///
    /// # Errors
    /// [`CudaError::Memory`].
    pub fn new(stream: &Stream, limits: StepLimits) -> Result<Self, CudaError> {
        let layout = Layout::new(&limits);
        let bytes = layout.pages.end;
        Ok(StepMemory {
            staging: Pinned::new(stream.gpu(), bytes)?,
            device: Array::new(stream.gpu(), "a step", bytes)?,
            changes: Changes::new(stream, &limits)?,
            limits,
            layout,
        })
    }

    /// Bytes on the device for steps of this size, with the changes to logits that there is room for from the start.
    pub fn bytes(limits: &StepLimits) -> u64 {
        Layout::new(limits).pages.end as u64 + Changes::bytes(limits)
    }

    /// How large steps may be.
    pub fn limits(&self) -> &StepLimits {
        &self.limits
    }

    /// Makes room for the changes of a step. Says whether that moved them: graphs that read them must be recorded again.
    ///
    /// # Errors
    /// [`CudaError::Memory`].
    pub fn reserve(&mut self, stream: &Stream, input: &StepInput) -> Result<bool, CudaError> {
        self.changes.reserve(stream, input)
    }

    /// Copies a step to the device, when the stream comes to it. The last step's work must be done.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the step leaves the limits, or needs more room for changes than was reserved.
    pub fn upload(&mut self, stream: &Stream, input: &StepInput) -> Result<(), CudaError> {
        input.check(&self.limits);
        let (layout, to) = (&self.layout, self.staging.bytes_mut());
        put(to, &layout.tokens, &input.tokens);
        put(to, &layout.positions, &input.positions);
        put(to, &layout.slots, &input.slots);
        put(to, &layout.row_of, &input.row_of);
        put(to, &layout.spans, &input.spans);
        put(to, &layout.outputs, &input.outputs);
        put(to, &layout.asks, &input.asks);
        put(to, &layout.draws, &input.draws);
        put(to, &layout.pages, &input.pages);
        let bytes = layout.pages.start + size_of_val(&input.pages[..]);
        self.staging.upload(stream, &self.device, bytes)?;
        self.changes.upload(stream, input)
    }

    fn view<T: Element>(&self, range: &Range<usize>) -> View<T> {
        let part = self.device.part(range.start, range.len());
        View::new(part.pointer(), range.len() / size_of::<T>())
    }

    /// `[tokens]`
    pub fn tokens(&self) -> View<u32> {
        self.view(&self.layout.tokens)
    }

    /// `[tokens]`
    pub fn positions(&self) -> View<u32> {
        self.view(&self.layout.positions)
    }

    /// `[tokens]`
    pub fn slots(&self) -> View<u32> {
        self.view(&self.layout.slots)
    }

    /// `[tokens]`
    pub fn row_of(&self) -> View<u32> {
        self.view(&self.layout.row_of)
    }

    /// `[rows]`
    pub fn spans(&self) -> View<Span> {
        self.view(&self.layout.spans)
    }

    /// `[outputs]`
    pub fn outputs(&self) -> View<u32> {
        self.view(&self.layout.outputs)
    }

    /// `[outputs]`
    pub fn asks(&self) -> View<Ask> {
        self.view(&self.layout.asks)
    }

    /// `[outputs]`
    pub fn draws(&self) -> View<Draw> {
        self.view(&self.layout.draws)
    }

    /// Page tables, one after another.
    pub fn pages(&self) -> View<u32> {
        self.view(&self.layout.pages)
    }

    /// Edits of all draws.
    pub fn edits(&self) -> View<Edit> {
        self.changes.edits()
    }

    /// Masks of all draws.
    pub fn masks(&self) -> View<u32> {
        self.changes.masks()
    }
}

/// Writes values as bytes to the start of a place.
pub(super) fn put<T: Element>(to: &mut [u8], place: &Range<usize>, values: &[T]) {
    // SAFETY: elements have no padding, so all bytes are initialised.
    let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    to[place.clone()][..bytes.len()].copy_from_slice(bytes);
}
