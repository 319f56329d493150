//! A step as kernels read it. Owner: the device. Invariant: in a recorded shape every request has the same number of rows,
//! and rows that pad have no position and no slot, so they touch no page that lives.

use super::draws;
use crate::batch::Batch;
use crate::ops::{Ask, DrawAt, Shape, Tail};
use tokenrouter_kernels::attention::PAGE_TOKENS;
use tokenrouter_kernels::cuda::{self, NONE, Span, StepInput, ask};

/// What was staged.
#[derive(Clone, Debug, Default)]
pub struct Staged {
    /// Rows, padding included.
    pub tokens: usize,
    /// Requests, padding included.
    pub spans: usize,
    /// Rows of the longest request, padding included.
    pub longest: usize,
    /// Outputs, padding included.
    pub outputs: usize,
    /// What is asked about each output that is no padding.
    pub asks: Vec<Ask>,
    /// Temperature at which the token of each is drawn, where one is.
    pub temperatures: Vec<f32>,
}

impl Staged {
    /// Outputs that are no padding.
    pub fn asked(&self) -> usize {
        self.asks.len()
    }

    /// Whether a list of highest logits is wanted.
    pub fn lists(&self) -> bool {
        self.asks.iter().any(|ask| ask.top_k.max(ask.real_top_k) > 0)
    }
}

/// Lays a batch out, in a shape that has room for it or as it is.
pub fn fill(
    input: &mut StepInput,
    (batch, tail): (&Batch, &Tail),
    (shape, vocab): (Option<Shape>, u32),
    staged: &mut Staged,
) {
    input.clear();
    input.pages.extend_from_slice(&batch.pages);
    let longest = batch.spans.iter().map(|span| span.len as usize).max().unwrap_or(0);
    let rows = shape.map_or(batch.spans.len(), |shape| shape.rows);
    for row in 0..rows {
        let first = input.tokens.len();
        let mut end = first + shape.map_or(0, |shape| shape.tokens);
        let mut real = Span { first: first as u32, ..Span::default() };
        if let Some(span) = batch.spans.get(row) {
            real = Span { len: span.len, start: span.start, table: span.page, ..real };
            for index in span.row..span.row + span.len {
                let position = batch.positions[index as usize];
                let page = batch.pages[(span.page + position / PAGE_TOKENS as u32) as usize];
                input.tokens.push(batch.tokens[index as usize]);
                input.positions.push(position);
                input.slots.push(page * PAGE_TOKENS as u32 + position % PAGE_TOKENS as u32);
            }
            end = end.max(first + span.len as usize);
        }
        input.tokens.resize(end, 0);
        input.positions.resize(end, NONE);
        input.slots.resize(end, NONE);
        input.row_of.resize(end, row as u32);
        input.spans.push(real);
    }
    fill_tail(input, (batch, tail), (shape, vocab));
    staged.tokens = input.tokens.len();
    staged.spans = rows;
    staged.longest = shape.map_or(longest, |shape| shape.tokens);
    staged.outputs = input.outputs.len();
    staged.asks.clone_from(&tail.asks);
    staged.temperatures.clear();
    staged.temperatures.extend(tail.draws.iter().map(|at| at.draw.params.temperature));
}

fn fill_tail(input: &mut StepInput, (batch, tail): (&Batch, &Tail), (shape, vocab): (Option<Shape>, u32)) {
    for &row in &tail.outputs {
        let Some(shape) = shape else {
            input.outputs.push(row);
            continue;
        };
        let request = batch.spans.partition_point(|span| span.row <= row) - 1;
        input.outputs.push((request * shape.tokens) as u32 + row - batch.spans[request].row);
    }
    input.asks.extend(tail.asks.iter().map(kernel_ask));
    for DrawAt { draw, position } in &tail.draws {
        draws::push((draw, *position), vocab, input);
    }
    let outputs = shape.map_or(input.outputs.len(), |shape| shape.rows);
    input.outputs.resize(outputs, 0);
    input.asks.resize(outputs, cuda::Ask { target: NONE, ..cuda::Ask::default() });
    input.draws.resize(outputs, draws::PADDING);
}

fn kernel_ask(wanted: &Ask) -> cuda::Ask {
    let flag = |wanted: bool, flag: u32| if wanted { flag } else { 0 };
    cuda::Ask {
        flags: ask::PRESENT | flag(wanted.distribution, ask::DISTRIBUTION),
        real_vocab: wanted.real_vocab.max(1) as u32,
        top_k: wanted.top_k as u32,
        real_top_k: wanted.real_top_k as u32,
        target: wanted.target.unwrap_or(NONE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::executor::{ExecutorLimits, Row, Step};
    use tokenrouter_core::ids::RequestId;

    fn batch() -> Batch {
        let row = |request, start, tokens: &[u32], pages: &[u32]| Row {
            request: RequestId(request),
            start,
            tokens: tokens.to_vec(),
            pages: pages.to_vec(),
            draw: Some(Default::default()),
            targets: None,
        };
        let limits = ExecutorLimits { pages: 9, rows_max: 8, step_tokens_max: 64, context_len: 64, vocab_width: 50 };
        let rows = vec![row(1, 15, &[3, 4, 5], &[7, 2]), row(2, 0, &[6], &[5])];
        let mut batch = Batch::default();
        batch.fill(&Step { rows }, &limits).expect("a good step");
        batch
    }

    fn staged(shape: Option<Shape>) -> (StepInput, Staged) {
        let batch = batch();
        let asks = vec![Ask { real_vocab: 50, ..Ask::default() }; 2];
        let tail = Tail { outputs: batch.outputs.clone(), asks, draws: vec![DrawAt::default(); 2], scored: Vec::new() };
        let (mut input, mut staged) = (StepInput::default(), Staged::default());
        fill(&mut input, (&batch, &tail), (shape, 50), &mut staged);
        (input, staged)
    }

    #[test]
    fn a_batch_is_laid_out_as_it_is() {
        let (input, staged) = staged(None);
        assert_eq!((input.tokens, input.positions), (vec![3, 4, 5, 6], vec![15, 16, 17, 0]));
        assert_eq!((input.slots, input.row_of), (vec![7 * 16 + 15, 2 * 16, 2 * 16 + 1, 5 * 16], vec![0, 0, 0, 1]));
        assert_eq!((input.outputs, input.pages), (vec![2, 3], vec![7, 2, 5]));
        assert_eq!(input.spans[1], Span { first: 3, len: 1, start: 0, table: 2 });
        assert_eq!((staged.tokens, staged.spans, staged.longest, staged.outputs), (4, 2, 3, 2));
    }

    #[test]
    fn a_shape_is_filled_with_rows_that_touch_nothing() {
        let (input, staged) = staged(Some(Shape { rows: 4, tokens: 4 }));
        assert_eq!(input.tokens, [3, 4, 5, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let real = [0, 1, 2, 4];
        for index in 0..16 {
            let padding = !real.contains(&index);
            assert_eq!((input.positions[index] == NONE, input.slots[index] == NONE), (padding, padding), "{index}");
            assert_eq!(input.row_of[index] as usize, index / 4);
        }
        assert_eq!(input.outputs, [2, 4, 0, 0]);
        assert_eq!(input.spans.iter().map(|span| span.len).collect::<Vec<_>>(), [3, 1, 0, 0]);
        assert_eq!(input.asks.iter().map(|ask| ask.flags).collect::<Vec<_>>(), [1, 1, 0, 0]);
        assert_eq!((staged.tokens, staged.spans, staged.longest, staged.outputs), (16, 4, 4, 4));
        assert_eq!(staged.asked(), 2);
    }
}
