//! The blocks decoders are built from: attention, gated MLP, and the loop over layers. Owner: one `Decoder` per loaded
//! model, shared read-only by its executors. Invariant: blocks hold weights and call operations; they keep no state and
//! know neither devices nor requests.

use crate::batch::Batch;
use crate::ops::{
    Ask, AttentionRows, GateUp, GatedRows, HeadInput, HeadNorms, HeadOutput, Linear, Norm, Ops, OpsError, Qkv,
    Residual, Site, Tail,
};
use crate::weights::ModelConfig;
use tokenrouter_core::ids::TokenId;

/// Causal self-attention with grouped key/value heads.
pub struct Attention<O: Ops> {
    /// Projections of the input.
    pub qkv: Qkv<O::Matrix, O::Vector>,
    /// Norms of each head of q and k, where the architecture has them.
    pub head_norms: Option<HeadNorms<O::Vector>>,
    /// Projection back to the residual stream.
    pub out: Linear<O::Matrix, O::Vector>,
}

/// `down(silu(gate(x)) * up(x))`
pub struct GatedMlp<O: Ops> {
    /// The two matrices that share the input.
    pub gate_up: GateUp<O::Matrix, O::Vector>,
    /// Projection back to the residual stream.
    pub down: Linear<O::Matrix, O::Vector>,
}

/// A pre-norm decoder layer.
pub struct Layer<O: Ops> {
    /// Before attention.
    pub attention_norm: Norm<O::Vector>,
    /// First half.
    pub attention: Attention<O>,
    /// Before the MLP.
    pub mlp_norm: Norm<O::Vector>,
    /// Second half.
    pub mlp: GatedMlp<O>,
}

/// A whole decoder.
pub struct Decoder<O: Ops> {
    /// Token embedding `[vocab, hidden]`.
    pub embed: O::Matrix,
    /// Layers, in order.
    pub layers: Vec<Layer<O>>,
    /// Before the head.
    pub final_norm: Norm<O::Vector>,
    /// Output head `[vocab, hidden]`; `None` = the embedding.
    pub head: Option<O::Matrix>,
    /// Rotation of all layers.
    pub rope: O::Rope,
}

/// Activation memory of a forward pass.
pub struct Scratch<O: Ops> {
    residual: Residual<O::Rows>,
    normed: O::Rows,
    attention: AttentionRows<O::Rows>,
    gated: GatedRows<O::Rows>,
    last: Residual<O::Rows>,
    /// Hidden rows after the final norm, one per output row of the batch.
    pub outputs: O::Rows,
    /// What the head says of them.
    pub head: HeadOutput<O>,
}

/// How large batches may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchSizes {
    /// Tokens.
    pub tokens_max: usize,
    /// Output rows.
    pub outputs_max: usize,
    /// Ids below this are tokens, of the `vocab` that a row of logits has.
    pub real_vocab: usize,
}

impl<O: Ops> Scratch<O> {
    /// Memory for batches of these sizes.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    pub fn new(ops: &mut O, config: &ModelConfig, sizes: ScratchSizes) -> Result<Self, OpsError> {
        let ScratchSizes { tokens_max, outputs_max, real_vocab } = sizes;
        let (hidden, q, kv) = (config.hidden, config.q_width(), config.kv_width());
        Ok(Scratch {
            residual: Residual { sum: ops.rows(tokens_max, hidden)?, delta: ops.rows(tokens_max, hidden)? },
            normed: ops.rows(tokens_max, hidden)?,
            attention: AttentionRows {
                q: ops.rows(tokens_max, q)?,
                k: ops.rows(tokens_max, kv)?,
                v: ops.rows(tokens_max, kv)?,
                out: ops.rows(tokens_max, q)?,
            },
            gated: GatedRows { gate: ops.rows(tokens_max, config.ffn)?, up: ops.rows(tokens_max, config.ffn)? },
            last: Residual { sum: ops.rows(outputs_max, hidden)?, delta: ops.rows(outputs_max, hidden)? },
            outputs: ops.rows(outputs_max, hidden)?,
            head: HeadOutput::new(ops, outputs_max, (config.vocab, real_vocab))?,
        })
    }

    /// Bytes of the rows of [`Scratch::new`] with these sizes.
    pub fn bytes(config: &ModelConfig, tokens_max: usize, outputs_max: usize) -> u64 {
        let per_token = 3 * config.hidden + 2 * config.q_width() + 2 * config.kv_width() + 2 * config.ffn;
        let per_output = 3 * config.hidden + config.vocab;
        4 * (per_token as u64 * tokens_max as u64 + per_output as u64 * outputs_max as u64)
    }
}

