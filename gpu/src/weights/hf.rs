//! HF model directories: `config.json`, `generation_config.json`, and where the tokenizer lies.
//! Owner: the loaded model. Invariant: a setting that changes the computation is either carried over or refused by name;
//! none is dropped.

use super::architectures::{ARCHITECTURES, Architecture, supported};
use super::error::{Result, WeightsError};
use super::json::{self, Json};
use super::model_config::{GenerationDefaults, ModelConfig};
use super::names;
use super::rope::{Rope, RopeLayout, RopeScaling};
use super::safetensors;
use super::tensor::Weights;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Text files of an HF model directory; the ones that are absent are `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct HfText {
    /// `tokenizer.json`; always there.
    pub tokenizer: PathBuf,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<PathBuf>,
    /// `chat_template.jinja`; wins over the template inside `tokenizer_config.json`.
    pub chat_template: Option<PathBuf>,
}

/// The fields of `config.json` that describe a dense decoder.
#[derive(Debug, Deserialize)]
struct HfConfig {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    rope_theta: Option<f32>,
    rope_scaling: Option<HfRope>,
    /// The home of both since transformers 5.
    rope_parameters: Option<HfRope>,
    partial_rotary_factor: Option<f32>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    hidden_act: Option<String>,
    sliding_window: Option<u64>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
    quantization_config: Option<Json>,
    bos_token_id: Option<TokenIds>,
    eos_token_id: Option<TokenIds>,
}

/// `rope_scaling` or `rope_parameters`; keys this module does not know end up in `other` and are refused.
#[derive(Debug, Deserialize)]
struct HfRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<usize>,
    beta_fast: Option<f32>,
    beta_slow: Option<f32>,
    attention_factor: Option<f32>,
    #[serde(flatten)]
    other: BTreeMap<String, Json>,
}

/// One token id or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Several(Vec<u32>),
}

impl TokenIds {
    fn as_slice(&self) -> &[u32] {
        match self {
            TokenIds::One(id) => std::slice::from_ref(id),
            TokenIds::Several(ids) => ids,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
struct HfGeneration {
    bos_token_id: Option<TokenIds>,
    eos_token_id: Option<TokenIds>,
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

/// What an HF directory holds.
pub(super) struct HfModel {
    pub config: ModelConfig,
    pub generation: GenerationDefaults,
    pub text: HfText,
    pub weights: Weights,
}

/// Reads an HF model directory; tensor data stays unread.
pub(super) fn open(dir: &Path) -> Result<HfModel> {
    let path = dir.join("config.json");
    let raw = json::read(&path)?;
    let architecture = architecture(&path, &raw)?;
    let hf: HfConfig =
        serde_json::from_value(raw).map_err(|error| WeightsError::invalid(&path, "json", error.to_string()))?;
    hf.refuse_unsupported(&path)?;
    let mut config = hf.model_config(&path, architecture)?;
    let generation = generation(dir, &hf)?;
    let text = text_files(dir)?;
    let (files, entries) = safetensors::open(dir)?;
    let mut weights = Weights::new(dir, files, entries, names::from_hf)?;
    settle_head(&mut config, &mut weights, hf.tie_word_embeddings)?;
    config.check(&path)?;
    config.check_tensors(&weights)?;
    Ok(HfModel { config, generation, text, weights })
}

/// The architecture a `config.json` names, judged before any other field.
fn architecture(path: &Path, raw: &Json) -> Result<Architecture> {
    let model_type = raw.get("model_type").and_then(Json::as_str);
    let class = raw.get("architectures").and_then(|list| list.get(0)).and_then(Json::as_str);
    let Some(name) = class.or(model_type) else {
        return Err(WeightsError::MissingKey { file: path.to_owned(), key: "architectures".into() });
    };
    let known = ARCHITECTURES.into_iter().find(|known| match class {
        Some(class) => known.hf_class == class,
        None => Some(known.name) == model_type,
    });
    known.ok_or_else(|| WeightsError::UnknownArchitecture {
        file: path.to_owned(),
        name: name.to_owned(),
        supported: supported(),
    })
}

/// Decides tied or untied: a tied model ignores a head that is stored too; one that says nothing and stores none is tied.
fn settle_head(config: &mut ModelConfig, weights: &mut Weights, said: Option<bool>) -> Result<()> {
    let stored = weights.contains("head.weight");
    config.tied_head = match (said, stored) {
        (Some(true), _) | (None, false) => true,
        (_, true) => false,
        (Some(false), false) => {
            return Err(WeightsError::MissingTensor {
                file: weights.origin().to_owned(),
                tensor: "lm_head.weight".into(),
                remedy: "add it, or set tie_word_embeddings to true in config.json if the embedding is the head",
            });
        }
    };
    if config.tied_head {
        weights.discard("head.weight");
    }
    Ok(())
}

impl HfConfig {
    fn refuse_unsupported(&self, path: &Path) -> Result<()> {
        let refuse = |key: &str, reason: &str| Err(WeightsError::invalid(path, format!("key {key:?}"), reason));
        if self.quantization_config.is_some() {
            return refuse(
                "quantization_config",
                "quantised checkpoints are not read; use a GGUF file or plain weights",
            );
        }
        if let Some(act) = self.hidden_act.as_deref().filter(|act| !matches!(*act, "silu" | "swish")) {
            return refuse("hidden_act", &format!("activation {act:?} is not supported; only silu is"));
        }
        let slides = self.layer_types.iter().flatten().any(|kind| kind != "full_attention");
        // Qwen files carry a window that `use_sliding_window = false` switches off; elsewhere a window is in use.
        let windowed = self.use_sliding_window.unwrap_or(self.sliding_window.is_some());
        if slides || windowed {
            return refuse("sliding_window", "attention windows are not supported");
        }
        Ok(())
    }

    fn model_config(&self, path: &Path, architecture: Architecture) -> Result<ModelConfig> {
        let head_dim = match self.head_dim {
            Some(width) => width,
            None => self.hidden_size.checked_div(self.num_attention_heads).unwrap_or(0),
        };
        let attention_bias = self.attention_bias.unwrap_or(false);
        Ok(ModelConfig {
            architecture: architecture.name.to_owned(),
            hidden: self.hidden_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim,
            ffn: self.intermediate_size,
            vocab: self.vocab_size,
            context: self.max_position_embeddings,
            norm_eps: self.rms_norm_eps,
            rope: self.rope(path, head_dim)?,
            tied_head: self.tie_word_embeddings.unwrap_or(false),
            qkv_bias: attention_bias || architecture.always_qkv_bias,
            attn_o_bias: attention_bias && !architecture.always_qkv_bias,
            ffn_bias: self.mlp_bias.unwrap_or(false),
            qk_norm: architecture.qk_norm,
        })
    }

    fn rope(&self, path: &Path, head_dim: usize) -> Result<Rope> {
        let (key, rope) = match (&self.rope_parameters, &self.rope_scaling) {
            (Some(rope), _) => ("rope_parameters", Some(rope)),
            (None, rope) => ("rope_scaling", rope.as_ref()),
        };
        let scaling = match rope {
            Some(rope) => rope.scaling(path, key, self.max_position_embeddings)?,
            None => RopeScaling::None,
        };
        let theta = self.rope_theta.or(rope.and_then(|rope| rope.rope_theta)).unwrap_or(10_000.0);
        let rotated = match self.partial_rotary_factor {
            None => head_dim,
            Some(share) => (head_dim as f32 * share) as usize,
        };
        Ok(Rope { layout: RopeLayout::HalfSplit, theta, dims: rotated, scaling })
    }
}

impl HfRope {
    fn scaling(&self, path: &Path, key: &str, context: usize) -> Result<RopeScaling> {
        let refuse =
            |field: &str, reason: String| Err(WeightsError::invalid(path, format!("key \"{key}.{field}\""), reason));
        if let Some((field, value)) = self.other.iter().find(|(_, value)| !value.is_null()) {
            return refuse(field, format!("setting {value} is not supported; remove it if it has no effect"));
        }
        let need = |field: &str, value: Option<f32>| {
            value.ok_or_else(|| WeightsError::MissingKey { file: path.to_owned(), key: format!("{key}.{field}") })
        };
        match self.rope_type.as_deref().unwrap_or("default") {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: need("factor", self.factor)? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: need("factor", self.factor)?,
                low_freq_factor: need("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: need("high_freq_factor", self.high_freq_factor)?,
                original_context: self.original_max_position_embeddings.unwrap_or(context),
            }),
            "yarn" => Ok(RopeScaling::Yarn {
                factor: need("factor", self.factor)?,
                original_context: self.original_max_position_embeddings.unwrap_or(context),
                beta_fast: self.beta_fast.unwrap_or(32.0),
                beta_slow: self.beta_slow.unwrap_or(1.0),
                attention_factor: self.attention_factor,
            }),
            other => refuse("rope_type", format!("{other:?} is not supported; default, linear, llama3 and yarn are")),
        }
    }
}

/// Stop tokens and sampling defaults; `generation_config.json` wins over `config.json`.
fn generation(dir: &Path, config: &HfConfig) -> Result<GenerationDefaults> {
    let file: HfGeneration = json::read_optional(&dir.join("generation_config.json"))?;
    let mut defaults = GenerationDefaults {
        eos: Vec::new(),
        bos: file
            .bos_token_id
            .as_ref()
            .or(config.bos_token_id.as_ref())
            .and_then(|ids| ids.as_slice().first().copied()),
        do_sample: file.do_sample,
        temperature: file.temperature,
        top_k: file.top_k,
        top_p: file.top_p,
        min_p: file.min_p,
        repetition_penalty: file.repetition_penalty,
    };
    let eos = file.eos_token_id.as_ref().or(config.eos_token_id.as_ref());
    eos.into_iter().flat_map(|ids| ids.as_slice()).for_each(|&id| defaults.add_eos(id));
    Ok(defaults)
}

fn text_files(dir: &Path) -> Result<HfText> {
    let tokenizer = dir.join("tokenizer.json");
    if !tokenizer.exists() {
        let reason = "has no tokenizer.json; convert the tokenizer to the fast format with transformers";
        return Err(WeightsError::invalid(dir, "directory", reason));
    }
    let optional = |name: &str| Some(dir.join(name)).filter(|path| path.exists());
    Ok(HfText {
        tokenizer,
        tokenizer_config: optional("tokenizer_config.json"),
        chat_template: optional("chat_template.jinja"),
    })
}
