//! Sound tiny files open and agree across formats; every hostile variant is refused with its name; noise never panics.

use super::testing::*;
use super::*;

fn open_gguf(parts: &GgufParts) -> Result<ModelFiles> {
    let scratch = Scratch::new();
    open(&scratch.write("model.gguf", parts.bytes()))
}

fn refused(parts: &GgufParts) -> String {
    open_gguf(parts).map(|files| files.config).unwrap_err().to_string()
}

fn hf(config: &serde_json::Value, tensors: &[RawTensor]) -> Result<ModelFiles> {
    let scratch = Scratch::new();
    write_hf(&scratch, config, tensors);
    open(scratch.path())
}

#[test]
fn both_formats_give_the_same_model() {
    let scratch = Scratch::new();
    write_hf(&scratch, &tiny_hf_config(), &tiny_hf_tensors());
    let path = scratch.write("model.gguf", tiny_gguf().bytes());
    let (gguf, hf) = (open(&path).unwrap(), open(scratch.path()).unwrap());

    assert_eq!(gguf.config.rope.layout, RopeLayout::Interleaved);
    assert_eq!(hf.config.rope.layout, RopeLayout::HalfSplit);
    let mut same = gguf.config.clone();
    same.rope.layout = RopeLayout::HalfSplit;
    assert_eq!(same, hf.config);
    assert!(hf.config.tied_head && !hf.config.qkv_bias && !hf.config.qk_norm);

    for (name, shape) in gguf.config.tensors() {
        let (a, b) = (gguf.weights.tensor(&name).unwrap(), hf.weights.tensor(&name).unwrap());
        assert_eq!(a.shape, shape);
        assert_eq!((a.shape, a.format, a.bytes.as_slice()), (b.shape, b.format, b.bytes.as_slice()), "{name}");
        assert_eq!(a.bytes.as_slice().len(), shape[0] * shape[1] * 4);
    }
    assert_eq!(gguf.weights.total_bytes(), hf.weights.total_bytes());
    assert_eq!(gguf.generation.eos, [4, 3]);
    assert_eq!(hf.generation.eos, [3]);
    assert_eq!((gguf.generation.bos, hf.generation.bos), (Some(4), Some(4)));
}

#[test]
fn inspection_sees_one_token_table_whatever_the_file_and_its_padding() {
    let scratch = Scratch::new();
    write_hf(&scratch, &tiny_hf_config(), &tiny_hf_tensors());
    let path = scratch.write("model.gguf", tiny_gguf().bytes());
    let (gguf, hf) = (inspect(&path).unwrap(), inspect(scratch.path()).unwrap());
    assert_eq!(gguf.tokens, hf.tokens);
    assert_eq!(gguf.tokens.len, 5);
    assert_eq!(gguf.config.vocab, 6);
    assert_eq!(gguf.formats, [(Format::F32, gguf.weight_bytes)]);

    let mut other = tiny_gguf();
    other.set("tokenizer.ggml.tokens", texts(&["b", "a", "ab", "<|im_end|>", "<s>", "[PAD5]"]));
    let path = scratch.write("other.gguf", other.bytes());
    assert_ne!(inspect(&path).unwrap().tokens, gguf.tokens);
}

#[test]
fn a_vocabulary_wider_than_the_embedding_is_refused() {
    let scratch = Scratch::new();
    write_hf(&scratch, &tiny_hf_config(), &tiny_hf_tensors());
    let mut tokenizer = tiny_hf_tokenizer();
    tokenizer["added_tokens"][0]["id"] = 6.into();
    scratch.write("tokenizer.json", tokenizer.to_string());
    let error = inspect(scratch.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("7 tokens for 6 rows"), "{error}");
}

