//! The blocks decoders are built from: attention, gated MLP, and the loop over layers. Owner: one `Decoder` per loaded
//! model, shared read-only by its executors. Invariant: blocks hold weights and call operations; they keep no state and
//! know neither devices nor requests.

use crate::batch::Batch;
use crate::ops::{GateUp, GatedRows, HeadNorms, Linear, Norm, Ops, OpsError, Qkv, QkvRows, Site};
use crate::weights::ModelConfig;

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
    hidden: O::Rows,
    normed: O::Rows,
    delta: O::Rows,
    qkv: QkvRows<O::Rows>,
    attended: O::Rows,
    gated: GatedRows<O::Rows>,
    last: O::Rows,
    last_delta: O::Rows,
    /// Hidden rows after the final norm, one per output row of the batch.
    pub outputs: O::Rows,
    /// Raw logits, one row per output row of the batch.
    pub logits: O::Rows,
}

impl<O: Ops> Scratch<O> {
    /// Memory for batches of up to `tokens_max` tokens and `outputs_max` output rows.
    ///
    /// # Errors
    /// [`OpsError`] when there is not enough memory.
    pub fn new(ops: &mut O, config: &ModelConfig, tokens_max: usize, outputs_max: usize) -> Result<Self, OpsError> {
        Ok(Scratch {
            hidden: ops.rows(tokens_max, config.hidden)?,
            normed: ops.rows(tokens_max, config.hidden)?,
            delta: ops.rows(tokens_max, config.hidden)?,
            qkv: QkvRows {
                q: ops.rows(tokens_max, config.q_width())?,
                k: ops.rows(tokens_max, config.kv_width())?,
                v: ops.rows(tokens_max, config.kv_width())?,
            },
            attended: ops.rows(tokens_max, config.q_width())?,
            gated: GatedRows { gate: ops.rows(tokens_max, config.ffn)?, up: ops.rows(tokens_max, config.ffn)? },
            last: ops.rows(outputs_max, config.hidden)?,
            last_delta: ops.rows(outputs_max, config.hidden)?,
            outputs: ops.rows(outputs_max, config.hidden)?,
            logits: ops.rows(outputs_max, config.vocab)?,
        })
    }

    /// Bytes of [`Scratch::new`] with these arguments.
    pub fn bytes(config: &ModelConfig, tokens_max: usize, outputs_max: usize) -> u64 {
        let per_token = 3 * config.hidden + 2 * config.q_width() + 2 * config.kv_width() + 2 * config.ffn;
        let per_output = 3 * config.hidden + config.vocab;
        4 * (per_token as u64 * tokens_max as u64 + per_output as u64 * outputs_max as u64)
    }
}

impl<O: Ops> Decoder<O> {
    /// Runs a batch: writes its keys and values to `kv`, and the hidden rows and logits of its outputs to `scratch`.
    pub fn forward(&self, ops: &mut O, batch: &Batch, kv: &mut O::Kv, scratch: &mut Scratch<O>) {
        ops.embed(&self.embed, &batch.tokens, &mut scratch.hidden);
        for (index, layer) in self.layers.iter().enumerate() {
            if index == 0 {
                ops.rms_norm(&scratch.hidden, &layer.attention_norm, &mut scratch.normed);
            } else {
                ops.add_rms_norm(&mut scratch.hidden, &scratch.delta, &layer.attention_norm, &mut scratch.normed);
            }
            let head_norms = layer.attention.head_norms.as_ref();
            let site = Site { layer: index, batch, rope: &self.rope, head_norms };
            layer.attention.forward(ops, &site, kv, scratch);
            ops.add_rms_norm(&mut scratch.hidden, &scratch.delta, &layer.mlp_norm, &mut scratch.normed);
            layer.mlp.forward(ops, scratch);
        }
        if batch.outputs.is_empty() {
            return;
        }
        ops.select(&scratch.hidden, &batch.outputs, &mut scratch.last);
        ops.select(&scratch.delta, &batch.outputs, &mut scratch.last_delta);
        ops.add_rms_norm(&mut scratch.last, &scratch.last_delta, &self.final_norm, &mut scratch.outputs);
        ops.multiply(&scratch.outputs, self.head.as_ref().unwrap_or(&self.embed), &mut scratch.logits);
    }
}

impl<O: Ops> Attention<O> {
    /// From `normed` to `delta`.
    fn forward(&self, ops: &mut O, site: &Site<'_, O>, kv: &mut O::Kv, scratch: &mut Scratch<O>) {
        ops.qkv(&scratch.normed, &self.qkv, &mut scratch.qkv);
        ops.rotate_and_store(site, &mut scratch.qkv, kv);
        ops.attend(site, &scratch.qkv.q, kv, &mut scratch.attended);
        ops.linear(&scratch.attended, &self.out, &mut scratch.delta);
    }
}

impl<O: Ops> GatedMlp<O> {
    /// From `normed` to `delta`.
    fn forward(&self, ops: &mut O, scratch: &mut Scratch<O>) {
        ops.gate_up(&scratch.normed, &self.gate_up, &mut scratch.gated);
        ops.linear(&scratch.gated.gate, &self.down, &mut scratch.delta);
    }
}
