//! A model driven by hand: rows of several sequences, KV kept between steps. Owner: the test. Invariant: a sequence has
//! pages of its own, scattered over the pool, and the walker alone knows how much of it has KV.

use std::sync::Arc;
use tokenrouter_core::executor::{Draw, Drawn, Executor, Needs, PAGE_TOKENS, PageId, Row, RowOutput, Step};
use tokenrouter_core::ids::{RequestId, TokenId};
use tokenrouter_gpu::load::{AnyRunner, LoadedModel};

/// What a sequence's last token gave.
#[derive(Clone, Debug)]
pub struct Fed {
    /// Raw logits after the last token.
    pub logits: Vec<f32>,
    /// The greedy candidate, with entropy and log-probability.
    pub drawn: Drawn,
}

impl Fed {
    /// Bits of the logits, so that comparisons are exact.
    pub fn bits(&self) -> Vec<u32> {
        self.logits.iter().map(|logit| logit.to_bits()).collect()
    }
}

/// A runner and how much of each of its sequences has KV.
pub struct Walker {
    runner: AnyRunner,
    fed: Vec<usize>,
}

impl Walker {
    /// A new executor of a model, for so many sequences at once.
    ///
    /// # Panics
    /// When the machine refuses memory or threads: a failed test.
    pub fn new(model: &LoadedModel, sequences: usize) -> Self {
        let runner = model.executor().unwrap_or_else(|error| panic!("{error}"));
        Walker { runner, fed: vec![0; sequences] }
    }

    /// Tokens of a sequence that have KV.
    pub fn known(&self, sequence: usize) -> usize {
        self.fed[sequence]
    }

    /// Forgets a sequence: its next step is a fresh prefill.
    pub fn forget(&mut self, sequence: usize) {
        self.fed[sequence] = 0;
    }

    /// One step: each named sequence, given in full, is fed the tokens it lacks.
    ///
    /// # Panics
    /// When the step fails: a failed test.
    pub fn step(&mut self, sequences: &[(usize, &[TokenId])]) -> Vec<Fed> {
        let rows = sequences.iter().map(|&(sequence, tokens)| self.row(sequence, tokens)).collect();
        let output = self.runner.step(&Step { rows }).unwrap_or_else(|error| panic!("{error}"));
        for &(sequence, tokens) in sequences {
            self.fed[sequence] = tokens.len();
        }
        let mut fed = |(row, output)| match output {
            RowOutput::Drawn(drawn) => Fed { logits: self.runner.last_logits(row).unwrap_or_default().to_vec(), drawn },
            other => panic!("row {row}: {other:?}"),
        };
        output.rows.into_iter().enumerate().map(&mut fed).collect()
    }

    /// One step of one sequence.
    ///
    /// # Panics
    /// As [`Walker::step`].
    pub fn feed(&mut self, sequence: usize, tokens: &[TokenId]) -> Fed {
        self.step(&[(sequence, tokens)]).remove(0)
    }

    fn row(&self, sequence: usize, tokens: &[TokenId]) -> Row {
        let start = self.fed[sequence];
        let draw = Draw {
            params: Arc::default(),
            history: None,
            banned: Arc::from([]),
            mask: None,
            needs: Needs { entropy: true, ..Needs::default() },
            logprobs: Some(0),
        };
        Row {
            request: RequestId(sequence as u64),
            start: start as u32,
            tokens: tokens[start..].to_vec(),
            pages: self.table(sequence, tokens.len()),
            draw: Some(draw),
            targets: None,
        }
    }

    /// Pages of all sequences interleave, last page first.
    fn table(&self, sequence: usize, tokens: usize) -> Vec<PageId> {
        let stride = self.fed.len();
        let per_sequence = self.runner.limits().pages as usize / stride;
        (0..tokens.div_ceil(PAGE_TOKENS))
            .map(|page| ((per_sequence - 1 - page) * stride + sequence) as PageId)
            .collect()
    }
}
