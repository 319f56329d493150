//! What a step has to read and to multiply, counted from the matrices in memory. Owner: the loaded model. Invariant: a
//! floor, not an estimate: weights, keys and values are counted once for a step, however often a kernel comes back to
//! them, and nothing is counted that every implementation could do without.

use crate::cpu::Cpu;
use crate::models::blocks::Decoder;
use crate::weights::ModelConfig;
use tokenrouter_kernels::matmul::Matrix;

/// Bytes and multiply-adds of some matrices for one activation row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Products {
    /// Bytes of the weights as the kernels read them.
    pub bytes: u64,
    /// Bytes of the weights in the model's file.
    pub stored_bytes: u64,
    /// Multiply-adds with weights that are multiplied as 8-bit integers.
    pub int8_macs: u64,
    /// Multiply-adds with weights that are multiplied as floats.
    pub float_macs: u64,
}

impl Products {
    fn add(&mut self, matrix: &Matrix) {
        let macs = matrix.rows() as u64 * matrix.cols() as u64;
        self.bytes += matrix.weight_bytes() as u64;
        self.stored_bytes += matrix.stored_bytes() as u64;
        if matrix.format().is_quantized() { self.int8_macs += macs } else { self.float_macs += macs }
    }
}

/// What a model costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// The matrices of all layers: every token of a step passes them.
    pub layers: Products,
    /// The output head: every row that draws passes it.
    pub head: Products,
    /// Multiply-adds of attention (scores and values) for one token and each position that it sees.
    pub attention_macs: u64,
    /// Bytes of keys and values of one token.
    pub kv_bytes: u64,
}

/// What a step costs at least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Bytes of weights, as the kernels read them.
    pub weight_bytes: u64,
    /// Bytes of keys and values that are read.
    pub kv_bytes: u64,
    /// Multiply-adds of 8-bit integers.
    pub int8_macs: u64,
    /// Multiply-adds of floats, attention's among them.
    pub float_macs: u64,
}

impl Work {
    /// Counts the matrices of a decoder.
    pub(crate) fn of(decoder: &Decoder<Cpu>, config: &ModelConfig, kv_bytes: u64) -> Work {
        let mut work =
            Work { attention_macs: 2 * (config.layers * config.q_width()) as u64, kv_bytes, ..Work::default() };
        for layer in &decoder.layers {
            let (qkv, mlp) = (&layer.attention.qkv, &layer.mlp);
            let linears = [&qkv.q, &qkv.k, &qkv.v, &layer.attention.out, &mlp.gate_up.gate, &mlp.gate_up.up, &mlp.down];
            linears.iter().for_each(|linear| work.layers.add(&linear.weight));
        }
        work.head.add(decoder.head.as_ref().unwrap_or(&decoder.embed));
        work
    }

    /// A step of `rows` sequences that hold `context` tokens each and append `tokens` each; `draws` of them draw.
    pub fn step(&self, (rows, tokens, context): (u32, u32, u32), draws: u32) -> StepWork {
        let [rows, tokens, context, draws] = [rows, tokens, context, draws].map(u64::from);
        let head = if draws > 0 { self.head.bytes } else { 0 };
        // Token j of a row sees the context, the tokens before it and itself.
        let seen = rows * (tokens * context + tokens * (tokens + 1) / 2);
        StepWork {
            weight_bytes: self.layers.bytes + head,
            kv_bytes: rows * (context + tokens) * self.kv_bytes,
            int8_macs: rows * tokens * self.layers.int8_macs + draws * self.head.int8_macs,
            float_macs: rows * tokens * self.layers.float_macs
                + draws * self.head.float_macs
                + seen * self.attention_macs,
        }
    }
}

impl std::ops::Add for StepWork {
    type Output = StepWork;

    fn add(self, other: StepWork) -> StepWork {
        StepWork {
            weight_bytes: self.weight_bytes + other.weight_bytes,
            kv_bytes: self.kv_bytes + other.kv_bytes,
            int8_macs: self.int8_macs + other.int8_macs,
            float_macs: self.float_macs + other.float_macs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_read_weights_once_and_multiply_for_every_token() {
        let layers = Products { bytes: 1000, stored_bytes: 900, int8_macs: 800, float_macs: 10 };
        let head = Products { bytes: 50, stored_bytes: 45, int8_macs: 0, float_macs: 20 };
        let work = Work { layers, head, attention_macs: 3, kv_bytes: 7 };
        let one = StepWork { weight_bytes: 1050, kv_bytes: 7 * 129, int8_macs: 800, float_macs: 10 + 20 + 3 * 129 };
        assert_eq!(work.step((1, 1, 128), 1), one);
        let extend = work.step((2, 3, 10), 2);
        assert_eq!((extend.weight_bytes, extend.kv_bytes), (1050, 2 * 13 * 7));
        assert_eq!(extend.int8_macs, 6 * 800);
        assert_eq!(extend.float_macs, 6 * 10 + 2 * 20 + 2 * (11 + 12 + 13) * 3);
        let fed = work.step((1, 2, 0), 0);
        assert_eq!((fed.weight_bytes, fed.float_macs), (1000, 20 + 3 * 3), "no head where nothing is drawn");
        assert_eq!((one + fed).weight_bytes, 2050);
    }
}