#[test]
fn heads_are_tied_untied_or_ignored_as_the_configuration_says() {
    let head = || RawTensor::f32("lm_head.weight", &[VOCAB, HIDDEN], 99.0);
    let with_head = || [tiny_hf_tensors(), vec![head()]].concat();
    let config = |tied: Option<bool>| {
        let mut config = tiny_hf_config();
        match tied {
            Some(tied) => config["tie_word_embeddings"] = tied.into(),
            None => drop(config.as_object_mut().unwrap().remove("tie_word_embeddings")),
        }
        config
    };
    let tied = |said, tensors: &[RawTensor]| hf(&config(said), tensors).map(|files| files.config.tied_head);
    assert!(tied(Some(true), &tiny_hf_tensors()).unwrap());
    assert!(tied(Some(true), &with_head()).unwrap());
    assert!(!tied(Some(false), &with_head()).unwrap());
    assert!(tied(None, &tiny_hf_tensors()).unwrap());
    assert!(!tied(None, &with_head()).unwrap());
    let error = tied(Some(false), &tiny_hf_tensors()).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight") && error.contains("tie_word_embeddings"), "{error}");
    let ignored = hf(&config(Some(true)), &with_head()).unwrap();
    assert!(ignored.weights.tensor("head.weight").is_err());

    let mut gguf = tiny_gguf();
    assert!(open_gguf(&gguf).unwrap().config.tied_head);
    gguf.tensors.push(RawTensor::f32("output.weight", &[VOCAB, HIDDEN], 9.0));
    let untied = open_gguf(&gguf).unwrap();
    assert!(!untied.config.tied_head);
    assert_eq!(untied.weights.tensor("head.weight").unwrap().shape, [6, 32]);
}

#[test]
fn every_truncation_of_a_gguf_is_refused() {
    let whole = tiny_gguf().bytes();
    let scratch = Scratch::new();
    let last_tensor_end = whole.len();
    let head = (0..4000).step_by(7);
    for len in head.chain((4000..last_tensor_end).step_by(997)).chain([last_tensor_end - 1]) {
        let error = open(&scratch.write("cut.gguf", &whole[..len])).unwrap_err();
        assert!(matches!(error, WeightsError::Truncated { .. }), "{len} bytes: {error}");
        assert!(error.to_string().contains("cut.gguf"), "{error}");
    }
    let error = open(&scratch.write("cut.gguf", &whole[..whole.len() * 9 / 10])).unwrap_err().to_string();
    assert!(error.contains("blk.1.") && error.contains("download"), "{error}");
}

#[test]
fn an_unknown_architecture_is_not_called_truncated() {
    let mut parts = tiny_gguf();
    parts.set("general.architecture", Value::Text("foo".into()));
    let error = open_gguf(&parts).unwrap_err();
    assert!(matches!(&error, WeightsError::UnknownArchitecture { name, .. } if name == "foo"), "{error}");
    assert!(error.to_string().contains("llama, qwen2, qwen3"), "{error}");

    let error = hf(&serde_json::json!({ "architectures": ["FooForCausalLM"] }), &[]).unwrap_err();
    assert!(matches!(&error, WeightsError::UnknownArchitecture { name, .. } if name == "FooForCausalLM"), "{error}");
}

