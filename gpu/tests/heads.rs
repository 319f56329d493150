//! Learned heads inside the step of a runner: what they read, who gets a score, and what must not change beside them.

mod common;

use common::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use tokenrouter_core::executor::{Drawn, Executor, ExecutorError, Needs, Row, RowOutput, Step};
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::{Stream, mix, unit};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_gpu::heads::{Class, Family, HeadConfig, HeadSource};
use tokenrouter_gpu::load::{AnyRunner, LoadOptions, load};
use tokenrouter_gpu::ops::KvFormat;

const SCORE: Needs = Needs { entropy: false, top_k: 0, hidden: false, score: true };

/// A head with random weights, in memory and as a folder.
struct Head {
    config: HeadConfig,
    tensors: BTreeMap<String, ([usize; 2], Vec<f32>)>,
}

fn config(class: Class, hidden: usize) -> HeadConfig {
    let inputs = class.inputs();
    let r2r = class != Class::Mlp;
    HeadConfig {
        format: 1,
        family: if r2r { Family::R2r } else { Family::Citer },
        class,
        hidden_size: if inputs.hidden { hidden } else { 0 },
        embedding_size: if inputs.token { hidden } else { 0 },
        logits_size: if inputs.logits { 10 } else { 0 },
        layers: if r2r { vec![20, 12, 20] } else { vec![2 * hidden, hidden] },
        expansion: if r2r { 3 } else { 0 },
        normalize_input: false,
        threshold: Some(0.4),
        model: None,
    }
}

impl Head {
    fn random(config: HeadConfig, seed: u64) -> Head {
        let mut tensors = BTreeMap::new();
        for (index, (name, shape)) in config.tensors().into_iter().enumerate() {
            let key = mix(seed ^ (index as u64) << 32);
            let scale = if shape[0] == 1 { 0.3 } else { 2.0 / (shape[1] as f64).sqrt() };
            let around = if name.contains("norm.weight") || name.ends_with("running_var") { 1.0 } else { 0.0 };
            let values = (0..(shape[0] * shape[1]) as u32)
                .map(|at| (around + (unit(key, at, Stream::Token) * 2.0 - 1.0) * scale) as f32);
            tensors.insert(name, (shape, values.collect()));
        }
        Head { config, tensors }
    }

