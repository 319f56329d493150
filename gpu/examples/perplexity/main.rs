//! Perplexity beside llama.cpp's on the same token ids: `perplexity MODEL WINDOWS.json [THREADS [KV_FORMAT]]`, where
//! `reference.py` (beside this file) wrote the windows and llama.cpp's answer. The first half of a window is the context, each token of
//! the second half is predicted from all before it; the windows of a group decode as one batch.
//!
//! Errors unless the two differ by at most 0.5 %.

use serde_json::Value;
use std::path::Path;
use tokenrouter_core::executor::{Draw, Executor, PAGE_TOKENS, Row, Step};
use tokenrouter_core::ids::{RequestId, TokenId};
use tokenrouter_gpu::load::{AnyRunner, KvMemory, LoadOptions, load};
use tokenrouter_gpu::ops::KvFormat;

/// Windows that decode together.
const GROUP: usize = 8;
/// Largest relative difference of the two perplexities.
const TOLERANCE: f64 = 0.005;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, windows, more @ ..] = &arguments[..] else {
        return Err("usage: perplexity MODEL WINDOWS.json [THREADS [KV_FORMAT]]".into());
    };
    let reference: Value = serde_json::from_str(&std::fs::read_to_string(windows)?)?;
    let windows: Vec<Vec<TokenId>> = serde_json::from_value(reference["windows"].clone())?;
    let context = windows.first().ok_or("no windows")?.len();
    let pages = context.div_ceil(PAGE_TOKENS) as u32;
    let options = LoadOptions {
        threads: more.first().map_or(Ok(0), |text| text.parse())?,
        kv_format: more.get(1).map_or(Ok(KvFormat::default()), |text| text.parse())?,
        kv: KvMemory::Pages(GROUP as u32 * pages),
        context_len: Some(context as u32),
        step_tokens_max: context as u32,
        ..LoadOptions::default()
    };
    let mut runner = load(Path::new(model), &options, &mut |_| ())?.executor()?;
    let mut losses = Vec::new();
    for group in windows.chunks(GROUP) {
        losses.extend(mean_losses(&mut runner, group, pages)?);
    }
    println!("window   ours nll  llama.cpp nll");
    for (window, (loss, theirs)) in
        losses.iter().zip(reference["mean_nll"].as_array().ok_or("no mean_nll")?).enumerate()
    {
        println!("{window:6} {loss:10.4} {:14.4}", theirs.as_f64().unwrap_or(f64::NAN));
    }
    let ours = (losses.iter().sum::<f64>() / losses.len() as f64).exp();
    let theirs = reference["perplexity"].as_f64().ok_or("no perplexity")?;
    let off = ours / theirs - 1.0;
    println!("perplexity: ours {ours:.4}, llama.cpp {theirs:.4}, difference {:+.3} %", 100.0 * off);
    // Written so that NaN fails too.
    if off.abs() <= TOLERANCE { Ok(()) } else { Err(format!("more than {} % apart", 100.0 * TOLERANCE).into()) }
}

/// Mean of `-ln p` over the second half of each window.
fn mean_losses(runner: &mut AnyRunner, windows: &[Vec<TokenId>], pages: u32) -> Result<Vec<f64>, Failure> {
    let draw = Draw::default();
    let row = |window: usize, from: usize, to: usize| Row {
        request: RequestId(window as u64),
        start: from as u32,
        tokens: windows[window][from..to].to_vec(),
        pages: (window as u32 * pages..(window as u32 + 1) * pages).collect(),
        draw: Some(draw.clone()),
        targets: None,
    };
    let (half, end) = (windows[0].len() / 2, windows[0].len());
    let mut sums = vec![0.0; windows.len()];
    for (window, sum) in sums.iter_mut().enumerate() {
        runner.step(&Step { rows: vec![row(window, 0, half + 1)] })?;
        *sum += loss(runner.last_logits(0).ok_or("no logits")?, windows[window][half + 1]);
    }
    for position in half + 1..end - 1 {
        runner.step(&Step { rows: (0..windows.len()).map(|window| row(window, position, position + 1)).collect() })?;
        for (window, sum) in sums.iter_mut().enumerate() {
            *sum += loss(runner.last_logits(window).ok_or("no logits")?, windows[window][position + 1]);
        }
    }
    Ok(sums.into_iter().map(|sum| sum / (end - 1 - half) as f64).collect())
}

/// `-ln softmax(logits)[target]`, in f64.
fn loss(logits: &[f32], target: TokenId) -> f64 {
    let largest = logits.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
    let sum: f64 = logits.iter().map(|&v| f64::from(v - largest).exp()).sum();
    sum.ln() + f64::from(largest - logits[target as usize])
}
