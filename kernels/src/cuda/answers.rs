//! What a step has to say, on the device and on the host. Owner: the executor. Invariant: one copy brings all answers of a
//! step; lists of candidates travel only if somebody asked for one.

use super::error::CudaError;
use super::memory::{Array, Element, Pinned, View};
use super::stream::Stream;
use std::mem::size_of;

/// Entries in the lists of highest logits.
pub const TOP_MAX: usize = 128;

/// What became of an output. The same as in `common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answer {
    /// 0, or what is wrong with the logits: 1 = not finite, 2 = empty.
    pub fault: u32,
    /// Highest token.
    pub argmax: u32,
    /// Its logit.
    pub highest: f32,
    /// `ln sum exp(logit)` over the whole row.
    pub log_sum_exp: f32,
    /// `-sum p ln p` over the whole row, in nats.
    pub entropy: f32,
    /// Logit of the id that was asked for.
    pub target: f32,
    /// Logit of the column that was taken out.
    pub column: f32,
    /// The token that was drawn.
    pub token: u32,
    /// Its raw logit.
    pub token_logit: f32,
    /// 0, or why nothing was drawn: 1 = nothing left, 2 = not finite.
    pub draw_fault: u32,
    /// The value that is not finite.
    pub draw_value: f32,
    /// Score of the learned head, after its sigmoid.
    pub score: f32,
    /// Entries in the list of the whole row.
    pub tops: u32,
    /// Entries in the list of the tokens.
    pub real_tops: u32,
    /// Makes it 64 bytes.
    pub pad: [u32; 2],
}

/// A logit with its id. The same as in `common.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Which.
    pub id: u32,
    /// Its value.
    pub logit: f32,
}

// SAFETY: numbers of 4 bytes without padding.
unsafe impl Element for Answer {}
// SAFETY: as above.
unsafe impl Element for Candidate {}

/// The answers of a step on the host.
#[derive(Clone, Copy, Debug)]
pub struct Answers<'a> {
    bytes: &'a [u8],
    outputs_max: usize,
}

/// Answers in the memory of a device, with a place on the host.
#[derive(Debug)]
pub struct AnswerMemory {
    outputs_max: usize,
    device: Array<u8>,
    staging: Pinned,
}

impl AnswerMemory {
    /// Room for the answers of so many outputs.
    ///
    /// # Errors
    /// [`CudaError::Memory`].
    pub fn new(stream: &Stream, outputs_max: usize) -> Result<Self, CudaError> {
        let bytes = Self::bytes(outputs_max) as usize;
        let device = Array::zeros(stream, "answers", bytes)?;
        Ok(AnswerMemory { outputs_max, device, staging: Pinned::new(stream.gpu(), bytes)? })
    }

    /// Bytes on the device for so many outputs.
    pub fn bytes(outputs_max: usize) -> u64 {
        (outputs_max * (size_of::<Answer>() + 2 * TOP_MAX * size_of::<Candidate>())) as u64
    }

    fn tops_start(&self) -> usize {
        self.outputs_max * size_of::<Answer>()
    }

    fn list_bytes(&self) -> usize {
        self.outputs_max * TOP_MAX * size_of::<Candidate>()
    }

    /// `[outputs]`
    pub fn answers(&self) -> View<Answer> {
        View::new(self.device.view().pointer(), self.outputs_max)
    }

    /// `[outputs, TOP_MAX]`: highest logits of whole rows.
    pub fn tops(&self) -> View<Candidate> {
        let part = self.device.part(self.tops_start(), self.list_bytes());
        View::new(part.pointer(), self.outputs_max * TOP_MAX)
    }

    /// `[outputs, TOP_MAX]`: highest logits of the tokens.
    pub fn real_tops(&self) -> View<Candidate> {
        let part = self.device.part(self.tops_start() + self.list_bytes(), self.list_bytes());
        View::new(part.pointer(), self.outputs_max * TOP_MAX)
    }

    /// Starts the copy of the answers, with the lists if `lists`; read them when the stream has come there.
    ///
    /// # Errors
    /// What the driver says.
    pub fn download(&mut self, stream: &Stream, lists: bool) -> Result<(), CudaError> {
        let bytes = self.tops_start() + if lists { 2 * self.list_bytes() } else { 0 };
        self.staging.download(stream, &self.device, bytes)
    }

    /// What the last copy brought.
    pub fn host(&self) -> Answers<'_> {
        Answers { bytes: self.staging.bytes(), outputs_max: self.outputs_max }
    }
}

impl Answers<'_> {
    fn read<T: Element>(&self, at: usize) -> T {
        let bytes = &self.bytes[at..at + size_of::<T>()];
        // SAFETY: there are so many bytes, and any bits are a value.
        unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
    }

    /// The answer for an output.
    pub fn answer(&self, output: usize) -> Answer {
        assert!(output < self.outputs_max, "output {output} of {}", self.outputs_max);
        self.read(output * size_of::<Answer>())
    }

    fn list(&self, which: usize, output: usize, len: u32) -> impl Iterator<Item = Candidate> + '_ {
        let start = self.outputs_max * (size_of::<Answer>() + which * TOP_MAX * size_of::<Candidate>())
            + output * TOP_MAX * size_of::<Candidate>();
        let answers = *self;
        (0..(len as usize).min(TOP_MAX)).map(move |index| answers.read(start + index * size_of::<Candidate>()))
    }

    /// Highest logits of the whole row.
    pub fn tops(&self, output: usize) -> impl Iterator<Item = Candidate> + '_ {
        self.list(0, output, self.answer(output).tops)
    }

    /// Highest logits of the tokens.
    pub fn real_tops(&self, output: usize) -> impl Iterator<Item = Candidate> + '_ {
        self.list(1, output, self.answer(output).real_tops)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_have_the_size_that_kernels_think() {
        assert_eq!((size_of::<Answer>(), size_of::<Candidate>()), (64, 8));
        assert_eq!((size_of::<super::super::Draw>(), size_of::<super::super::Ask>()), (40, 20));
    }
}
