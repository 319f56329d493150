//! A step flattened into the arrays that operations read. Owner: the runner, which reuses one batch for all steps.
//! Invariant: a filled batch is safe to run: every page, position, token and table has been checked against the limits.

use tokenrouter_core::executor::{ExecutorError, ExecutorLimits, PAGE_TOKENS, PageId, Row, Step, Targets};
use tokenrouter_core::ids::TokenId;

/// Rows of a ragged batch: the tokens of all requests, one after another.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Token of each row.
    pub tokens: Vec<TokenId>,
    /// Absolute position of each row.
    pub positions: Vec<u32>,
    /// One span of rows per request, in the order of the step.
    pub spans: Vec<Span>,
    /// Page tables of all spans, one after another.
    pub pages: Vec<PageId>,
    /// Rows whose next token is drawn, ascending.
    pub outputs: Vec<u32>,
    /// Tokens whose log-probabilities are wanted, in the order of the step.
    pub targets: Vec<Target>,
    written: Vec<PageId>,
    requests: Vec<u64>,
}

/// The rows of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row in the batch.
    pub row: u32,
    /// Rows.
    pub len: u32,
    /// Absolute position of the first row; everything before it is in KV memory.
    pub start: u32,
    /// First entry of the page table in [`Batch::pages`].
    pub page: u32,
    /// Entries of the page table.
    pub pages: u32,
}

/// A token whose log-probability is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The row that predicts it.
    pub row: u32,
    /// The token.
    pub token: TokenId,
    /// Most probable tokens to report beside it.
    pub alternatives: u8,
}

impl Span {
    /// This span's page table.
    pub fn table<'a>(&self, batch: &'a Batch) -> &'a [PageId] {
        &batch.pages[self.page as usize..(self.page + self.pages) as usize]
    }
}

impl Batch {
    /// Replaces the contents by a step.
    ///
    /// # Errors
    /// [`ExecutorError::Step`] naming the request and what is out of range; nothing has touched the device then.
    pub fn fill(&mut self, step: &Step, limits: &ExecutorLimits) -> Result<(), ExecutorError> {
        self.clear();
        let rows_max = limits.rows_max as usize;
        let tokens_max = limits.step_tokens_max as usize;
        if step.rows.len() > rows_max {
            return refuse(format!("{} rows in a step, the limit is {rows_max}; split it", step.rows.len()));
        }
        for row in &step.rows {
            if self.tokens.len() + row.tokens.len() > tokens_max {
                let tokens = step.tokens();
                return refuse(format!(
                    "{tokens} tokens in a step, the limit is {tokens_max}; cut prefills into chunks"
                ));
            }
            self.push(row, limits)?;
        }
        self.refuse_doubles(step)
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.spans.clear();
        self.pages.clear();
        self.outputs.clear();
        self.targets.clear();
        self.written.clear();
        self.requests.clear();
    }

    fn push(&mut self, row: &Row, limits: &ExecutorLimits) -> Result<(), ExecutorError> {
        let request = row.request;
        if row.tokens.is_empty() {
            return refuse(format!("{request}: no tokens; a row consumes at least one"));
        }
        let end = row.start as usize + row.tokens.len();
        if end > limits.context_len as usize {
            return refuse(format!("{request}: ends at position {end}, the context holds {}", limits.context_len));
        }
        if let Some(token) = row.tokens.iter().find(|&&token| token >= limits.vocab_width) {
            return refuse(format!("{request}: token {token} is outside the vocabulary of {}", limits.vocab_width));
        }
        let needed = end.div_ceil(PAGE_TOKENS);
        let Some(table) = row.pages.get(..needed) else {
            return refuse(format!("{request}: {} pages for {end} tokens, {needed} are needed", row.pages.len()));
        };
        if let Some(page) = table.iter().find(|&&page| page >= limits.pages) {
            return refuse(format!("{request}: page {page} does not exist, the pool has {}", limits.pages));
        }
        let first = self.tokens.len();
        self.spans.push(Span {
            row: first as u32,
            len: row.tokens.len() as u32,
            start: row.start,
            page: self.pages.len() as u32,
            pages: needed as u32,
        });
        self.tokens.extend_from_slice(&row.tokens);
        self.positions.extend((row.start as usize..end).map(|position| position as u32));
        self.pages.extend_from_slice(table);
        self.written.extend_from_slice(&table[row.start as usize / PAGE_TOKENS..]);
        if row.draw.is_some() {
            self.outputs.push(self.tokens.len() as u32 - 1);
        }
        match &row.targets {
            None => Ok(()),
            Some(targets) => self.push_targets(row, (targets, first as u32), limits.vocab_width),
        }
    }

    fn push_targets(
        &mut self,
        row: &Row,
        (targets, at): (&Targets, u32),
        vocab_width: u32,
    ) -> Result<(), ExecutorError> {
        let (request, Targets { first, tokens, alternatives }) = (row.request, targets);
        let (end, len) = (*first as usize + tokens.len(), row.tokens.len());
        if end > len {
            return refuse(format!("{request}: the last target comes after {end} tokens, the row has {len}"));
        }
        if let Some(token) = tokens.iter().find(|&&token| token >= vocab_width) {
            return refuse(format!("{request}: target {token} is outside the vocabulary of {vocab_width}"));
        }
        let target = |(row, &token)| Target { row, token, alternatives: *alternatives };
        self.targets.extend((at + first..).zip(tokens).map(target));
        Ok(())
    }

