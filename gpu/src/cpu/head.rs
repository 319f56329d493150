//! The output head on the CPU. Owner: the device. Invariant: that of [`tokenrouter_kernels::head`]; only rows that are kept
//! are written.

use super::{Cpu, CpuRows};
use crate::heads::math;
use crate::ops::{Ask, DrawAt, Fault, HeadInput, HeadOutput, OpsError, Reduced};
use crate::sampling::is_plain_greedy;
use tokenrouter_core::ids::TokenId;
use tokenrouter_kernels::head::{BadLogits, Candidate, Head, Product, Want};
use tokenrouter_kernels::matmul::Matrix;

/// Memory that steps have in common.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    head: Head,
    wants: Vec<Want>,
}

impl Cpu {
    pub(super) fn head_rows(&mut self, input: HeadInput<'_, Self>, out: &mut HeadOutput<Self>) {
        let HeadInput { hidden, matrix, asks, column } = input;
        let Scratch { head, wants } = &mut self.head;
        wants.clear();
        wants.extend(asks.iter().map(want));
        let input = &self.codes.input(&self.pool, hidden.values(), &[matrix]);
        let logits = out.logits.resize(hidden.rows);
        head.run(&self.pool, Product { input, matrix, wants, apart: column.map(|id| id as usize), logits });
        out.column.clear();
        out.column.extend_from_slice(head.apart());
        out.reduced.clear();
        out.reduced.extend((0..hidden.rows).map(|row| reduced(head, row)));
        for (row, (reduced, ask)) in out.reduced.iter_mut().zip(asks).enumerate() {
            if let (Ok(reduced), Some(target)) = (reduced, ask.target) {
                reduced.target = out.logits.row(row)[target as usize];
            }
        }
    }

    /// Draws the tokens of rows without a fault.
    pub(super) fn draw_rows(draws: &[DrawAt], out: &mut HeadOutput<Self>) {
        let HeadOutput { reduced, drawn, logits, answers: sampler, .. } = out;
        drawn.clear();
        drawn.extend(draws.iter().zip(reduced).enumerate().map(|(row, (DrawAt { draw, position }, reduced))| {
            let Ok(Reduced { argmax, highest, .. }) = *reduced else { return Ok((0, 0.0)) };
            if is_plain_greedy(draw) {
                return Ok((argmax, highest));
            }
            let logits = logits.row(row);
            sampler.draw(logits, draw, *position).map(|token| (token, logits[token as usize]))
        }));
    }

    /// The highest logits of rows that are scored.
    pub(super) fn top_rows((from, scored): (&HeadOutput<Self>, &[u32]), softmax: bool, out: &mut CpuRows) {
        let width = out.width;
        for (&output, row) in scored.iter().zip(out.resize(scored.len()).chunks_exact_mut(width)) {
            row.fill(f32::NEG_INFINITY);
            let top = from.reduced[output as usize].as_ref().map_or(&[][..], |reduced| &reduced.top);
            row.iter_mut().zip(top).for_each(|(to, &(_, logit))| *to = logit);
            if softmax {
                math::softmax(row);
            }
        }
    }

    /// The embeddings of tokens that were drawn.
    pub(super) fn drawn_rows(table: &Matrix, (from, scored): (&HeadOutput<Self>, &[u32]), out: &mut CpuRows) {
        let width = out.width;
        for (&output, row) in scored.iter().zip(out.resize(scored.len()).chunks_exact_mut(width)) {
            let token = from.drawn[output as usize].as_ref().map_or(0, |&(token, _)| token);
            table.row(token as usize, row);
        }
    }
}

impl HeadOutput<Cpu> {
    /// What a head would leave that found these highest logits, `[rows, any number]`, and drew the token `i` for row `i`: for
    /// learned heads alone, without a model.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    pub fn of_top(ops: &mut Cpu, rows: usize, top: &[f32]) -> Result<Self, OpsError> {
        let mut found = HeadOutput::new(ops, rows, (1, 1))?;
        let list = |row: usize| top.chunks((top.len() / rows.max(1)).max(1)).nth(row).unwrap_or_default();
        let entries = |row: usize| list(row).iter().map(|&logit| (0, logit)).collect();
        found.reduced = (0..rows).map(|row| Ok(Reduced { top: entries(row), ..Reduced::default() })).collect();
        found.drawn = (0..rows as TokenId).map(|row| Ok((row, 0.0))).collect();
        Ok(found)
    }
}

fn want(ask: &Ask) -> Want {
    Want {
        real: ask.real_vocab.max(1),
        distribution: ask.distribution,
        top: ask.top_k,
        real_top: ask.real_top_k,
        keep: ask.keep || ask.target.is_some(),
    }
}

fn reduced(head: &Head, row: usize) -> Result<Reduced, Fault> {
    let outcome = head.row(row)?;
    let list = |entries: &[Candidate]| -> Vec<(TokenId, f32)> { entries.iter().map(|c| (c.id, c.logit)).collect() };
    Ok(Reduced {
        argmax: outcome.best.id,
        highest: outcome.best.logit,
        log_sum_exp: outcome.distribution.map_or(0.0, |found| found.logsumexp),
        entropy: outcome.distribution.map_or(0.0, |found| found.entropy),
        target: 0.0,
        top: list(outcome.top),
        real_top: list(outcome.real_top),
    })
}

impl From<BadLogits> for Fault {
    fn from(bad: BadLogits) -> Fault {
        match bad {
            BadLogits::NotFinite => Fault::NotFinite,
            BadLogits::Empty => Fault::Empty,
        }
    }
}
