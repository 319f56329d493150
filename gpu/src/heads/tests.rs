//! Converted checkpoints against the scores that NumPy gives them, and checkpoints that must be refused.

use super::network::{NetworkInput, Scratch};
use super::*;
use crate::cpu::{Cpu, CpuOptions};
use crate::ops::{HeadOutput, Ops};
use crate::weights::Tensor;
use crate::weights::torch::tests::archive;
use serde::Deserialize;
use std::sync::atomic::{AtomicU32, Ordering};
use tokenrouter_core::rng::{Stream, unit};
use tokenrouter_kernels::quant::Format;

#[derive(Deserialize)]
struct Expected {
    hidden_size: usize,
    logits_size: usize,
    cases: Vec<Case>,
}

/// A checkpoint with inputs; `embedding` has the row of each candidate.
#[derive(Deserialize)]
struct Case {
    file: String,
    family: String,
    kind: String,
    layers: Vec<usize>,
    threshold: Option<f64>,
    hidden: Vec<Vec<f32>>,
    embedding: Vec<Vec<f32>>,
    logits: Vec<Vec<f32>>,
    scores: Vec<f64>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/heads")
}

fn expected() -> Expected {
    serde_json::from_slice(&std::fs::read(fixtures().join("expected.json")).unwrap()).unwrap()
}

/// A folder that is removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("tokenrouter-heads-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Folder(std::env::temp_dir().join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn converted(file: &str, hidden: Option<usize>) -> (Folder, Conversion) {
    let folder = Folder::new();
    let conversion = convert(&fixtures().join(file), &folder.0, hidden).unwrap_or_else(|error| panic!("{error}"));
    (folder, conversion)
}

fn refusal(file: &Path) -> String {
    let folder = Folder::new();
    let error = convert(file, &folder.0, None).map(|_| ()).expect_err("a checkpoint that must be refused").to_string();
    assert!(!folder.0.exists(), "nothing is written: {error}");
    error
}

/// Rows of a case, one after another.
#[derive(Clone, Default)]
struct Rows {
    hidden: Vec<f32>,
    embedding: Vec<f32>,
    top: Vec<f32>,
}

/// Scores of `count` rows.
fn scores(network: &Network<Cpu>, ops: &mut Cpu, rows: &Rows, count: usize) -> Vec<f32> {
    let width = rows.hidden.len() / count;
    let mut hidden = ops.rows(count, width).unwrap();
    hidden.fill(&rows.hidden);
    let embedding = if rows.embedding.is_empty() { vec![0.0; count] } else { rows.embedding.clone() };
    let bytes: Vec<u8> = embedding.iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape = [count, embedding.len() / count];
    let embed = ops.matrix(Tensor { name: "embed".into(), shape, format: Format::F32, bytes: bytes.into() }).unwrap();
    let scored: Vec<u32> = (0..count as u32).collect();
    let mut scratch = Scratch::new(ops, network.config(), count).unwrap();
    let mut found = HeadOutput::of_top(ops, count, &rows.top).unwrap();
    let input = NetworkInput { hidden: &hidden, embed: &embed, scored: &scored };
    network.score(ops, input, (&mut scratch, &mut found));
    found.scores
}

fn cpu(threads: usize) -> Cpu {
    Cpu::new(&CpuOptions { threads, cores: Vec::new() }).unwrap()
}

