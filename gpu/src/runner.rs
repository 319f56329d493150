//! Runs steps: checks the step, runs the model, reads signals, draws tokens. Implements the executor port once for all
//! devices. Owner: the executor actor's thread. Invariant: the answer for a row depends on its own tokens and parameters
//! alone; a step that is refused has not touched the device.

use crate::batch::Batch;
use crate::heads::{Seat, Source};
use crate::models::blocks::{Decoder, Memory, Scratch};
use crate::ops::{Ask, Fault, Ops};
use crate::sampling::{Sampler, is_plain_greedy};
use crate::signals;
use std::sync::Arc;
use tokenrouter_core::executor::{
    Draw, Drawn, Executor, ExecutorError, ExecutorLimits, Row, RowOutput, Step, StepOutput, TokenLogprobs,
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
    sampler: Sampler,
    head: Option<Seat<O>>,
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
    /// The learned head, with scratch for `limits.rows_max` rows.
    pub head: Option<Seat<O>>,
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
            sampler: Sampler::new(parts.limits.vocab_width as usize, real_vocab),
            head: parts.head,
        }
    }

    /// Raw logits that row `row` of the last step had, less a column that its head takes out; `None` if it drew nothing.
    /// A step keeps no logits that it does not read itself, so this multiplies the hidden row by the head once more.
    pub fn last_logits(&mut self, row: usize) -> Option<&[f32]> {
        let (output, column) = (self.output_of(row)? as u32, self.head.as_ref().and_then(Seat::column));
        self.model.logits(&mut self.ops, (output, column), &mut self.memory.scratch);
        Some(self.ops.row(&self.memory.scratch.head.logits, 0))
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

    /// A score that nothing here can give is a mistake of whoever set up the routing.
    fn refuse_scores(&self, step: &Step) -> Result<(), ExecutorError> {
        let asks = |row: &&Row| row.draw.as_ref().is_some_and(|draw| draw.needs.score);
        match step.rows.iter().find(asks).filter(|_| self.head.is_none()) {
            None => Ok(()),
            Some(row) => Err(ExecutorError::Step(format!(
                "{}: asks for the score of a learned head, but this model was loaded without one; name it in router.params.head",
                row.request
            ))),
        }
    }

    /// Log-probabilities of all targets, or what is wrong with the logits before one: as many rows at a time as a step may
    /// draw for, so that no more memory is taken. The outputs are others afterwards.
    fn targets(&mut self) -> Vec<Result<TokenLogprobs, String>> {
        let column = self.head.as_ref().and_then(Seat::column);
        let scratch = &mut self.memory.scratch;
        let mut answers = Vec::with_capacity(self.batch.targets.len());
        for slice in self.batch.targets.chunks(self.limits.rows_max as usize) {
            let rows: Vec<u32> = slice.iter().map(|target| target.row).collect();
            self.asks.clear();
            self.asks.extend(slice.iter().map(|target| signals::ask_target(target.alternatives, self.real_vocab)));
            self.model.outputs(&mut self.ops, &rows, scratch);
            self.model.head(&mut self.ops, (&self.asks, column), scratch);
            for (index, (target, reduced)) in slice.iter().zip(&mut scratch.head.reduced).enumerate() {
                answers.push(match reduced {
                    Err(fault) => Err(not_finite(self.batch.positions[target.row as usize], *fault)),
                    Ok(reduced) => {
                        let logit = self.ops.row(&scratch.head.logits, index)[target.token as usize];
                        Ok(signals::logprobs(logit, reduced))
                    }
                });
            }
        }
        answers
    }

    /// The head on the rows that draw: the answers, and the hidden rows behind them, are in the scratch memory then.
    fn reduce(&mut self, step: &Step) {
        let draws = step.rows.iter().filter_map(|row| row.draw.as_ref());
        let head_top = self.head.as_ref().map_or(0, Seat::top_k);
        self.asks.clear();
        self.asks.extend(draws.map(|draw| signals::ask(draw, self.real_vocab, head_top)));
        if self.asks.is_empty() {
            return;
        }
        let column = self.head.as_ref().and_then(Seat::column);
        self.model.outputs(&mut self.ops, &self.batch.outputs, &mut self.memory.scratch);
        self.model.head(&mut self.ops, (&self.asks, column), &mut self.memory.scratch);
    }

    fn draw(&mut self, output: usize, draw: &Draw, position: u32) -> RowOutput {
        let Scratch { outputs, head, .. } = &mut self.memory.scratch;
        let reduced = match &mut head.reduced[output] {
            Ok(reduced) => reduced,
            Err(fault) => return RowOutput::Failed(not_finite(position - 1, *fault)),
        };
        let (mut token, mut logit) = (reduced.argmax, reduced.highest);
        if !is_plain_greedy(draw) {
            let logits = self.ops.row(&head.logits, output);
            match self.sampler.draw(logits, draw, position) {
                Ok(drawn) => (token, logit) = (drawn, logits[drawn as usize]),
                Err(error) => return RowOutput::Failed(format!("no token at position {position}: {error}")),
            }
        }
        let logprobs = draw.logprobs.map(|_| signals::logprobs(logit, reduced));
        let width = self.limits.vocab_width;
        let signals = signals::signals(draw, reduced, width, || self.ops.row(outputs, output));
        RowOutput::Drawn(Drawn { token, signals, logprobs, targets: Vec::new() })
    }
}

fn not_finite(position: u32, fault: Fault) -> String {
    format!("the logits at position {position} {fault}")
}

/// Gives the rows of a step what was found for their targets; a row fails that has one without an answer.
fn hand_out(answers: Vec<Result<TokenLogprobs, String>>, (step, rows): (&Step, &mut [RowOutput])) {
    let mut answers = answers.into_iter();
    for (row, output) in step.rows.iter().zip(rows) {
        let count = row.targets.as_ref().map_or(0, |targets| targets.tokens.len());
        let own: Vec<_> = answers.by_ref().take(count).collect();
        match (own.into_iter().collect::<Result<Vec<_>, _>>(), &mut *output) {
            (Err(reason), _) => *output = RowOutput::Failed(reason),
            (Ok(own), RowOutput::Fed(targets) | RowOutput::Drawn(Drawn { targets, .. })) => *targets = own,
            (Ok(_), RowOutput::Failed(_)) => {}
        }
    }
}

impl<O: Ops> Executor for Runner<O> {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        self.refuse_scores(step)?;
        self.batch.fill(step, &self.limits)?;
        if self.batch.tokens.is_empty() {
            return Ok(StepOutput::default());
        }
        self.model.forward(&mut self.ops, &self.batch, &mut self.memory);
        let targets = self.targets();
        self.reduce(step);
        let mut outputs = 0;
        let mut answer = |row: &Row| match &row.draw {
            None => RowOutput::Fed(Vec::new()),
            Some(draw) => {
                let output = outputs;
                outputs += 1;
                self.draw(output, draw, row.start + row.tokens.len() as u32)
            }
        };
        let mut rows: Vec<RowOutput> = step.rows.iter().map(&mut answer).collect();
        if let Some(head) = &mut self.head {
            let Scratch { outputs, head: found, .. } = &self.memory.scratch;
            let source = Source { hidden: outputs, embed: &self.model.embed, column: &found.column };
            head.score(&mut self.ops, source, (step, &mut rows));
        }
        hand_out(targets, (step, &mut rows));
        Ok(StepOutput { rows })
    }
}