    fn write(&self) -> PathBuf {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("head-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("head.json"), serde_json::to_string(&self.config).unwrap()).unwrap();
        let bytes: Vec<(&str, Vec<usize>, Vec<u8>)> = self
            .tensors
            .iter()
            .map(|(name, (shape, values))| {
                let dims = if name.ends_with(".weight") && shape[0] > 1 || name == "linear.weight" {
                    shape.to_vec()
                } else {
                    vec![shape[1]]
                };
                (name.as_str(), dims, values.iter().flat_map(|v| v.to_le_bytes()).collect())
            })
            .collect();
        let views = bytes.iter().map(|(name, dims, bytes)| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, dims.clone(), bytes).unwrap();
            (*name, view)
        });
        std::fs::write(folder.join("head.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        folder
    }

    fn source(&self) -> HeadSource {
        HeadSource::Checkpoint { path: self.write(), family: self.config.family }
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let ((_, weight), (_, bias)) =
            (&self.tensors[&format!("{name}.weight")], &self.tensors[&format!("{name}.bias")]);
        let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
        weight.chunks(x.len()).zip(bias).map(|(row, &b)| dot(row) + f64::from(b)).collect()
    }

    fn scaled(&self, name: &str, x: impl Iterator<Item = f64>) -> Vec<f64> {
        let (weight, bias) = (&self.tensors[&format!("{name}.weight")].1, &self.tensors[&format!("{name}.bias")].1);
        x.zip(weight).zip(bias).map(|((x, &w), &b)| x * f64::from(w) + f64::from(b)).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
        self.scaled(name, x.iter().map(|v| (v - mean) / (variance + 1e-5).sqrt()))
    }

    /// The slow reference: one row, scalars, f64, nothing folded.
    fn reference(&self, hidden: &[f64], embedding: &[f64], top: &[f64]) -> f64 {
        let inputs = self.config.class.inputs();
        let output = if self.config.family == Family::Citer {
            let (mean, var) = (&self.tensors["mlp.1.running_mean"].1, &self.tensors["mlp.1.running_var"].1);
            let x = self.linear("mlp.0", hidden);
            let x = x.iter().zip(mean).zip(var);
            let x = self.scaled("mlp.1", x.map(|((x, &m), &v)| (x - f64::from(m)) / (f64::from(v) + 1e-5).sqrt()));
            let x: Vec<f64> = x.into_iter().map(|x| x.max(0.0)).collect();
            self.linear("linear", &self.linear("mlp.4", &x))
        } else {
            let projected = if inputs.logits { self.linear("logits_projection", top) } else { Vec::new() };
            let mut x = projected.clone();
            if let Some(join) = self.config.class.join() {
                let embedding = if inputs.token { embedding } else { &[] };
                x = self.linear(join, &[hidden, embedding, &projected].concat());
            }
            x = self.linear("backbone.input_projection", &x);
            for (index, (from, to)) in self.config.blocks().enumerate() {
                let name = |part: &str| format!("backbone.blocks.{index}.{part}");
                let inner = self.linear(&name("mlp.0"), &self.norm(&name("layer_norm"), &x));
                let inner: Vec<f64> =
                    inner.into_iter().map(|v| v * (1.0 - libm::erfc(v / 2f64.sqrt()) / 2.0)).collect();
                let delta = self.linear(&name("mlp.3"), &inner);
                let kept = if from == to { x } else { self.linear(&name("dim_change"), &x) };
                x = kept.iter().zip(delta).map(|(a, b)| a + b).collect();
            }
            self.linear("backbone.output_layer.1", &self.norm("backbone.output_layer.0", &x))
        };
        1.0 / (1.0 + (-output[0]).exp())
    }
}

fn with_head(head: HeadSource) -> LoadOptions {
    LoadOptions { head: Some(head), real_vocab: Some(140), ..options(2, KvFormat::F32) }
}

fn asking(request: u64, tokens: &[TokenId], needs: Needs) -> Row {
    let mut row = row(request, 0, tokens, &pages(request, tokens.len()));
    row.draw.as_mut().unwrap().needs = needs;
    row
}

fn drawn(output: &RowOutput) -> &Drawn {
    match output {
        RowOutput::Drawn(drawn) => drawn,
        other => panic!("{other:?}"),
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

const CLASSES: [Class; 6] = [
    Class::HiddenStatesTokenLMHeadLogitsClassifier,
    Class::HiddenStatesTokenLMHeadClassifier,
    Class::HiddenStatesLogitsClassifier,
    Class::HiddenStatesClassifier,
    Class::LogitsClassifier,
    Class::Mlp,
];

#[test]
fn scores_in_a_step_equal_the_slow_reference_on_random_heads() {
    for (index, class) in CLASSES.into_iter().enumerate() {
        let model = Tiny { tied: index % 2 == 0, ..Tiny::new("llama") }.model(40 + index as u64);
        let head = Head::random(config(class, model.shape.hidden), 70 + index as u64);
        let mut runner = model.load(&with_head(head.source())).executor().unwrap();
        let prompts: Vec<Vec<TokenId>> = (0..5).map(|r| random_tokens(r + 9, 3 + r as usize, 140)).collect();
        let rows = |needs: Needs| (0..5).map(|r| asking(r as u64, &prompts[r], needs)).collect::<Vec<_>>();
        let outputs = run(&mut runner, rows(SCORE));
        for (r, output) in outputs.iter().enumerate() {
            let found = drawn(output);
            let (hidden, logits) = (wide(runner.last_hidden(r).unwrap()), wide(runner.last_logits(r).unwrap()));
            let mut top = logits.clone();
            top.sort_by(|a, b| b.total_cmp(a));
            top.truncate(10);
            let embed = &model.tensors["model.embed_tokens.weight"].1[found.token as usize * 64..][..64];
            let exact = head.reference(&hidden, &wide(embed), &top);
            let score = f64::from(found.signals.score.unwrap());
            assert!((score - exact).abs() <= 1e-4 * exact, "{class:?} row {r}: {score} {exact}");
            assert!(found.signals.top.is_empty() && found.signals.hidden.is_empty() && found.signals.entropy.is_none());
        }
        // Scores are wanted by some rows only, and change nothing else.
        let mixed = rows(SCORE).into_iter().enumerate().map(|(r, mut row)| {
            row.draw.as_mut().unwrap().needs = Needs { score: r % 2 == 0, top_k: 3, ..SCORE };
            row
        });
        for (r, output) in run(&mut runner, mixed.collect()).iter().enumerate() {
            let (found, before) = (drawn(output), drawn(&outputs[r]));
            assert_eq!(found.token, before.token);
            assert_eq!(found.signals.top.len(), 3);
            assert_eq!(
                found.signals.score.map(f32::to_bits),
                before.signals.score.filter(|_| r % 2 == 0).map(f32::to_bits)
            );
        }
    }
}

#[test]
fn a_score_has_the_same_bits_alone_and_beside_others() {
    let model = Tiny::new("qwen2").model(3);
    let head = Head::random(config(Class::HiddenStatesTokenLMHeadLogitsClassifier, 64), 4);
    let loaded = model.load(&with_head(head.source()));
    let prompts: Vec<Vec<TokenId>> = (0..8).map(|r| random_tokens(r + 50, 2 + r as usize, 140)).collect();
    let mut runner = loaded.executor().unwrap();
    let rows = prompts.iter().enumerate().map(|(r, tokens)| asking(r as u64, tokens, SCORE)).collect();
    let together: Vec<u32> =
        run(&mut runner, rows).iter().map(|output| drawn(output).signals.score.unwrap().to_bits()).collect();
    for (r, tokens) in prompts.iter().enumerate() {
        let alone = run(&mut loaded.executor().unwrap(), vec![asking(r as u64, tokens, SCORE)]);
        assert_eq!(drawn(&alone[0]).signals.score.unwrap().to_bits(), together[r], "row {r}");
    }
}

#[test]
fn a_head_for_another_model_is_refused_with_both_numbers() {
    let path = Tiny::new("llama").model(1).write();
    let fault = |head: HeadSource| load(&path, &with_head(head), &mut |_| ()).map(|_| ()).unwrap_err().to_string();
    let text = fault(Head::random(config(Class::Mlp, 48), 1).source());
    assert!(text.contains("hidden rows of 48") && text.contains("has 64"), "{text}");
    let head = Head::random(HeadConfig { logits_size: 151, ..config(Class::LogitsClassifier, 64) }, 1);
    let text = fault(head.source());
    assert!(text.contains("151 highest") && text.contains("150"), "{text}");
    let citer = Head::random(config(Class::Mlp, 64), 1).write();
    let text = fault(HeadSource::Checkpoint { path: citer, family: Family::R2r });
    assert!(text.contains("citer") && text.contains("r2r"), "{text}");
    let text = fault(HeadSource::Row { token: 150 });
    assert!(text.contains("row 150") && text.contains("150;"), "{text}");
    let text = fault(HeadSource::Checkpoint { path: PathBuf::from("nowhere"), family: Family::R2r });
    assert!(text.contains("head.json"), "{text}");
}

#[test]
fn a_score_that_nobody_can_give_refuses_the_step() {
    let mut runner = Tiny::new("llama").model(1).load(&options(1, KvFormat::F16)).executor().unwrap();
    let refused = runner.step(&Step { rows: vec![asking(1, &[1], Needs::default()), asking(2, &[1], SCORE)] });
    match refused {
        Err(ExecutorError::Step(reason)) => {
            assert!(reason.contains("r2") && reason.contains("without one"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(run(&mut runner, vec![asking(1, &[1], Needs::default())])[0], RowOutput::Drawn(_)));
}

/// A model whose token 7 has the highest logit after any input, and a runner that takes it for a head.
fn deferring() -> (AnyRunner, AnyRunner) {
    let mut model = Tiny { tied: false, ..Tiny::new("llama") }.model(21);
    let hidden = model.shape.hidden;
    // Row 7 is three times a row that wins somewhere.
    let mut plain = model.load(&with_head(HeadSource::Row { token: 149 })).executor().unwrap();
    let winner = drawn(&run(&mut plain, vec![asking(1, &[5, 6], Needs::default())])[0]).token as usize;
    let head = &mut model.tensors.get_mut("lm_head.weight").unwrap().1;
    for column in 0..hidden {
        head[7 * hidden + column] = 3.0 * head[winner * hidden + column];
    }
    let plain = model.load(&LoadOptions { head: None, ..with_head(HeadSource::Row { token: 7 }) });
    let split = model.load(&with_head(HeadSource::Row { token: 7 }));
    (plain.executor().unwrap(), split.executor().unwrap())
}

#[test]
fn the_row_of_the_output_layer_is_a_score_and_never_a_token() {
    let (mut plain, mut split) = deferring();
    let everything = Needs { entropy: true, top_k: 5, hidden: false, score: true };
    let usual = run(&mut plain, vec![asking(1, &[5, 6], Needs { score: false, ..everything })]);
    assert_eq!(drawn(&usual[0]).token, 7, "without the head the token would be drawn");
    let raw = f64::from(plain.last_logits(0).unwrap()[7]);
    let others: Vec<f64> = wide(plain.last_logits(0).unwrap());
    let others: Vec<f64> = others.iter().enumerate().filter(|(id, _)| *id != 7).map(|(_, &v)| v).collect();

    let found = run(&mut split, vec![asking(1, &[5, 6], everything)]);
    let found = drawn(&found[0]);
    assert!((f64::from(found.signals.score.unwrap()) - 1.0 / (1.0 + (-raw).exp())).abs() < 1e-6);
    assert!(found.token != 7 && found.signals.top.iter().all(|&(id, _)| id != 7));
    assert_eq!(found.signals.top[0].0, found.token);
    let total: f64 = others.iter().map(|v| v.exp()).sum();
    let nats: f64 = others.iter().map(|v| v.exp() / total * (total.ln() - v)).sum();
    assert!((f64::from(found.signals.entropy.unwrap().nats) - nats).abs() < 1e-4, "the row has no part in the entropy");

    // Not by any temperature, not by bias, not for a row that asks for no score.
    for seed in 0..200 {
        let mut row = asking(1, &[5, 6], Needs::default());
        let params = SamplingParams { temperature: 4.0, logit_bias: vec![(7, 100.0)], seed, ..Default::default() };
        row.draw.as_mut().unwrap().params = std::sync::Arc::new(params);
        row.draw.as_mut().unwrap().logprobs = Some(5);
        let output = run(&mut split, vec![row]);
        assert_ne!(drawn(&output[0]).token, 7);
        assert!(drawn(&output[0]).logprobs.as_ref().unwrap().top.iter().all(|&(id, _)| id != 7));
        assert_eq!(drawn(&output[0]).signals.score, None);
    }
}
