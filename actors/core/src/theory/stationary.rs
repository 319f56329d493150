//! Stationary vector of a chain, also of a periodic one and of one with transient states. Owner: the chain. Invariant:
//! what is returned satisfies `pi P = pi` to [`RESIDUAL`], checked on the matrix itself.

use crate::theory::chain::Chain;
use std::collections::VecDeque;

/// Largest sum of `|pi P - pi|` that is accepted.
pub const RESIDUAL: f64 = 1e-12;
/// Up to this many states the vector is found by elimination.
const DIRECT: usize = 64;
/// Sweeps that are combined for the next one.
const DEPTH: usize = 8;
/// Sweeps before giving up; a sweep costs as much as the matrix has entries.
const SWEEPS: usize = 100_000;
/// Sweeps between two looks at the residual.
const LOOK: usize = 8;

/// The long-run shares of the states when the chain starts in state 0.
///
/// Small irreducible chains by elimination without subtraction (Grassmann, Taksar, Heyman 1985), larger ones by
/// Gauss-Seidel sweeps, which a period does not disturb; several closed classes by the lazy chain `(I + P) / 2` from
/// state 0, whose limit is the average over time of the original.
///
/// # Errors
/// One line when the sweeps do not settle.
pub fn stationary(chain: &Chain) -> Result<Vec<f64>, String> {
    let class = closed_class(chain);
    match class {
        Some(members) if members.len() <= DIRECT => Ok(eliminate(chain, &members)),
        Some(members) => sweep(chain, &members).map_or_else(|| lazy(chain), Ok),
        None => lazy(chain),
    }
}

/// The states of the only closed class in ascending order; `None` when there are several.
fn closed_class(chain: &Chain) -> Option<Vec<usize>> {
    let components = components(chain);
    let count = components.iter().max().map_or(0, |&largest| largest as usize + 1);
    let mut closed = vec![true; count];
    for s in 0..chain.len() {
        if chain.row(s).any(|(target, p)| p > 0.0 && components[target] != components[s]) {
            closed[components[s] as usize] = false;
        }
    }
    let mut classes = (0..count).filter(|&component| closed[component]);
    match (classes.next(), classes.next()) {
        (Some(only), None) => Some((0..chain.len()).filter(|&s| components[s] as usize == only).collect()),
        _ => None,
    }
}

/// Strongly connected components (Tarjan 1972, without recursion): the number of each state's.
fn components(chain: &Chain) -> Vec<u32> {
    const NEW: u32 = u32::MAX;
    let n = chain.len();
    let (mut order, mut low, mut component) = (vec![NEW; n], vec![0u32; n], vec![NEW; n]);
    let (mut stack, mut calls, mut counter, mut found) = (Vec::new(), Vec::new(), 0u32, 0u32);
    for root in 0..n {
        if order[root] != NEW {
            continue;
        }
        calls.push((root, chain.starts[root] as usize));
        while let Some(&mut (s, ref mut edge)) = calls.last_mut() {
            if *edge == chain.starts[s] as usize && order[s] == NEW {
                order[s] = counter;
                low[s] = counter;
                counter += 1;
                stack.push(s);
            }
            if *edge < chain.starts[s + 1] as usize {
                let target = chain.targets[*edge] as usize;
                *edge += 1;
                if order[target] == NEW {
                    calls.push((target, chain.starts[target] as usize));
                } else if component[target] == NEW {
                    low[s] = low[s].min(order[target]);
                }
                continue;
            }
            calls.pop();
            if let Some(&mut (parent, _)) = calls.last_mut() {
                low[parent] = low[parent].min(low[s]);
            }
            if low[s] == order[s] {
                while let Some(member) = stack.pop() {
                    component[member] = found;
                    if member == s {
                        break;
                    }
                }
                found += 1;
            }
        }
    }
    component
}

/// Elimination without subtraction over an irreducible class.
fn eliminate(chain: &Chain, members: &[usize]) -> Vec<f64> {
    let n = members.len();
    let mut place = vec![0; chain.len()];
    members.iter().enumerate().for_each(|(at, &s)| place[s] = at);
    let mut a = vec![0.0; n * n];
    for (row, &s) in members.iter().enumerate() {
        chain.row(s).for_each(|(target, p)| a[row * n + place[target]] += p);
    }
    for last in (1..n).rev() {
        let out: f64 = a[last * n..last * n + last].iter().sum();
        for row in 0..last {
            let factor = a[row * n + last] / out;
            a[row * n + last] = factor;
            for column in 0..last {
                a[row * n + column] += factor * a[last * n + column];
            }
        }
    }
    let mut pi = vec![0.0; chain.len()];
    let mut own = vec![1.0; n];
    for state in 1..n {
        own[state] = (0..state).map(|row| own[row] * a[row * n + state]).sum();
    }
    let sum: f64 = own.iter().sum();
    members.iter().zip(own).for_each(|(&s, value)| pi[s] = value / sum);
    pi
}

