//! A quantised model turned into an F32 one, so that nothing rounds but float32 arithmetic and whole models can be
//! compared to the fifth decimal; or into a BF16 one. Owner: the numerics tests.

use safetensors::tensor::{Dtype, View, serialize_to_file};
use serde_json::json;
use std::borrow::Cow;
use std::path::Path;
use tokenrouter_gpu::weights::{self, ModelConfig, ModelFiles, Tensor};
use tokenrouter_kernels::quant::dequantize_row;

/// The same model with every tensor dequantised into a file under `folder`, which must outlive the answer's use.
///
/// # Panics
/// When a tensor cannot be read or the folder not be written: a failed test.
pub fn dequantised(files: ModelFiles, folder: &Path) -> ModelFiles {
    written(files, (folder, Dtype::F32))
}

/// The same model with every tensor rounded to BF16 into a file under `folder`, which must outlive the answer's use.
///
/// # Panics
/// As [`dequantised`].
pub fn rounded(files: ModelFiles, folder: &Path) -> ModelFiles {
    written(files, (folder, Dtype::BF16))
}

fn written(files: ModelFiles, (folder, dtype): (&Path, Dtype)) -> ModelFiles {
    let path = folder.join("model.safetensors");
    let names = files.config.tensors().into_iter().map(|(name, _)| name);
    let tensors = names.map(|name| {
        let tensor = files.weights.tensor(&name).unwrap_or_else(|error| panic!("{error}"));
        let shape = if tensor.rows() == 1 { vec![tensor.cols()] } else { tensor.shape.to_vec() };
        (hf_name(&name), Widened { shape, tensor, dtype })
    });
    serialize_to_file(tensors, None, &path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    for (name, text) in [("config.json", config(&files.config).to_string()), ("tokenizer.json", "{}".to_owned())] {
        std::fs::write(folder.join(name), text).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    // Only the tensors are taken from there: the shape, the rotation and the vocabulary stay those of the original.
    let wide = weights::open(folder).unwrap_or_else(|error| panic!("{error}"));
    ModelFiles { weights: wide.weights, ..files }
}

/// A tensor that becomes F32 or BF16 when it is written, so that one at a time is in memory.
struct Widened {
    shape: Vec<usize>,
    tensor: Tensor,
    dtype: Dtype,
}

/// The upper half of a float, rounded to nearest, ties to even; for finite values.
fn bf16(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes()
}

impl View for Widened {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let Tensor { format, bytes, .. } = &self.tensor;
        let mut out = Vec::with_capacity(self.data_len());
        let mut row = vec![0f32; self.tensor.cols()];
        for stored in bytes.as_slice().chunks_exact(bytes.as_slice().len() / self.tensor.rows()) {
            dequantize_row(*format, stored, &mut row).unwrap_or_else(|error| panic!("{}: {error}", self.tensor.name));
            match self.dtype {
                Dtype::BF16 => out.extend(row.iter().flat_map(|&value| bf16(value))),
                _ => out.extend(row.iter().flat_map(|value| value.to_le_bytes())),
            }
        }
        Cow::Owned(out)
    }

    fn data_len(&self) -> usize {
        let width = if self.dtype == Dtype::BF16 { 2 } else { 4 };
        width * self.tensor.rows() * self.tensor.cols()
    }
}

/// Name of a tensor in HF checkpoints.
fn hf_name(neutral: &str) -> String {
    match neutral {
        "embed.weight" => return "model.embed_tokens.weight".into(),
        "final_norm.weight" => return "model.norm.weight".into(),
        "head.weight" => return "lm_head.weight".into(),
        _ => {}
    }
    let parts = [
        ("attn_norm.", "input_layernorm."),
        ("attn_q.", "self_attn.q_proj."),
        ("attn_k.", "self_attn.k_proj."),
        ("attn_v.", "self_attn.v_proj."),
        ("attn_o.", "self_attn.o_proj."),
        ("attn_q_norm.", "self_attn.q_norm."),
        ("attn_k_norm.", "self_attn.k_norm."),
        ("ffn_norm.", "post_attention_layernorm."),
        ("ffn_gate.", "mlp.gate_proj."),
        ("ffn_up.", "mlp.up_proj."),
        ("ffn_down.", "mlp.down_proj."),
    ];
    let renamed = parts.iter().find(|(part, _)| neutral.contains(&format!(".{part}")));
    let (part, hf) = renamed.unwrap_or_else(|| panic!("no HF name for {neutral}"));
    format!("model.{}", neutral.replacen(part, hf, 1))
}

/// Enough of a `config.json` for the tensors to be checked against.
fn config(config: &ModelConfig) -> serde_json::Value {
    let class = match config.architecture.as_str() {
        "llama" => "LlamaForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        other => panic!("no class for architecture {other}"),
    };
    json!({
        "architectures": [class], "model_type": config.architecture, "hidden_size": config.hidden,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "intermediate_size": config.ffn,
        "vocab_size": config.vocab, "max_position_embeddings": config.context, "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head, "hidden_act": "silu",
    })
}
