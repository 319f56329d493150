//! Reductions of logits and draws: against plain loops in f64, and against the sampler of the host, token by token.

use super::{Finding, Random, bits, same, text};
use std::sync::Arc;
use tokenrouter_core::constraint::Mask;
use tokenrouter_core::executor::Draw;
use tokenrouter_core::sampling::{SamplingParams, TokenCounts};
use tokenrouter_gpu::cuda::draws;
use tokenrouter_gpu::sampling::{SampleError, Sampler};
use tokenrouter_kernels::cuda::{
    Answer, AnswerMemory, Array, Ask, CudaError, Gpu, NONE, StepInput, StepLimits, StepMemory, Stream, TOP_MAX, ask,
};
use tokenrouter_kernels::head::cuda::{HeadArgs, HeadKernels, HeadScratch};

/// Runs all checks.
///
/// # Errors
/// What differs where everything must be equal, or what the device says.
pub fn check(gpu: &Gpu, seed: u64) -> Result<Vec<Finding>, String> {
    let mut random = Random::new(seed);
    let mut findings = Findings {
        // Relative to what exceeds 1.
        log_sum_exp: Finding::new("head: log-sum-exp", 1e-6),
        entropy: Finding::new("head: entropy", 2e-5),
    };
    for (vocab, batches) in [(1, 2), (300, 6), (1024, 4), (5000, 6), (40_000, 4), (151_936, 1)] {
        let mut bench = Bench::new(gpu, vocab).map_err(text)?;
        for _ in 0..batches {
            reductions(&mut bench, &mut random, &mut findings)?;
        }
    }
    for (vocab, batches) in [(1, 1), (40, 25), (300, 130), (2100, 40), (5000, 15), (40_000, 3), (151_936, 1)] {
        let mut bench = Bench::new(gpu, vocab).map_err(text)?;
        for _ in 0..batches {
            draw_batch(&mut bench, &mut random)?;
        }
    }
    Ok(vec![findings.log_sum_exp, findings.entropy])
}

struct Findings {
    log_sum_exp: Finding,
    entropy: Finding,
}

/// A row, what is asked about it, and how its token is drawn.
#[derive(Clone, Debug)]
struct Row {
    logits: Vec<f32>,
    ask: Ask,
    draw: Draw,
    position: u32,
}

/// What the device says of a row.
struct Said {
    answer: Answer,
    top: Vec<(u32, f32)>,
    real_top: Vec<(u32, f32)>,
    /// The row afterwards.
    logits: Vec<f32>,
}

/// Memory for batches of rows of one width.
struct Bench {
    vocab: usize,
    rows: usize,
    stream: Stream,
    kernels: HeadKernels,
    step: StepMemory,
    answers: AnswerMemory,
    scratch: HeadScratch,
    logits: Array<f32>,
}

impl Bench {
    fn new(gpu: &Gpu, vocab: usize) -> Result<Bench, CudaError> {
        let rows = if vocab > 100_000 { 3 } else { 16 };
        let limits = StepLimits { tokens: 1, rows, row_pages: 1, pages: 1, vocab: vocab as u32 };
        let stream = Stream::new(gpu, 0)?;
        Ok(Bench {
            vocab,
            rows,
            kernels: HeadKernels::load(gpu)?,
            step: StepMemory::new(&stream, limits)?,
            answers: AnswerMemory::new(&stream, rows)?,
            scratch: HeadScratch::new(gpu, rows, vocab)?,
            logits: Array::new(gpu, "logits", rows * vocab)?,
            stream,
        })
    }

