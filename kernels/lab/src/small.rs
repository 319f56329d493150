//! Norms, rotation and elementwise kernels. Owner: `main`. Invariant: references are the definitions, in f64.

use crate::bench::{Lab, Random, Run, worst};
use half::bf16;
use tokenrouter_kernels::{activation, norm, rope};

const EPS: f32 = 1e-5;
/// Words of an answer; its list of highest logits has `TOPS` entries of an id and a logit.
const ANSWER_WORDS: usize = 16;
const TOPS: usize = 128;
/// Words in front of the score, and of the length of the list, in an answer.
const SCORE: usize = 11;
const LEN: usize = 12;

/// All of them.
pub fn all(lab: &mut Lab) -> Result<(), String> {
    norms(lab)?;
    rotation(lab)?;
    elementwise(lab)?;
    placing(lab)?;
    softmax(lab)?;
    answers(lab)
}

fn norms(lab: &mut Lab) -> Result<(), String> {
    let (rows, width) = (lab.options.rows, lab.options.width);
    let n = rows * width;
    for kernel in ["rms_norm", "add_rms_norm", "layer_norm"] {
        lab.case((&norm::cuda::SOURCE, kernel), |lab| {
            let (x, delta) = (lab.random.values(n), lab.random.values(n));
            let (weight, bias) = (lab.random.values(width), lab.random.values(width));
            let (at_x, at_delta) = (lab.put(&x)?, lab.put(&delta)?);
            let (at_weight, at_bias, out) = (lab.put(&weight)?, lab.put(&bias)?, lab.empty::<f32>(n)?);
            let run = Run::new((rows, 1), 256).at(&at_x);
            let run = match kernel {
                "rms_norm" => run.at(&at_weight).at(&out).moves(8 * n),
                "add_rms_norm" => run.at(&at_delta).at(&at_weight).at(&out).moves(16 * n),
                _ => run.at(&at_weight).at(&at_bias).at(&out).moves(8 * n),
            };
            let run = run.size(width).float(EPS);
            let found = lab.first(&run, &out)?;
            let mut expected = Vec::new();
            for (x, delta) in x.chunks(width).zip(delta.chunks(width)) {
                let sums = |(x, delta): (&f32, &f32)| f64::from(if kernel == "add_rms_norm" { x + delta } else { *x });
                let x: Vec<f64> = x.iter().zip(delta).map(sums).collect();
                let mean = if kernel == "layer_norm" { x.iter().sum::<f64>() / width as f64 } else { 0.0 };
                let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
                let scale = 1.0 / (square + f64::from(EPS)).sqrt();
                expected.extend(x.iter().zip(weight.iter().zip(&bias)).map(|(x, (weight, bias))| {
                    let bias = if kernel == "layer_norm" { f64::from(*bias) } else { 0.0 };
                    (x - mean) * scale * f64::from(*weight) + bias
                }));
            }
            lab.time(&run)?;
            Ok((worst(found, expected, 1.0), 1e-5))
        })?;
    }
    Ok(())
}

/// A head, rotated by angles whose cosines and sines are given, halves apart.
fn rotated(head: &[f32], cos: &[f32], sin: &[f32]) -> Vec<f64> {
    let pairs = head.len() / 2;
    let turn = |i: usize| {
        let (pair, second) = (i % pairs, i >= pairs);
        let [a, b, c, s] = [head[pair], head[pair + pairs], cos[pair], sin[pair]].map(f64::from);
        if second { b * c + a * s } else { a * c - b * s }
    };
    (0..head.len()).map(turn).collect()
}

