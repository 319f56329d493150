//! What the loaders must know about an architecture that its files do not say. Owner: the loaders. Invariant: an
//! architecture missing here is refused by name before anything else of the file is judged.

use super::rope::RopeLayout;

/// Facts about one architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Name in GGUF (`general.architecture`) and in `config.json` (`model_type`).
    pub name: &'static str,
    /// Class in the `architectures` list of `config.json`.
    pub hf_class: &'static str,
    /// Pairing of rotated components in GGUF files; HF checkpoints always use [`RopeLayout::HalfSplit`].
    pub gguf_rope: RopeLayout,
    /// Whether q, k and v have biases although `config.json` has no `attention_bias`.
    pub always_qkv_bias: bool,
    /// Whether each head of q and k is normalised before the rotation.
    pub qk_norm: bool,
}

/// Every architecture that can be loaded.
pub const ARCHITECTURES: [Architecture; 3] = [
    Architecture {
        name: "llama",
        hf_class: "LlamaForCausalLM",
        gguf_rope: RopeLayout::Interleaved,
        always_qkv_bias: false,
        qk_norm: false,
    },
    Architecture {
        name: "qwen2",
        hf_class: "Qwen2ForCausalLM",
        gguf_rope: RopeLayout::HalfSplit,
        always_qkv_bias: true,
        qk_norm: false,
    },
    Architecture {
        name: "qwen3",
        hf_class: "Qwen3ForCausalLM",
        gguf_rope: RopeLayout::HalfSplit,
        always_qkv_bias: false,
        qk_norm: true,
    },
];

/// The names of [`ARCHITECTURES`] for a message.
pub(super) fn supported() -> String {
    ARCHITECTURES.map(|architecture| architecture.name).join(", ")
}