#[test]
fn every_published_network_scores_like_numpy() {
    let expected = expected();
    assert_eq!(expected.cases.len(), 9);
    for case in &expected.cases {
        let (folder, conversion) = converted(&case.file, None);
        let config = &conversion.config;
        assert_eq!((config.family.name(), config.class.name()), (case.family.as_str(), case.kind.as_str()));
        assert_eq!((&config.layers, config.threshold), (&case.layers, case.threshold), "{}", case.file);
        let inputs = config.class.inputs();
        assert_eq!(config.hidden_size, if inputs.hidden { expected.hidden_size } else { 0 }, "{}", case.file);
        assert_eq!(config.logits_size, if inputs.logits { expected.logits_size } else { 0 }, "{}", case.file);
        let warned = conversion.notes.iter().any(|note| note.contains("2048") && note.contains("32"));
        assert_eq!(warned, inputs.hidden && config.family == Family::R2r, "{:?}", conversion.notes);
        let files = open(&folder.0).unwrap();
        assert_eq!(files.config, *config);
        let mut ops = cpu(2);
        let network = Network::new(&mut ops, &files).unwrap();
        let rows = Rows { hidden: case.hidden.concat(), embedding: case.embedding.concat(), top: case.logits.concat() };
        for (found, exact) in scores(&network, &mut ops, &rows, case.scores.len()).iter().zip(&case.scores) {
            let error = (f64::from(*found) - exact).abs() / exact;
            assert!(error < 1e-4, "{}: {found} {exact}", case.file);
        }
    }
}

#[test]
fn a_score_has_the_same_bits_alone_and_in_any_batch() {
    for case in expected().cases {
        let (folder, conversion) = converted(&case.file, None);
        let files = open(&folder.0).unwrap();
        let (count, seed) = (23, 5);
        let random = |stream: u64, width: usize| -> Vec<f32> {
            (0..(count * width) as u32).map(|i| (unit(seed + stream, i, Stream::Token) * 4.0 - 2.0) as f32).collect()
        };
        let config = &conversion.config;
        let (h, e, l) = (config.hidden_size.max(1), config.embedding_size, config.logits_size);
        let all = Rows { hidden: random(0, h), embedding: random(1, e), top: random(2, l) };
        let mut first: Option<Vec<u32>> = None;
        for threads in [1, 3] {
            let mut ops = cpu(threads);
            let network = Network::new(&mut ops, &files).unwrap();
            let together: Vec<u32> = scores(&network, &mut ops, &all, count).iter().map(|s| s.to_bits()).collect();
            assert_eq!(*first.get_or_insert(together.clone()), together, "{} threads", threads);
            for row in 0..count {
                let part = |values: &[f32], width: usize| values[row * width..(row + 1) * width].to_vec();
                let alone =
                    Rows { hidden: part(&all.hidden, h), embedding: part(&all.embedding, e), top: part(&all.top, l) };
                assert_eq!(scores(&network, &mut ops, &alone, 1)[0].to_bits(), together[row], "{} {row}", case.file);
            }
        }
    }
}

#[test]
fn checkpoints_that_are_wrong_are_refused_and_nothing_runs() {
    for (file, words) in [
        ("evil-reduce.pt", &["posix.system", "not run"][..]),
        ("wrong-shape.pth", &["mlp.4.weight", "[32, 32]", "[32, 64]"]),
        ("not-a-number.pth", &["linear.bias", "no numbers"]),
        ("extra-tensor.pth", &["extra.weight", "MLP"]),
        ("repeated-storage.pth", &["bytes in a file of"]),
        ("list.pt", &["a list"]),
        ("make_heads.py", &["no zip archive"]),
        ("nowhere.pt", &["nowhere.pt"]),
    ] {
        let error = refusal(&fixtures().join(file));
        assert!(words.iter().all(|word| error.contains(word)) && error.contains(file), "{error}");
    }
    assert!(!Path::new("pickle-was-run").exists());
    let folder = Folder::new();
    let error = convert(&fixtures().join("citer.pth"), &folder.0, Some(64)).unwrap_err().to_string();
    assert!(error.contains("32") && error.contains("64"), "{error}");
}

