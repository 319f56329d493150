//! Random tiny models, written as HF directories, and a slow scalar f64 forward pass to compare with. The reference
//! shares no code with the crate: it recomputes attention over the whole sequence, with no cache and no batch.
#![allow(dead_code)]

pub mod gguf;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokenrouter_core::executor::{Draw, Executor, PAGE_TOKENS, PageId, Row, RowOutput, Step};
use tokenrouter_core::ids::{RequestId, TokenId};
use tokenrouter_core::rng::{Stream, mix, unit};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_gpu::load::{AnyRunner, KvMemory, LoadOptions, LoadedModel, load_files};
use tokenrouter_gpu::ops::KvFormat;
use tokenrouter_gpu::weights::{self, RopeLayout};

/// Shape of a random model.
#[derive(Clone, Debug)]
pub struct Tiny {
    pub architecture: &'static str,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
    pub context: usize,
    pub tied: bool,
    pub llama3_rope: bool,
    pub interleaved: bool,
    pub bias: bool,
}

impl Tiny {
    pub fn new(architecture: &'static str) -> Tiny {
        Tiny {
            architecture,
            hidden: 64,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 96,
            vocab: 150,
            context: 256,
            tied: true,
            llama3_rope: false,
            interleaved: false,
            bias: architecture == "qwen2",
        }
    }

    /// Every architecture and variant that the crate claims to run.
    pub fn variants() -> Vec<Tiny> {
        vec![
            Tiny::new("llama"),
            Tiny { tied: false, llama3_rope: true, ..Tiny::new("llama") },
            Tiny { interleaved: true, kv_heads: 1, hidden: 48, ..Tiny::new("llama") },
            Tiny { bias: true, kv_heads: 4, ..Tiny::new("llama") },
            Tiny::new("qwen2"),
            Tiny { tied: false, heads: 6, kv_heads: 2, hidden: 96, ..Tiny::new("qwen2") },
            Tiny { head_dim: 32, ..Tiny::new("qwen3") },
            Tiny { tied: false, head_dim: 24, heads: 3, kv_heads: 1, ..Tiny::new("qwen3") },
        ]
    }

    fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut out = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab, self.hidden]),
            ("model.norm.weight".to_owned(), vec![self.hidden]),
        ];
        if !self.tied {
            out.push(("lm_head.weight".to_owned(), vec![self.vocab, self.hidden]));
        }
        for layer in 0..self.layers {
            let mut add =
                |name: &str, shape: &[usize]| out.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            add("input_layernorm.weight", &[self.hidden]);
            add("post_attention_layernorm.weight", &[self.hidden]);
            for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
                add(&format!("self_attn.{name}_proj.weight"), &[rows, self.hidden]);
                if self.bias {
                    add(&format!("self_attn.{name}_proj.bias"), &[rows]);
                }
            }
            add("self_attn.o_proj.weight", &[self.hidden, q]);
            if self.bias && self.architecture == "llama" {
                add("self_attn.o_proj.bias", &[self.hidden]);
                add("mlp.gate_proj.bias", &[self.ffn]);
                add("mlp.up_proj.bias", &[self.ffn]);
                add("mlp.down_proj.bias", &[self.hidden]);
            }
            if self.architecture == "qwen3" {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
            add("mlp.gate_proj.weight", &[self.ffn, self.hidden]);
            add("mlp.up_proj.weight", &[self.ffn, self.hidden]);
            add("mlp.down_proj.weight", &[self.hidden, self.ffn]);
        }
        out
    }

    /// Random weights of this shape.
    pub fn model(&self, seed: u64) -> Model {
        let mut tensors = BTreeMap::new();
        for (index, (name, shape)) in self.shapes().into_iter().enumerate() {
            let key = mix(seed ^ (index as u64) << 32);
            let fan_in = *shape.last().unwrap() as f64;
            let values: Vec<f32> = (0..shape.iter().product::<usize>())
                .map(|at| {
                    let uniform = unit(key, at as u32, Stream::Token) * 2.0 - 1.0;
                    let value = match shape.len() {
                        1 if name.ends_with("bias") => uniform * 0.3,
                        1 => 1.0 + uniform * 0.3,
                        _ if name.contains("embed") => uniform,
                        _ => uniform * 2.0 / fan_in.sqrt(),
                    };
                    value as f32
                })
                .collect();
            tensors.insert(name, (shape, values));
        }
        Model { shape: self.clone(), tensors, int8: false }
    }
}

