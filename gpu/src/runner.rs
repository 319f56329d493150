//! Runs steps: checks the step, runs the model, reads signals, draws tokens. Implements the executor port once for all
//! devices. Owner: the executor actor's thread. Invariant: the answer for a row depends on its own tokens and parameters
//! alone; a step that is refused has not touched the device.

use crate::batch::Batch;
use crate::heads::{Seat, Source};
use crate::models::blocks::{Decoder, Memory, Scratch};
use crate::ops::{Ask, DrawAt, Fault, Ops, Tail};
use crate::signals;
use std::sync::Arc;
use tokenrouter_core::executor::{
    Drawn, Executor, ExecutorError, ExecutorLimits, Row, RowOutput, Step, StepOutput, TokenLogprobs,
};

/// A model on a device with KV memory of its own.
pub struct Runner<O: Ops> {
    ops: O,
    model: Arc<Decoder<O>>,
    memory: Memory<O>,
    limits: ExecutorLimits,
    real_vocab: usize,
    batch: Batch,
    tail: Tail,
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
            tail: Tail::default(),
            head: parts.head,
        }
    }

    /// Keys and values, for tests that look at them.
    pub fn kv(&self) -> &O::Kv {
        &self.memory.kv
    }

    /// The device, for measurements between steps.
    pub fn device(&mut self) -> &mut O {
        &mut self.ops
    }

    /// Prepares the shapes of steps that the device records, telling how many of how many are done.
    ///
    /// # Errors
    /// [`ExecutorError`] of the device.
    pub fn warm(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<(), ExecutorError> {
        let scored = if self.head.as_ref().is_some_and(Seat::is_network) { &[false, true][..] } else { &[false] };
        let shapes = self.ops.shapes(&self.limits);
        let passes: Vec<_> =
            shapes.iter().flat_map(|shape| scored.iter().map(move |scored| (*shape, *scored))).collect();
        for (done, &(shape, scored)) in passes.iter().enumerate() {
            progress(done, passes.len());
            self.tail = Tail::padding(shape.rows, scored);
            self.ops.stage_shape(shape, &self.tail);
            self.give();
            self.ops.finish(&mut self.memory.scratch.head)?;
        }
        progress(passes.len(), passes.len());
        Ok(())
    }

    /// Raw logits that row `row` of the last step had, less a column that its head takes out; `None` if it drew nothing.
    /// A step keeps no logits that it does not read itself, so this multiplies the hidden row by the head once more.
    pub fn last_logits(&mut self, row: usize) -> Option<&[f32]> {
        let (output, column) = (self.output_of(row)? as u32, self.head.as_ref().and_then(Seat::column));
        let ask = Ask { real_vocab: 1, keep: true, ..Ask::default() };
        let tail = Tail { outputs: vec![output], asks: vec![ask], ..Tail::default() };
        self.ops.stage(&self.batch, &tail);
        self.model.logits(&mut self.ops, (&tail, column), &mut self.memory.scratch);
        self.ops.finish(&mut self.memory.scratch.head).ok()?;
        self.ops.row(&self.memory.scratch.head.logits, 0).ok()
    }

    /// Hidden row after the final norm that row `row` of the last step had; `None` if it drew nothing.
    pub fn last_hidden(&mut self, row: usize) -> Option<&[f32]> {
        let output = self.output_of(row)?;
        self.ops.row(&self.memory.scratch.outputs, output).ok()
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

    /// What is asked about the rows that draw.
    fn ask(&mut self, step: &Step) {
        let head_top = self.head.as_ref().map_or(0, Seat::top_k);
        self.tail.clear();
        let Tail { outputs, asks, draws, scored } = &mut self.tail;
        outputs.extend_from_slice(&self.batch.outputs);
        for row in &step.rows {
            let Some(draw) = &row.draw else { continue };
            if draw.needs.score {
                scored.push(asks.len() as u32);
            }
            asks.push(signals::ask(draw, self.real_vocab, head_top));
            draws.push(DrawAt { draw: draw.clone(), position: row.start + row.tokens.len() as u32 });
        }
    }

    /// Gives the whole pass: the model, its head, the draws and the scores.
    fn give(&mut self) {
        let Runner { ops, model, memory, batch, tail, head, .. } = self;
        ops.pass(&mut |ops| {
            model.forward(ops, batch, memory);
            answer(ops, model, (tail, head.as_mut()), memory);
        });
    }

    /// Gives the model first and asks about the targets, as many at a time as a step may draw for, so that no more memory is
    /// taken; then gives the rest. Log-probabilities of all targets, or what is wrong with the logits before one.
    fn give_with_targets(&mut self, tail: &Tail) -> Result<Vec<Result<TokenLogprobs, String>>, ExecutorError> {
        let column = self.head.as_ref().and_then(Seat::column);
        let mut answers = Vec::with_capacity(self.batch.targets.len());
        let Runner { ops, model, memory, batch, head, .. } = self;
        ops.stage(batch, &Tail::default());
        model.forward(ops, batch, memory);
        ops.finish(&mut memory.scratch.head)?;
        for slice in batch.targets.chunks(self.limits.rows_max as usize) {
            let asks = slice.iter().map(|target| signals::ask_target(target, self.real_vocab)).collect();
            let rows = Tail { outputs: slice.iter().map(|target| target.row).collect(), asks, ..Tail::default() };
            ops.stage(batch, &rows);
            model.outputs(ops, &rows.outputs, &mut memory.scratch);
            model.head(ops, (&rows.asks, column), &mut memory.scratch);
            ops.finish(&mut memory.scratch.head)?;
            for (target, reduced) in slice.iter().zip(&mut memory.scratch.head.reduced) {
                answers.push(match reduced {
                    Err(fault) => Err(not_finite(batch.positions[target.row as usize], *fault)),
                    Ok(reduced) => Ok(signals::logprobs(reduced.target, reduced)),
                });
            }
        }
        ops.stage(batch, tail);
        answer(ops, model, (tail, head.as_mut()), memory);
        Ok(answers)
    }

    /// The answer for an output of a finished step.
    fn drawn(&mut self, output: usize) -> Result<RowOutput, ExecutorError> {
        let Scratch { outputs, head, .. } = &mut self.memory.scratch;
        let DrawAt { draw, position } = &self.tail.draws[output];
        let score = match &self.head {
            Some(seat) if draw.needs.score => Some(seat.read(output, head)),
            _ => None,
        };
        let reduced = match &mut head.reduced[output] {
            Ok(reduced) => reduced,
            Err(fault) => return Ok(RowOutput::Failed(not_finite(position - 1, *fault))),
        };
        let (token, logit) = match &head.drawn[output] {
            Ok(drawn) => *drawn,
            Err(error) => return Ok(RowOutput::Failed(format!("no token at position {position}: {error}"))),
        };
        let logprobs = draw.logprobs.map(|_| signals::logprobs(logit, reduced));
        let width = self.limits.vocab_width;
        let hidden = if draw.needs.hidden { self.ops.row(outputs, output)?.to_vec() } else { Vec::new() };
        let mut signals = signals::signals(draw, reduced, width, hidden);
        signals.score = score;
        Ok(RowOutput::Drawn(Drawn { token, signals, logprobs, targets: Vec::new() }))
    }
}

/// From the model's last layer to tokens and scores.
fn answer<O: Ops>(
    ops: &mut O,
    model: &Decoder<O>,
    (tail, seat): (&Tail, Option<&mut Seat<O>>),
    memory: &mut Memory<O>,
) {
    if tail.outputs.is_empty() {
        return;
    }
    let column = seat.as_ref().and_then(|seat| seat.column());
    let scratch = &mut memory.scratch;
    model.outputs(ops, &tail.outputs, scratch);
    model.head(ops, (&tail.asks, column), scratch);
    ops.draw(&tail.draws, &mut scratch.head);
    if let Some(seat) = seat {
        let source = Source { hidden: &scratch.outputs, embed: &model.embed, scored: &tail.scored };
        seat.score(ops, source, &mut scratch.head);
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
        let answer = self.take(step);
        // Whoever counts the tokens of a request copies the counts while somebody else has them.
        self.tail.clear();
        answer
    }
}

impl<O: Ops> Runner<O> {
    fn take(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        self.refuse_scores(step)?;
        self.batch.fill(step, &self.limits)?;
        if self.batch.tokens.is_empty() {
            return Ok(StepOutput::default());
        }
        self.ask(step);
        let targets = if self.batch.targets.is_empty() {
            self.ops.stage(&self.batch, &self.tail);
            self.give();
            Vec::new()
        } else {
            let tail = std::mem::take(&mut self.tail);
            let targets = self.give_with_targets(&tail);
            self.tail = tail;
            targets?
        };
        self.ops.finish(&mut self.memory.scratch.head)?;
        let (mut rows, mut outputs) = (Vec::with_capacity(step.rows.len()), 0);
        for row in &step.rows {
            rows.push(match row.draw {
                None => RowOutput::Fed(Vec::new()),
                Some(_) => self.drawn(outputs)?,
            });
            outputs += usize::from(row.draw.is_some());
        }
        hand_out(targets, (step, &mut rows));
        Ok(StepOutput { rows })
    }
}
