//! What a model does, learnt while it does it: L(b), its row of P and of C, with decay. Owner: the Decode of that model.
//! Invariant: an estimate is always usable; where little was seen it leans on the prior, and a shift of the workload
//! throws away what was learnt before it. Learning allocates nothing, but for a look at 128 ways now and then.

use serde::{Deserialize, Serialize};

/// A step counts half after this many later ones.
const HALF_LIFE_STEPS: f64 = 400.0;
/// A way of a request counts half after this many later ones of the same model.
const HALF_LIFE_WAYS: f64 = 2_000.0;
/// The prior weighs as much as so many ways.
const PRIOR_WAYS: f64 = 16.0;
/// The line through all batch sizes weighs as much as so many steps of one batch size.
const LINE_STEPS: f64 = 4.0;
/// Ways in one look for a shift of the workload, and steps in one.
const WINDOW_WAYS: u32 = 128;
const WINDOW_STEPS: u32 = 32;
/// A share that is this many standard errors away from what was learnt is a shift.
const SHIFT_DEVIATIONS: f64 = 5.0;
/// So is a window of steps this many times slower or faster than learnt.
const SHIFT_LATENCY: f64 = 1.5;

/// What one model does, as the planner takes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Behaviour {
    /// Steps behind it, decayed; 0 when nothing was seen.
    pub steps: f64,
    /// `seconds[b - 1]`: a step with b requests.
    pub seconds: Vec<f64>,
    /// Probability that a request goes to each model after a step here.
    pub moves: Vec<f64>,
    /// Tokens committed on each of these ways.
    pub tokens: Vec<f64>,
}

/// All steps with one number of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Total {
    /// How many.
    pub steps: u64,
    /// Seconds of all together.
    pub seconds: f64,
}

/// Sums of a decayed straight-line fit.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    w: f64,
    wb: f64,
    wbb: f64,
    wt: f64,
    wbt: f64,
}

/// A decayed sum that is brought up to date when it is touched.
#[derive(Clone, Copy, Debug, Default)]
struct Decayed {
    weight: f64,
    sum: f64,
    /// The number of the last step or way in it.
    at: u32,
}

impl Decayed {
    /// As it is by the time of number `now`.
    fn by(self, now: u32, half_life: f64) -> Decayed {
        let keep = (-f64::from(now.wrapping_sub(self.at)) / half_life).exp2();
        Decayed { weight: self.weight * keep, sum: self.sum * keep, at: now }
    }

    fn add(&mut self, value: f64, now: u32, half_life: f64) {
        let before = self.by(now, half_life);
        *self = Decayed { weight: before.weight + 1.0, sum: before.sum + value, at: now };
    }
}

/// Learns the [`Behaviour`] of one model.
#[derive(Clone, Debug)]
pub struct Observer {
    line: Line,
    /// Weight of what was there before after one more step.
    keep: f64,
    steps_seen: u32,
    /// Seconds per batch size.
    sizes: Vec<Decayed>,
    /// The same undecayed.
    totals: Vec<Total>,
    prior: (Vec<f64>, Vec<f64>),
    ways_seen: u32,
    /// Tokens per target.
    ways: Vec<Decayed>,
    recent_ways: Vec<(u32, f64)>,
    recent_steps: (u32, f64),
}

impl Observer {
    /// Nothing seen: `moves` and `tokens` are what the algorithm expects of this model, `rows_max` its largest batch.
    pub fn new(moves: Vec<f64>, tokens: Vec<f64>, rows_max: u32) -> Observer {
        let models = moves.len();
        Observer {
            line: Line::default(),
            keep: (-1.0 / HALF_LIFE_STEPS).exp2(),
            steps_seen: 0,
            sizes: vec![Decayed::default(); rows_max as usize],
            totals: vec![Total::default(); rows_max as usize],
            prior: (moves, tokens),
            ways_seen: 0,
            ways: vec![Decayed::default(); models],
            recent_ways: vec![(0, 0.0); models],
            recent_steps: (0, 0.0),
        }
    }