    /// Two rows of one request, or two rows writing one page, would read each other's half-written memory.
    fn refuse_doubles(&mut self, step: &Step) -> Result<(), ExecutorError> {
        self.requests.extend(step.rows.iter().map(|row| row.request.0));
        self.requests.sort_unstable();
        if let Some(pair) = self.requests.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse(format!("r{}: twice in a step; join its tokens into one row", pair[0]));
        }
        self.written.sort_unstable();
        if let Some(pair) = self.written.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse(format!(
                "page {} would be written twice in a step; pages being written are not shared",
                pair[0]
            ));
        }
        Ok(())
    }
}

fn refuse<T>(reason: String) -> Result<T, ExecutorError> {
    Err(ExecutorError::Step(reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::ids::RequestId;

    const LIMITS: ExecutorLimits =
        ExecutorLimits { pages: 8, rows_max: 3, step_tokens_max: 40, context_len: 64, vocab_width: 100 };

    fn row(request: u64, start: u32, tokens: usize, pages: &[PageId]) -> Row {
        Row {
            request: RequestId(request),
            start,
            tokens: vec![7; tokens],
            pages: pages.to_vec(),
            draw: None,
            targets: None,
        }
    }

    fn targets(first: u32, tokens: &[TokenId]) -> Option<Targets> {
        Some(Targets { first, tokens: tokens.to_vec(), alternatives: 2 })
    }

    #[test]
    fn targets_stand_beside_the_rows_that_predict_them() {
        let mut batch = Batch::default();
        let rows = vec![
            row(1, 0, 2, &[0]),
            Row { targets: targets(1, &[8, 9]), ..row(2, 0, 3, &[1]) },
            Row { targets: targets(0, &[4]), ..row(3, 5, 1, &[2]) },
        ];
        assert_eq!(batch.fill(&Step { rows }, &LIMITS), Ok(()));
        let found: Vec<_> = batch.targets.iter().map(|target| (target.row, target.token)).collect();
        assert_eq!(found, [(3, 8), (4, 9), (5, 4)]);
        assert_eq!(batch.fill(&Step { rows: vec![row(1, 0, 2, &[3])] }, &LIMITS), Ok(()));
        assert!(batch.targets.is_empty());
    }

    fn fault(rows: Vec<Row>) -> String {
        match Batch::default().fill(&Step { rows }, &LIMITS) {
            Err(ExecutorError::Step(reason)) => reason,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn a_ragged_step_is_laid_out_row_after_row() {
        let mut batch = Batch::default();
        let step = Step { rows: vec![row(1, 30, 3, &[4, 2, 6]), row(2, 0, 1, &[1, 0])] };
        assert_eq!(batch.fill(&step, &LIMITS), Ok(()));
        assert_eq!(batch.positions, [30, 31, 32, 0]);
        assert_eq!(batch.spans[0], Span { row: 0, len: 3, start: 30, page: 0, pages: 3 });
        assert_eq!(batch.spans[1], Span { row: 3, len: 1, start: 0, page: 3, pages: 1 });
        assert_eq!(batch.spans[1].table(&batch), [1]);
        assert_eq!(batch.outputs, [0u32; 0]);
        assert_eq!(batch.fill(&Step { rows: vec![row(1, 0, 2, &[3])] }, &LIMITS), Ok(()));
        assert_eq!(batch.pages, [3]);
    }

    #[test]
    fn everything_out_of_range_is_refused_by_name() {
        let cases: Vec<(Vec<Row>, &str)> = vec![
            (vec![row(1, 0, 0, &[0])], "r1: no tokens"),
            (vec![row(1, 60, 5, &[0, 1, 2, 3, 4])], "ends at position 65"),
            (vec![row(1, u32::MAX, 1, &[0])], "ends at position 4294967296"),
            (vec![row(1, 15, 2, &[0])], "1 pages for 17 tokens, 2 are needed"),
            (vec![row(1, 15, 2, &[0, 8])], "page 8 does not exist"),
            (vec![row(1, 0, 30, &[0, 1]), row(2, 0, 30, &[2, 3])], "60 tokens in a step"),
            ((0..4).map(|r| row(r, 0, 1, &[r as u32])).collect(), "4 rows in a step"),
            (vec![row(1, 0, 1, &[0]), row(1, 1, 1, &[1])], "r1: twice"),
            (vec![row(1, 16, 1, &[0, 5]), row(2, 0, 1, &[5])], "page 5 would be written twice"),
            (vec![Row { tokens: vec![99, 100], ..row(1, 0, 2, &[0]) }], "token 100 is outside"),
            (vec![Row { targets: targets(1, &[5, 6]), ..row(1, 0, 2, &[0]) }], "target comes after 3 tokens"),
            (vec![Row { targets: targets(0, &[99, 100]), ..row(1, 0, 2, &[0]) }], "target 100 is outside"),
        ];
        for (rows, expected) in cases {
            let found = fault(rows);
            assert!(found.contains(expected), "{found:?} should say {expected:?}");
        }
    }

    #[test]
    fn prefix_pages_may_be_shared_for_reading() {
        assert_eq!(fault(vec![row(1, 16, 1, &[0, 5]), row(2, 16, 1, &[0, 6])]), "Ok(())");
    }
}
