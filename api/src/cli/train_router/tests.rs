//! Training against the served networks, plain formulas, and made-up shards in which one feature decides.

use super::*;
use crate::cli::label::shards::{FORMAT as SHARDS_FORMAT, Folder, Labelled, MANIFEST, Rows};
use crate::launch::Environment;
use crate::progress::Progress;
use candle_core::{Device, Tensor};
use candle_nn::optim::{AdamW, Optimizer, ParamsAdamW};
use clap::Parser;
use network::Trainee;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use tokenrouter_core::executor::Signals;
use tokenrouter_core::rng::{self, Stream};
use tokenrouter_gpu::cpu::{Cpu, CpuOptions};
use tokenrouter_gpu::heads::{self, Network, NetworkInput, Scratch};
use tokenrouter_gpu::ops::{HeadOutput, Ops};
use tokenrouter_kernels::quant::Format;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

/// A folder that is removed at the end of the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Temporary {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("tokenrouter-train-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Temporary(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn args(shards: &[&Path], options: &str, out: &Path) -> Args {
    let mut line = vec!["train-router".to_owned(), "--out".to_owned(), out.display().to_string()];
    line.extend(shards.iter().map(|folder| folder.display().to_string()));
    line.extend(options.split_whitespace().map(str::to_owned));
    Line::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).args
}

fn context() -> Context {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/demo/launch.toml");
    let line = ["tokenrouter", "--quiet", "--config", &demo.display().to_string(), "check"];
    let common = crate::cli::Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).common;
    let interrupts = Default::default();
    Context { common, environment: Environment::read(), progress: Progress::hidden(), interrupts }
}

fn number(seed: u64, at: usize) -> f64 {
    rng::unit(seed, at as u32, Stream::Token)
}

/// Settings of shards of the demo pair.
fn settings(fingerprint: &str) -> Settings {
    Settings {
        small: "small".into(),
        small_parameters: 136_512,
        large: "large".into(),
        large_parameters: 826_496,
        hidden_size: 64,
        top_k: 4,
        judge: "equal".into(),
        max_tokens: 8,
        shard_problems: 100,
        problems: 200,
        fingerprint: fingerprint.into(),
    }
}

/// What decides the label of a made-up row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A direction of the hidden row.
    Hidden,
    /// Which token the candidate is.
    Token,
    /// How far the second logit is below the first.
    Logits,
    /// Nothing: the labels of [`Rule::Hidden`], each at another row.
    Shuffled,
}

/// Shards with 200 problems of 20 rows, a tenth divergent by the rule, with a margin; everything else is noise.
fn shards(folder: &Path, rule: Rule) {
    let mut shards = Folder::open(folder, settings("00")).expect("a new folder");
    for shard in 0..2u32 {
        let mut rows = Rows::default();
        for problem in 100 * shard..100 * (shard + 1) {
            for position in 0..20u32 {
                let seed = u64::from(problem * 20 + position);
                let divergent = |seed: u64| number(1, seed as usize) < 0.1;
                let (label, other) = (divergent(seed), divergent((seed + 1777) % 4000));
                let hidden_says = if rule == Rule::Hidden || rule == Rule::Shuffled { label } else { other };
                let token_says = if rule == Rule::Token { label } else { other };
                let logits_say = if rule == Rule::Logits { label } else { other };
                let mut hidden: Vec<f32> = (0..64).map(|at| (2.0 * number(seed + 9, at) - 1.0) as f32).collect();
                let lift = if hidden_says { 1.0 } else { -1.0 } * (0.5 + number(3, seed as usize) as f32);
                (hidden[5], hidden[40]) = (lift, -lift);
                let gap = if logits_say { 0.5 } else { 4.0 } + number(4, seed as usize) as f32;
                let top = vec![(1, 9.0), (2, 9.0 - gap), (3, 4.0 - gap), (4, 3.0 - gap)];
                rows.push(&Labelled {
                    signals: &Signals { hidden, top, ..Signals::default() },
                    // Digits: tokens that the demo models know well.
                    candidate: if token_says { 16 } else { 17 + (seed % 7) as u32 },
                    large: 9,
                    label: u32::from(if rule == Rule::Shuffled { divergent((seed + 501) % 4000) } else { label }),
                    problem,
                    position,
                });
            }
        }
        shards.add(&rows).expect("a shard");
    }
}