fn rotation(lab: &mut Lab) -> Result<(), String> {
    let (heads, kv_heads, head_dim) = (32, 8, 128);
    let (tokens, pairs) = (lab.options.rows, head_dim / 2);
    lab.case((&rope::cuda::SOURCE, "rotate_and_store"), |lab| {
        let q = lab.random.values(tokens * heads * head_dim);
        let [k, v] = [(); 2].map(|()| lab.random.values(tokens * kv_heads * head_dim));
        let positions: Vec<u32> = (0..tokens as u32).map(|token| token * 3 % 50).collect();
        // A token in each page, at the place of its number.
        let slots: Vec<u32> = (0..tokens as u32).map(|token| token * 16 + token % 16).collect();
        let angles: Vec<f32> = lab.random.values(50 * pairs).iter().map(|x| x * 3.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|angle| (angle.cos(), angle.sin())).unzip();
        let (at_q, at_k, at_v) = (lab.put(&q)?, lab.put(&k)?, lab.put(&v)?);
        let pages = tokens * kv_heads * 16 * head_dim;
        let (k_pages, v_pages) = (lab.empty::<u16>(pages)?, lab.empty::<u16>(pages)?);
        let (at_positions, at_slots) = (lab.put(&positions)?, lab.put(&slots)?);
        let (at_cos, at_sin) = (lab.put(&cos)?, lab.put(&sin)?);
        let run = Run::new((tokens, (heads + 2 * kv_heads).div_ceil(8)), 256);
        let run = run.at(&at_q).at(&at_k).at(&at_v).at(&k_pages).at(&v_pages).at(&at_positions).at(&at_slots);
        let run = run.at(&at_cos).at(&at_sin).null().null().float(EPS).float(EPS);
        let run = run.size(heads).size(kv_heads).size(head_dim).size(head_dim).size(pairs).size(0);
        let run = run.moves(tokens * head_dim * (8 * heads + 12 * kv_heads));
        let found = lab.first(&run, &at_q)?;
        let stored = [lab.get(&k_pages)?, lab.get(&v_pages)?];
        let mut error: f64 = 0.0;
        for token in 0..tokens {
            let table = positions[token] as usize * pairs..(positions[token] as usize + 1) * pairs;
            let turn = |head: &[f32]| rotated(head, &cos[table.clone()], &sin[table.clone()]);
            for at in (token * heads..(token + 1) * heads).map(|head| head * head_dim) {
                let range = at..at + head_dim;
                error = error.max(worst(found[range.clone()].to_vec(), turn(&q[range]), 1.0));
            }
            for head in 0..kv_heads {
                let from = (token * kv_heads + head) * head_dim..(token * kv_heads + head + 1) * head_dim;
                let page = slots[token] as usize / 16 * kv_heads + head;
                let to = (page * 16 + slots[token] as usize % 16) * head_dim;
                let values = stored.each_ref().map(|stored| stored[to..to + head_dim].iter().copied().map(of_bf16));
                let [found_k, found_v] = values;
                // Half of the last bit of a stored number below 2 is 2^-8: counted as 1e-6.
                error = error.max(worst(found_k, turn(&k[from.clone()]), 1.01 * 2.0_f64.powi(-8) / 1e-6));
                let v = v[from].iter().map(|v| f64::from(*v));
                error = error.max(worst(found_v, v, 1.01 * 2.0_f64.powi(-8) / 1e-6));
            }
        }
        lab.time(&run)?;
        Ok((error, 1e-6))
    })
}

fn of_bf16(bits: u16) -> f32 {
    bf16::from_bits(bits).to_f32()
}

