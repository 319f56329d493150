//! Drawing the next token from a row of raw logits. Owner: the runner. Invariant: the token is a pure function of the
//! logits, the parameters, the history and (seed, position); sums run in a fixed order, so equal inputs give equal
//! tokens in any batch.
//!
//! Order of the rules (the one vLLM's sampler documents): logit bias, penalties (repetition, then frequency and
//! presence), bans; then greedy, or temperature, min-p, top-k, top-p, draw. Top-p is measured on what min-p and top-k
//! left, renormalised. Equal logits are ordered by lower id everywhere.

use tokenrouter_core::executor::Draw;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::{self, Stream};
use tokenrouter_core::sampling::{SamplingParams, TokenCounts};

/// Weights below `exp(-45)` of the highest are dropped: even a whole vocabulary of them cannot reach one draw in 1e14.
const LOG_WEIGHT_MIN: f64 = -45.0;
/// First size of the sorted head that top-p looks at; grows by `HEAD_GROWTH` until the head holds the mass.
const HEAD_FIRST: usize = 64;
const HEAD_GROWTH: usize = 8;

/// Why no token could be drawn.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// Bias and bans left no token with a finite logit.
    #[error("every token is masked by bans and logit bias; allow at least one token")]
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
    work: Vec<f32>,
    kept: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    id: TokenId,
}

impl Candidate {
    /// Higher logits first, lower ids first among equals.
    fn rank(&self, other: &Candidate) -> std::cmp::Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// Whether the candidate is simply the highest raw logit of the real vocabulary.
pub fn is_plain_greedy(draw: &Draw) -> bool {
    draw.params.temperature == 0.0
        && draw.params.logit_bias.is_empty()
        && draw.banned.is_empty()
        && !(draw.params.reads_history() && draw.history.is_some())
}

impl Sampler {
    /// A sampler for logits rows of up to `vocab_width` entries of which the first `real_vocab` name tokens; the
    /// padding above is never drawn.
    pub fn new(vocab_width: usize, real_vocab: usize) -> Self {
        let real_vocab = real_vocab.min(vocab_width);
        Sampler { real_vocab, work: Vec::with_capacity(real_vocab), kept: Vec::with_capacity(real_vocab) }
    }

    /// Draws the token of `position` from raw logits `[vocab_width]`.
    ///
    /// # Errors
    /// [`SampleError`] when the parameters leave nothing that can be drawn.
    pub fn draw(&mut self, logits: &[f32], draw: &Draw, position: u32) -> Result<TokenId, SampleError> {
        let params = &*draw.params;
        self.work.clear();
        self.work.extend_from_slice(&logits[..self.real_vocab.min(logits.len())]);
        adjust(&mut self.work, draw);
        let best = highest(&self.work)?;
        if params.temperature == 0.0 {
            return Ok(best.id);
        }
        if !(params.temperature > 0.0 && params.temperature.is_finite()) {
            return Err(SampleError::Temperature(params.temperature));
        }
        let scale = Scale { max: best.logit, temperature: f64::from(params.temperature) };
        self.keep(params, scale);
        let unit = rng::unit(params.seed, position, Stream::Token);
        Ok(pick(&self.kept, scale, unit).unwrap_or(best.id))
    }

    /// Fills `kept` by min-p, top-k and top-p. Afterwards it is sorted by rank if a top rule cut it, by id otherwise.
    fn keep(&mut self, params: &SamplingParams, scale: Scale) {
        let log_min =
            if params.min_p > 0.0 { f64::from(params.min_p).ln().max(LOG_WEIGHT_MIN) } else { LOG_WEIGHT_MIN };
        self.kept.clear();
        for (id, &logit) in self.work.iter().enumerate() {
            if scale.log_weight(logit) >= log_min {
                self.kept.push(Candidate { logit, id: id as TokenId });
            }
        }
        let k = params.top_k as usize;
        if k > 0 && k < self.kept.len() {
            self.kept.select_nth_unstable_by(k - 1, Candidate::rank);
            self.kept.truncate(k);
            self.kept.sort_unstable_by(Candidate::rank);
        }
        if params.top_p < 1.0 {
            let len = nucleus(&mut self.kept, scale, f64::from(params.top_p));
            self.kept.truncate(len);
        }
    }
}

/// Turns logits into unnormalised weights relative to the highest.
#[derive(Clone, Copy)]
struct Scale {
    max: f32,
    temperature: f64,
}

impl Scale {
    fn log_weight(self, logit: f32) -> f64 {
        (f64::from(logit) - f64::from(self.max)) / self.temperature
    }