/// What a run printed as JSON would say, without the process.
fn trained(shards: &[&Path], options: &str, out: &Path) -> Result<HeadConfig, CliError> {
    run(&context(), &args(shards, options, out))?;
    Ok(heads::open(out).expect("what was written opens").config)
}

fn config(family: Family, class: Class) -> HeadConfig {
    let inputs = class.inputs();
    let r2r = family == Family::R2r;
    HeadConfig {
        format: FORMAT,
        family,
        class,
        hidden_size: if inputs.hidden { 24 } else { 0 },
        embedding_size: if inputs.token { 24 } else { 0 },
        logits_size: if inputs.logits { 10 } else { 0 },
        layers: if r2r { vec![20, 28, 28] } else { vec![40, 20] },
        expansion: if r2r { 3 } else { 0 },
        normalize_input: false,
        threshold: Some(0.5),
        model: None,
    }
}

/// Random rows of a network's inputs.
struct Drawn {
    hidden: Vec<f32>,
    embedding: Vec<f32>,
    top: Vec<f32>,
}

impl Drawn {
    fn new(seed: u64, rows: usize) -> Drawn {
        let draw = |stream: u64, count: usize| -> Vec<f32> {
            (0..count).map(|at| (6.0 * number(seed * 8 + stream, at) - 3.0) as f32).collect()
        };
        let mut top = draw(3, rows * 10);
        top.chunks_mut(10).for_each(|row| row.sort_by(|a, b| b.total_cmp(a)));
        Drawn { hidden: draw(1, rows * 24), embedding: draw(2, rows * 24), top }
    }

    fn inputs(&self) -> network::Inputs {
        let tensor = |values: &[f32], width: usize| {
            Some(Tensor::from_slice(values, (values.len() / width, width), &Device::Cpu).expect("a tensor"))
        };
        network::Inputs {
            hidden: tensor(&self.hidden, 24),
            embedding: tensor(&self.embedding, 24),
            top: tensor(&self.top, 10),
        }
    }

    /// Scores of the head in a folder, as a server computes them.
    fn served(&self, folder: &Path) -> Vec<f32> {
        let files = heads::open(folder).expect("a head");
        let mut ops = Cpu::new(&CpuOptions { threads: 1, cores: Vec::new() }).expect("a device");
        let network = Network::new(&mut ops, &files).expect("a network");
        let rows = self.hidden.len() / 24;
        let mut hidden = ops.rows(rows, 24).expect("rows");
        hidden.fill(&self.hidden);
        let bytes: Vec<u8> = self.embedding.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor =
            weights::Tensor { name: "embed".into(), shape: [rows, 24], format: Format::F32, bytes: bytes.into() };
        let embed = ops.matrix(tensor).expect("a matrix");
        let scored: Vec<u32> = (0..rows as u32).collect();
        let mut scratch = Scratch::new(&mut ops, network.config(), rows).expect("scratch");
        let mut found = HeadOutput::of_top(&mut ops, rows, &self.top).expect("a head");
        let input = NetworkInput { hidden: &hidden, embed: &embed, scored: &scored };
        network.score(&mut ops, input, (&mut scratch, &mut found));
        found.scores
    }
}