/// Gauss-Seidel over one closed class: `pi_s (1 - p_ss) = sum of pi_t p_ts`, newest values used at once. `None` when it
/// does not settle.
fn sweep(chain: &Chain, members: &[usize]) -> Option<Vec<f64>> {
    let mut own = vec![0.0; chain.len()];
    let mut inside = vec![false; chain.len()];
    members.iter().for_each(|&s| inside[s] = true);
    let mut counts = vec![0u32; chain.len() + 1];
    for &s in members {
        for (target, p) in chain.row(s) {
            if target == s {
                own[s] += p;
            } else {
                counts[target + 1] += 1;
            }
        }
    }
    for s in 0..chain.len() {
        counts[s + 1] += counts[s];
    }
    let mut fill = counts.clone();
    let mut sources = vec![(0u32, 0.0f64); counts[chain.len()] as usize];
    for &s in members {
        for (target, p) in chain.row(s).filter(|&(target, _)| target != s) {
            sources[fill[target] as usize] = (s as u32, p);
            fill[target] += 1;
        }
    }
    let mut pi = vec![0.0; chain.len()];
    members.iter().for_each(|&s| pi[s] = 1.0 / members.len() as f64);
    let mut mixing = Mixing::default();
    for round in 1..=SWEEPS / 50 {
        let before = pi.clone();
        for &s in members {
            let into: f64 =
                sources[counts[s] as usize..counts[s + 1] as usize].iter().map(|&(t, p)| pi[t as usize] * p).sum();
            pi[s] = into / (1.0 - own[s]);
        }
        let sum: f64 = pi.iter().sum();
        pi.iter_mut().for_each(|p| *p /= sum);

        if round % LOOK == 0 && residual(chain, &pi) < RESIDUAL {
            return Some(pi);
        }
        mixing.mix(&before, &mut pi);
    }
    None
}

/// Anderson mixing: the next vector is the combination of the last sweeps whose changes cancel best (Walker, Ni 2011,
/// in the difference form). It only chooses where to sweep next; what is accepted is tested on its own.
#[derive(Default)]
struct Mixing {
    /// The last (vector after a sweep, change by that sweep).
    last: Option<(Vec<f64>, Vec<f64>)>,
    /// Differences of both between sweeps that follow each other.
    steps: VecDeque<(Vec<f64>, Vec<f64>)>,
}

impl Mixing {
    fn mix(&mut self, before: &[f64], after: &mut [f64]) {
        let minus = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<f64>>();
        let change = minus(after, before);
        if let Some((last_after, last_change)) = &self.last {
            self.steps.push_back((minus(after, last_after), minus(&change, last_change)));
            if self.steps.len() > DEPTH {
                self.steps.pop_front();
            }
        }
        self.last = Some((after.to_vec(), change.clone()));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let n = self.steps.len();
        let mut a: Vec<Vec<f64>> = (0..n)
            .map(|i| {
                let row =
                    (0..n).map(|j| dot(&self.steps[i].1, &self.steps[j].1) * if i == j { 1.0 + 1e-10 } else { 1.0 });
                row.chain([dot(&self.steps[i].1, &change)]).collect()
            })
            .collect();
        let Some(weights) = solve(&mut a) else { return };
        for (weight, (vector, _)) in weights.iter().zip(&self.steps) {
            after.iter_mut().zip(vector).for_each(|(x, step)| *x -= weight * step);
        }
    }
}

/// Solves a small system given as rows `[a | b]`; `None` when it has no unique solution.
fn solve(rows: &mut [Vec<f64>]) -> Option<Vec<f64>> {
    let n = rows.len();
    for column in 0..n {
        let pivot = (column..n).max_by(|&i, &j| rows[i][column].abs().total_cmp(&rows[j][column].abs()))?;
        rows.swap(column, pivot);
        if rows[column][column].abs() < f64::MIN_POSITIVE {
            return None;
        }
        let (done, below) = rows.split_at_mut(column + 1);
        let pivot = &done[column];
        for row in below {
            let factor = row[column] / pivot[column];
            row.iter_mut().zip(pivot).for_each(|(value, above)| *value -= factor * above);
        }
    }
    let mut x = vec![0.0; n];
    for row in (0..n).rev() {
        let known: f64 = (row + 1..n).map(|at| rows[row][at] * x[at]).sum();
        x[row] = (rows[row][n] - known) / rows[row][row];
    }
    x.iter().all(|value| value.is_finite()).then_some(x)
}

/// `(I + P) / 2` applied to "certainly in state 0" until nothing changes.
fn lazy(chain: &Chain) -> Result<Vec<f64>, String> {
    let mut pi = vec![0.0; chain.len()];
    pi[0] = 1.0;
    for _ in 0..SWEEPS {
        let next = step(chain, &pi);
        let moved: f64 = next.iter().zip(&pi).map(|(a, b)| (a - b).abs()).sum();
        pi.iter_mut().zip(&next).for_each(|(p, next)| *p = 0.5 * (*p + next));
        if moved < RESIDUAL {
            return Ok(pi);
        }
    }
    Err(format!("the stationary vector of {} states did not settle in {SWEEPS} sweeps", chain.len()))
}

fn step(chain: &Chain, pi: &[f64]) -> Vec<f64> {
    let mut next = vec![0.0; pi.len()];
    for (s, &mass) in pi.iter().enumerate() {
        chain.row(s).for_each(|(target, p)| next[target] += mass * p);
    }
    next
}

fn residual(chain: &Chain, pi: &[f64]) -> f64 {
    step(chain, pi).iter().zip(pi).map(|(a, b)| (a - b).abs()).sum()
}
