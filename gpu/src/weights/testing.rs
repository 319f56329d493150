//! Tiny model files that tests write themselves.

use super::metadata::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that is removed at the end of the test.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("tokenrouter-weights-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A tensor to be written: shape outermost first, GGUF type number, data.
#[derive(Clone, Debug)]
pub struct RawTensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub kind: u32,
    pub data: Vec<u8>,
}

impl RawTensor {
    /// An F32 tensor whose elements count up from `first`.
    pub fn f32(name: &str, dims: &[u64], first: f32) -> Self {
        let elements: u64 = dims.iter().product();
        let data = (0..elements).flat_map(|index| (first + index as f32 / 64.0).to_le_bytes()).collect();
        RawTensor { name: name.to_owned(), dims: dims.to_vec(), kind: 0, data }
    }
}

/// What a GGUF file is made of; [`GgufParts::bytes`] writes it. Tests spoil single parts.
#[derive(Clone, Debug)]
pub struct GgufParts {
    pub version: u32,
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<RawTensor>,
}

impl GgufParts {
    pub fn set(&mut self, key: &str, value: Value) {
        match self.metadata.iter_mut().find(|(other, _)| other == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
    }

    pub fn remove(&mut self, key: &str) {
        self.metadata.retain(|(other, _)| other != key);
    }

    pub fn tensor_mut(&mut self, name: &str) -> &mut RawTensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_text(&mut out, key);
            put_value(&mut out, value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().rev().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (tensor.data.len() as u64).next_multiple_of(32);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&tensor.data);
        }
        out
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Writes a value with its type; integers as u32 or i32, floats as f32, as converters do.
fn put_value(out: &mut Vec<u8>, value: &Value) {
    out.extend(kind_of(value).to_le_bytes());
    put_payload(out, value);
}

fn kind_of(value: &Value) -> u32 {
    match value {
        Value::Unsigned(_) => 4,
        Value::Signed(_) => 5,
        Value::Float(_) => 6,
        Value::Bool(_) => 7,
        Value::Text(_) => 8,
        Value::Array(_) => 9,
    }
}

fn put_payload(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Unsigned(value) => out.extend((*value as u32).to_le_bytes()),
        Value::Signed(value) => out.extend((*value as i32).to_le_bytes()),
        Value::Float(value) => out.extend((*value as f32).to_le_bytes()),
        Value::Bool(value) => out.push(u8::from(*value)),
        Value::Text(text) => put_text(out, text),
        Value::Array(values) => {
            out.extend(values.first().map_or(4, kind_of).to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put_payload(out, value));
        }
    }
}

pub fn texts(list: &[&str]) -> Value {
    Value::Array(list.iter().map(|text| Value::Text((*text).to_owned())).collect())
}

pub fn numbers(list: &[i64]) -> Value {
    Value::Array(list.iter().map(|&number| Value::Signed(number)).collect())
}

/// Width, layers, query heads, key/value heads, inner width and vocabulary of the tiny models.
pub const HIDDEN: u64 = 32;
pub const LAYERS: u64 = 2;
pub const HEADS: u64 = 4;
pub const KV_HEADS: u64 = 2;
pub const FFN: u64 = 64;
pub const VOCAB: u64 = 6;

/// Real tokens of the tiny models; one padding token follows in GGUF.
pub const TOKENS: [&str; 5] = ["a", "b", "ab", "<|im_end|>", "<s>"];