/// The forward pass that is trained is the one that is served: with the first weights, and after steps that moved all of
/// them, running statistics included.
#[test]
fn what_is_trained_scores_as_what_is_served() {
    let citer = (Family::Citer, Class::Mlp, false);
    let r2r = R2R_CLASSES.into_iter().flat_map(|class| [false, true].map(|norm| (Family::R2r, class, norm)));
    for (seed, (family, class, normalize_input)) in (0u64..).zip(r2r.chain([citer])) {
        let config = HeadConfig { normalize_input, ..config(family, class) };
        let head = Trainee::new(config.clone(), seed).expect("a head");
        let params = ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() };
        let mut optimizer = AdamW::new(head.trained(), params).expect("an optimiser");
        let mut before: Option<Vec<f32>> = None;
        for steps in [0, 5] {
            for step in 0..steps {
                let inputs = Drawn::new(100 * seed + step, 32).inputs();
                let targets: Vec<f32> = (0..32).map(|at| number(step, at).round() as f32).collect();
                let targets = Tensor::from_vec(targets, 32, &Device::Cpu).expect("targets");
                let loss = fit::loss(&head.train(&inputs).expect("logits"), &targets, 3.0).expect("a loss");
                optimizer.backward_step(&loss).expect("a step");
            }
            let folder = Temporary::new();
            let place = Place::free(&folder.at("head"), false).expect("free");
            place.write(&config, &head.snapshot().expect("tensors")).expect("written");
            let drawn = Drawn::new(seed + 77, 40);
            let logits = head.evaluate(&drawn.inputs()).expect("logits");
            let scores: Vec<f32> = candle_nn::ops::sigmoid(&logits).and_then(|s| s.to_vec1()).expect("scores");
            let served = drawn.served(&folder.at("head"));
            for (trained, served) in scores.iter().zip(&served) {
                let error = (trained - served).abs() / served;
                assert!(error < 1e-4, "{class:?} {normalize_input} after {steps} steps: {trained} {served}");
            }
            let spread = |s: &[f32]| s.iter().any(|score| (score - s[0]).abs() > 1e-3);
            assert!(spread(&scores), "{class:?}: all scores are alike");
            assert!(before.as_ref().is_none_or(|before| before != &scores), "{class:?}: training moved nothing");
            before = Some(scores);
        }
    }
}

#[test]
fn the_loss_is_the_weighted_cross_entropy() {
    let logits: Vec<f32> = (0..60).map(|at| (40.0 * number(5, at) - 20.0) as f32).chain([0.0, 90.0, -90.0]).collect();
    let targets: Vec<f32> = (0..63).map(|at| f32::from(u8::from(number(6, at) < 0.3))).collect();
    for weight in [1.0, 19.0] {
        let terms = logits.iter().zip(&targets).map(|(&z, &y)| {
            let (p, y) = (1.0 / (1.0 + (-f64::from(z)).exp()), f64::from(y));
            -(weight * y * p.max(1e-300).ln() + (1.0 - y) * (1.0 / (1.0 + f64::from(z).exp())).max(1e-300).ln())
        });
        let plain = terms.sum::<f64>() / logits.len() as f64;
        let tensor = |values: &[f32]| Tensor::from_slice(values, values.len(), &Device::Cpu).expect("a tensor");
        let found = fit::loss(&tensor(&logits), &tensor(&targets), weight).expect("a loss");
        let found = f64::from(found.to_scalar::<f32>().expect("a number"));
        assert!((found / plain - 1.0).abs() < 1e-5, "{found} {plain}");
    }
}

