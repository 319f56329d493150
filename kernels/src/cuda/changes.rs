//! Changes to logits before draws, in the memory of a device. Owner: the memory of a step. Invariant: there is room for what a
//! step stages; where there is not, it is made, by twice as much at least, while nothing runs.

use super::error::CudaError;
use super::memory::{Array, Pinned, View};
use super::step::{Edit, StepInput, StepLimits, put};
use super::stream::Stream;
use std::mem::size_of;

/// Edits that there is room for from the start.
const EDITS: usize = 256;
/// Requests that there is room for a mask of from the start.
const MASKED_ROWS: usize = 64;

/// Edits, and masks behind them. Their number has no bound that would be worth its memory.
#[derive(Debug)]
pub(super) struct Changes {
    staging: Pinned,
    device: Array<u8>,
    /// Bytes of edits there is room for.
    edits: usize,
    /// Bytes of masks.
    masks: usize,
}

/// Bytes of edits and of masks that there is room for from the start.
fn at_first(limits: &StepLimits) -> (usize, usize) {
    let words = limits.vocab.div_ceil(32) as usize;
    let edits = (EDITS * size_of::<Edit>()).next_multiple_of(16);
    (edits, limits.rows.min(MASKED_ROWS) * words * size_of::<u32>())
}

impl Changes {
    /// Room for a mask of each request, up to a number, and for few edits.
    pub(super) fn new(stream: &Stream, limits: &StepLimits) -> Result<Self, CudaError> {
        let (edits, masks) = at_first(limits);
        Self::with(stream, edits, masks)
    }

    fn with(stream: &Stream, edits: usize, masks: usize) -> Result<Self, CudaError> {
        let edits = edits.next_multiple_of(16);
        Ok(Changes {
            staging: Pinned::new(stream.gpu(), edits + masks)?,
            device: Array::new(stream.gpu(), "changes to logits", edits + masks)?,
            edits,
            masks,
        })
    }

    /// Bytes on the device at first.
    pub(super) fn bytes(limits: &StepLimits) -> u64 {
        let (edits, masks) = at_first(limits);
        (edits + masks) as u64
    }

    /// Makes room; says whether that moved them.
    pub(super) fn reserve(&mut self, stream: &Stream, input: &StepInput) -> Result<bool, CudaError> {
        let (edits, masks) = (size_of_val(&input.edits[..]), size_of_val(&input.masks[..]));
        if edits <= self.edits && masks <= self.masks {
            return Ok(false);
        }
        stream.synchronize()?;
        let more =
            |wanted: usize, room: usize| if wanted > room { wanted.next_power_of_two().max(2 * room) } else { room };
        *self = Self::with(stream, more(edits, self.edits), more(masks, self.masks))?;
        Ok(true)
    }

    /// Copies those of a step to the device, if it has any.
    pub(super) fn upload(&mut self, stream: &Stream, input: &StepInput) -> Result<(), CudaError> {
        if input.edits.is_empty() && input.masks.is_empty() {
            return Ok(());
        }
        let Changes { staging, device, edits, masks } = self;
        put(staging.bytes_mut(), &(0..*edits), &input.edits);
        put(staging.bytes_mut(), &(*edits..*edits + *masks), &input.masks);
        let bytes =
            if input.masks.is_empty() { size_of_val(&input.edits[..]) } else { *edits + size_of_val(&input.masks[..]) };
        staging.upload(stream, device, bytes)
    }

    /// Edits of all draws.
    pub(super) fn edits(&self) -> View<Edit> {
        let part = self.device.part(0, self.edits);
        View::new(part.pointer(), part.len() / size_of::<Edit>())
    }

    /// Masks of all draws.
    pub(super) fn masks(&self) -> View<u32> {
        let part = self.device.part(self.edits, self.masks);
        View::new(part.pointer(), part.len() / size_of::<u32>())
    }
}
