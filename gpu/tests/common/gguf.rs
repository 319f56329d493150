//! Random models as GGUF files whose matrices are random blocks of one quantised format.

use super::{Model, Tiny};
use half::f16;
use std::path::{Path, PathBuf};
use tokenrouter_core::rng::{Stream, bits, mix};
use tokenrouter_kernels::quant::{Format, dequantize_row};

/// Parts of a layer: HF name, GGUF name.
const PARTS: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// A shape whose rows are whole blocks of every format.
pub fn shape(architecture: &'static str) -> Tiny {
    let interleaved = architecture == "llama";
    Tiny { hidden: 256, heads: 4, head_dim: 64, kv_heads: 2, ffn: 256, interleaved, ..Tiny::new(architecture) }
}

/// A random model in a GGUF file; the values in [`Model::tensors`] are what the blocks in the file stand for.
pub fn quantised(architecture: &'static str, format: Format, seed: u64) -> (PathBuf, Model) {
    let mut model = shape(architecture).model(seed);
    let mut tensors = Vec::new();
    for (index, (name, (shape, values))) in model.tensors.iter_mut().enumerate() {
        let (kind, data) = match shape[..] {
            [rows, cols] => {
                let data = blocks(format, rows * cols / format.block_values(), mix(seed + index as u64));
                let row_bytes = format.row_bytes(cols).unwrap();
                for (row, bytes) in values.chunks_mut(cols).zip(data.chunks(row_bytes)) {
                    dequantize_row(format, bytes, row).unwrap();
                }
                (number(format), data)
            }
            _ => (0, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        };
        tensors.push((gguf_name(name), shape.clone(), kind, data));
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "tiny-{}-{architecture}-{}-{seed}.gguf",
        std::process::id(),
        format.name()
    ));
    std::fs::write(&path, file(&model.shape, &tensors)).unwrap();
    (path, model)
}

type Raw = (String, Vec<usize>, u32, Vec<u8>);

fn file(s: &Tiny, tensors: &[Raw]) -> Vec<u8> {
    let numbers = [
        ("embedding_length", s.hidden),
        ("block_count", s.layers),
        ("attention.head_count", s.heads),
        ("attention.head_count_kv", s.kv_heads),
        ("attention.key_length", s.head_dim),
        ("attention.value_length", s.head_dim),
        ("feed_forward_length", s.ffn),
        ("context_length", s.context),
    ];
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((numbers.len() as u64 + 2).to_le_bytes());
    text(&mut out, "general.architecture");
    out.extend(8u32.to_le_bytes());
    text(&mut out, s.architecture);
    text(&mut out, &format!("{}.attention.layer_norm_rms_epsilon", s.architecture));
    out.extend(6u32.to_le_bytes());
    out.extend(1e-5f32.to_le_bytes());
    for (key, value) in numbers {
        text(&mut out, &format!("{}.{key}", s.architecture));
        out.extend(4u32.to_le_bytes());
        out.extend((value as u32).to_le_bytes());
    }
    let mut offset = 0u64;
    for (name, shape, kind, data) in tensors {
        text(&mut out, name);
        out.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&dim| out.extend((dim as u64).to_le_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += (data.len() as u64).next_multiple_of(32);
    }
    for (_, _, _, data) in tensors {
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
    }
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn gguf_name(hf: &str) -> String {
    match hf {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        _ => {}
    }
    let (layer, rest) = hf.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let (part, kind) = rest.rsplit_once('.').unwrap();
    let (_, gguf) = PARTS.iter().find(|(name, _)| *name == part).unwrap();
    format!("blk.{layer}.{gguf}.{kind}")
}

fn number(format: Format) -> u32 {
    (0..64).find(|&number| Format::from_ggml(number) == Some(format)).unwrap()
}

/// Random codes under scales that give values of about `1 / sqrt(256)` around 0.
fn blocks(format: Format, count: usize, seed: u64) -> Vec<u8> {
    let size = format.block_bytes();
    let mut data: Vec<u8> = (0..count * size).map(|at| (bits(seed, at as u32, Stream::Token) >> 40) as u8).collect();
    // (where the f16 scale is, its value, and the value of the f16 after it, for formats with an offset)
    let (at, scale, offset) = match format {
        Format::Q8_0 => (0, 1e-3, None),
        Format::Q4_0 => (0, 1.5e-2, None),
        Format::Q4_1 => (0, 1.5e-2, Some(-7.5 * 1.5e-2)),
        Format::Q5_0 => (0, 7.5e-3, None),
        Format::Q5_1 => (0, 7.5e-3, Some(-15.5 * 7.5e-3)),
        Format::Q4_K => (0, 5e-4, Some(7.5 * 5e-4)),
        Format::Q5_K => (0, 2.5e-4, Some(15.5 * 2.5e-4)),
        Format::Q6_K => (208, 5e-5, None),
        other => panic!("no random blocks of {other:?}"),
    };
    for (index, block) in data.chunks_mut(size).enumerate() {
        let vary = 0.5 + (bits(seed, index as u32, Stream::Owner) % 256) as f32 / 256.0;
        block[at..at + 2].copy_from_slice(&f16::from_f32(scale * vary).to_le_bytes());
        if let Some(offset) = offset {
            block[at + 2..at + 4].copy_from_slice(&f16::from_f32(offset * vary).to_le_bytes());
        }
    }
    data
}
