//! What a script sees of a step. Owner: one call of `route`. Invariant: a signal that was not asked for in `needs()` is
//! an error when it is read, never a silent default, and so is one that is not a number.

use super::program::ITEMS_MAX;
use crate::executor::Signals;
use crate::ids::TokenId;
use crate::rng::{self, Stream};
use crate::routing::StepView;
use rhai::{Array, Dynamic, Engine, EvalAltResult, INT, Map};
use std::sync::Arc;

type Outcome<T> = Result<T, Box<EvalAltResult>>;

/// The argument of `route`.
#[derive(Clone)]
pub(super) struct Step {
    model: INT,
    seed: u64,
    prompt_len: u32,
    candidate: TokenId,
    tokens: Arc<[TokenId]>,
    signals: Arc<Signals>,
}

impl Step {
    /// A copy of what a routing decision may look at: a script may keep it.
    pub(super) fn of(step: &StepView<'_>) -> Dynamic {
        Dynamic::from(Step {
            model: step.model.0.into(),
            seed: step.seed,
            prompt_len: step.prompt_len,
            candidate: step.candidate,
            tokens: step.tokens.into(),
            signals: Arc::new(step.signals.clone()),
        })
    }

    fn nats(&self) -> Outcome<f64> {
        let entropy = self.signals.entropy.ok_or_else(|| unasked("nats", "entropy: true"))?;
        number("nats", entropy.nats)
    }

    fn entropy(&self) -> Outcome<f64> {
        let entropy = self.signals.entropy.ok_or_else(|| unasked("entropy", "entropy: true"))?;
        number("entropy", entropy.normalised())
    }

    fn score(&self) -> Outcome<f64> {
        number("score", self.signals.score.ok_or_else(|| unasked("score", "score: true, head: #{...}"))?)
    }

    fn top(&self) -> Outcome<Array> {
        if self.signals.top.is_empty() {
            return Err(unasked("top", "top_k: 10"));
        }
        let entry = |&(token, logit): &(TokenId, f32)| {
            let (token, logit) = (Dynamic::from_int(token.into()), number("top", logit)?);
            Ok(map([("token", token), ("logit", Dynamic::from_float(logit))]).into())
        };
        self.signals.top.iter().map(entry).collect()
    }

    fn hidden(&self) -> Outcome<Hidden> {
        if self.signals.hidden.is_empty() {
            return Err(unasked("hidden", "hidden: true"));
        }
        Ok(Hidden(Arc::clone(&self.signals)))
    }

    /// The committed token at a position; a negative one counts from the end.
    fn token(&self, at: INT) -> Outcome<INT> {
        let len = self.tokens.len();
        let index = if at < 0 { (len as INT).checked_add(at) } else { Some(at) };
        let found = index.and_then(|index| usize::try_from(index).ok()).and_then(|index| self.tokens.get(index));
        found.map(|&token| token.into()).ok_or_else(|| format!("token({at}): there are {len} committed tokens").into())
    }

    /// The last committed tokens, as many as there are up to `count` and the size of an array.
    fn tail(&self, count: INT) -> Array {
        let count = usize::try_from(count).unwrap_or(0).min(self.tokens.len()).min(ITEMS_MAX);
        self.tokens[self.tokens.len() - count..].iter().map(|&token| Dynamic::from_int(token.into())).collect()
    }
}

/// The hidden row, which is longer than an array may be.
#[derive(Clone)]
struct Hidden(Arc<Signals>);

impl Hidden {
    fn at(&self, index: INT) -> Outcome<f64> {
        let row = &self.0.hidden;
        let found = usize::try_from(index).ok().and_then(|index| row.get(index));
        number("hidden", *found.ok_or_else(|| format!("hidden[{index}]: the row has {} values", row.len()))?)
    }
}

fn unasked(field: &str, need: &str) -> Box<EvalAltResult> {
    format!("step.{field} was not asked for; let needs() give #{{ {need} }}").into()
}

/// Signals have 32 bits and numbers of scripts 64: a signal becomes the shortest decimal that means it, so that 0.1 in a
/// script or launch file equals a signal of 0.1, as it does where both have 32 bits.
fn number(field: &str, value: f32) -> Outcome<f64> {
    let decimal = value.to_string().parse().ok().filter(|decimal: &f64| !decimal.is_nan());
    decimal.ok_or_else(|| format!("step.{field} is not a number").into())
}

/// A map of a few named values.
pub(super) fn map<const N: usize>(fields: [(&str, Dynamic); N]) -> Map {
    fields.into_iter().map(|(name, value)| (name.into(), value)).collect()
}

/// Makes steps and random numbers known to an engine.
pub(super) fn register(engine: &mut Engine) {
    engine
        .register_type_with_name::<Hidden>("Hidden")
        .register_fn("len", |row: &mut Hidden| row.0.hidden.len() as INT)
        .register_indexer_get(|row: &mut Hidden, index: INT| row.at(index))
        .register_type_with_name::<Step>("Step")
        .register_get("model", |step: &mut Step| step.model)
        .register_get("seed", |step: &mut Step| step.seed as INT)
        .register_get("position", |step: &mut Step| step.tokens.len() as INT)
        .register_get("prompt_len", |step: &mut Step| INT::from(step.prompt_len))
        .register_get("candidate", |step: &mut Step| INT::from(step.candidate))
        .register_get("nats", |step: &mut Step| step.nats())
        .register_get("entropy", |step: &mut Step| step.entropy())
        .register_get("score", |step: &mut Step| step.score())
        .register_get("top", |step: &mut Step| step.top())
        .register_get("hidden", |step: &mut Step| step.hidden())
        .register_fn("token", |step: &mut Step, at: INT| step.token(at))
        .register_fn("tail", |step: &mut Step, count: INT| step.tail(count))
        .register_fn("unit", |seed: INT, position: INT| {
            rng::unit(seed as u64 ^ (position as u64 >> 32), position as u32, Stream::Owner)
        });
}
