//! From the tensor names of the file formats to one neutral scheme. Owner: the loaders. Invariant: the mapping is one to
//! one per format, so that two names of one file never mean the same tensor unless the file repeats it.
//!
//! Neutral names: `embed.weight`, `final_norm.weight`, `head.weight`, and per layer `layers.N.PART.weight` or `.bias`
//! with PART one of `attn_norm`, `attn_q`, `attn_k`, `attn_v`, `attn_o`, `attn_q_norm`, `attn_k_norm`, `ffn_norm`,
//! `ffn_gate`, `ffn_up`, `ffn_down`.

/// Parts of a layer: HF name, GGUF name, neutral name.
const LAYER_PARTS: [(&str, &str, &str); 11] = [
    ("input_layernorm", "attn_norm", "attn_norm"),
    ("self_attn.q_proj", "attn_q", "attn_q"),
    ("self_attn.k_proj", "attn_k", "attn_k"),
    ("self_attn.v_proj", "attn_v", "attn_v"),
    ("self_attn.o_proj", "attn_output", "attn_o"),
    ("self_attn.q_norm", "attn_q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate", "ffn_gate"),
    ("mlp.up_proj", "ffn_up", "ffn_up"),
    ("mlp.down_proj", "ffn_down", "ffn_down"),
];

/// Name of GGUF's stored frequency divisors; not part of the neutral naming because it becomes configuration.
pub(super) const GGUF_ROPE_DIVISORS: &str = "rope_freqs.weight";

/// The neutral name of a tensor of an HF checkpoint.
pub(super) fn from_hf(source: &str) -> Option<String> {
    match source {
        "model.embed_tokens.weight" => return Some("embed.weight".into()),
        "model.norm.weight" => return Some("final_norm.weight".into()),
        "lm_head.weight" => return Some("head.weight".into()),
        _ => {}
    }
    layer(source.strip_prefix("model.layers.")?, |(hf, _, neutral)| (hf, neutral))
}

/// The neutral name of a tensor of a GGUF file.
pub(super) fn from_gguf(source: &str) -> Option<String> {
    match source {
        "token_embd.weight" => return Some("embed.weight".into()),
        "output_norm.weight" => return Some("final_norm.weight".into()),
        "output.weight" => return Some("head.weight".into()),
        _ => {}
    }
    layer(source.strip_prefix("blk.")?, |(_, gguf, neutral)| (gguf, neutral))
}

/// `N.PART.KIND` to `layers.N.NEUTRAL.KIND`.
fn layer<'a>(rest: &str, pick: impl Fn((&'a str, &'a str, &'a str)) -> (&'a str, &'a str)) -> Option<String> {
    let (number, rest) = rest.split_once('.')?;
    let (part, kind) = rest.rsplit_once('.')?;
    let plain_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    if !plain_number || (number.len() > 1 && number.starts_with('0')) || !matches!(kind, "weight" | "bias") {
        return None;
    }
    let (_, neutral) = LAYER_PARTS.into_iter().map(pick).find(|&(source, _)| source == part)?;
    Some(format!("layers.{number}.{neutral}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_meet_in_one_name() {
        let cases = [
            ("model.embed_tokens.weight", "token_embd.weight", "embed.weight"),
            ("model.norm.weight", "output_norm.weight", "final_norm.weight"),
            ("lm_head.weight", "output.weight", "head.weight"),
            ("model.layers.3.self_attn.q_proj.bias", "blk.3.attn_q.bias", "layers.3.attn_q.bias"),
            ("model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight", "layers.0.attn_q_norm.weight"),
            ("model.layers.12.mlp.down_proj.weight", "blk.12.ffn_down.weight", "layers.12.ffn_down.weight"),
        ];
        for (hf, gguf, neutral) in cases {
            assert_eq!(from_hf(hf).as_deref(), Some(neutral));
            assert_eq!(from_gguf(gguf).as_deref(), Some(neutral));
        }
    }

    #[test]
    fn other_names_have_no_neutral_name() {
        for name in ["", "model.layers.", "model.layers.x.mlp.up_proj.weight", "model.layers.01.mlp.up_proj.weight"] {
            assert_eq!(from_hf(name), None, "{name}");
        }
        for name in ["rope_freqs.weight", "blk..attn_q.weight", "blk.1.attn_q.scale", "blk.1.ffn_gate_exps.weight"] {
            assert_eq!(from_gguf(name), None, "{name}");
        }
    }
}