/// The error function by its series, which converges for |x| < 6, beyond which it is 1.
fn erf(x: f64) -> f64 {
    if x.abs() >= 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

fn elementwise(lab: &mut Lab) -> Result<(), String> {
    // Not a multiple of what a block takes.
    let n = lab.options.rows * lab.options.width + 3;
    for kernel in ["silu_mul", "add", "gelu", "relu"] {
        lab.case((&activation::cuda::SOURCE, kernel), |lab| {
            let large = |random: &mut Random| random.values(n).into_iter().map(|x| 3.0 * x).collect::<Vec<f32>>();
            let (x, y) = (large(&mut lab.random), large(&mut lab.random));
            let (at_x, at_y) = (lab.put(&x)?, lab.put(&y)?);
            let both = matches!(kernel, "silu_mul" | "add");
            let run = Run::new((n.div_ceil(1024), 1), 256).at(&at_x);
            let run = if both { run.at(&at_y).moves(12 * n) } else { run.moves(8 * n) }.size(n);
            let found = lab.first(&run, &at_x)?;
            let expected = x.iter().zip(&y).map(|(x, y)| {
                let (x, y) = (f64::from(*x), f64::from(*y));
                match kernel {
                    "silu_mul" => x / (1.0 + (-x).exp()) * y,
                    "add" => x + y,
                    "gelu" => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
                    _ => x.max(0.0),
                }
            });
            lab.time(&run)?;
            Ok((worst(found, expected, 1.0), 4e-6))
        })?;
    }
    Ok(())
}

fn placing(lab: &mut Lab) -> Result<(), String> {
    let (rows, width, column) = (lab.options.rows, lab.options.width, 5);
    lab.case((&activation::cuda::SOURCE, "place"), |lab| {
        let (n, out_width) = (rows * width, width + 9);
        let (part, before) = (lab.random.values(n), lab.random.values(rows * out_width));
        let (at_part, out) = (lab.put(&part)?, lab.put(&before)?);
        let run = Run::new((n.div_ceil(256), 1), 256).at(&at_part).at(&out);
        let run = run.size(n).size(width).size(column).size(out_width).moves(8 * n);
        let found = lab.first(&run, &out)?;
        let expected = (0..rows * out_width).map(|i| {
            let (row, at) = (i / out_width, i % out_width);
            let inside = (column..column + width).contains(&at);
            f64::from(if inside { part[row * width + at - column] } else { before[i] })
        });
        lab.time(&run)?;
        Ok((worst(found, expected, 1.0), 0.0))
    })
}

/// Softmax of a row.
fn probabilities(row: &[f32]) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = row.iter().map(|x| f64::from(x - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

fn softmax(lab: &mut Lab) -> Result<(), String> {
    let (rows, width) = (lab.options.rows + 1, lab.options.width);
    lab.case((&activation::cuda::SOURCE, "softmax"), |lab| {
        let x: Vec<f32> = lab.random.values(rows * width).iter().map(|x| 9.0 * x).collect();
        let at_x = lab.put(&x)?;
        let run = Run::new((rows.div_ceil(8), 1), 256).at(&at_x).size(rows).size(width).moves(8 * rows * width);
        let found = lab.first(&run, &at_x)?;
        let expected = x.chunks(width).flat_map(probabilities);
        lab.time(&run)?;
        Ok((worst(found, expected, 1.0), 1e-6))
    })
}

/// Kernels that read or write answers.
fn answers(lab: &mut Lab) -> Result<(), String> {
    let rows = lab.options.rows;
    lab.case((&activation::cuda::SOURCE, "top_rows"), |lab| {
        let width = 100;
        let logits: Vec<f32> = lab.random.values(rows * TOPS).iter().map(|x| 9.0 * x).collect();
        let tops: Vec<u32> = logits.iter().flat_map(|logit| [7, logit.to_bits()]).collect();
        let mut answers = vec![0; rows * ANSWER_WORDS];
        answers.chunks_mut(ANSWER_WORDS).for_each(|answer| answer[LEN] = 90);
        let (at_answers, at_tops, out) = (lab.put(&answers)?, lab.put(&tops)?, lab.empty::<f32>(rows * width)?);
        let run = Run::new((rows.div_ceil(8), 1), 256).at(&at_answers).at(&at_tops).at(&out);
        let run = run.size(rows).size(width).size(1).moves(12 * rows * width);
        let found = lab.first(&run, &out)?;
        let expected = logits.chunks(TOPS).flat_map(|row| {
            let behind = vec![0.0; width - 90];
            [probabilities(&row[..90]), behind].concat()
        });
        lab.time(&run)?;
        Ok((worst(found, expected, 1.0), 1e-6))
    })?;
    lab.case((&activation::cuda::SOURCE, "scores"), |lab| {
        let x: Vec<f32> = lab.random.values(rows).iter().map(|x| 5.0 * x).collect();
        let (at_x, answers) = (lab.put(&x)?, lab.empty::<u32>(rows * ANSWER_WORDS)?);
        let run = Run::new((rows.div_ceil(256), 1), 256).at(&at_x).at(&answers).size(rows).moves(8 * rows);
        let found = lab.first(&run, &answers)?;
        let found = found.chunks(ANSWER_WORDS).map(|answer| f32::from_bits(answer[SCORE]));
        let expected = x.iter().map(|x| 1.0 / (1.0 + (-f64::from(*x)).exp()));
        lab.time(&run)?;
        Ok((worst(found, expected, 1.0), 1e-6))
    })
}
