//! Logits of five prompts and sixteen greedy steps each, beside those of llama.cpp and of an exact forward pass
//! (layout: fixtures/README.md). Owner: the numerics tests.

use super::walker::{Fed, Walker};
use serde::Deserialize;
use std::fmt;
use tokenrouter_core::ids::TokenId;
use tokenrouter_gpu::load::LoadedModel;

/// A `logits-*.json` file.
#[derive(Debug, Deserialize)]
pub struct LogitsFixture {
    /// Name of the model file.
    pub model: String,
    /// Its size.
    pub model_bytes: u64,
    /// Its SHA-256.
    pub model_sha256: String,
    /// Width of a row of logits.
    pub vocab_size: usize,
    /// Ids whose logits are listed whatever their rank.
    pub fixed_ids: Vec<usize>,
    /// The prompts.
    pub prompts: Vec<Prompt>,
}

/// A prompt and two programs' answers.
#[derive(Debug, Deserialize)]
pub struct Prompt {
    /// What it is of.
    pub name: String,
    /// Its text; control tokens in it are recognised.
    pub text: String,
    /// Its ids.
    pub token_ids: Vec<TokenId>,
    /// Of llama.cpp, which rounds activations to int8 as this engine does.
    pub llama_cpp: Answer,
    /// Of a forward pass in float32 with every weight dequantised.
    pub numpy_f32: Answer,
}

/// One program's answer.
#[derive(Debug, Deserialize)]
pub struct Answer {
    /// The 20 largest logits after the prompt.
    pub top: Vec<(usize, f64)>,
    /// Of that row.
    pub logsumexp: f64,
    /// Of that row.
    pub entropy_nats: f64,
    /// That row's logits of the fixture's `fixed_ids`.
    pub fixed_logits: Vec<f64>,
    /// The largest logit's id at each of 16 steps, the first after the prompt.
    pub greedy_ids: Vec<TokenId>,
    /// By how much it beats the second.
    pub greedy_margins: Vec<f64>,
}

/// How far a model's rows are from an answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Distance {
    /// Largest, over the 20 largest logits of the answer, after the prompt.
    pub top: f64,
    /// Root mean square over the same.
    pub top_rms: f64,
    /// Largest over the fixed ids.
    pub fixed: f64,
    /// Of the log of the sum of exponentials.
    pub log_sum_exp: f64,
    /// Of the entropy, nats.
    pub entropy: f64,
    /// Largest over 16 steps: the margin of the answer's greedy token, here and there.
    pub margin: f64,
    /// Largest margin of the answer at a step where this model's greedy token is another; 0 = none is.
    pub flipped: f64,
}

/// Limits for [`Distance`].
pub type Tolerance = Distance;