/// Weights by their HF names.
pub struct Model {
    pub shape: Tiny,
    /// Whether the reference rounds the inputs of its products to int8, as the crate does for quantised weights.
    pub int8: bool,
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Model {
    /// Writes an HF directory and returns it.
    pub fn write(&self) -> PathBuf {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tiny-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let s = &self.shape;
        let (class, kind) = match s.architecture {
            "llama" => ("LlamaForCausalLM", "llama"),
            "qwen2" => ("Qwen2ForCausalLM", "qwen2"),
            _ => ("Qwen3ForCausalLM", "qwen3"),
        };
        let mut config = json!({
            "architectures": [class], "model_type": kind, "hidden_size": s.hidden, "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim,
            "intermediate_size": s.ffn, "vocab_size": s.vocab, "max_position_embeddings": s.context,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": s.tied, "hidden_act": "silu",
            "eos_token_id": 2,
        });
        if s.bias && s.architecture == "llama" {
            config["attention_bias"] = json!(true);
            config["mlp_bias"] = json!(true);
        }
        if s.llama3_rope {
            config["rope_scaling"] = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32});
        }
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        std::fs::write(dir.join("tokenizer.json"), "{}").unwrap();
        let bytes: BTreeMap<&str, Vec<u8>> = self
            .tensors
            .iter()
            .map(|(name, (_, values))| (name.as_str(), values.iter().flat_map(|v| v.to_le_bytes()).collect()))
            .collect();
        let views = self.tensors.iter().map(|(name, (shape, _))| {
            (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), &bytes[name.as_str()]).unwrap())
        });
        std::fs::write(dir.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        dir
    }

    /// Loads what [`Self::write`] wrote.
    pub fn load(&self, options: &LoadOptions) -> LoadedModel {
        let dir = self.write();
        let mut files = weights::open(&dir).unwrap();
        if self.shape.interleaved {
            files.config.rope.layout = RopeLayout::Interleaved;
        }
        load_files(&files, options, &mut |_| ()).unwrap()
    }

    fn tensor(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.tensor(&format!("{name}.weight"));
        let bias = self.tensors.get(&format!("{name}.bias"));
        let x = &if self.int8 { rounded(x) } else { x.to_vec() };
        weight
            .chunks(x.len())
            .enumerate()
            .map(|(row, w)| {
                let dot: f64 = w.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum();
                dot + bias.map_or(0.0, |(_, b)| f64::from(b[row]))
            })
            .collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + 1e-5f32 as f64).sqrt();
        x.iter().zip(self.tensor(&format!("{name}.weight"))).map(|(v, &w)| v * scale * f64::from(w)).collect()
    }

    fn angle(&self, pair: usize, position: usize) -> f64 {
        let mut frequency = 10_000f64.powf(-2.0 * pair as f64 / self.shape.head_dim as f64);
        if self.shape.llama3_rope {
            // As transformers' `_compute_llama3_parameters`: factor 8, low 1, high 4, original context 32.
            let wavelength = std::f64::consts::TAU / frequency;
            if wavelength > 32.0 {
                frequency /= 8.0;
            } else if wavelength >= 32.0 / 4.0 {
                let smooth = (32.0 / wavelength - 1.0) / (4.0 - 1.0);
                frequency = (1.0 - smooth) * frequency / 8.0 + smooth * frequency;
            }
        }
        frequency * position as f64
    }

    fn rotate(&self, head: &mut [f64], position: usize) {
        let half = head.len() / 2;
        for pair in 0..half {
            let (a, b) = if self.shape.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            let (sin, cos) = self.angle(pair, position).sin_cos();
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
        }
    }

    /// Hidden rows after the final norm and logits of every position.
    pub fn reference(&self, tokens: &[TokenId]) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        let s = &self.shape;
        let d = s.head_dim;
        let embed = self.tensor("model.embed_tokens.weight");
        let mut rows: Vec<Vec<f64>> = tokens
            .iter()
            .map(|&t| embed[t as usize * s.hidden..][..s.hidden].iter().map(|&v| f64::from(v)).collect())
            .collect();
        for layer in 0..s.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let project = |part: &str, x: &[f64], position: Option<usize>| {
                let mut heads = self.linear(&name(&format!("self_attn.{part}_proj")), x);
                let Some(position) = position else { return heads };
                for head in heads.chunks_mut(d) {
                    if s.architecture == "qwen3" {
                        let normed = self.norm(&name(&format!("self_attn.{part}_norm")), head);
                        head.copy_from_slice(&normed);
                    }
                    self.rotate(head, position);
                }
                heads
            };
            let normed: Vec<Vec<f64>> = rows.iter().map(|x| self.norm(&name("input_layernorm"), x)).collect();
            let keys: Vec<_> = normed.iter().enumerate().map(|(p, x)| project("k", x, Some(p))).collect();
            let values: Vec<_> = normed.iter().map(|x| project("v", x, None)).collect();
            for (p, row) in rows.iter_mut().enumerate() {
                let q = project("q", &normed[p], Some(p));
                let mut attended = vec![0.0; s.heads * d];
                for head in 0..s.heads {
                    let kv = head / (s.heads / s.kv_heads) * d;
                    let dot =
                        |k: &Vec<f64>| (0..d).map(|i| q[head * d + i] * k[kv + i]).sum::<f64>() / (d as f64).sqrt();
                    let scores: Vec<f64> = keys[..=p].iter().map(dot).collect();
                    let max = scores.iter().copied().fold(f64::MIN, f64::max);
                    let total: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                    for (score, value) in scores.iter().zip(&values) {
                        let share = (score - max).exp() / total;
                        (0..d).for_each(|i| attended[head * d + i] += share * value[kv + i]);
                    }
                }
                let delta = self.linear(&name("self_attn.o_proj"), &attended);
                row.iter_mut().zip(delta).for_each(|(x, y)| *x += y);
                let normed = self.norm(&name("post_attention_layernorm"), row);
                let gate = self.linear(&name("mlp.gate_proj"), &normed);
                let up = self.linear(&name("mlp.up_proj"), &normed);
                let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                let delta = self.linear(&name("mlp.down_proj"), &inner);
                row.iter_mut().zip(delta).for_each(|(x, y)| *x += y);
            }
        }
        let hidden: Vec<Vec<f64>> = rows.iter().map(|x| self.norm("model.norm", x)).collect();
        let head = if s.tied { "model.embed_tokens" } else { "lm_head" };
        let logits = hidden.iter().map(|x| self.linear(head, x)).collect();
        (hidden, logits)
    }
}