    /// A step with `rows` requests took so many seconds.
    pub fn step(&mut self, rows: u32, seconds: f64) {
        let Some(index) = (rows as usize).checked_sub(1).filter(|&index| index < self.sizes.len()) else { return };
        if !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        if let Some(expected) = self.seconds(rows) {
            self.recent_steps.0 += 1;
            self.recent_steps.1 += (seconds / expected).ln();
            if self.recent_steps.0 == WINDOW_STEPS {
                if (self.recent_steps.1 / f64::from(WINDOW_STEPS)).abs() > SHIFT_LATENCY.ln() {
                    self.line = Line::default();
                    self.sizes.fill(Decayed::default());
                }
                self.recent_steps = (0, 0.0);
            }
        }
        self.steps_seen = self.steps_seen.wrapping_add(1);
        self.line.add(f64::from(rows), seconds, self.keep);
        self.sizes[index].add(seconds, self.steps_seen, HALF_LIFE_STEPS);
        self.totals[index].steps += 1;
        self.totals[index].seconds += seconds;
    }

    /// All steps so far: `[b - 1]` those with b requests.
    pub fn totals(&self) -> &[Total] {
        &self.totals
    }

    /// A request went to model `to` and committed so many tokens.
    pub fn went(&mut self, to: usize, tokens: f64) {
        if to >= self.ways.len() {
            return;
        }
        self.recent_ways[to].0 += 1;
        self.recent_ways[to].1 += tokens;
        self.ways_seen = self.ways_seen.wrapping_add(1);
        self.ways[to].add(tokens, self.ways_seen, HALF_LIFE_WAYS);
        if self.recent_ways.iter().map(|way| way.0).sum::<u32>() == WINDOW_WAYS {
            if self.shifted() {
                for (way, &(count, sum)) in self.ways.iter_mut().zip(&self.recent_ways) {
                    *way = Decayed { weight: f64::from(count), sum, at: self.ways_seen };
                }
            }
            self.recent_ways.fill((0, 0.0));
        }
    }

    /// Whether the last window of ways is another workload than what was learnt before.
    fn shifted(&self) -> bool {
        let n = f64::from(WINDOW_WAYS);
        if self.ways().map(|way| way.weight).sum::<f64>() < 2.0 * n {
            return false;
        }
        self.recent_ways.iter().zip(self.moves()).any(|(&(count, _), p)| {
            let p = p.clamp(1.0 / n, 1.0 - 1.0 / n);
            (f64::from(count) - n * p).abs() > SHIFT_DEVIATIONS * (n * p * (1.0 - p)).sqrt()
        })
    }

    /// The sums of all ways as they are now.
    fn ways(&self) -> impl Iterator<Item = Decayed> {
        self.ways.iter().map(|way| way.by(self.ways_seen, HALF_LIFE_WAYS))
    }

    fn moves(&self) -> Vec<f64> {
        let seen: f64 = self.ways().map(|way| way.weight).sum();
        let share = |(way, prior): (Decayed, &f64)| (way.weight + PRIOR_WAYS * prior) / (seen + PRIOR_WAYS);
        self.ways().zip(&self.prior.0).map(share).collect()
    }

    /// Seconds of a step with so many requests; none when no step was seen.
    fn seconds(&self, rows: u32) -> Option<f64> {
        let line = self.line.at(f64::from(rows))?;
        let size = self.sizes.get(rows as usize - 1).copied().unwrap_or_default().by(self.steps_seen, HALF_LIFE_STEPS);
        Some((size.sum + LINE_STEPS * line) / (size.weight + LINE_STEPS))
    }

    /// What is known now.
    pub fn behaviour(&self) -> Behaviour {
        let tokens = |(way, prior): (Decayed, &f64)| (way.sum + prior) / (way.weight + 1.0);
        Behaviour {
            steps: self.line.w,
            seconds: (1..=self.sizes.len() as u32).map_while(|rows| self.seconds(rows)).collect(),
            moves: self.moves(),
            tokens: self.ways().zip(&self.prior.1).map(tokens).collect(),
        }
    }
}

impl Line {
    fn add(&mut self, b: f64, t: f64, keep: f64) {
        for (sum, new) in
            [(&mut self.w, 1.0), (&mut self.wb, b), (&mut self.wbb, b * b), (&mut self.wt, t), (&mut self.wbt, b * t)]
        {
            *sum = *sum * keep + new;
        }
    }

