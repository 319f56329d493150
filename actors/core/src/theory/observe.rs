//! What a model does, learnt while it does it: L(b), its row of P and of C, with decay. Owner: the Decode of that model.
//! Invariant: an estimate is always usable; where little was seen it leans on the prior, and a shift of the workload
//! throws away what was learnt before it.

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

/// Sums of a decayed straight-line fit.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    w: f64,
    wb: f64,
    wbb: f64,
    wt: f64,
    wbt: f64,
}

/// Learns the [`Behaviour`] of one model.
#[derive(Clone, Debug)]
pub struct Observer {
    line: Line,
    /// Per batch size: (weight, weighted seconds).
    sizes: Vec<(f64, f64)>,
    prior: (Vec<f64>, Vec<f64>),
    /// Per target: (weight, weighted tokens).
    ways: Vec<(f64, f64)>,
    recent_ways: Vec<(u32, f64)>,
    recent_steps: (u32, f64),
}

impl Observer {
    /// Nothing seen: `moves` and `tokens` are what the algorithm expects of this model, `rows_max` its largest batch.
    pub fn new(moves: Vec<f64>, tokens: Vec<f64>, rows_max: u32) -> Observer {
        let models = moves.len();
        Observer {
            line: Line::default(),
            sizes: vec![(0.0, 0.0); rows_max as usize],
            prior: (moves, tokens),
            ways: vec![(0.0, 0.0); models],
            recent_ways: vec![(0, 0.0); models],
            recent_steps: (0, 0.0),
        }
    }

    /// A step with `rows` requests took so many seconds.
    pub fn step(&mut self, rows: u32, seconds: f64) {
        let Some(index) = (rows as usize).checked_sub(1).filter(|&index| index < self.sizes.len()) else { return };
        let expected = self.seconds(rows);
        if let Some(expected) = expected {
            self.recent_steps.0 += 1;
            self.recent_steps.1 += (seconds / expected).ln();
            if self.recent_steps.0 == WINDOW_STEPS {
                if (self.recent_steps.1 / f64::from(WINDOW_STEPS)).abs() > SHIFT_LATENCY.ln() {
                    self.line = Line::default();
                    self.sizes.fill((0.0, 0.0));
                }
                self.recent_steps = (0, 0.0);
            }
        }
        let keep = 0.5_f64.powf(1.0 / HALF_LIFE_STEPS);
        self.line.add(f64::from(rows), seconds, keep);
        for size in &mut self.sizes {
            size.0 *= keep;
            size.1 *= keep;
        }
        self.sizes[index].0 += 1.0;
        self.sizes[index].1 += seconds;
    }

    /// A request went to model `to` and committed so many tokens.
    pub fn went(&mut self, to: usize, tokens: f64) {
        if to >= self.ways.len() {
            return;
        }
        self.recent_ways[to].0 += 1;
        self.recent_ways[to].1 += tokens;
        let keep = 0.5_f64.powf(1.0 / HALF_LIFE_WAYS);
        for way in &mut self.ways {
            way.0 *= keep;
            way.1 *= keep;
        }
        self.ways[to].0 += 1.0;
        self.ways[to].1 += tokens;
        if self.recent_ways.iter().map(|way| way.0).sum::<u32>() == WINDOW_WAYS {
            if self.shifted() {
                self.ways = self.recent_ways.iter().map(|&(count, tokens)| (f64::from(count), tokens)).collect();
            }
            self.recent_ways.fill((0, 0.0));
        }
    }

    /// Whether the last window of ways is another workload than what was learnt before.
    fn shifted(&self) -> bool {
        let seen: f64 = self.ways.iter().map(|way| way.0).sum();
        let n = f64::from(WINDOW_WAYS);
        if seen < 2.0 * n {
            return false;
        }
        self.recent_ways.iter().zip(self.moves()).any(|(&(count, _), p)| {
            let p = p.clamp(1.0 / n, 1.0 - 1.0 / n);
            (f64::from(count) - n * p).abs() > SHIFT_DEVIATIONS * (n * p * (1.0 - p)).sqrt()
        })
    }

    fn moves(&self) -> Vec<f64> {
        let seen: f64 = self.ways.iter().map(|way| way.0).sum();
        let share = |(way, prior): (&(f64, f64), &f64)| (way.0 + PRIOR_WAYS * prior) / (seen + PRIOR_WAYS);
        self.ways.iter().zip(&self.prior.0).map(share).collect()
    }

    /// Seconds of a step with so many requests; none when no step was seen.
    fn seconds(&self, rows: u32) -> Option<f64> {
        let line = self.line.at(f64::from(rows))?;
        let (weight, sum) = self.sizes.get(rows as usize - 1).copied().unwrap_or_default();
        Some((sum + LINE_STEPS * line) / (weight + LINE_STEPS))
    }

    /// What is known now.
    pub fn behaviour(&self) -> Behaviour {
        let tokens = |(way, prior): (&(f64, f64), &f64)| (way.1 + prior) / (way.0 + 1.0);
        Behaviour {
            steps: self.line.w,
            seconds: (1..=self.sizes.len() as u32).map_while(|rows| self.seconds(rows)).collect(),
            moves: self.moves(),
            tokens: self.ways.iter().zip(&self.prior.1).map(tokens).collect(),
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