/// One feature decides, and the head of either family finds it; without it, or with shuffled labels, there is nothing to
/// find.
#[test]
fn a_head_finds_what_decides_and_nothing_where_nothing_does() {
    let quick = "--epochs 12 --batch 64 --rate 0.003 --layers 16,16 --recall 0.95";
    for (rule, options, learns) in [
        (Rule::Hidden, "--family citer", true),
        (Rule::Hidden, "--family r2r", true),
        (Rule::Token, "--family r2r --normalize-input", true),
        (Rule::Logits, "--family r2r --normalize-input", true),
        (Rule::Logits, "--family r2r --reads logits --top-k 3", true),
        (Rule::Token, "--family r2r --reads hidden,logits", false),
        (Rule::Logits, "--family citer", false),
        (Rule::Shuffled, "--family citer", false),
        (Rule::Shuffled, "--family r2r", false),
    ] {
        let folder = Temporary::new();
        shards(&folder.at("shards"), rule);
        let data = Data::read(&[folder.at("shards")]).expect("shards");
        let args = args(&[&folder.at("shards")], &format!("{options} {quick}"), &folder.at("head"));
        let config = args.shape.config(args.family, &data.settings).expect("a network");
        let small = small(&context(), &args, &data.settings).expect("the small model");
        let embeddings = embeddings(&small, &data.candidate).expect("embeddings");
        let split = data.split(0.25, 0).expect("both labels");
        let batches = Batches { data: &data, config: &config, embeddings: &embeddings };
        let fit = fit::fit(&config, &batches, (&split, &args.plan), &Progress::hidden().count("", 1)).expect("a fit");
        let base = data.divergent_of(&split.validation) as f64 / split.validation.len() as f64;
        let choice = choice::choose(config.family, &fit.scored, args.recall);
        let area = choice::auroc(config.family, &fit.scored);
        if learns {
            let choice = choice.expect("a threshold");
            assert!(choice.recall >= 0.95 && choice.routed < 1.1 * base, "{rule:?} {options}: {choice:?} of {base}");
            assert!(area > 0.99, "{rule:?} {options}: {area}");
        } else {
            assert!((0.35..0.65).contains(&area), "{rule:?} {options}: {area}");
            // A recall that chance gives costs about as many rows.
            assert!(choice.is_none_or(|choice| choice.routed > 0.7), "{rule:?} {options}: {choice:?}");
        }
    }
}

#[test]
fn the_same_seed_and_shards_give_the_same_bytes() {
    let folder = Temporary::new();
    shards(&folder.at("shards"), Rule::Hidden);
    let options = "--family r2r --epochs 2 --recall 0.5 --validation 0.3";
    for (out, seed) in [("one", 4), ("two", 4), ("three", 5)] {
        let config = trained(&[&folder.at("shards")], &format!("{options} --seed {seed}"), &folder.at(out));
        let config = config.expect("trained");
        assert_eq!((config.layers, config.logits_size), (vec![64, 64], 4));
        assert!(config.threshold.is_some_and(|threshold| (0.01..=0.99).contains(&threshold)));
        assert_eq!(config.model.as_deref(), Some("small"));
        assert_eq!(std::fs::read_dir(folder.at(out)).expect("the head").count(), 2);
    }
    let read = |out: &str, name: &str| std::fs::read(folder.at(out).join(name)).expect(name);
    for name in [heads::CONFIG_FILE, heads::WEIGHTS_FILE] {
        assert!(read("one", name) == read("two", name), "{name}");
    }
    assert!(read("one", heads::WEIGHTS_FILE) != read("three", heads::WEIGHTS_FILE));
    assert_eq!(std::fs::read_dir(&folder.0).expect("the folder").count(), 4, "nothing is left beside the heads");
}

#[test]
fn problems_are_never_on_both_sides() {
    let folder = Temporary::new();
    shards(&folder.at("shards"), Rule::Hidden);
    let data = Data::read(&[folder.at("shards")]).expect("shards");
    let split = data.split(0.25, 3).expect("both labels");
    assert_eq!((split.validation.len(), split.training.len()), (50 * 20, 150 * 20));
    // Twenty rows are a problem, in order.
    let problems = |rows: &[usize]| rows.iter().map(|row| row / 20).collect::<std::collections::BTreeSet<_>>();
    let (training, validation) = (problems(&split.training), problems(&split.validation));
    assert_eq!((validation.len(), training.len(), validation.intersection(&training).count()), (50, 150, 0));
    assert_ne!(validation, problems(&data.split(0.25, 4).expect("another split").validation));
}

