//! Drawing the next token from a row of raw logits. Owner: the runner. Invariant: the token is a pure function of the
//! logits, the parameters, the history and (seed, position); sums run in a fixed order and exponentials are computed
//! here, so equal inputs give equal tokens in any batch and on any machine.
//!
//! Order of the rules (the one vLLM's sampler documents): logit bias, penalties (repetition, then frequency and
//! presence), bans and the mask of the answer's form; then greedy, or temperature, min-p, top-k, top-p, draw. Top-p is
//! measured on what min-p and top-k left, renormalised. Equal logits are ordered by lower id everywhere. Temperatures below 1e-5 are greedy.

use tokenrouter_core::executor::Draw;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::{self, Stream};
use tokenrouter_core::sampling::{SamplingParams, TokenCounts};

/// Temperatures below this are greedy.
const TEMPERATURE_MIN: f32 = 1e-5;
/// Weights below `exp(-45)` of the highest are dropped: even a whole vocabulary of them cannot reach one draw in 1e14.
const LOG_WEIGHT_MIN: f32 = -45.0;
/// Up to this many tokens are found by one scan with a short sorted list; more are found by selection.
const SCAN_MAX: usize = 128;
/// How the sorted part grows when top-p needs more than a scan gives.
const HEAD_GROWTH: usize = 8;
/// Tokens per partial sum of weights.
const BLOCK: usize = 512;
const LANES: usize = 16;

/// Why no token could be drawn.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// Bias and bans left no token with a finite logit.
    #[error("every token is masked by bans, logit bias and the form of the answer; allow at least one token")]
    NothingLeft,
    /// The adjusted logits have no usable maximum.
    #[error("highest logit after bias and penalties is {0}; check logit_bias and penalties")]
    NotFinite(f32),
    /// A temperature that cannot divide logits.
    #[error("temperature {0} is not a number at or above 0")]
    Temperature(f32),
}

/// Draws tokens; owns scratch memory so that a draw allocates nothing once warm.
#[derive(Debug)]
pub struct Sampler {
    real_vocab: usize,
    /// Logits after bias, penalties, bans and mask.
    work: Vec<f32>,
    /// Tokens that top-k and top-p left, by rank.
    kept: Vec<Candidate>,
    /// Weights of blocks of tokens, when nothing but min-p cut them.
    blocks: Vec<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    id: TokenId,
}

impl Candidate {
    /// Higher logits first, lower ids first among equals, which both zeros are.
    fn rank(&self, other: &Candidate) -> std::cmp::Ordering {
        (other.logit + 0.0).total_cmp(&(self.logit + 0.0)).then(self.id.cmp(&other.id))
    }
}

/// Whether a temperature is as good as 0.
pub(crate) fn is_greedy(temperature: f32) -> bool {
    (0.0..TEMPERATURE_MIN).contains(&temperature)
}

/// Whether a temperature can divide logits.
pub(crate) fn is_usable(temperature: f32) -> bool {
    temperature > 0.0 && temperature.is_finite()
}

/// Logarithm of the least weight that is drawn, relative to the highest: of min-p, or of the smallest that matters.
pub(crate) fn log_weight_min(min_p: f32) -> f32 {
    if min_p > 0.0 { min_p.ln().clamp(LOG_WEIGHT_MIN, 0.0) } else { LOG_WEIGHT_MIN }
}

/// Whether the candidate is simply the highest raw logit of the real vocabulary.
pub fn is_plain_greedy(draw: &Draw) -> bool {
    is_greedy(draw.params.temperature)
        && draw.params.logit_bias.is_empty()
        && draw.banned.is_empty()
        && draw.mask.is_none()
        && !(draw.params.reads_history() && draw.history.is_some())
}

impl Sampler {
    /// A sampler for logits rows of up to `vocab_width` entries of which the first `real_vocab` name tokens; the
    /// padding above is never drawn.
    pub fn new(vocab_width: usize, real_vocab: usize) -> Self {
        let real_vocab = real_vocab.min(vocab_width);
        Sampler { real_vocab, work: Vec::with_capacity(real_vocab), kept: Vec::new(), blocks: Vec::new() }
    }

