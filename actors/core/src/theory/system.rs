//! The closed system that the theory is about: N requests between M models. Owner: the planner. Invariant: a [`System`]
//! exists only if it is well formed, so nothing that computes with it checks again.

use serde::{Deserialize, Serialize};

/// Largest N, far beyond what any method answers for in reasonable time.
pub const REQUESTS_MAX: u32 = 4096;
/// Largest M.
pub const MODELS_MAX: usize = 16;
/// How far a row of P may be from a sum of 1; it is then scaled to it.
const ROW_SUM_TOLERANCE: f64 = 1e-6;

/// Latency of one model as the JSON form has it: a step with `b` requests takes `base + per_request * b` ticks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Affine {
    /// Ticks of a step whatever its batch.
    pub base: f64,
    /// Ticks for every request of the batch.
    #[serde(default)]
    pub per_request: f64,
}

impl Affine {
    /// Ticks for b = 1 .. `requests`, rounded; `i` is the model for errors.
    ///
    /// # Errors
    /// One line for ticks that are not a number from 1 to 65,535.
    pub fn table(&self, i: usize, requests: u32) -> Result<Vec<u32>, String> {
        requests_in_range(requests)?;
        let at = |b: u32| match (self.base + self.per_request * f64::from(b)).round() {
            ticks @ 1.0..=65_535.0 => Ok(ticks as u32),
            ticks => Err(format!("latency_ticks[{i}] gives {ticks} ticks at batch {b}; it must be 1 to 65535")),
        };
        (1..=requests).map(at).collect()
    }
}

fn requests_in_range(requests: u32) -> Result<(), String> {
    match requests {
        1..=REQUESTS_MAX => Ok(()),
        0 => Err("N is 0; there must be at least 1 request".into()),
        _ => Err(format!("N is {requests}; at most {REQUESTS_MAX} requests are planned for")),
    }
}

/// N requests, M models, time in ticks.
#[derive(Clone, Debug, PartialEq)]
pub struct System {
    requests: u32,
    /// `latency[i][b - 1]`: ticks of a step of model i with b requests, as many entries as it takes at once.
    latency: Vec<Vec<u32>>,
    /// `moves[i][j]`: probability that a request goes to j after a step of i.
    moves: Vec<Vec<f64>>,
    /// `tokens[i][j]`: tokens committed on that way.
    tokens: Vec<Vec<f64>>,
}

impl System {
    /// A system of `requests` requests. `latency[i]` has the ticks of a step with 1, 2, ... requests; a batch is never
    /// larger than its length. P is `moves`, C is `tokens`, both `[models][models]`.
    ///
    /// # Errors
    /// One line naming the field that is wrong and how.
    pub fn new(
        requests: u32,
        mut latency: Vec<Vec<u32>>,
        mut moves: Vec<Vec<f64>>,
        tokens: Vec<Vec<f64>>,
    ) -> Result<System, String> {
        let models = latency.len();
        if models == 0 {
            return Err("latency_ticks is empty; give one entry per model".into());
        }
        if models > MODELS_MAX {
            return Err(format!("latency_ticks has {models} entries; at most {MODELS_MAX} models are planned for"));
        }
        requests_in_range(requests)?;
        for (i, ticks) in latency.iter_mut().enumerate() {
            ticks.truncate(requests as usize);
            if ticks.is_empty() {
                return Err(format!("latency_ticks[{i}] allows no batch; give the ticks of a step with 1 request"));
            }
            if let Some(b) = ticks.iter().position(|&ticks| ticks == 0) {
                return Err(format!("latency_ticks[{i}] is 0 at batch {}; a step takes at least 1 tick", b + 1));
            }
        }
        square("P", &moves, models)?;
        square("C", &tokens, models)?;
        for (i, row) in moves.iter_mut().enumerate() {
            let sum: f64 = row.iter().sum();
            if row.iter().any(|p| !(0.0..=1.0).contains(p)) || (sum - 1.0).abs() > ROW_SUM_TOLERANCE {
                return Err(format!("P[{i}] is {row:?}; its entries must be probabilities that sum to 1"));
            }
            row.iter_mut().for_each(|p| *p /= sum);
        }
        match tokens.iter().flatten().find(|c| !c.is_finite() || **c < 0.0) {
            Some(c) => Err(format!("C holds {c}; tokens committed must be 0 or more")),
            None => Ok(System { requests, latency, moves, tokens }),
        }
    }