#[test]
fn a_head_is_replaced_only_on_request_and_whole() {
    let folder = Temporary::new();
    shards(&folder.at("shards"), Rule::Hidden);
    let (shards, out) = (folder.at("shards"), folder.at("heads/citer"));
    let options = "--family citer --epochs 1 --recall 0.3";
    let first = trained(&[&shards], options, &out).expect("a new folder").layers;
    assert_eq!(first, [128, 64]);
    let error = trained(&[&shards], options, &out).expect_err("a head is there").to_string();
    assert!(error.contains("holds a head") && error.contains("--force"), "{error}");
    let second = trained(&[&shards], &format!("{options} --force --layers 8,4"), &out).expect("replaced");
    assert_eq!(second.layers, [8, 4]);
    assert_eq!(std::fs::read_dir(folder.at("heads")).expect("the folder").count(), 1);
    std::fs::write(out.join("notes.txt"), "mine").expect("a file of the user");
    let error = trained(&[&shards], &format!("{options} --force"), &out).expect_err("another file").to_string();
    assert!(error.contains("notes.txt") && error.contains("--out"), "{error}");
    assert_eq!(heads::describe(&out).expect("the head is untouched").layers, [8, 4]);
}

#[test]
fn wrong_options_are_refused_by_name() {
    let folder = Temporary::new();
    shards(&folder.at("shards"), Rule::Hidden);
    for (options, parts) in [
        ("--family citer --reads hidden", ["--reads", "--family r2r"]),
        ("--family citer --top-k 2", ["--top-k", "--family r2r"]),
        ("--family citer --layers 5", ["two layers", "network"]),
        ("--family r2r --layers 0", ["layers is 0", "between 1"]),
        ("--family r2r --top-k 9", ["--top-k is 9", "4 highest"]),
        ("--family r2r --reads token,logits", ["--reads", "hidden,logits"]),
        ("--family r2r --recall 0", ["--recall is 0", "share"]),
        ("--family r2r --validation 1.5", ["--validation is 1.5", "share"]),
        ("--family r2r --validation 1", ["training has 0 rows", "--validation"]),
        ("--family r2r --rate 0", ["--rate is 0", "above 0"]),
        ("--family r2r --recall-factor=-1", ["--recall-factor is -1", "above 0"]),
        ("--family r2r --rate 1e30 --epochs 3", ["the loss is", "--rate"]),
        ("--family r2r --small large", ["hidden_size", "64"]),
        ("--family r2r --small tiny", ["no model tiny", "small, large"]),
    ] {
        let error = trained(&[&folder.at("shards")], options, &folder.at("head")).expect_err(options).to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{options}: {error}");
        assert!(!error.contains('\n') && !folder.at("head").exists(), "{options}: {error}");
    }
    assert!(Line::try_parse_from(["train-router", "--family", "r2r", "--out", "x"]).is_err(), "no shards");
}

/// Rows of a small shard, and the shard's file with one tensor changed.
fn damaged(folder: &Path, settings: Settings, change: impl Fn(&mut serde_json::Value), cut: Option<(&str, u32)>) {
    let mut rows = Rows::default();
    for problem in 0..20u32 {
        let hidden = if cut.is_some_and(|(name, _)| name == "hidden") { vec![f32::NAN; 64] } else { vec![0.5; 64] };
        let top = vec![(1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5)];
        let with = |name: &str, value: u32| cut.filter(|(cut, _)| *cut == name).map_or(value, |(_, wrong)| wrong);
        rows.push(&Labelled {
            signals: &Signals { hidden, top, ..Signals::default() },
            candidate: with("candidate", 5),
            large: 9,
            label: with("label", problem % 2),
            problem: with("problem", problem),
            position: 0,
        });
    }
    Folder::open(folder, settings).and_then(|mut folder| folder.add(&rows)).expect("shards");
    let path = folder.join(MANIFEST);
    let mut manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).expect("a manifest")).expect("JSON");
    change(&mut manifest);
    std::fs::write(&path, manifest.to_string()).expect("written");
}

