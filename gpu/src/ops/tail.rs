//! What is asked about the outputs of a step, and what is found. Owner: the runner asks, the device answers. Invariant: only
//! what was asked for is defined.

use super::{Ops, OpsError};
use crate::sampling::SampleError;
use tokenrouter_core::executor::Draw;
use tokenrouter_core::ids::TokenId;

/// What is asked about one row of logits, besides its highest entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask {
    /// Find the highest logit among the ids below this; at least 1.
    pub real_vocab: usize,
    /// Compute the entropy and the log of the sum of exponentials.
    pub distribution: bool,
    /// How many of the highest logits of the whole row to list.
    pub top_k: usize,
    /// How many of the highest logits of the real vocabulary to list.
    pub real_top_k: usize,
    /// Somebody reads the logits themselves.
    pub keep: bool,
    /// An id whose logit is wanted; the row is kept then.
    pub target: Option<TokenId>,
}

/// How the token of an output is drawn.
#[derive(Clone, Debug, Default)]
pub struct DrawAt {
    /// Parameters, history, bans, mask.
    pub draw: Draw,
    /// Position of the token.
    pub position: u32,
}

/// What is asked about the outputs of a step.
#[derive(Clone, Debug, Default)]
pub struct Tail {
    /// Rows of the batch that are outputs.
    pub outputs: Vec<u32>,
    /// One for each output.
    pub asks: Vec<Ask>,
    /// One for each output; none if nothing is drawn.
    pub draws: Vec<DrawAt>,
    /// Outputs that the learned head scores, ascending.
    pub scored: Vec<u32>,
}

impl Tail {
    /// Questions about so many rows of padding.
    pub fn padding(rows: usize, scored: bool) -> Tail {
        Tail {
            outputs: vec![0; rows],
            asks: vec![Ask::default(); rows],
            draws: vec![DrawAt::default(); rows],
            scored: if scored { (0..rows as u32).collect() } else { Vec::new() },
        }
    }

    /// Nothing is asked.
    pub fn clear(&mut self) {
        self.outputs.clear();
        self.asks.clear();
        self.draws.clear();
        self.scored.clear();
    }
}

/// Size of a pass: requests, and tokens of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// Requests.
    pub rows: usize,
    /// Tokens of each.
    pub tokens: usize,
}

/// What a row of logits has to say; parts that were not asked for are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reduced {
    /// The highest logit of the real vocabulary, the lowest id among equals.
    pub argmax: TokenId,
    /// That logit.
    pub highest: f32,
    /// `ln sum exp(logit)` over the whole row.
    pub log_sum_exp: f32,
    /// `-sum p ln p` over the whole row, in nats.
    pub entropy: f32,
    /// Logit of [`Ask::target`].
    pub target: f32,
    /// The highest logits of the whole row with their ids, descending, ties by lower id. Minus infinity is left out.
    pub top: Vec<(TokenId, f32)>,
    /// The same of the real vocabulary.
    pub real_top: Vec<(TokenId, f32)>,
}

/// What the output head multiplies, and who asks what about it.
#[derive(Debug)]
pub struct HeadInput<'a, O: Ops + ?Sized> {
    /// Hidden rows after the final norm.
    pub hidden: &'a O::Rows,
    /// The head, `[vocab, hidden]`.
    pub matrix: &'a O::Matrix,
    /// One for each row.
    pub asks: &'a [Ask],
    /// A column that is taken out of the rows: its values go to [`HeadOutput::column`], and minus infinity takes their
    /// place, so that the column has no part in anything any more. NaN and plus infinity stay where they are, to be found.
    pub column: Option<TokenId>,
}

/// What becomes of it, after [`Ops::finish`].
#[derive(Debug)]
pub struct HeadOutput<O: Ops + ?Sized> {
    /// Answers, one for each row.
    pub reduced: Vec<Result<Reduced, Fault>>,
    /// Tokens that were drawn and their raw logits, one for each row; rows with a fault have none.
    pub drawn: Vec<Result<(TokenId, f32), SampleError>>,
    /// Scores of the learned head, one for each row; those of rows that are not scored are not defined.
    pub scores: Vec<f32>,
    /// Values of the column that was taken out, one for each row.
    pub column: Vec<f32>,
    /// Raw logits `[rows, vocab]`; rows that were not to be kept are not defined.
    pub logits: O::Rows,
    /// What the device keeps of all this.
    pub answers: O::Answers,
}

impl<O: Ops> HeadOutput<O> {
    /// Memory for so many rows of `vocab` logits, of which the first `real_vocab` are tokens.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    pub fn new(ops: &mut O, rows_max: usize, (vocab, real_vocab): (usize, usize)) -> Result<Self, OpsError> {
        Ok(HeadOutput {
            reduced: Vec::new(),
            drawn: Vec::new(),
            scores: Vec::new(),
            column: Vec::new(),
            logits: ops.rows(rows_max, vocab)?,
            answers: ops.answers(rows_max, (vocab, real_vocab))?,
        })
    }
}

/// A row of logits that is no distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// At least one entry is NaN or plus infinity.
    #[error("contain nan or infinity; the weights are damaged or overflow")]
    NotFinite,
    /// No real token is left.
    #[error("are all minus infinity; the weights are damaged")]
    Empty,
}