    /// Draws the token of `position` from raw logits `[vocab_width]`.
    ///
    /// # Errors
    /// [`SampleError`] when the parameters leave nothing that can be drawn.
    pub fn draw(&mut self, logits: &[f32], draw: &Draw, position: u32) -> Result<TokenId, SampleError> {
        let params = &*draw.params;
        let best = self.adjust(logits, draw)?;
        if is_greedy(params.temperature) {
            return Ok(best.id);
        }
        if !is_usable(params.temperature) {
            return Err(SampleError::Temperature(params.temperature));
        }
        let scale = Scale::new(best.logit, params);
        let unit = rng::unit(params.seed, position, Stream::Token);
        let drawn = if params.top_k == 0 && params.top_p >= 1.0 {
            self.sum_blocks(scale);
            self.pick_from_all(scale, unit)
        } else {
            self.keep(params, scale);
            pick(&self.kept, scale, unit)
        };
        Ok(drawn.unwrap_or(best.id))
    }

    /// Sums of the weights of each 512 tokens, on which draws without top-k are measured: for those who draw in the same way.
    ///
    /// # Errors
    /// As [`Sampler::draw`].
    pub fn partial_sums(&mut self, logits: &[f32], draw: &Draw) -> Result<&[f64], SampleError> {
        let best = self.adjust(logits, draw)?;
        self.sum_blocks(Scale::new(best.logit, &draw.params));
        Ok(&self.blocks)
    }

    /// Takes the row over, adjusted; returns its highest.
    fn adjust(&mut self, logits: &[f32], draw: &Draw) -> Result<Candidate, SampleError> {
        self.work.clear();
        self.work.extend_from_slice(&logits[..self.real_vocab.min(logits.len())]);
        adjust(&mut self.work, draw);
        highest(&self.work)
    }

    /// Fills `kept` by top-k and top-p, by rank; one of the two is in use.
    fn keep(&mut self, params: &SamplingParams, scale: Scale) {
        let k = if params.top_k == 0 { usize::MAX } else { params.top_k as usize };
        scan(&self.work, (k.min(SCAN_MAX), scale.floor), &mut self.kept);
        let mut complete = self.kept.len() == k || self.kept.len() < SCAN_MAX;
        if !complete && params.top_k > 0 {
            self.collect(scale);
            self.sort_head(0, k);
            self.kept.truncate(k);
            complete = true;
        }
        if params.top_p >= 1.0 {
            return;
        }
        let total = if complete {
            self.kept.iter().map(|candidate| scale.weight(candidate.logit)).sum()
        } else {
            self.sum_blocks(scale)
        };
        let target = f64::from(params.top_p) * total;
        match nucleus(&self.kept, scale, target) {
            Some(len) => self.kept.truncate(len),
            None if complete => (),
            None => self.keep_nucleus(scale, target),
        }
    }

    /// Keeps the head that holds `target` weight, sorting more and more of it.
    fn keep_nucleus(&mut self, scale: Scale, target: f64) {
        self.collect(scale);
        let mut sorted = 0;
        while sorted < self.kept.len() {
            let end = (sorted.max(SCAN_MAX) * HEAD_GROWTH).min(self.kept.len());
            self.sort_head(sorted, end);
            sorted = end;
            if let Some(len) = nucleus(&self.kept[..sorted], scale, target) {
                return self.kept.truncate(len);
            }
        }
    }

    /// Everything that weighs something, in the order of ids.
    fn collect(&mut self, scale: Scale) {
        let tokens = self.work.iter().zip(0..).filter(|&(&logit, _)| logit >= scale.floor);
        self.kept.clear();
        self.kept.extend(tokens.map(|(&logit, id)| Candidate { logit, id }));
    }

    /// Puts the highest `end` in order, of which the first `sorted` are already.
    fn sort_head(&mut self, sorted: usize, end: usize) {
        let end = end.min(self.kept.len());
        if end < self.kept.len() {
            self.kept[sorted..].select_nth_unstable_by(end - sorted - 1, Candidate::rank);
        }
        self.kept[sorted..end].sort_unstable_by(Candidate::rank);
    }