    /// One pass; the last of the rows there is room for are padding.
    fn run(&mut self, rows: &[Row], column: Option<u32>) -> Result<Vec<Said>, CudaError> {
        let Bench { vocab, stream, step, answers, .. } = self;
        let mut input = StepInput::default();
        for row in rows {
            input.outputs.push(0);
            input.asks.push(row.ask);
            draws::push((&row.draw, row.position), *vocab as u32, &mut input);
        }
        input.outputs.resize(self.rows, 0);
        input.asks.resize(self.rows, Ask::default());
        input.draws.resize(self.rows, draws::PADDING);
        step.reserve(stream, &input)?;
        step.upload(stream, &input)?;
        let flat: Vec<f32> = rows.iter().flat_map(|row| row.logits.iter().copied()).collect();
        self.logits.write(stream, 0, &flat)?;
        let args = HeadArgs { logits: self.logits.view(), outputs: self.rows, step, answers, scratch: &self.scratch };
        self.kernels.reduce(stream, &args, column)?;
        self.kernels.draw(stream, &args)?;
        answers.download(stream, true)?;
        stream.synchronize()?;
        let after = self.logits.read(stream, 0, flat.len())?;
        let host = answers.host();
        Ok((0..rows.len())
            .map(|index| Said {
                answer: host.answer(index),
                top: host.tops(index).map(|entry| (entry.id, entry.logit)).collect(),
                real_top: host.real_tops(index).map(|entry| (entry.id, entry.logit)).collect(),
                logits: after[index * *vocab..][..*vocab].to_vec(),
            })
            .collect())
    }
}

/// Rows of any kind that a model, healthy or not, may have.
fn random_logits(random: &mut Random, vocab: usize) -> Vec<f32> {
    let scale = random.of(&[0.01, 1.0, 4.0, 20.0]);
    let mut row: Vec<f32> = (0..vocab).map(|_| random.normal() * scale).collect();
    match random.below(9) {
        // Many equal ones, both zeros among them.
        0 => row.iter_mut().for_each(|x| *x = (*x * 2.0).round() / 2.0),
        1 => row.fill(random.normal()),
        2 => row.sort_by(f32::total_cmp),
        3 => row.sort_by(|a, b| b.total_cmp(a)),
        // Only few are possible.
        4 => row.iter_mut().filter(|_| random.below(100) > 0).for_each(|x| *x = f32::NEG_INFINITY),
        5 => {
            let at = random.below(vocab);
            row[at] = 60.0;
        }
        // Every chunk of the kernels has the same highest ones.
        6 => (1024..vocab).for_each(|at| row[at] = row[at % 1024]),
        _ => {}
    }
    row
}

/// Makes some rows no distribution.
fn damage(random: &mut Random, row: &mut [f32]) {
    let at = random.below(row.len());
    match random.below(10) {
        0 => row[at] = f32::NAN,
        1 => row[at] = f32::INFINITY,
        2 => row.fill(f32::NEG_INFINITY),
        _ => {}
    }
}

fn real_vocab(random: &mut Random, vocab: usize) -> usize {
    match random.below(3) {
        0 => vocab,
        1 => (vocab - random.below(vocab.min(300))).max(1),
        _ => 1 + random.below(vocab),
    }
}

/// What an answer must be.
struct Expected {
    fault: u32,
    argmax: u32,
    log_sum_exp: f64,
    entropy: f64,
    top: Vec<(u32, f32)>,
    real_top: Vec<(u32, f32)>,
}

