//! An algorithm that counts what another one decides: P, C and how much a row consumes, exactly. Owner: the command.
//! Invariant: decisions are the other algorithm's own; only prompts (the first row of a request at a model) are left out
//! of what rows consume.

use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokenrouter_core::executor::Needs;
use tokenrouter_core::ids::{ModelIdx, TokenId};
use tokenrouter_core::peer::{PeerError, PeerReq};
use tokenrouter_core::routing::{Algorithm, Decision, Handoff, HeadSpec, Prior, Route, RoutingError, StepView, Suffix};
use tokenrouter_core::theory::profile::Way;

/// Lengths of rows are counted in classes from each power of two to the next; the last one is open.
const CLASSES: usize = 8;
/// Parts of the rows that stay below a typical length and below a long one.
const HALF: f64 = 0.5;
const MOST: f64 = 0.99;

/// Counts of one model.
#[derive(Debug, Default)]
struct Counts {
    /// Per target: requests that went there, and those whose candidate was kept.
    ways: Vec<[AtomicU64; 2]>,
    /// Rows after the first of a request here, by the class of the tokens that they consumed.
    lengths: [AtomicU64; CLASSES],
    /// Tokens behind all rows together.
    context: AtomicU64,
}

/// What was seen of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Rows behind the ways.
    pub observations: u64,
    /// Where requests went, by name.
    pub ways: BTreeMap<String, Way>,
    /// Half of the rows, and nearly all, consumed less than twice as many tokens: powers of two.
    pub lengths: (u32, u32),
    /// Mean tokens behind a row; 0 when there was none.
    pub context: u32,
}

/// The algorithm that counts.
#[derive(Debug)]
pub struct Counted {
    inner: Arc<dyn Algorithm>,
    counts: Arc<Vec<Counts>>,
}

impl Counted {
    /// Counts what this algorithm decides between so many models.
    pub fn new(inner: Arc<dyn Algorithm>, models: usize) -> Counted {
        let counts = || Counts { ways: (0..models).map(|_| Default::default()).collect(), ..Counts::default() };
        Counted { inner, counts: Arc::new((0..models).map(|_| counts()).collect()) }
    }

    /// What was seen so far; of a model that made no step, what the algorithm expects.
    pub fn seen(&self, names: &[String]) -> Vec<Seen> {
        let prior = self.inner.prior();
        let one = |(i, counts): (usize, &Counts)| {
            let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let taken: Vec<[u64; 2]> = counts.ways.iter().map(|[all, kept]| [load(all), load(kept)]).collect();
            let observations: u64 = taken.iter().map(|way| way[0]).sum();
            let way = |j: usize| match (observations, taken[j]) {
                (0, _) => Way { share: prior.p[i][j], tokens: prior.c[i][j] },
                (_, [0, _]) => Way { share: 0.0, tokens: prior.c[i][j] },
                (all, [went, kept]) => Way { share: went as f64 / all as f64, tokens: kept as f64 / went as f64 },
            };
            let lengths = counts.lengths.each_ref().map(load);
            let lengths = (below(&lengths, HALF), below(&lengths, MOST));
            let context = load(&counts.context).checked_div(observations).unwrap_or(0) as u32;
            let ways = names.iter().enumerate().map(|(j, name)| (name.clone(), way(j))).collect();
            Seen { observations, ways, lengths, context }
        };
        self.counts.iter().enumerate().map(one).collect()
    }
}

impl Algorithm for Counted {
    fn needs(&self, model: ModelIdx) -> Needs {
        self.inner.needs(model)
    }

    fn entry(&self, seed: u64) -> ModelIdx {
        self.inner.entry(seed)
    }

    fn prior(&self) -> Prior {
        self.inner.prior()
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(CountedRoute { inner: self.inner.start(), counts: Arc::clone(&self.counts), last: None })
    }

    fn head(&self, model: ModelIdx) -> Option<HeadSpec> {
        self.inner.head(model)
    }

    fn greedy_warning(&self) -> Option<&'static str> {
        self.inner.greedy_warning()
    }

    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        self.inner.with(overrides)
    }
}

/// Follows one request at one model.
#[derive(Debug)]
struct CountedRoute {
    inner: Box<dyn Route>,
    counts: Arc<Vec<Counts>>,
    /// Tokens that had keys and values here after the last row.
    last: Option<u32>,
}