/// HF name, GGUF name and shape of every tensor of the tiny model without head and biases.
fn plan() -> Vec<(String, String, Vec<u64>)> {
    let kv = HIDDEN / HEADS * KV_HEADS;
    let mut out = vec![
        ("model.embed_tokens.weight".to_owned(), "token_embd.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), "output_norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let parts: [(&str, &str, Vec<u64>); 9] = [
            ("input_layernorm", "attn_norm", vec![HIDDEN]),
            ("self_attn.q_proj", "attn_q", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", "attn_k", vec![kv, HIDDEN]),
            ("self_attn.v_proj", "attn_v", vec![kv, HIDDEN]),
            ("self_attn.o_proj", "attn_output", vec![HIDDEN, HIDDEN]),
            ("post_attention_layernorm", "ffn_norm", vec![HIDDEN]),
            ("mlp.gate_proj", "ffn_gate", vec![FFN, HIDDEN]),
            ("mlp.up_proj", "ffn_up", vec![FFN, HIDDEN]),
            ("mlp.down_proj", "ffn_down", vec![HIDDEN, FFN]),
        ];
        for (hf, gguf, dims) in parts {
            out.push((format!("model.layers.{layer}.{hf}.weight"), format!("blk.{layer}.{gguf}.weight"), dims));
        }
    }
    out
}

/// A sound GGUF of architecture llama with tied head and a padded vocabulary.
pub fn tiny_gguf() -> GgufParts {
    let number = |value: u64| Value::Unsigned(value);
    let mut tokens = TOKENS.to_vec();
    tokens.push("[PAD5]");
    let metadata: Vec<(&str, Value)> = vec![
        ("general.architecture", Value::Text("llama".into())),
        ("llama.block_count", number(LAYERS)),
        ("llama.embedding_length", number(HIDDEN)),
        ("llama.feed_forward_length", number(FFN)),
        ("llama.attention.head_count", number(HEADS)),
        ("llama.attention.head_count_kv", number(KV_HEADS)),
        ("llama.context_length", number(128)),
        ("llama.attention.layer_norm_rms_epsilon", Value::Float(1e-5)),
        ("llama.rope.freq_base", Value::Float(10_000.0)),
        ("tokenizer.ggml.model", Value::Text("gpt2".into())),
        ("tokenizer.ggml.tokens", texts(&tokens)),
        ("tokenizer.ggml.token_type", numbers(&[1, 1, 1, 3, 3, 5])),
        ("tokenizer.ggml.merges", texts(&["a b"])),
        ("tokenizer.ggml.bos_token_id", number(4)),
        ("tokenizer.ggml.eos_token_id", number(4)),
    ];
    let tensors =
        plan().into_iter().zip(0..).map(|((_, gguf, dims), index)| RawTensor::f32(&gguf, &dims, index as f32));
    GgufParts {
        version: 3,
        metadata: metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
        tensors: tensors.collect(),
    }
}

/// The tensors of the tiny model under HF names.
pub fn tiny_hf_tensors() -> Vec<RawTensor> {
    plan().iter().zip(0..).map(|((hf, _, dims), index)| RawTensor::f32(hf, dims, index as f32)).collect()
}

/// `config.json` of the tiny model.
pub fn tiny_hf_config() -> serde_json::Value {
    serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu", "eos_token_id": 3, "bos_token_id": 4,
    })
}

/// `tokenizer.json` of the tiny model.
pub fn tiny_hf_tokenizer() -> serde_json::Value {
    serde_json::json!({
        "added_tokens": [{ "id": 3, "content": TOKENS[3] }, { "id": 4, "content": TOKENS[4] }],
        "model": { "type": "BPE", "vocab": { "b": 1, "a": 0, "ab": 2 }, "merges": ["a b"] },
    })
}

/// Writes a whole HF directory.
pub fn write_hf(scratch: &Scratch, config: &serde_json::Value, tensors: &[RawTensor]) {
    scratch.write("config.json", config.to_string());
    scratch.write("tokenizer.json", tiny_hf_tokenizer().to_string());
    scratch.write("model.safetensors", safetensors_bytes(tensors));
}

/// A safetensors file of F32 tensors.
pub fn safetensors_bytes(tensors: &[RawTensor]) -> Vec<u8> {
    let mut header = BTreeMap::new();
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.data.len();
        let info = serde_json::json!({ "dtype": "F32", "shape": tensor.dims, "data_offsets": [at, end] });
        header.insert(tensor.name.clone(), info);
        at = end;
    }
    let header = serde_json::to_string(&header).unwrap();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    tensors.iter().for_each(|tensor| out.extend(&tensor.data));
    out
}

/// A sequence of pseudo-random numbers (splitmix64).
pub struct Noise(pub u64);

impl Noise {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// A seed that differs from run to run; tests print it when they fail.
pub fn fresh_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_nanos() as u64
}
