//! The output head on the CPU. Owner: the device. Invariant: that of [`tokenrouter_kernels::head`]; only rows that are kept
//! are written.

use super::{Cpu, CpuRows};
use crate::ops::{Ask, Fault, HeadInput, HeadOutput, Reduced};
use tokenrouter_core::ids::TokenId;
use tokenrouter_kernels::head::{BadLogits, Candidate, Head, Product, Want};

/// Memory that steps have in common.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    head: Head,
    wants: Vec<Want>,
}

impl Cpu {
    pub(super) fn head_rows(&mut self, input: HeadInput<'_, Self>, out: &mut HeadOutput<CpuRows>) {
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
    }
}

fn want(ask: &Ask) -> Want {
    Want {
        real: ask.real_vocab.max(1),
        distribution: ask.distribution,
        top: ask.top_k,
        real_top: ask.real_top_k,
        keep: ask.keep,
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