/// Spoils a sound file and lists the words the refusal must hold.
type Spoil = (&'static str, fn(&mut GgufParts), &'static [&'static str]);

#[test]
fn hostile_ggufs_are_refused_by_name() {
    let cases: [Spoil; 17] = [
        ("version 1", |p| p.version = 1, &["version 1", "convert"]),
        ("big-endian", |p| p.version = 3u32.swap_bytes(), &["big-endian"]),
        ("version 9", |p| p.version = 9, &["version 9"]),
        ("unknown type", |p| p.tensor_mut("blk.0.attn_q.weight").kind = 23, &["blk.0.attn_q.weight", "IQ4_XS", "Q4_K"]),
        ("unheard-of type", |p| p.tensor_mut("blk.0.attn_q.weight").kind = 777, &["blk.0.attn_q.weight", "777"]),
        (
            "huge shape",
            |p| p.tensor_mut("blk.1.ffn_up.weight").dims = vec![1 << 40, 1 << 40],
            &["blk.1.ffn_up", "shape"],
        ),
        (
            "long shape",
            |p| p.tensor_mut("blk.1.ffn_up.weight").dims[0] = 1 << 30,
            &["blk.1.ffn_up.weight", "truncated"],
        ),
        ("empty shape", |p| p.tensor_mut("output_norm.weight").dims = vec![0], &["output_norm.weight", "empty"]),
        ("no shape", |p| p.tensor_mut("output_norm.weight").dims = vec![], &["output_norm.weight", "0 dimensions"]),
        (
            "five dims",
            |p| p.tensor_mut("output_norm.weight").dims = vec![1; 5],
            &["output_norm.weight", "5 dimensions"],
        ),
        (
            "wrong shape",
            |p| p.tensor_mut("output_norm.weight").dims = vec![31],
            &["output_norm.weight", "[31]", "[1, 32]"],
        ),
        ("ragged rows", |p| p.tensor_mut("output_norm.weight").kind = 12, &["output_norm.weight", "multiple", "Q4_K"]),
        ("twice", |p| p.tensors.push(p.tensors[3].clone()), &["occurs twice"]),
        ("key twice", |p| p.metadata.push(p.metadata[0].clone()), &["general.architecture", "occurs twice"]),
        ("no tensor", |p| p.tensors.truncate(p.tensors.len() - 1), &["layers.1.ffn_down.weight", "missing"]),
        ("no key", |p| p.remove("llama.block_count"), &["llama.block_count", "missing"]),
        ("odd alignment", |p| p.set("general.alignment", Value::Unsigned(24)), &["general.alignment", "24"]),
    ];
    for (name, spoil, words) in cases {
        let mut parts = tiny_gguf();
        spoil(&mut parts);
        let error = refused(&parts);
        for word in ["model.gguf"].iter().chain(words) {
            assert!(error.contains(word), "{name}: {error:?} lacks {word:?}");
        }
    }
}

#[test]
fn impossible_settings_are_refused_by_key() {
    let cases: [(&str, Value, &str); 10] = [
        ("llama.attention.head_count", Value::Unsigned(0), "heads"),
        ("llama.attention.head_count", Value::Text("4".into()), "llama.attention.head_count"),
        ("llama.attention.head_count_kv", Value::Unsigned(3), "does not divide"),
        ("llama.block_count", Value::Signed(-1), "llama.block_count"),
        ("llama.block_count", Value::Unsigned(4_000_000_000), "number of layers"),
        ("llama.attention.layer_norm_rms_epsilon", Value::Float(f64::NAN), "epsilon"),
        ("llama.rope.dimension_count", Value::Unsigned(7), "rotated components"),
        ("llama.rope.scaling.type", Value::Text("longrope".into()), "longrope"),
        ("llama.attention.sliding_window", Value::Unsigned(16), "sliding_window"),
        ("split.count", Value::Unsigned(2), "split.count"),
    ];
    for (key, value, word) in cases {
        let mut parts = tiny_gguf();
        parts.set(key, value.clone());
        let error = refused(&parts);
        assert!(error.contains(word), "{key} = {value}: {error}");
    }
}

#[test]
fn claimed_counts_are_bounded_by_the_file() {
    let scratch = Scratch::new();
    let sound = tiny_gguf().bytes();
    for (at, name) in [(8, "tensors"), (16, "metadata keys"), (24, "metadata key 0")] {
        for claim in [u64::MAX, 1 << 62, 1 << 33] {
            let mut bytes = sound.clone();
            bytes[at..at + 8].copy_from_slice(&claim.to_le_bytes());
            let error = open(&scratch.write("model.gguf", bytes)).unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
        }
    }
    let mut array = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k\x09\0\0\0\x04\0\0\0".to_vec();
    array.extend(u64::MAX.to_le_bytes());
    let error = open(&scratch.write("model.gguf", array)).unwrap_err();
    assert!(matches!(&error, WeightsError::Truncated { what, .. } if what.contains("\"k\"")), "{error}");

    let mut nested = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k\x09\0\0\0".to_vec();
    (0..1000).for_each(|_| nested.extend([9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]));
    let error = open(&scratch.write("model.gguf", nested)).unwrap_err().to_string();
    assert!(error.contains("nests arrays"), "{error}");
}

#[test]
fn noise_in_a_gguf_never_panics() {
    let seed = fresh_seed();
    let (mut noise, sound, scratch) = (Noise(seed), tiny_gguf().bytes(), Scratch::new());
    let header = sound.len() / 10;
    for round in 0..400 {
        let mut bytes = sound.clone();
        for _ in 0..1 + noise.below(4) {
            let at = noise.below(if round % 4 == 0 { bytes.len() } else { header });
            bytes[at] = noise.next() as u8;
        }
        if let Ok(files) = open(&scratch.write("noise.gguf", bytes)) {
            for (name, shape) in files.config.tensors() {
                let tensor = files.weights.tensor(&name).unwrap();
                assert_eq!(tensor.shape, shape, "seed {seed}, round {round}, {name}");
            }
            let _ = files.inspect();
        }
    }
}

#[test]
fn noise_in_safetensors_and_json_never_panics() {
    let seed = fresh_seed();
    let (mut noise, scratch) = (Noise(seed), Scratch::new());
    write_hf(&scratch, &tiny_hf_config(), &tiny_hf_tensors());
    let names = ["config.json", "tokenizer.json", "model.safetensors"];
    let sound = names.map(|name| std::fs::read(scratch.path().join(name)).unwrap());
    for round in 0..300 {
        let which = round % names.len();
        let mut bytes = sound[which].clone();
        let header = bytes.len().min(2500);
        for _ in 0..1 + noise.below(3) {
            let at = noise.below(header);
            bytes[at] = noise.next() as u8;
        }
        if noise.below(5) == 0 {
            bytes.truncate(noise.below(bytes.len()));
        }
        scratch.write(names[which], &bytes);
        if let Ok(files) = open(scratch.path()) {
            for (name, shape) in files.config.tensors() {
                assert_eq!(files.weights.tensor(&name).unwrap().shape, shape, "seed {seed}, round {round}, {name}");
            }
            let _ = files.inspect();
        }
        scratch.write(names[which], &sound[which]);
    }
}

#[test]
fn shards_are_joined_by_their_index() {
    let scratch = Scratch::new();
    write_hf(&scratch, &tiny_hf_config(), &tiny_hf_tensors());
    let whole = open(scratch.path()).unwrap();
    std::fs::remove_file(scratch.path().join("model.safetensors")).unwrap();
    let error = open(scratch.path()).unwrap_err().to_string();
    assert!(error.contains("model.safetensors.index.json"), "{error}");

    let tensors = tiny_hf_tensors();
    let (first, second) = tensors.split_at(7);
    scratch.write("a.safetensors", safetensors_bytes(first));
    scratch.write("b.safetensors", safetensors_bytes(second));
    let place = |index: usize| if index < 7 { "a.safetensors" } else { "b.safetensors" };
    let index = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let mut map: serde_json::Map<String, serde_json::Value> =
            tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), place(index).into())).collect();
        change(&mut map);
        scratch.write("model.safetensors.index.json", serde_json::json!({ "weight_map": map }).to_string());
        open(scratch.path())
    };
    let sharded = index(&|_| ()).unwrap();
    for (name, _) in whole.config.tensors() {
        let bytes = |files: &ModelFiles| files.weights.tensor(&name).unwrap().bytes.as_slice().to_vec();
        assert_eq!(bytes(&sharded), bytes(&whole), "{name}");
    }
    let norm = "model.norm.weight";
    let cases: [(&str, &[&str]); 3] = [
        ("../a.safetensors", &["not a plain file name", norm]),
        ("b.safetensors", &["b.safetensors", norm, "missing"]),
        ("c.safetensors", &["c.safetensors"]),
    ];
    for (shard, words) in cases {
        let error = index(&|map| drop(map.insert(norm.into(), shard.into()))).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{shard}: {error:?} lacks {word:?}");
        }
    }
}