/// What a forward pass writes to.
pub struct Memory<O: Ops> {
    /// Keys and values of all sequences.
    pub kv: O::Kv,
    /// Activations of this pass.
    pub scratch: Scratch<O>,
}

impl<O: Ops> Decoder<O> {
    /// Runs a batch: writes its keys and values to `memory.kv`; what [`Decoder::outputs`] reads is in `memory.scratch` then.
    pub fn forward(&self, ops: &mut O, batch: &Batch, memory: &mut Memory<O>) {
        ops.embed(&self.embed, batch, &mut memory.scratch.residual.sum);
        for (index, layer) in self.layers.iter().enumerate() {
            let scratch = &mut memory.scratch;
            if index == 0 {
                ops.rms_norm(&scratch.residual.sum, &layer.attention_norm, &mut scratch.normed);
            } else {
                ops.add_rms_norm(&mut scratch.residual, &layer.attention_norm, &mut scratch.normed);
            }
            let head_norms = layer.attention.head_norms.as_ref();
            let site = Site { layer: index, batch, rope: &self.rope, head_norms };
            layer.attention.forward(ops, &site, memory);
            let scratch = &mut memory.scratch;
            ops.add_rms_norm(&mut scratch.residual, &layer.mlp_norm, &mut scratch.normed);
            layer.mlp.forward(ops, scratch);
        }
    }

    /// Final norm of the rows of the last batch that are staged as outputs.
    pub fn outputs(&self, ops: &mut O, rows: &[u32], scratch: &mut Scratch<O>) {
        ops.select(&scratch.residual.sum, rows, &mut scratch.last.sum);
        ops.select(&scratch.residual.delta, rows, &mut scratch.last.delta);
        ops.add_rms_norm(&mut scratch.last, &self.final_norm, &mut scratch.outputs);
    }

    /// The head on all outputs: answers to `asks`, and the logits that they keep.
    pub fn head(&self, ops: &mut O, (asks, column): (&[Ask], Option<TokenId>), scratch: &mut Scratch<O>) {
        let matrix = self.head.as_ref().unwrap_or(&self.embed);
        ops.head(HeadInput { hidden: &scratch.outputs, matrix, asks, column }, &mut scratch.head);
    }

    /// Multiplies outputs of the last batch once more, those that are staged as outputs now, and keeps their logits in the
    /// place of all others.
    pub fn logits(&self, ops: &mut O, (tail, column): (&Tail, Option<TokenId>), scratch: &mut Scratch<O>) {
        let (asks, matrix) = (&tail.asks[..], self.head.as_ref().unwrap_or(&self.embed));
        ops.select(&scratch.outputs, &tail.outputs, &mut scratch.last.sum);
        ops.head(HeadInput { hidden: &scratch.last.sum, matrix, asks, column }, &mut scratch.head);
    }
}

impl<O: Ops> Attention<O> {
    /// From `normed` to `residual.delta`.
    fn forward(&self, ops: &mut O, site: &Site<'_, O>, memory: &mut Memory<O>) {
        let Memory { kv, scratch } = memory;
        ops.qkv(&scratch.normed, &self.qkv, &mut scratch.attention);
        ops.rotate_and_store(site, &mut scratch.attention, kv);
        ops.attend(site, &mut scratch.attention, kv);
        ops.linear(&scratch.attention.out, &self.out, &mut scratch.residual.delta);
    }
}

impl<O: Ops> GatedMlp<O> {
    /// From `normed` to `residual.delta`.
    fn forward(&self, ops: &mut O, scratch: &mut Scratch<O>) {
        ops.gate_up(&scratch.normed, &self.gate_up, &mut scratch.gated);
        ops.linear(&scratch.gated.gate, &self.down, &mut scratch.residual.delta);
    }
}