    /// With affine latencies, rounded to whole ticks.
    ///
    /// # Errors
    /// As [`System::new`], and for ticks that are not a number from 1 to 65,535.
    pub fn affine(
        requests: u32,
        latency: &[Affine],
        moves: Vec<Vec<f64>>,
        tokens: Vec<Vec<f64>>,
    ) -> Result<System, String> {
        let ticks = latency.iter().enumerate().map(|(i, line)| line.table(i, requests)).collect::<Result<_, _>>()?;
        System::new(requests, ticks, moves, tokens)
    }

    /// The same system with another number of requests, which must be at least 1 and at most as many as before for
    /// latencies that are known for small batches only.
    pub fn with_requests(&self, requests: u32) -> System {
        let mut other = self.clone();
        other.requests = requests.max(1);
        other.latency.iter_mut().for_each(|ticks| ticks.truncate(requests.max(1) as usize));
        other
    }

    /// N.
    pub fn requests(&self) -> u32 {
        self.requests
    }

    /// M.
    pub fn models(&self) -> usize {
        self.latency.len()
    }

    /// Largest batch of model i.
    pub fn cap(&self, i: usize) -> u32 {
        self.latency[i].len() as u32
    }

    /// Ticks of a step of model i with b requests, 1 <= b <= cap.
    pub fn ticks(&self, i: usize, b: u32) -> u32 {
        self.latency[i][b as usize - 1]
    }

    /// Ticks of the longest step of all.
    pub fn longest(&self) -> u32 {
        self.latency.iter().flatten().copied().max().unwrap_or(1)
    }

    /// Row i of P.
    pub fn moves(&self, i: usize) -> &[f64] {
        &self.moves[i]
    }

    /// Row i of C.
    pub fn tokens(&self, i: usize) -> &[f64] {
        &self.tokens[i]
    }

    /// Expected tokens that a request commits in a step of model i.
    pub fn reward(&self, i: usize) -> f64 {
        self.moves[i].iter().zip(&self.tokens[i]).map(|(p, c)| p * c).sum()
    }

    /// Whether thresholds fit: one per model, each from 1 to the largest batch, `sum(B_i - 1) < N`, so that wherever the
    /// requests wait, some model has enough of them.
    pub fn is_feasible(&self, thresholds: &[u32]) -> bool {
        thresholds.len() == self.models()
            && thresholds.iter().enumerate().all(|(i, &b)| (1..=self.cap(i)).contains(&b))
            && thresholds.iter().map(|b| u64::from(b - 1)).sum::<u64>() < u64::from(self.requests)
    }

    /// All feasible thresholds, the first model's slowest to change.
    pub fn feasible(&self) -> Vec<Vec<u32>> {
        let mut all: Vec<Vec<u32>> = vec![Vec::new()];
        for i in 0..self.models() {
            let extend = |head: Vec<u32>| {
                let used: u32 = head.iter().map(|b| b - 1).sum();
                (1..=self.cap(i).min(self.requests - used)).map(move |b| [head.clone(), vec![b]].concat())
            };
            all = all.into_iter().flat_map(extend).collect();
        }
        all
    }
}

fn square(name: &str, matrix: &[Vec<f64>], models: usize) -> Result<(), String> {
    if matrix.len() != models {
        return Err(format!("{name} has {} rows; there are {models} models in latency_ticks", matrix.len()));
    }
    match matrix.iter().position(|row| row.len() != models) {
        Some(i) => Err(format!("{name}[{i}] has {} entries; there are {models} models", matrix[i].len())),
        None => Ok(()),
    }
}