#[test]
fn hostile_safetensors_are_refused_by_name() {
    let scratch = Scratch::new();
    write_hf(&scratch, &tiny_hf_config(), &tiny_hf_tensors());
    let sound = safetensors_bytes(&tiny_hf_tensors());
    let header_len = u64::from_le_bytes(*sound.first_chunk().unwrap()) as usize;
    let header = std::str::from_utf8(&sound[8..8 + header_len]).unwrap();
    let with_header = |header: String| {
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.as_bytes());
        out.extend(&sound[8 + header_len..]);
        out
    };
    let repeated = header.replacen("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight", 1);
    let cases: [(Vec<u8>, &[&str]); 7] = [
        (sound[..sound.len() - 1].to_vec(), &["truncated", "tensor"]),
        (sound[..100].to_vec(), &["truncated", "header"]),
        (sound[..4].to_vec(), &["truncated", "header"]),
        ([sound.clone(), vec![0]].concat(), &["every byte"]),
        (with_header(header.replacen("F32", "I64", 1)), &["header"]),
        (with_header(header.replacen("[32]", "[16,4]", 1)), &["header"]),
        (with_header(repeated), &["model.layers.0.mlp.gate_proj.weight"]),
    ];
    for (bytes, words) in cases {
        let error = open({
            scratch.write("model.safetensors", bytes);
            scratch.path()
        })
        .unwrap_err()
        .to_string();
        for word in ["model.safetensors"].iter().chain(words) {
            assert!(error.contains(word), "{error:?} lacks {word:?}");
        }
    }
}