/// Options for a tiny model.
pub fn options(threads: usize, kv_format: KvFormat) -> LoadOptions {
    LoadOptions { threads, kv: KvMemory::Pages(64), kv_format, rows_max: 8, step_tokens_max: 128, ..Default::default() }
}

/// A greedy draw that asks for nothing else.
pub fn greedy() -> Draw {
    draw_with(SamplingParams::default())
}

/// A draw with these parameters that asks for nothing else.
pub fn draw_with(params: SamplingParams) -> Draw {
    Draw { params: Arc::new(params), ..Draw::default() }
}

/// A row of a request whose page table is `pages`.
pub fn row(request: u64, start: usize, tokens: &[TokenId], pages: &[PageId]) -> Row {
    let request = RequestId(request);
    let (tokens, pages) = (tokens.to_vec(), pages.to_vec());
    Row { request, start: start as u32, tokens, pages, draw: Some(greedy()), targets: None }
}

/// Page `p` of a request's table: scattered, and disjoint for requests below 8.
pub fn pages(request: u64, tokens: usize) -> Vec<PageId> {
    (0..tokens.div_ceil(PAGE_TOKENS) as u32).map(|p| (p * 8 + request as u32) * 5 % 64).collect()
}

/// Runs one request alone, its tokens cut into chunks, and returns the logits after the last token.
pub fn logits_in_chunks(runner: &mut AnyRunner, tokens: &[TokenId], chunk: usize) -> Vec<f32> {
    let table = pages(1, tokens.len());
    for (index, piece) in tokens.chunks(chunk).enumerate() {
        run(runner, vec![row(1, index * chunk, piece, &table)]);
    }
    runner.last_logits(0).unwrap().to_vec()
}

/// Runs a step that must succeed.
pub fn run(runner: &mut AnyRunner, rows: Vec<Row>) -> Vec<RowOutput> {
    runner.step(&Step { rows }).unwrap().rows
}

/// `count` random tokens below `vocab`.
pub fn random_tokens(seed: u64, count: usize, vocab: usize) -> Vec<TokenId> {
    (0..count).map(|i| (unit(seed, i as u32, Stream::Owner) * vocab as f64) as TokenId).collect()
}

/// Bits of a row, so that comparisons are exact and tell -0 from 0.
pub fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|v| v.to_bits()).collect()
}

/// Blocks of 32 values rounded to multiples of their largest magnitude over 127.
fn rounded(x: &[f64]) -> Vec<f64> {
    let round = |block: &[f64]| {
        let step = block.iter().fold(0.0f64, |max, v| max.max(v.abs())) / 127.0;
        block.iter().map(|v| if step > 0.0 { (v / step).round_ties_even() * step } else { 0.0 }).collect::<Vec<f64>>()
    };
    x.chunks(32).flat_map(round).collect()
}