    /// Sums the weights of all tokens, block by block; returns the sum of the sums.
    fn sum_blocks(&mut self, scale: Scale) -> f64 {
        self.blocks.clear();
        self.blocks.extend(self.work.chunks(BLOCK).map(|block| {
            let mut lanes = [0.0f32; LANES];
            let (vectors, rest) = block.as_chunks::<LANES>();
            for vector in vectors {
                for (lane, &logit) in lanes.iter_mut().zip(vector) {
                    *lane += scale.weight32(logit);
                }
            }
            for (lane, &logit) in lanes.iter_mut().zip(rest) {
                *lane += scale.weight32(logit);
            }
            lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>()
        }));
        self.blocks.iter().sum()
    }

    /// Inverse transform sampling over all tokens in the order of their ids: finds the block, then the token in it.
    fn pick_from_all(&self, scale: Scale, unit: f64) -> Option<TokenId> {
        let mut left = unit * self.blocks.iter().sum::<f64>();
        let mut last = None;
        for (index, block) in self.work.chunks(BLOCK).enumerate() {
            if left >= self.blocks[index] {
                left -= self.blocks[index];
                continue;
            }
            for (&logit, id) in block.iter().zip(index * BLOCK..) {
                let weight = scale.weight(logit);
                if weight > 0.0 {
                    last = Some(id as TokenId);
                }
                if left < weight {
                    return last;
                }
                left -= weight;
            }
        }
        // Rounding can leave a crumb behind the last token of a block.
        last
    }
}

/// Turns logits into unnormalised weights relative to the highest.
#[derive(Clone, Copy)]
struct Scale {
    max: f32,
    inverse_temperature: f32,
    /// Logits below this weigh nothing: min-p, or the smallest weight that matters.
    floor: f32,
}

impl Scale {
    fn new(max: f32, params: &SamplingParams) -> Scale {
        let floor = (max + log_weight_min(params.min_p) * params.temperature).min(max);
        Scale { max, inverse_temperature: 1.0 / params.temperature, floor }
    }

    fn weight32(self, logit: f32) -> f32 {
        let power = ((logit - self.max) * self.inverse_temperature).max(2.0 * LOG_WEIGHT_MIN);
        if logit >= self.floor { exp(power) } else { 0.0 }
    }

    fn weight(self, logit: f32) -> f64 {
        f64::from(self.weight32(logit))
    }
}

/// `e^x` for `-87 <= x <= 0`, to about 2e-7: `2^n e^r` with `n` the nearest integer to `x / ln 2` and a polynomial for
/// `e^r` (Cephes `expf`). Plain arithmetic, so that it vectorises and is the same on every machine.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
    const MAGIC: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = (x - n * 0.693_359_4) + n * 2.121_944_4e-4;
    let mut p = 1.987_569_2e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p * r + c;
    }
    let exponent = (shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits());
    (p * r * r + r + 1.0) * f32::from_bits(exponent)
}

/// Bias, penalties, bans and mask, in place.
pub(crate) fn adjust(logits: &mut [f32], draw: &Draw) {
    for &(id, bias) in &draw.params.logit_bias {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += bias;
        }
    }
    if let (true, Some(history)) = (draw.params.reads_history(), draw.history.as_deref()) {
        penalise(logits, &draw.params, history);
    }
    for &id in draw.banned.iter() {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    if let Some(mask) = &draw.mask {
        mask.apply(logits);
    }
}

fn penalise(logits: &mut [f32], params: &SamplingParams, history: &TokenCounts) {
    for (id, seen) in history.iter() {
        let Some(logit) = logits.get_mut(id as usize) else { continue };
        if *logit == f32::NEG_INFINITY {
            continue;
        }
        if params.repetition_penalty != 1.0 && (seen.in_prompt || seen.in_output > 0) {
            *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        }
        if seen.in_output > 0 {
            *logit -= params.frequency_penalty * seen.in_output as f32 + params.presence_penalty;
        }
    }
}