fn expected(row: &[f32], ask: &Ask) -> Expected {
    let real = (ask.real_vocab.max(1) as usize).min(row.len());
    let distribution = ask.flags & ask::DISTRIBUTION != 0;
    let judged = if distribution { row } else { &row[..real] };
    let highest = |of: &[f32], most: u32| -> Vec<(u32, f32)> {
        let mut all: Vec<(u32, f32)> = (0..).zip(of.iter().copied()).filter(|(_, x)| *x > f32::NEG_INFINITY).collect();
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal));
        all.truncate(most as usize);
        all
    };
    let best = highest(&row[..real], 1);
    let mut found = Expected {
        fault: u32::from(best.is_empty()) * 2,
        argmax: best.first().map_or(0, |best| best.0),
        log_sum_exp: 0.0,
        entropy: 0.0,
        top: Vec::new(),
        real_top: Vec::new(),
    };
    if judged.iter().any(|x| x.is_nan() || *x == f32::INFINITY) {
        found.fault = 1;
    }
    if found.fault != 0 {
        return found;
    }
    (found.top, found.real_top) = (highest(row, ask.top_k), highest(&row[..real], ask.real_top_k));
    if distribution {
        let max = row.iter().fold(f64::NEG_INFINITY, |max, &x| max.max(f64::from(x)));
        let weights: Vec<f64> = row.iter().map(|&x| (f64::from(x) - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        found.log_sum_exp = max + sum.ln();
        found.entropy = -weights.iter().filter(|&&w| w > 0.0).map(|w| w / sum * (w / sum).ln()).sum::<f64>();
    }
    found
}

fn random_ask(random: &mut Random, vocab: usize) -> Ask {
    let list = |random: &mut Random| random.of(&[0, 1, 5, 20, TOP_MAX - 1, TOP_MAX]) as u32;
    Ask {
        flags: ask::PRESENT | random.of(&[0, ask::DISTRIBUTION]),
        real_vocab: real_vocab(random, vocab) as u32,
        top_k: list(random),
        real_top_k: list(random),
        target: if random.below(2) == 0 { NONE } else { random.below(vocab) as u32 },
    }
}

fn reductions(bench: &mut Bench, random: &mut Random, findings: &mut Findings) -> Result<(), String> {
    let vocab = bench.vocab;
    let rows: Vec<Row> = (0..1 + random.below(bench.rows))
        .map(|_| {
            let mut logits = random_logits(random, vocab);
            damage(random, &mut logits);
            Row { logits, ask: random_ask(random, vocab), draw: Draw::default(), position: 0 }
        })
        .collect();
    let column = (random.below(2) == 0).then(|| random.below(vocab) as u32);
    let said = bench.run(&rows, column).map_err(text)?;
    for (index, (row, said)) in rows.iter().zip(&said).enumerate() {
        let at =
            |what: &str| format!("head: {what} of row {index} of {vocab} logits, {:?}, column {column:?}", row.ask);
        let mut logits = row.logits.clone();
        let apart = column.map_or(0.0, |id| logits[id as usize]);
        if let (Some(id), true) = (column, apart < f32::INFINITY) {
            logits[id as usize] = f32::NEG_INFINITY;
        }
        let answer = &said.answer;
        same(&at("logits"), &bits(&said.logits), &bits(&logits))?;
        let target = logits.get(row.ask.target as usize).copied().unwrap_or(0.0);
        same(&at("column and target"), &bits(&[answer.column, answer.target]), &bits(&[apart, target]))?;
        let expected = expected(&logits, &row.ask);
        same(&at("fault"), &[answer.fault], &[expected.fault])?;
        same(&at("highest of all"), &said.top, &expected.top)?;
        same(&at("highest of the tokens"), &said.real_top, &expected.real_top)?;
        if expected.fault == 0 {
            let highest = (expected.argmax, logits[expected.argmax as usize]);
            same(&at("highest token"), &[(answer.argmax, answer.highest)], &[highest])?;
            same(&at("greedy token"), &[(answer.token, answer.token_logit)], &[highest])?;
        }
        findings.log_sum_exp.note(answer.log_sum_exp, expected.log_sum_exp, expected.log_sum_exp.abs().max(1.0));
        findings.entropy.note(answer.entropy, expected.entropy, 1.0);
    }
    let last = rows.len() - 1;
    let alone = bench.run(&rows[last..], column).map_err(text)?;
    let numbers = |said: &Said| bits(&[said.answer.log_sum_exp, said.answer.entropy]);
    same(&format!("head: a row of {vocab} logits alone"), &numbers(&alone[0]), &numbers(&said[last]))
}

fn random_draw(random: &mut Random, vocab: usize) -> Draw {
    let id = |random: &mut Random| random.below(vocab + 3) as u32;
    let rare = |random: &mut Random| random.below(4) == 0;
    let mut params = SamplingParams {
        temperature: random.of(&[0.0, 0.3, 1.0, 1.0, 1.7, 40.0, 1e30, 1e-7, -1.0]),
        top_k: random.of(&[0, 0, 1, 2, 40, 127, 128, 129, 1000, 3000, 30_000]),
        top_p: random.of(&[0.0, 1e-6, 0.5, 0.9, 0.999, 1.0, 1.0, f32::NAN]),
        min_p: random.of(&[0.0, 0.0, 1e-3, 0.05, 1.0]),
        seed: random.next(),
        ..SamplingParams::default()
    };
    if rare(random) {
        let strength = random.of(&[0.5, 5.0, 100.0]);
        params.logit_bias = (0..1 + random.below(40)).map(|_| (id(random), random.normal() * strength)).collect();
        if rare(random) && rare(random) {
            params.logit_bias.push((id(random), random.of(&[f32::INFINITY, f32::NAN])));
        }
    }
    if rare(random) {
        params.repetition_penalty = random.of(&[1.0, 1.3, 0.7]);
        params.presence_penalty = random.of(&[0.0, 0.8]);
        params.frequency_penalty = random.of(&[0.0, 0.3, -0.2]);
    }
    let tokens: Vec<u32> = (0..random.below(200)).map(|_| id(random)).collect();
    let history = params.reads_history().then(|| Arc::new(TokenCounts::of(&tokens, tokens.len() / 3)));
    let banned: Vec<u32> = if rare(random) { (0..random.below(20)).map(|_| id(random)).collect() } else { Vec::new() };
    let share = random.of(&[1, 30, 900]);
    let mask = rare(random).then(|| {
        let allowed: Vec<u32> = (0..vocab as u32).filter(|_| random.below(1000) < share).collect();
        Mask::of(&allowed)
    });
    Draw { params: Arc::new(params), history, banned: banned.into(), mask, ..Draw::default() }
}

fn draw_batch(bench: &mut Bench, random: &mut Random) -> Result<(), String> {
    let vocab = bench.vocab;
    let real = real_vocab(random, vocab);
    // The widest take long on the processor.
    let most = if vocab > 100_000 { 1 } else { bench.rows };
    let rows: Vec<Row> = (0..1 + random.below(most))
        .map(|_| Row {
            logits: random_logits(random, vocab),
            ask: Ask { flags: ask::PRESENT, real_vocab: real as u32, top_k: 0, real_top_k: 0, target: NONE },
            draw: random_draw(random, vocab),
            position: random.below(100_000) as u32,
        })
        .collect();
    let said = bench.run(&rows, None).map_err(text)?;
    let (sums, width) = bench.scratch.sums();
    let sums = sums.to_host(&bench.stream).map_err(text)?;
    let mut sampler = Sampler::new(vocab, real);
    for (index, (row, said)) in rows.iter().zip(&said).enumerate() {
        if said.answer.fault != 0 {
            continue;
        }
        let logit = |token: u32| (token, row.logits[token as usize]);
        let expected = sampler.draw(&row.logits, &row.draw, row.position).map(logit);
        let found = draws::drawn(row.draw.params.temperature, &said.answer);
        // A fault may carry a NaN, which is equal to nothing but its text.
        let words = |drawn: &Result<(u32, f32), SampleError>| format!("{drawn:?}");
        if words(&found) != words(&expected) {
            let draw = words_of(&row.draw);
            let what = format!("row {index} of {vocab} logits, {real} tokens, position {}, {draw}", row.position);
            return Err(format!("sample: {what}: {} and not {}", words(&found), words(&expected)));
        }
        let params = &row.draw.params;
        if found.is_ok() && params.temperature > 1e-3 && params.top_k == 0 {
            // Weights are the same bit by bit, so that no draw, however rare, falls on another token.
            let expected = sampler.partial_sums(&row.logits, &row.draw).map_err(text)?;
            let what = format!("sample: sums of row {index} of {vocab} logits, {}", words_of(&row.draw));
            same(&what, &sums[index * width..][..expected.len()], expected)?;
        }
    }
    Ok(())
}

/// A draw without its long lists.
fn words_of(draw: &Draw) -> String {
    format!("{draw:?}").chars().take(600).collect()
}