    fn weight(self, candidate: &Candidate) -> f64 {
        self.log_weight(candidate.logit).exp()
    }
}

/// Bias, penalties and bans, in place.
fn adjust(logits: &mut [f32], draw: &Draw) {
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
    let mut best = Candidate { logit: f32::NEG_INFINITY, id: 0 };
    for (id, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return Err(SampleError::NotFinite(logit));
        }
        if logit > best.logit {
            best = Candidate { logit, id: id as TokenId };
        }
    }
    match best.logit {
        f32::NEG_INFINITY => Err(SampleError::NothingLeft),
        f32::INFINITY => Err(SampleError::NotFinite(best.logit)),
        _ => Ok(best),
    }
}

/// Sorts as much of the head by rank as is needed to hold `p` of the mass; returns its length, at least 1.
fn nucleus(kept: &mut [Candidate], scale: Scale, p: f64) -> usize {
    let target = p * kept.iter().map(|candidate| scale.weight(candidate)).sum::<f64>();
    let mut sorted = 0;
    let mut mass = 0.0;
    let mut head = HEAD_FIRST;
    while sorted < kept.len() {
        let end = head.min(kept.len());
        if end < kept.len() {
            kept[sorted..].select_nth_unstable_by(end - sorted - 1, Candidate::rank);
        }
        kept[sorted..end].sort_unstable_by(Candidate::rank);
        for (index, candidate) in kept.iter().enumerate().take(end).skip(sorted) {
            mass += scale.weight(candidate);
            if mass >= target {
                return index + 1;
            }
        }
        sorted = end;
        head = head.saturating_mul(HEAD_GROWTH);
    }
    kept.len()
}

/// Inverse transform sampling: the first candidate at which the running weight exceeds `unit` of the whole.
fn pick(kept: &[Candidate], scale: Scale, unit: f64) -> Option<TokenId> {
    let total: f64 = kept.iter().map(|candidate| scale.weight(candidate)).sum();
    let target = unit * total;
    let mut mass = 0.0;
    for candidate in kept {
        mass += scale.weight(candidate);
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

    fn draw_with(params: SamplingParams) -> Draw {
        Draw {
            params: Arc::new(params),
            history: None,
            banned: Arc::from([]),
            needs: Default::default(),
            logprobs: None,
        }
    }

    fn random_logits(seed: u64, width: usize) -> Vec<f32> {
        (0..width).map(|i| (rng::unit(seed, i as u32, Stream::Owner) * 16.0 - 8.0) as f32).collect()
    }

    /// The rules written out the slow way: sort everything, mask, renormalise. Returns (id, probability) by rank.
    fn distribution(logits: &[f32], params: &SamplingParams) -> Vec<(u32, f64)> {
        let mut all: Vec<(u32, f64)> = logits.iter().enumerate().map(|(i, &l)| (i as u32, f64::from(l))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
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
    fn nucleus_equals_a_full_sort_on_wide_rows() {
        let mut sampler = Sampler::new(5000, 5000);
        for case in 0..12u64 {
            let logits: Vec<f32> = random_logits(case, 5000).iter().map(|l| (l * 4.0).round() / 4.0).collect();
            let top_p = [0.05, 0.5, 0.9, 0.999][case as usize % 4];
            let params = SamplingParams { temperature: 1.3, top_p, ..Default::default() };
            let scale = Scale { max: logits.iter().copied().fold(f32::MIN, f32::max), temperature: f64::from(1.3f32) };
            sampler.work.clear();
            sampler.work.extend_from_slice(&logits);
            sampler.keep(&params, scale);
            let ids: Vec<u32> = sampler.kept.iter().map(|c| c.id).collect();
            let slow: Vec<u32> = distribution(&logits, &params).iter().map(|e| e.0).collect();
            assert_eq!(ids, slow, "case {case}");
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
