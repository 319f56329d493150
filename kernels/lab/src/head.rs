//! Reductions of rows of logits, and draws. Owner: `main`. Invariant: each kernel is compared by what its chain of kernels
//! answers: a list of the highest, the softmax, and a token that an edit of its logit makes certain.

use crate::bench::{Lab, Run, worst};
use cust::memory::DeviceBuffer;
use tokenrouter_kernels::head::cuda::{REDUCE, SAMPLE};

/// Ids of a chunk; threads of blocks for chunks and for rows.
const CHUNK: usize = 1024;
const CHUNK_THREADS: u32 = 256;
const ROW_THREADS: u32 = 512;
/// Words of an answer and entries of a list.
const ANSWER_WORDS: usize = 16;
const TOPS: usize = 128;
/// Entries that are asked for, and the id whose logit is.
const LISTED: usize = 20;
const TARGET: usize = 7;
const NONE: usize = u32::MAX as usize;

/// All of them.
pub fn all(lab: &mut Lab) -> Result<(), String> {
    for kernel in ["head_read", "head_answer"] {
        lab.case((&REDUCE, kernel), |lab| reduce(lab, kernel))?;
    }
    for kernel in ["sample_adjust", "sample_weigh", "sample_draw"] {
        lab.case((&SAMPLE, kernel), |lab| draw(lab, kernel))?;
    }
    Ok(())
}

/// Rows of logits, what is asked, and scratch.
struct Rows {
    count: usize,
    vocab: usize,
    chunks: usize,
    logits: Vec<f32>,
    at_logits: DeviceBuffer<f32>,
    asks: DeviceBuffer<u32>,
    parts: DeviceBuffer<u64>,
    runs: DeviceBuffer<u64>,
}

impl Rows {
    fn new(lab: &mut Lab) -> Result<Rows, String> {
        let (count, vocab) = (lab.options.rows, lab.options.vocab);
        let chunks = vocab.div_ceil(CHUNK);
        let logits: Vec<f32> = lab.random.values(count * vocab).iter().map(|x| 9.0 * x).collect();
        // Present, and its distribution; all ids are tokens.
        let ask = [1 | 2, vocab as u32, LISTED as u32, LISTED as u32, TARGET as u32];
        let (at_logits, asks) = (lab.put(&logits)?, lab.put(&ask.repeat(count))?);
        let (parts, runs) = (lab.empty(count * chunks * 4)?, lab.empty(count * (chunks + 1) * CHUNK)?);
        Ok(Rows { count, vocab, chunks, logits, at_logits, asks, parts, runs })
    }

    fn of_chunks(&self) -> Run {
        Run::new((self.chunks, self.count), CHUNK_THREADS).moves(4 * self.count * self.vocab)
    }

    /// What is left to read of a row are its chunks.
    fn of_rows(&self) -> Run {
        Run::new((self.count, 1), ROW_THREADS).moves(32 * self.count * self.chunks)
    }

    /// Ids of a row, the highest first.
    fn ranks(&self, row: usize) -> Vec<usize> {
        let logits = &self.logits[row * self.vocab..(row + 1) * self.vocab];
        let mut ids: Vec<usize> = (0..self.vocab).collect();
        ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        ids
    }

    /// Words of an answer and of its list, as they must be, for what is exact; the error of the softmax.
    fn wrong(&self, row: usize, (answer, tops): (&[u32], &[u32])) -> f64 {
        let logits = &self.logits[row * self.vocab..(row + 1) * self.vocab];
        let ranks = self.ranks(row);
        let bits = |id: usize| logits[id].to_bits();
        let list: Vec<u32> = ranks[..LISTED].iter().flat_map(|&id| [id as u32, bits(id)]).collect();
        let exact = answer[..3] == [0, ranks[0] as u32, bits(ranks[0])]
            && answer[5] == bits(TARGET)
            && answer[12..14] == [LISTED as u32; 2]
            && tops[..2 * LISTED] == list;
        let most = f64::from(logits[ranks[0]]);
        let sums = logits.iter().map(|logit| f64::from(*logit) - most).map(|x| (x.exp(), x.exp() * x));
        let (sum, weighted) = sums.fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
        let expected = [most + sum.ln(), sum.ln() - weighted / sum];
        let error = worst([3, 4].map(|at| f32::from_bits(answer[at])), expected, expected[0].abs());
        if exact { error } else { f64::INFINITY }
    }
}