fn highest(logits: &[f32]) -> Result<Candidate, SampleError> {
    let (vectors, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    for lane in 0..rest.len() {
        (lanes[lane], nan[lane]) = (rest[lane], rest[lane].is_nan());
    }
    for vector in vectors {
        for lane in 0..LANES {
            lanes[lane] = if vector[lane] > lanes[lane] { vector[lane] } else { lanes[lane] };
            nan[lane] |= vector[lane].is_nan();
        }
    }
    if nan.contains(&true) {
        return Err(SampleError::NotFinite(f32::NAN));
    }
    let logit = lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    match logit {
        f32::NEG_INFINITY => Err(SampleError::NothingLeft),
        f32::INFINITY => Err(SampleError::NotFinite(logit)),
        _ => Ok(Candidate { logit, id: logits.iter().position(|&x| x == logit).unwrap_or(0) as TokenId }),
    }
}

/// The `k` highest logits not below `floor`, by rank: one pass with a short sorted list.
fn scan(logits: &[f32], (k, floor): (usize, f32), out: &mut Vec<Candidate>) {
    out.clear();
    let mut bar = floor;
    for (&logit, id) in logits.iter().zip(0..) {
        // Equals of the last kept one come later, so they lose; the floor itself is still kept.
        if logit < bar || (out.len() == k && logit == bar) {
            continue;
        }
        if out.len() == k {
            out.pop();
        }
        let place = out.partition_point(|kept| kept.logit >= logit);
        out.insert(place, Candidate { logit, id });
        if out.len() == k {
            bar = out[k - 1].logit;
        }
    }
}

/// How many of these tokens, by rank, hold `target` weight together; `None` if all of them do not.
fn nucleus(kept: &[Candidate], scale: Scale, target: f64) -> Option<usize> {
    let mut mass = 0.0;
    for (index, candidate) in kept.iter().enumerate() {
        mass += scale.weight(candidate.logit);
        if mass >= target {
            return Some(index + 1);
        }
    }
    None
}

/// Inverse transform sampling: the first candidate at which the running weight exceeds `unit` of the whole.
fn pick(kept: &[Candidate], scale: Scale, unit: f64) -> Option<TokenId> {
    let total: f64 = kept.iter().map(|candidate| scale.weight(candidate.logit)).sum();
    let target = unit * total;
    let mut mass = 0.0;
    for candidate in kept {
        mass += scale.weight(candidate.logit);
        if mass > target {
            return Some(candidate.id);
        }
    }
    kept.last().map(|candidate| candidate.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokenrouter_core::constraint::Mask;

    fn draw_with(params: SamplingParams) -> Draw {
        Draw { params: Arc::new(params), ..Draw::default() }
    }

    fn random_logits(seed: u64, width: usize) -> Vec<f32> {
        (0..width).map(|i| (rng::unit(seed, i as u32, Stream::Owner) * 16.0 - 8.0) as f32).collect()
    }

    /// The rules written out the slow way: sort everything, mask, renormalise. Returns (id, probability) by rank.
    fn distribution(logits: &[f32], params: &SamplingParams) -> Vec<(u32, f64)> {
        let mut all: Vec<(u32, f64)> = logits.iter().enumerate().map(|(i, &l)| (i as u32, f64::from(l))).collect();
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        let max = all[0].1;
        let mut probs: Vec<(u32, f64)> =
            all.iter().map(|&(id, l)| (id, ((l - max) / f64::from(params.temperature)).exp())).collect();
        probs.retain(|&(_, p)| p >= f64::from(params.min_p));
        if params.top_k > 0 {
            probs.truncate(params.top_k as usize);
        }
        let total: f64 = probs.iter().map(|p| p.1).sum();
        let mut reached = 0.0;
        let mut len = 0;
        for &(_, p) in &probs {
            len += 1;
            reached += p / total;
            if reached >= f64::from(params.top_p) {
                break;
            }
        }
        probs.truncate(len);
        let total: f64 = probs.iter().map(|p| p.1).sum();
        probs.iter().map(|&(id, p)| (id, p / total)).collect()
    }

    #[test]
    fn frequencies_follow_the_slow_distribution() {
        let mut sampler = Sampler::new(90, 77);
        for case in 0..24u64 {
            let logits = random_logits(case, 90);
            let params = SamplingParams {
                temperature: [0.4, 1.0, 1.7][case as usize % 3],
                top_k: [0, 1, 5, 40][case as usize % 4],
                top_p: [1.0, 0.9, 0.3][(case / 3) as usize % 3],
                min_p: [0.0, 0.05][(case / 2) as usize % 2],
                seed: case * 7 + 1,
                ..Default::default()
            };
            let expected = distribution(&logits[..77], &params);
            let draws = 20_000u32;
            let mut seen = vec![0u32; 90];
            let draw = draw_with(params.clone());
            for position in 0..draws {
                seen[sampler.draw(&logits, &draw, position).unwrap() as usize] += 1;
            }
            for (id, &count) in seen.iter().enumerate() {
                let p = expected.iter().find(|e| e.0 == id as u32).map_or(0.0, |e| e.1);
                let sigma = (p * (1.0 - p) / f64::from(draws)).sqrt();
                let off = (f64::from(count) / f64::from(draws) - p).abs();
                assert!(off <= 5.0 * sigma + 1e-4, "case {case} {params:?} id {id}: {off} from {p}");
            }
        }
    }

    #[test]
    fn kept_tokens_equal_those_of_a_full_sort_on_wide_rows() {
        let mut sampler = Sampler::new(20_000, 20_000);
        for case in 0..48u64 {
            // Coarse values, so that many tokens are equal and order by id matters.
            let logits: Vec<f32> = random_logits(case, 20_000).iter().map(|l| (l * 4.0).round() / 4.0).collect();
            let params = SamplingParams {
                temperature: [0.5, 1.3, 30.0][case as usize % 3],
                top_p: [0.05, 0.5, 0.9, 0.999, 1.0][case as usize % 5],
                top_k: [0, 1, 40, 128, 129, 9000, 30_000][case as usize % 7],
                min_p: [0.0, 0.013][case as usize % 2],
                ..Default::default()
            };
            if params.top_k == 0 && params.top_p == 1.0 {
                continue;
            }
            sampler.work.clear();
            sampler.work.extend_from_slice(&logits);
            sampler.keep(&params, Scale::new(highest(&logits).unwrap().logit, &params));
            let ids: Vec<u32> = sampler.kept.iter().map(|c| c.id).collect();
            let slow: Vec<u32> = distribution(&logits, &params).iter().map(|e| e.0).collect();
            // Sums of thousands of f32 weights may end top-p one token early or late, never elsewhere.
            let shorter = ids.len().min(slow.len());
            assert!(ids.len().abs_diff(slow.len()) <= 1, "case {case} {params:?}: {} {}", ids.len(), slow.len());
            assert_eq!(ids[..shorter], slow[..shorter], "case {case} {params:?}");
        }
    }

    #[test]
    fn both_zeros_are_equal_however_many_tokens_are_sorted() {
        let logits: Vec<f32> = (0..400).map(|id| if id % 3 == 0 { -0.0 } else { 0.0 }).collect();
        let mut sampler = Sampler::new(400, 400);
        for top_k in [50, 128, 129, 300] {
            let params = SamplingParams { temperature: 1.0, top_k, ..Default::default() };
            sampler.work.clear();
            sampler.work.extend_from_slice(&logits);
            sampler.keep(&params, Scale::new(0.0, &params));
            assert!(sampler.kept.iter().map(|kept| kept.id).eq(0..top_k), "{top_k}");
        }
    }

    #[test]
    fn exponentials_are_accurate_and_weights_of_all_tokens_sum_up() {
        for step in 0..870_000 {
            let x = step as f32 * -1e-4;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) - exact).abs() <= 2.5e-7 * exact, "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        for width in [1, 15, 16, 511, 513, 5000] {
            let logits = random_logits(5, width);
            let params = SamplingParams { temperature: 0.8, ..Default::default() };
            let max = highest(&logits).unwrap().logit;
            let mut sampler = Sampler::new(width, width);
            sampler.work.extend_from_slice(&logits);
            let total = sampler.sum_blocks(Scale::new(max, &params));
            let exact: f64 = logits.iter().map(|&l| ((f64::from(l) - f64::from(max)) / f64::from(0.8f32)).exp()).sum();
            assert!((total - exact).abs() < 2e-6 * exact, "{width}: {total} {exact}");
        }
    }

    #[test]
    fn the_ends_of_the_unit_interval_draw_real_tokens() {
        for width in [1usize, 3, 512, 1500] {
            let mut logits = random_logits(9, width);
            logits[0] = f32::NEG_INFINITY;
            logits[width - 1] = f32::NEG_INFINITY;
            if width < 3 {
                logits[0] = 0.0;
            }
            let params = SamplingParams { temperature: 1.0, ..Default::default() };
            let scale = Scale::new(highest(&logits).unwrap().logit, &params);
            let mut sampler = Sampler::new(width, width);
            sampler.work.extend_from_slice(&logits);
            sampler.sum_blocks(scale);
            for unit in [0.0, 0.5, 1.0 - f64::EPSILON] {
                let token = sampler.pick_from_all(scale, unit).unwrap() as usize;
                assert!(logits[token].is_finite(), "{width} {unit}: {token}");
            }
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals_and_never_padding() {
        let mut sampler = Sampler::new(5, 4);
        let draw = draw_with(SamplingParams::default());
        assert!(is_plain_greedy(&draw));
        assert_eq!(sampler.draw(&[1.0, 3.0, 3.0, -1.0, 99.0], &draw, 0), Ok(1));
    }

    #[test]
    fn bias_penalties_and_bans_change_the_choice_in_order() {
        let mut sampler = Sampler::new(4, 4);
        let logits = [2.0, 1.9, 0.5, -1.0];
        let choose = |sampler: &mut Sampler, edit: &dyn Fn(&mut SamplingParams, &mut Draw)| {
            let mut params = SamplingParams::default();
            let mut draw = draw_with(params.clone());
            draw.history = Some(Arc::new(TokenCounts::of(&[0, 1, 1], 1)));
            edit(&mut params, &mut draw);
            draw.params = Arc::new(params);
            sampler.draw(&logits, &draw, 0)
        };
        assert_eq!(choose(&mut sampler, &|_, _| ()), Ok(0));
        assert_eq!(choose(&mut sampler, &|p, _| p.logit_bias = vec![(3, 4.0), (900, 50.0)]), Ok(3));
        // Token 0 is in the prompt only: repetition touches it (2.0 -> 0.4), presence and frequency do not.
        assert_eq!(choose(&mut sampler, &|p, _| p.repetition_penalty = 5.0), Ok(2));
        assert_eq!(choose(&mut sampler, &|p, _| p.presence_penalty = 5.0), Ok(0));
        // A negative frequency penalty rewards token 1, twice in the output: 1.9 + 2 * 0.2 > 2.0.
        assert_eq!(choose(&mut sampler, &|p, _| p.frequency_penalty = -0.2), Ok(1));
        // Bias comes before the repetition penalty: (2.0 + 1.0) / 1.4 = 2.14 > 1.9 / 1.4; the other order would be 2.43.
        assert_eq!(
            choose(&mut sampler, &|p, _| {
                p.logit_bias = vec![(0, 1.0), (2, 1.8)];
                p.repetition_penalty = 1.4;
            }),
            Ok(2)
        );
        assert_eq!(choose(&mut sampler, &|_, d| d.banned = Arc::from([0, 1, 70])), Ok(2));
        assert_eq!(choose(&mut sampler, &|_, d| d.banned = Arc::from([0, 1, 2, 3])), Err(SampleError::NothingLeft));
    }

    /// The slow way: a row in which the other tokens are impossible from the start.
    #[test]
    fn a_mask_draws_as_if_the_other_tokens_were_impossible() {
        let width = 3000;
        let (mut sampler, mut slow) = (Sampler::new(width, width - 40), Sampler::new(width, width - 40));
        for case in 0..60u64 {
            let logits = random_logits(case, width);
            let may = |id: u32| rng::unit(case ^ 0xA5, id, Stream::Owner) < [0.001, 0.05, 0.9][case as usize % 3];
            let allowed: Vec<u32> = (0..width as u32).filter(|&id| may(id) || id == 7).collect();
            let params = SamplingParams {
                temperature: [0.0, 0.7, 1.5][case as usize / 3 % 3],
                top_k: [0, 1, 40][case as usize % 3],
                top_p: [1.0, 0.8][case as usize % 2],
                min_p: [0.0, 0.05][case as usize / 2 % 2],
                // The best token of all is among those that are not allowed, most of the time.
                logit_bias: vec![(11, 30.0), (7, 0.5)],
                seed: case,
                ..Default::default()
            };
            let masked = Draw { mask: Some(Mask::of(&allowed)), ..draw_with(params.clone()) };
            let impossible = |(id, &logit): (u32, &f32)| if allowed.contains(&id) { logit } else { f32::NEG_INFINITY };
            let row: Vec<f32> = (0..).zip(&logits).map(impossible).collect();
            let free = draw_with(params);
            for position in 0..20 {
                let drawn = sampler.draw(&logits, &masked, position).unwrap();
                assert_eq!(Ok(drawn), slow.draw(&row, &free, position), "case {case} at {position}");
                assert!(allowed.contains(&drawn) && drawn < width as u32 - 40, "case {case}: {drawn}");
            }
        }
        let none = Draw { mask: Some(Mask::of(&[])), ..draw_with(SamplingParams::default()) };
        assert_eq!(sampler.draw(&random_logits(1, width), &none, 0), Err(SampleError::NothingLeft));
        let padding = Draw { mask: Some(Mask::of(&[width as u32 - 1])), ..none };
        assert_eq!(sampler.draw(&random_logits(1, width), &padding, 0), Err(SampleError::NothingLeft));
        assert!(!is_plain_greedy(&padding), "the highest logit may not be allowed");
    }

    #[test]
    fn draws_depend_on_seed_and_position_only() {
        let logits = random_logits(3, 300);
        let params = SamplingParams { temperature: 1.0, seed: 11, ..Default::default() };
        let (mut first, mut second) = (Sampler::new(300, 300), Sampler::new(300, 300));
        let draw = draw_with(params.clone());
        let forward: Vec<_> = (0..50).map(|p| first.draw(&logits, &draw, p).unwrap()).collect();
        let mut backward: Vec<_> = (0..50).rev().map(|p| second.draw(&logits, &draw, p).unwrap()).collect();
        backward.reverse();
        assert_eq!(forward, backward);
        let other = draw_with(SamplingParams { seed: 12, ..params });
        assert_ne!(forward, (0..50).map(|p| first.draw(&logits, &other, p).unwrap()).collect::<Vec<_>>());
    }

    #[test]
    fn tiny_temperature_is_greedy_and_bad_numbers_are_refused() {
        let mut sampler = Sampler::new(3, 3);
        let cold = draw_with(SamplingParams { temperature: 1e-30, ..Default::default() });
        assert_eq!(sampler.draw(&[0.0, 1.0, 0.999], &cold, 5), Ok(1));
        let hot = draw_with(SamplingParams { temperature: f32::NAN, ..Default::default() });
        assert!(matches!(sampler.draw(&[0.0, 1.0, 2.0], &hot, 5), Err(SampleError::Temperature(_))));
        let biased = SamplingParams { logit_bias: vec![(1, f32::INFINITY)], ..Default::default() };
        assert!(matches!(sampler.draw(&[0.0, 1.0, 2.0], &draw_with(biased), 5), Err(SampleError::NotFinite(_))));
    }
}
