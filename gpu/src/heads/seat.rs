//! A learned head at work in a runner. Owner: the runner. Invariant: after a step every drawn row that asked for a score
//! has one, and lists no more of the highest logits than it asked for.

use super::math;
use super::network::{Network, NetworkInput, Scratch};
use crate::ops::{Ops, OpsError};
use std::sync::Arc;
use tokenrouter_core::executor::{Drawn, RowOutput, Step};
use tokenrouter_core::ids::TokenId;

/// A head with its scratch.
pub struct Seat<O: Ops>(Kind<O>);

enum Kind<O: Ops> {
    Network(Box<Busy<O>>),
    Row(TokenId),
}

struct Busy<O: Ops> {
    network: Arc<Network<O>>,
    scratch: Scratch<O>,
    outputs: Vec<u32>,
    tokens: Vec<TokenId>,
    top: Vec<f32>,
    scores: Vec<f32>,
}

/// What a head reads of the model.
pub struct Source<'a, O: Ops> {
    /// Hidden rows after the final norm, of all outputs of the step.
    pub hidden: &'a O::Rows,
    /// The model's token embedding.
    pub embed: &'a O::Matrix,
    /// Raw logits of the head's own column, of all outputs of the step, where it has one.
    pub column: &'a [f32],
}

impl<O: Ops> Seat<O> {
    /// A network that scores up to `rows_max` rows a step.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    pub fn network(ops: &mut O, network: Arc<Network<O>>, rows_max: usize) -> Result<Self, OpsError> {
        let scratch = Scratch::new(ops, network.config(), rows_max)?;
        let (outputs, tokens, top, scores) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Ok(Seat(Kind::Network(Box::new(Busy { network, scratch, outputs, tokens, top, scores }))))
    }

    /// The row of the output layer of this token.
    pub fn row(token: TokenId) -> Self {
        Seat(Kind::Row(token))
    }

    /// How many of the highest logits it reads.
    pub fn top_k(&self) -> usize {
        match &self.0 {
            Kind::Network(busy) => busy.network.config().logits_size,
            Kind::Row(_) => 0,
        }
    }

    /// The column of the logits that is the head's own and has to be taken out of them, where it has one.
    pub fn column(&self) -> Option<TokenId> {
        match &self.0 {
            Kind::Network(_) => None,
            Kind::Row(token) => Some(*token),
        }
    }

    /// Writes the scores of the drawn rows that asked for one.
    pub fn score(&mut self, ops: &mut O, source: Source<'_, O>, (step, rows): (&Step, &mut [RowOutput])) {
        let mut wanted = wanted(step, rows);
        match &mut self.0 {
            Kind::Row(_) => {
                for (output, drawn) in wanted {
                    drawn.signals.score = Some(math::sigmoid(source.column[output as usize]));
                }
            }
            Kind::Network(busy) => busy.score(ops, source, &mut wanted),
        }
        for (row, output) in step.rows.iter().zip(rows) {
            if let (Some(draw), RowOutput::Drawn(drawn)) = (&row.draw, output) {
                drawn.signals.top.truncate(usize::from(draw.needs.top_k));
            }
        }
    }
}

impl<O: Ops> Busy<O> {
    fn score(&mut self, ops: &mut O, source: Source<'_, O>, wanted: &mut [(u32, &mut Drawn)]) {
        if wanted.is_empty() {
            return;
        }
        self.outputs.clear();
        self.tokens.clear();
        self.top.clear();
        let count = self.network.config().logits_size;
        for (output, drawn) in wanted.iter() {
            self.outputs.push(*output);
            self.tokens.push(drawn.token);
            self.top.extend(drawn.signals.top.iter().take(count).map(|&(_, logit)| logit));
            self.top.resize(self.outputs.len() * count, f32::NEG_INFINITY);
        }
        let Busy { network, scratch, outputs, tokens, top, scores } = self;
        let input = NetworkInput { hidden: source.hidden, embed: source.embed, outputs, tokens, top };
        network.score(ops, input, (scratch, scores));
        for ((_, drawn), score) in wanted.iter_mut().zip(scores) {
            drawn.signals.score = Some(*score);
        }
    }
}

/// The drawn rows that asked for a score, with their places among the outputs.
fn wanted<'a>(step: &Step, rows: &'a mut [RowOutput]) -> Vec<(u32, &'a mut Drawn)> {
    let drawing = step.rows.iter().zip(rows).filter_map(|(row, output)| Some((row.draw.as_ref()?, output)));
    let asked = drawing.enumerate().filter_map(|(output, (draw, row))| match row {
        RowOutput::Drawn(drawn) if draw.needs.score => Some((output as u32, drawn)),
        _ => None,
    });
    asked.collect()
}