/// A CITER checkpoint whose tensors all lie in one storage, as large as the largest of them.
fn sharing(hidden: u32) -> Vec<u8> {
    let (wide, long) = (2 * hidden, |name: &str| [&(name.len() as u32).to_le_bytes(), name.as_bytes()].concat());
    let elements = wide * hidden;
    let int = |value: u32| [&b"J"[..], &value.to_le_bytes()].concat();
    let tensor = |name: &str, shape: &[u32]| {
        let strides: Vec<u32> = if shape.len() == 2 { vec![shape[1], 1] } else { vec![1] };
        let tuple =
            |dims: &[u32]| [&b"("[..], &dims.iter().flat_map(|&dim| int(dim)).collect::<Vec<u8>>(), b"t"].concat();
        let storage = b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000";
        let parts: [&[u8]; 9] = [
            b"X",
            &long(name),
            storage,
            b"X\x03\0\0\0cpu",
            &int(elements),
            b"tQK\0",
            &[tuple(shape), tuple(&strides)].concat(),
            b"\x89ccollections\nOrderedDict\n)R",
            b"tR",
        ];
        parts.concat()
    };
    let mut pickle = b"\x80\x02}(".to_vec();
    pickle.extend(tensor("mlp.0.weight", &[wide, hidden]));
    for name in ["mlp.0.bias", "mlp.1.weight", "mlp.1.bias", "mlp.1.running_mean", "mlp.1.running_var"] {
        pickle.extend(tensor(name, &[wide]));
    }
    pickle.extend(tensor("mlp.4.weight", &[hidden, wide]));
    pickle.extend(tensor("mlp.4.bias", &[hidden]));
    pickle.extend(tensor("linear.weight", &[1, hidden]));
    pickle.extend(tensor("linear.bias", &[1]));
    pickle.extend(b"u.");
    let storage: Vec<u8> = (0..elements).flat_map(|_| 0.5f32.to_le_bytes()).collect();
    archive(&[("x/data.pkl", &pickle), ("x/data/0", &storage)])
}

#[test]
fn tensors_that_share_their_bytes_are_refused() {
    let folder = Folder::new();
    std::fs::create_dir_all(&folder.0).unwrap();
    let path = folder.0.join("sharing.pth");
    std::fs::write(&path, sharing(64)).unwrap();
    let error = refusal(&path);
    assert!(error.contains("tensors") && error.contains("bytes in a file of"), "{error}");
}

#[test]
fn a_checkpoint_cut_or_changed_anywhere_is_refused_or_read_the_same() {
    let whole = std::fs::read(fixtures().join("citer.pth")).unwrap();
    let folder = Folder::new();
    std::fs::create_dir_all(&folder.0).unwrap();
    let (_kept, exact) = converted("citer.pth", None);
    let path = folder.0.join("changed.pth");
    for case in 0..300u32 {
        let random = |index: u32| unit(99, case * 8 + index, Stream::Token);
        let mut bytes = whole.clone();
        if case % 3 == 0 {
            bytes.truncate((random(0) * whole.len() as f64) as usize);
        } else {
            for index in 0..1 + case % 4 {
                let at = (random(2 * index) * whole.len() as f64) as usize;
                bytes[at] = (random(2 * index + 1) * 256.0) as u8;
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        let out = folder.0.join("out");
        // Changed weights have another checksum, so whatever is read is what was saved.
        if let Ok(conversion) = convert(&path, &out, None) {
            assert!(case % 3 != 0, "a truncated file was read");
            assert_eq!((conversion.config, conversion.parameters), (exact.config.clone(), exact.parameters));
        }
    }
}

#[test]
fn a_description_is_read_strictly() {
    let (folder, _) = converted("r2r-default.pt", None);
    let path = folder.0.join(CONFIG_FILE);
    let good: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value, words) in [
        ("hiden_size", serde_json::json!(3), "hiden_size"),
        ("format", serde_json::json!(9), "format is 9"),
        ("hidden_size", serde_json::json!(64), "logits_projection.weight"),
        ("hidden_size", serde_json::json!(1u64 << 40), "hidden_size"),
        ("layers", serde_json::json!([24, 24, 24, 24]), "backbone.blocks.3"),
        ("layers", serde_json::json!([24, 24]), "backbone.blocks.2"),
        ("layers", serde_json::json!([]), "layers"),
        ("family", serde_json::json!("citer"), "family citer"),
        ("class", serde_json::json!("Other"), "Other"),
        ("threshold", serde_json::json!("high"), "high"),
    ] {
        let mut changed = good.clone();
        changed[key] = value;
        std::fs::write(&path, changed.to_string()).unwrap();
        let error = open(&folder.0).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "{key}: {error}");
    }
}