#[test]
fn wrong_shards_are_refused_with_a_remedy() {
    let folder = Temporary::new();
    let keep = |_: &mut serde_json::Value| ();
    let refuse = |name: &str, others: &[&str], parts: [&str; 2]| {
        let folders: Vec<PathBuf> = others.iter().chain([&name]).map(|name| folder.at(name)).collect();
        let folders: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
        let error = trained(&folders, "--family r2r --epochs 1", &folder.at("head")).expect_err(name).to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{name}: {error}");
        assert!(!folder.at("head").exists());
    };
    let base = || settings("01");
    damaged(&folder.at("good"), settings("02"), keep, None);
    damaged(&folder.at("other"), Settings { small: "tiny".into(), ..base() }, keep, None);
    refuse("other", &["good"], ["small is tiny with 136512", "one pair"]);
    damaged(&folder.at("retrained"), Settings { large_parameters: 7, ..base() }, keep, None);
    refuse("retrained", &["good"], ["large is large with 7 weights", "one pair"]);
    damaged(&folder.at("again"), settings("02"), keep, None);
    refuse("again", &["good"], ["same problems", "name one of them"]);
    damaged(&folder.at("grown"), Settings { small_parameters: 99, ..base() }, keep, None);
    refuse("grown", &[], ["small_parameters is 136512", "99"]);
    damaged(&folder.at("neutral"), base(), keep, Some(("label", 0)));
    refuse("neutral", &[], ["0 of them with label 1", "label more problems"]);
    damaged(&folder.at("unknown"), base(), keep, Some(("label", 7)));
    refuse("unknown", &[], ["`label` has the value 7", "new folder"]);
    damaged(&folder.at("astray"), base(), keep, Some(("problem", 200)));
    refuse("astray", &[], ["`problem` has the value 200", "200"]);
    damaged(&folder.at("foreign"), base(), keep, Some(("candidate", 100_000)));
    refuse("foreign", &[], ["`candidate` 100000", "label with this model"]);
    damaged(&folder.at("nan"), base(), keep, Some(("hidden", 0)));
    refuse("nan", &[], ["`hidden` has the value NaN", "new folder"]);
    damaged(&folder.at("narrow"), base(), |manifest| manifest["settings"]["hidden_size"] = 32.into(), None);
    refuse("narrow", &[], ["`hidden` is F32 [20, 64]", "[20, 32]"]);
    let next = SHARDS_FORMAT + 1;
    damaged(&folder.at("newer"), base(), |manifest| manifest["format"] = next.into(), None);
    refuse("newer", &[], ["format is 2", "new folder"]);
    damaged(&folder.at("none"), base(), |manifest| manifest["shards"] = serde_json::json!([]), None);
    refuse("none", &[], ["no shard", "finish"]);
    refuse("absent", &[], [MANIFEST, "name a folder that label wrote"]);
    std::fs::create_dir_all(folder.at("bare")).expect("a folder");
    let manifest = std::fs::read(folder.at("good").join(MANIFEST)).expect("a manifest");
    std::fs::write(folder.at("bare").join(MANIFEST), manifest).expect("written");
    let file = folder.at("bare").join("shard-00000.safetensors");
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::U32, vec![1], &[0; 4]).expect("a view");
    let columns = ["candidate", "label", "problem"].map(|name| (name, view.clone()));
    std::fs::write(&file, safetensors::serialize(columns, None).expect("bytes")).expect("written");
    refuse("bare", &[], ["has no tensor `hidden`", "new folder"]);
    std::fs::write(&file, "no tensors").expect("written");
    refuse("bare", &[], ["shard-00000.safetensors", "new folder"]);
}