    /// The fitted value, with a slope from 0 (never falling) to straight through the origin.
    fn at(&self, b: f64) -> Option<f64> {
        if self.w <= 0.0 {
            return None;
        }
        let (mean_b, mean_t) = (self.wb / self.w, self.wt / self.w);
        let variance = self.wbb / self.w - mean_b * mean_b;
        let covariance = self.wbt / self.w - mean_b * mean_t;
        let slope = if variance > 1e-9 { (covariance / variance).clamp(0.0, mean_t / mean_b) } else { 0.0 };
        Some((mean_t + slope * (b - mean_b)).max(f64::MIN_POSITIVE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Stream, unit};

    /// Ways of a model that stays with probability 1 - p and drops its token when it does not.
    fn walk(observer: &mut Observer, (p, ways): (f64, u32), seed: u64) {
        for n in 0..ways {
            let leaves = unit(seed, n, Stream::Owner) < p;
            observer.went(usize::from(leaves), f64::from(u8::from(!leaves)));
        }
    }

    #[test]
    fn little_leans_on_the_prior_and_much_does_not() {
        let mut observer = Observer::new(vec![0.9, 0.1], vec![1.0, 0.0], 8);
        let start = observer.behaviour();
        assert_eq!((start.steps, start.seconds.len(), start.moves), (0.0, 0, vec![0.9, 0.1]));
        walk(&mut observer, (0.4, 4), 1);
        assert!(observer.behaviour().moves[1] < 0.25);
        walk(&mut observer, (0.4, 8_000), 2);
        let learnt = observer.behaviour();
        assert!((learnt.moves[1] - 0.4).abs() < 0.03, "{learnt:?}");
        assert!(learnt.tokens[0] > 0.99 && learnt.tokens[1] < 0.01, "{learnt:?}");
        assert!((learnt.moves.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_shift_of_the_ways_is_seen_within_a_few_hundred() {
        let mut observer = Observer::new(vec![0.9, 0.1], vec![1.0, 0.0], 8);
        walk(&mut observer, (0.1, 20_000), 3);
        walk(&mut observer, (0.4, 1_000), 4);
        assert!((observer.behaviour().moves[1] - 0.4).abs() < 0.06, "{:?}", observer.behaviour());
    }

    #[test]
    fn latency_follows_a_line_where_nothing_was_seen_and_a_shift() {
        let line = |b: u32| 0.004 + 0.001 * f64::from(b);
        let mut observer = Observer::new(vec![1.0], vec![1.0], 16);
        for n in 0..500 {
            let b = 1 + n % 6;
            observer.step(b, line(b));
        }
        let seconds = observer.behaviour().seconds;
        assert_eq!(seconds.len(), 16);
        for b in 1..=16u32 {
            assert!((seconds[b as usize - 1] / line(b) - 1.0).abs() < 0.01, "{b}: {seconds:?}");
        }
        for n in 0..100 {
            observer.step(1 + n % 6, 3.0 * line(1 + n % 6));
        }
        assert!((observer.behaviour().seconds[3] / (3.0 * line(4)) - 1.0).abs() < 0.02);
        for wrong in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
            observer.step(2, wrong);
        }
        observer.step(0, 1.0);
        observer.step(99, 1.0);
        let four = observer.totals()[3];
        let mean = four.seconds / four.steps as f64;
        assert!(four.steps > 80 && line(4) < mean && mean < 3.0 * line(4), "all of them, whatever was forgotten");
        assert!(observer.behaviour().seconds.iter().all(|s| s.is_finite() && *s > 0.0));
    }

    /// What is decayed at a touch equals what is decayed at every step.
    #[test]
    fn lazy_decay_equals_eager_decay() {
        let (mut lazy, mut weight, mut sum) = (Decayed::default(), 0.0, 0.0);
        for n in 1..2_000u32 {
            weight *= (-1.0 / HALF_LIFE_STEPS).exp2();
            sum *= (-1.0 / HALF_LIFE_STEPS).exp2();
            if unit(7, n, Stream::Owner) < 0.3 {
                lazy.add(f64::from(n), n, HALF_LIFE_STEPS);
                weight += 1.0;
                sum += f64::from(n);
            }
        }
        let lazy = lazy.by(1_999, HALF_LIFE_STEPS);
        assert!((lazy.weight / weight - 1.0).abs() < 1e-9 && (lazy.sum / sum - 1.0).abs() < 1e-9);
    }
}
