//! What the throughput model says of the server as it is now. Owner: whoever looks. Invariant: it is worked out in a thread of
//! its own, one at a time and not often, so looking never waits and costs the serving next to nothing.

use super::state::Prediction;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokenrouter_actors::runtime::RuntimeSnapshot;
use tokenrouter_core::theory::adapt::{PLANNED_MAX, predict};
use tokenrouter_core::theory::observe::Behaviour;

/// Steps of a model before anything is concluded from them.
const STEPS_MIN: f64 = 16.0;
/// Looks that live requests are averaged over: one moment says little of a load of short requests.
const LOOKS: usize = 10;
/// Between two predictions, when the question is another one and when it is the same.
const OTHER_AFTER: Duration = Duration::from_secs(2);
const SAME_AFTER: Duration = Duration::from_secs(10);

/// The last prediction and the one that is being made.
#[derive(Clone, Debug, Default)]
pub struct Forecast(Arc<Mutex<Last>>);

#[derive(Debug, Default)]
struct Last {
    /// Live requests at the latest looks.
    lately: VecDeque<u32>,
    /// For so many live requests and these thresholds.
    question: Option<(u32, Vec<u32>)>,
    asked: Option<Instant>,
    is_busy: bool,
    answer: Option<Prediction>,
}

impl Forecast {
    /// The prediction for now, or the last one before it; none while nobody is there or too little was learnt, and none
    /// where models take turns, which the throughput model does not describe.
    pub fn look(&self, snapshot: &RuntimeSnapshot) -> Option<Prediction> {
        if snapshot.settings.execution.takes_turns() {
            return None;
        }
        let mut last = self.lock();
        let live = last.live(snapshot)?;
        let (thresholds, behaviours) = known(snapshot)?;
        let age = last.asked.map(|asked| asked.elapsed());
        let is_other = last.question.as_ref().is_none_or(|(n, b)| (*n, b) != (live, &thresholds));
        let is_due = age.is_none_or(|age| age >= if is_other { OTHER_AFTER } else { SAME_AFTER });
        if is_due && !last.is_busy {
            last.is_busy = true;
            last.question = Some((live, thresholds.clone()));
            last.asked = Some(Instant::now());
            let forecast = self.clone();
            let work = move || forecast.answer(live, predict(&behaviours, live, &thresholds));
            if let Err(error) = std::thread::Builder::new().name("forecast".into()).spawn(work) {
                tracing::warn!(%error, "no thread for a prediction");
                last.is_busy = false;
            }
        }
        last.answer
    }

    fn answer(&self, live: u32, predicted: Result<f64, String>) {
        let mut last = self.lock();
        last.is_busy = false;
        last.answer = match predicted {
            Ok(tokens_per_second) => Some(Prediction { live, tokens_per_second }),
            Err(problem) => {
                tracing::debug!(problem, "no prediction");
                None
            }
        };
    }

    fn lock(&self) -> MutexGuard<'_, Last> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Last {
    /// Live routed requests as they were lately, on average; none when nobody was there.
    fn live(&mut self, snapshot: &RuntimeSnapshot) -> Option<u32> {
        if self.lately.len() == LOOKS {
            self.lately.pop_front();
        }
        self.lately.push_back(snapshot.models.iter().map(|model| model.batcher.live).max().unwrap_or(0));
        let there: Vec<u32> = self.lately.iter().copied().filter(|live| *live > 0).collect();
        let mean = there.iter().sum::<u32>() as f64 / there.len() as f64;
        (!there.is_empty()).then_some(mean.round() as u32).filter(|live| *live <= PLANNED_MAX)
    }
}

/// Thresholds and what was learnt of each model.
fn known(snapshot: &RuntimeSnapshot) -> Option<(Vec<u32>, Vec<Behaviour>)> {
    let models = &snapshot.models;
    let learnt = |behaviour: &&Behaviour| behaviour.steps >= STEPS_MIN && !behaviour.seconds.is_empty();
    let behaviours: Option<Vec<Behaviour>> =
        models.iter().map(|model| Some(&*model.decode.behaviour).filter(learnt).cloned()).collect();
    Some((models.iter().map(|model| model.batcher.threshold).collect(), behaviours?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_actors::runtime::ModelSnapshot;
    use tokenrouter_core::execution::Execution;

    fn snapshot(steps: f64) -> RuntimeSnapshot {
        let mut model = ModelSnapshot::default();
        (model.batcher.live, model.batcher.threshold) = (1, 1);
        let behaviour = Behaviour { steps, seconds: vec![0.01; 4], moves: vec![1.0], tokens: vec![1.0] };
        model.decode.behaviour = Arc::new(behaviour);
        RuntimeSnapshot { models: vec![model], ..RuntimeSnapshot::default() }
    }

    #[test]
    fn it_is_there_soon_after_the_first_look() {
        let forecast = Forecast::default();
        assert_eq!(forecast.look(&snapshot(3.0)), None, "too little was learnt");
        assert!(!forecast.lock().is_busy);
        let begin = Instant::now();
        let found = loop {
            if let Some(found) = forecast.look(&snapshot(100.0)) {
                break found;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "{forecast:?}");
            std::thread::yield_now();
        };
        assert_eq!(found.live, 1);
        assert!((found.tokens_per_second - 100.0).abs() < 3.0, "one model of 10 ms: {found:?}");
        let mut turns = snapshot(100.0);
        turns.settings.execution = Execution::ModelSync;
        assert_eq!(forecast.look(&turns), None, "models take turns");
        let mut empty = snapshot(100.0);
        empty.models[0].batcher.live = 0;
        let later: Vec<_> = (0..=LOOKS).map(|_| forecast.look(&empty)).collect();
        assert_eq!((later[0], later[LOOKS]), (Some(found), None), "it stays for a moment when nobody is there");
    }
}