impl Route for CountedRoute {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        let decision = self.inner.route(step)?;
        if let Some(counts) = self.counts.get(step.model.index()) {
            let add = |counter: &AtomicU64, amount: u64| counter.fetch_add(amount, Ordering::Relaxed);
            if let Some([all, kept]) = counts.ways.get(decision.to.index()) {
                add(all, 1);
                add(kept, u64::from(decision.keep));
            }
            add(&counts.context, u64::from(step.position()));
            if let Some(last) = self.last.replace(step.position()) {
                add(&counts.lengths[class(step.position().saturating_sub(last))], 1);
            }
        }
        Ok(decision)
    }

    fn send(&mut self, handoff: &Handoff<'_>) -> Result<Suffix, String> {
        self.inner.send(handoff)
    }

    fn receive(&mut self, tokens: &mut Vec<TokenId>, message: &PeerReq) -> Result<(), PeerError> {
        self.inner.receive(tokens, message)
    }
}

fn class(tokens: u32) -> usize {
    (tokens.max(1).ilog2() as usize).min(CLASSES - 1)
}

/// The least power of two below whose double this part of the rows stays.
fn below(lengths: &[u64; CLASSES], part: f64) -> u32 {
    let all: u64 = lengths.iter().sum();
    let mut rows = 0;
    let reached = lengths.iter().position(|class| {
        rows += class;
        rows as f64 >= part * all as f64
    });
    1 << reached.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::executor::Signals;
    use tokenrouter_core::ids::RequestId;
    use tokenrouter_core::routing;

    /// A walk of one request between two models: shares, kept candidates and lengths are those of the walk itself.
    #[test]
    fn counts_are_those_of_the_walk() {
        let params = serde_json::json!({ "p": 0.3 });
        let inner = routing::build("bernoulli", &params, 2).expect("bernoulli");
        let counted = Counted::new(inner, 2);
        let mut routes = [counted.start(), counted.start()];
        let signals = Signals::default();
        let (mut tokens, mut at) = (vec![1; 10], ModelIdx(0));
        let (mut taken, mut kept) = ([[0u64; 2]; 2], [[0u64; 2]; 2]);
        let (mut held, mut lengths, mut context) = ([None; 2], [[0u64; CLASSES]; 2], [0u64; 2]);
        for _ in 0..3000 {
            let i = at.index();
            if let Some(held) = held[i].replace(tokens.len()) {
                lengths[i][class((tokens.len() - held) as u32)] += 1;
            }
            let view = StepView {
                request: RequestId(1),
                model: at,
                seed: 4,
                prompt_len: 10,
                tokens: &tokens,
                candidate: 7,
                signals: &signals,
            };
            context[i] += u64::from(view.position());
            let Decision { to, keep } = routes[i].route(&view).expect("a decision");
            taken[i][to.index()] += 1;
            kept[i][to.index()] += u64::from(keep);
            if keep {
                tokens.push(7);
            }
            at = to;
        }
        let names = ["small".to_owned(), "large".to_owned()];
        for (i, seen) in counted.seen(&names).iter().enumerate() {
            assert_eq!(seen.observations, taken[i].iter().sum::<u64>());
            assert_eq!(u64::from(seen.context), context[i] / seen.observations);
            assert_eq!(seen.lengths, (below(&lengths[i], HALF), below(&lengths[i], MOST)));
            for (j, name) in names.iter().enumerate().filter(|&(j, _)| taken[i][j] > 0) {
                let Way { share, tokens } = seen.ways[name];
                assert_eq!(share, taken[i][j] as f64 / seen.observations as f64);
                assert_eq!(tokens, kept[i][j] as f64 / taken[i][j] as f64);
            }
        }
        let [small, large] = &counted.seen(&names)[..] else { panic!("two models") };
        assert!((small.ways["large"].share - 0.3).abs() < 0.03 && large.ways["small"].share == 1.0);
        // A return of k tokens has probability 0.3 x 0.7^(k - 1): half have 3 or more, one in a hundred 14 or more.
        assert_eq!((small.lengths, large.lengths), ((1, 1), (2, 8)));
    }

    #[test]
    fn without_a_step_the_prior_stands() {
        let inner = routing::build("bernoulli", &serde_json::json!({ "p": 0.3 }), 2).expect("bernoulli");
        let seen = Counted::new(inner, 2).seen(&["a".into(), "b".into()]);
        let expected = (0, Way { share: 0.3, tokens: 0.0 }, (1, 1));
        assert_eq!((seen[0].observations, seen[0].ways["b"], seen[0].lengths), expected);
    }
}