#[test]
fn hf_settings_are_carried_over_or_refused() {
    let change = |key: &str, value: serde_json::Value| {
        let mut config = tiny_hf_config();
        config[key] = value;
        hf(&config, &tiny_hf_tensors())
    };
    use serde_json::json;
    let refusals = [
        ("hidden_act", json!("gelu"), "gelu"),
        ("sliding_window", json!(4096), "sliding_window"),
        ("use_sliding_window", json!(true), "sliding_window"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "sliding_window"),
        ("quantization_config", json!({ "quant_method": "gptq" }), "quantization_config"),
        ("rope_scaling", json!({ "rope_type": "dynamic", "factor": 2.0 }), "dynamic"),
        ("rope_scaling", json!({ "rope_type": "linear" }), "rope_scaling.factor"),
        ("rope_scaling", json!({ "type": "yarn", "factor": 4.0, "mscale": 0.7 }), "mscale"),
        ("attention_bias", json!(true), "layers.0.attn_q.bias"),
        ("hidden_size", json!(-3), "config.json"),
        ("head_dim", json!(7), "rotated components"),
        ("vocab_size", json!(7), "model.embed_tokens.weight"),
    ];
    for (key, value, word) in refusals {
        let error = change(key, value.clone()).map(|files| files.config).unwrap_err().to_string();
        assert!(error.contains(word), "{key} = {value}: {error}");
    }
    let scaling = |value| change("rope_scaling", value).unwrap().config.rope.scaling;
    let llama3 = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64 });
    assert!(matches!(scaling(llama3), RopeScaling::Llama3 { original_context: 64, .. }));
    assert!(matches!(scaling(json!({ "type": "linear", "factor": 2.0 })), RopeScaling::Linear { factor: 2.0 }));
    assert!(matches!(
        scaling(json!({ "type": "yarn", "factor": 4.0 })),
        RopeScaling::Yarn { original_context: 128, .. }
    ));
    let new_style = change("rope_parameters", json!({ "rope_type": "default", "rope_theta": 5.0 })).unwrap();
    assert_eq!(new_style.config.rope.scaling, RopeScaling::None);
}

#[test]
fn qwen_specifics_come_from_the_architecture() {
    let mut config = tiny_hf_config();
    config["architectures"] = serde_json::json!(["Qwen2ForCausalLM"]);
    config["use_sliding_window"] = false.into();
    config["sliding_window"] = 32768.into();
    let kv = HIDDEN / HEADS * KV_HEADS;
    let biases = (0..LAYERS).flat_map(|layer| {
        [("q", HIDDEN), ("k", kv), ("v", kv)]
            .map(|(part, len)| RawTensor::f32(&format!("model.layers.{layer}.self_attn.{part}_proj.bias"), &[len], 0.5))
    });
    let qwen2 = hf(&config, &[tiny_hf_tensors(), biases.collect()].concat()).unwrap();
    assert!(qwen2.config.qkv_bias && !qwen2.config.attn_o_bias);
    assert_eq!(qwen2.weights.tensor("layers.1.attn_k.bias").unwrap().shape, [1, 16]);

    config["architectures"] = serde_json::json!(["Qwen3ForCausalLM"]);
    let norms = (0..LAYERS).flat_map(|layer| {
        ["q", "k"].map(|part| {
            RawTensor::f32(&format!("model.layers.{layer}.self_attn.{part}_norm.weight"), &[HIDDEN / HEADS], 1.0)
        })
    });
    let qwen3 = hf(&config, &[tiny_hf_tensors(), norms.collect()].concat()).unwrap();
    assert!(qwen3.config.qk_norm && !qwen3.config.qkv_bias);
    let error = hf(&config, &tiny_hf_tensors()).unwrap_err().to_string();
    assert!(error.contains("layers.0.attn_q_norm.weight"), "{error}");
}

#[test]
fn generation_defaults_prefer_their_own_file() {
    let scratch = Scratch::new();
    write_hf(&scratch, &tiny_hf_config(), &tiny_hf_tensors());
    scratch
        .write("generation_config.json", r#"{"eos_token_id":[3,4,3],"do_sample":true,"temperature":0.7,"top_k":20}"#);
    let defaults = open(scratch.path()).unwrap().generation;
    assert_eq!(defaults.eos, [3, 4]);
    assert_eq!((defaults.do_sample, defaults.temperature, defaults.top_k), (Some(true), Some(0.7), Some(20)));
    assert_eq!(defaults.bos, Some(4));
}
