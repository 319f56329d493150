//! Runs steps: checks the step, runs the model, reads signals, draws tokens. Implements the executor port once for all
//! devices. Owner: the executor actor's thread. Invariant: the answer for a row depends on its own tokens and parameters
//! alone; a step that is refused has not touched the device.

use crate::batch::Batch;
use crate::models::blocks::{Decoder, Memory};
use crate::ops::{Ask, Fault, Ops, Reduced};
use crate::sampling::{Sampler, is_plain_greedy};
use crate::signals::{self, RawRow};
use std::sync::Arc;
use tokenrouter_core::executor::{
    Draw, Drawn, Executor, ExecutorError, ExecutorLimits, Row, RowOutput, Step, StepOutput,
};

/// A model on a device with KV memory of its own.
pub struct Runner<O: Ops> {
    ops: O,
    model: Arc<Decoder<O>>,
    memory: Memory<O>,
    limits: ExecutorLimits,
    real_vocab: usize,
    batch: Batch,
    asks: Vec<Ask>,
    reduced: Vec<Result<Reduced, Fault>>,
    sampler: Sampler,
}

/// What a runner is made of.
pub struct RunnerParts<O: Ops> {
    /// The device.
    pub ops: O,
    /// The model, shared with other runners.
    pub model: Arc<Decoder<O>>,
    /// KV memory of `limits.pages` pages, activations for `limits.step_tokens_max` tokens and `limits.rows_max` outputs.
    pub memory: Memory<O>,
    /// Capacity.
    pub limits: ExecutorLimits,
    /// Ids at and above this are padding and never drawn.
    pub real_vocab: u32,
}

impl<O: Ops> Runner<O> {
    /// Puts the parts together.
    pub fn new(parts: RunnerParts<O>) -> Self {
        let real_vocab = parts.real_vocab.min(parts.limits.vocab_width) as usize;
        Runner {
            ops: parts.ops,
            model: parts.model,
            memory: parts.memory,
            limits: parts.limits,
            real_vocab,
            batch: Batch::default(),
            asks: Vec::new(),
            reduced: Vec::new(),
            sampler: Sampler::new(parts.limits.vocab_width as usize, real_vocab),
        }
    }

    /// Raw logits that row `row` of the last step had; `None` if it drew nothing.
    pub fn last_logits(&mut self, row: usize) -> Option<&[f32]> {
        let output = self.output_of(row)?;
        Some(self.ops.row(&self.memory.scratch.logits, output))
    }

    /// Hidden row after the final norm that row `row` of the last step had; `None` if it drew nothing.
    pub fn last_hidden(&mut self, row: usize) -> Option<&[f32]> {
        let output = self.output_of(row)?;
        Some(self.ops.row(&self.memory.scratch.outputs, output))
    }

    fn output_of(&self, row: usize) -> Option<usize> {
        let span = self.batch.spans.get(row)?;
        self.batch.outputs.binary_search(&(span.row + span.len - 1)).ok()
    }

    fn draw(&mut self, output: usize, draw: &Draw, position: u32) -> RowOutput {
        let reduced = match &mut self.reduced[output] {
            Ok(reduced) => reduced,
            Err(fault) => return RowOutput::Failed(format!("the logits at position {} {fault}", position - 1)),
        };
        let mut token = reduced.argmax;
        if !is_plain_greedy(draw) {
            match self.sampler.draw(self.ops.row(&self.memory.scratch.logits, output), draw, position) {
                Ok(drawn) => token = drawn,
                Err(error) => return RowOutput::Failed(format!("no token at position {position}: {error}")),
            }
        }
        let width = self.limits.vocab_width;
        let logprobs = draw.logprobs.map(|count| {
            let logits = self.ops.row(&self.memory.scratch.logits, output);
            RawRow { logits, real_vocab: self.real_vocab, log_sum_exp: reduced.log_sum_exp }.logprobs(token, count)
        });
        let signals = signals::signals(draw, reduced, width, || self.ops.row(&self.memory.scratch.outputs, output));
        RowOutput::Drawn(Drawn { token, signals, logprobs })
    }
}

impl<O: Ops> Executor for Runner<O> {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        self.batch.fill(step, &self.limits)?;
        if self.batch.tokens.is_empty() {
            return Ok(StepOutput::default());
        }
        self.model.forward(&mut self.ops, &self.batch, &mut self.memory);
        let draws = step.rows.iter().filter_map(|row| row.draw.as_ref());
        self.asks.clear();
        self.asks.extend(draws.map(|draw| signals::ask(draw, self.real_vocab)));
        self.ops.reduce(&self.memory.scratch.logits, &self.asks, &mut self.reduced);
        let mut outputs = 0;
        let mut answer = |row: &Row| match &row.draw {
            None => RowOutput::Fed,
            Some(draw) => {
                let output = outputs;
                outputs += 1;
                self.draw(output, draw, row.start + row.tokens.len() as u32)
            }
        };
        Ok(StepOutput { rows: step.rows.iter().map(&mut answer).collect() })
    }
}