impl Distance {
    fn parts(&self) -> [(&'static str, f64); 7] {
        let Distance { top, top_rms, fixed, log_sum_exp, entropy, margin, flipped } = *self;
        [
            ("top", top),
            ("top_rms", top_rms),
            ("fixed", fixed),
            ("log_sum_exp", log_sum_exp),
            ("entropy", entropy),
            ("margin", margin),
            ("flipped", flipped),
        ]
    }

    /// What exceeds the limits.
    fn beyond(&self, tolerance: &Tolerance) -> Vec<String> {
        let pairs = self.parts().into_iter().zip(tolerance.parts());
        let over = pairs.filter(|((_, found), (_, limit))| found > limit || found.is_nan());
        over.map(|((name, found), (_, limit))| format!("{name} {found:.2e} > {limit:.2e}")).collect()
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.parts().iter().map(|(name, value)| format!("{name} {value:.2e}")).collect();
        f.write_str(&parts.join("  "))
    }
}

/// Compares a model with one program's answers, chosen by `answer`, at every prompt; prints all distances.
///
/// At each of the 16 steps the model is fed llama.cpp's tokens, as the answers were made.
///
/// # Panics
/// When a distance exceeds its limit: a failed test.
pub fn check_logits(
    model: &LoadedModel,
    fixture: &LogitsFixture,
    answer: fn(&Prompt) -> &Answer,
    tolerance: Tolerance,
) {
    assert_eq!(fixture.prompts.len(), 5, "{}", fixture.model);
    let rows = rows(model, fixture);
    let mut wrong = Vec::new();
    for (prompt, steps) in fixture.prompts.iter().zip(&rows) {
        assert_eq!(steps.len(), 16, "{}", prompt.name);
        assert!(steps.iter().all(|fed| fed.logits.len() == fixture.vocab_size), "{}", prompt.name);
        let distance = distance(steps, answer(prompt), &fixture.fixed_ids);
        println!("{:13} {distance}", prompt.name);
        wrong.extend(distance.beyond(&tolerance).into_iter().map(|what| format!("{}: {what}", prompt.name)));
    }
    assert!(wrong.is_empty(), "{}:\n{}", fixture.model, wrong.join("\n"));
}

/// What the model says at each step of each prompt; the prompts go side by side.
fn rows(model: &LoadedModel, fixture: &LogitsFixture) -> Vec<Vec<Fed>> {
    let mut walker = Walker::new(model, fixture.prompts.len());
    let mut sequences: Vec<Vec<TokenId>> = fixture.prompts.iter().map(|prompt| prompt.token_ids.clone()).collect();
    let mut rows: Vec<Vec<Fed>> = vec![Vec::new(); sequences.len()];
    for step in 0..16 {
        let feed: Vec<(usize, &[TokenId])> = sequences.iter().map(Vec::as_slice).enumerate().collect();
        for (row, fed) in rows.iter_mut().zip(walker.step(&feed)) {
            row.push(fed);
        }
        for (sequence, prompt) in sequences.iter_mut().zip(&fixture.prompts) {
            sequence.push(prompt.llama_cpp.greedy_ids[step]);
        }
    }
    rows
}

fn distance(steps: &[Fed], answer: &Answer, fixed_ids: &[usize]) -> Distance {
    assert_eq!((answer.top.len(), answer.fixed_logits.len()), (20, fixed_ids.len()));
    let logits: Vec<f64> = steps[0].logits.iter().map(|&logit| f64::from(logit)).collect();
    let off: Vec<f64> = answer.top.iter().map(|&(id, logit)| (logits[id] - logit).abs()).collect();
    let fixed = fixed_ids.iter().zip(&answer.fixed_logits).map(|(&id, logit)| (logits[id] - logit).abs());
    let drawn = &steps[0].drawn;
    let entropy = drawn.signals.entropy.map_or(f64::NAN, |entropy| f64::from(entropy.nats));
    // The drawn token's log-probability is its logit less the log of the sum.
    let chosen = drawn.logprobs.as_ref().map_or(f64::NAN, |logprobs| f64::from(logprobs.chosen));
    let log_sum_exp = logits[drawn.token as usize] - chosen;
    let mut out = Distance {
        top: worst(off.iter().copied()),
        top_rms: (off.iter().map(|x| x * x).sum::<f64>() / off.len() as f64).sqrt(),
        fixed: worst(fixed),
        log_sum_exp: (log_sum_exp - answer.logsumexp).abs(),
        entropy: (entropy - answer.entropy_nats).abs(),
        ..Distance::default()
    };
    for ((fed, &id), &margin) in steps.iter().zip(&answer.greedy_ids).zip(&answer.greedy_margins) {
        let others = fed.logits.iter().enumerate().filter(|&(other, _)| other != id as usize);
        let second = others.map(|(_, &logit)| logit).fold(f32::NEG_INFINITY, f32::max);
        let here = f64::from(fed.logits[id as usize]) - f64::from(second);
        out.margin = worst([out.margin, (here - margin).abs()].into_iter());
        if fed.drawn.token != id {
            out.flipped = out.flipped.max(margin);
        }
    }
    out
}

/// The largest; NaN if any is.
fn worst(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |a, b| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) })
}