fn reduce(lab: &mut Lab, kernel: &str) -> Result<(f64, f64), String> {
    let rows = Rows::new(lab)?;
    let answers = lab.empty::<u32>(rows.count * ANSWER_WORDS)?;
    let [tops, real_tops] = [lab.empty::<u32>(rows.count * TOPS * 2)?, lab.empty::<u32>(rows.count * TOPS * 2)?];
    let read = rows.of_chunks().at(&rows.at_logits).at(&rows.asks).at(&answers).at(&rows.parts).at(&rows.runs);
    let read = read.size(rows.vocab).size(NONE);
    let answer = rows.of_rows().at(&rows.at_logits).at(&rows.asks).at(&rows.parts).at(&rows.runs).at(&answers);
    let answer = answer.at(&tops).at(&real_tops).size(rows.vocab).size(rows.chunks);
    lab.launch("head_read", &read)?;
    lab.launch("head_answer", &answer)?;
    let (found, tops, real_tops) = (lab.get(&answers)?, lab.get(&tops)?, lab.get(&real_tops)?);
    let mut error: f64 = 0.0;
    for row in 0..rows.count {
        let answer = &found[row * ANSWER_WORDS..(row + 1) * ANSWER_WORDS];
        for tops in [&tops, &real_tops] {
            error = error.max(rows.wrong(row, (answer, &tops[row * 2 * TOPS..(row + 1) * 2 * TOPS])));
        }
    }
    lab.time(if kernel == "head_read" { &read } else { &answer })?;
    Ok((error, 1e-5))
}

/// An edit raises one logit so far that every other token weighs nothing.
fn draw(lab: &mut Lab, kernel: &str) -> Result<(f64, f64), String> {
    let rows = Rows::new(lab)?;
    let certain: Vec<u32> = (0..rows.count).map(|_| lab.random.below(rows.vocab) as u32).collect();
    let edits: Vec<u32> = certain.iter().flat_map(|&id| [id, 200.0f32.to_bits(), 1.0f32.to_bits(), 0, 0]).collect();
    let draws = (0..rows.count).flat_map(|row| {
        let unit = f64::from(lab.random.value().abs() % 1.0).to_bits();
        let [temperature, log_min_p, top_p] = [0.7f32, -45.0, 1.0].map(f32::to_bits);
        let first = [1, temperature, log_min_p, top_p, 0, row as u32, 1, u32::MAX];
        first.into_iter().chain([unit as u32, (unit >> 32) as u32])
    });
    let draws = draws.collect::<Vec<u32>>();
    // Rows that were read and had no fault.
    let before: Vec<u32> = vec![0; rows.count * ANSWER_WORDS];
    let (at_edits, at_draws, answers) = (lab.put(&edits)?, lab.put(&draws)?, lab.put(&before)?);
    let masks = lab.put(&[u32::MAX])?;
    let (work, sums) = (lab.empty::<f32>(rows.count * rows.vocab)?, lab.empty::<f64>(rows.count * rows.chunks * 2)?);
    let adjust = rows.of_chunks().at(&rows.at_logits).at(&rows.asks).at(&at_draws).at(&at_edits).at(&masks);
    let adjust = adjust.at(&answers).at(&work).at(&rows.parts).at(&rows.runs).size(rows.vocab);
    let adjust = adjust.moves(8 * rows.count * rows.vocab);
    let weigh = rows.of_chunks().at(&rows.asks).at(&at_draws).at(&answers).at(&work).at(&rows.parts).at(&sums);
    let weigh = weigh.size(rows.vocab);
    let draw = rows.of_rows().at(&rows.at_logits).at(&rows.asks).at(&at_draws).at(&work).at(&rows.parts);
    let draw = draw.at(&rows.runs).at(&sums).at(&answers).size(rows.vocab).size(rows.chunks);
    lab.launch("sample_adjust", &adjust)?;
    lab.launch("sample_weigh", &weigh)?;
    lab.launch("sample_draw", &draw)?;
    let found = lab.get(&answers)?;
    let wrong = found.chunks(ANSWER_WORDS).zip(&certain).enumerate().filter(|(row, (answer, id))| {
        let logit = rows.logits[row * rows.vocab + **id as usize].to_bits();
        answer[7..10] != [**id, logit, 0]
    });
    let error = wrong.count() as f64;
    lab.time(match kernel {
        "sample_adjust" => &adjust,
        "sample_weigh" => &weigh,
        _ => &draw,
    })?;
    Ok((error, 0.0))
}
