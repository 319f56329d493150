//! Faults on order, for tests of everything around a model: what goes wrong, and at which step or frame. Owner: whoever
//! gives the order. Invariant: the same order strikes at the same places in every run; nothing goes wrong without one.

use crate::executor::{Executor, ExecutorError, ExecutorLimits, RowOutput, Step, StepOutput};
use crate::rng::mix;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What every fault says of itself.
const WHY: &str = "fault on order";

/// What goes wrong in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The step is refused, memory stays.
    Error,
    /// The device is lost.
    Lost,
    /// The executor panics.
    Panic,
    /// Rows of the step fail one by one.
    BadRows,
    /// The step takes so much longer, and is right.
    Slow(Duration),
    /// The step does not end.
    Stuck,
}

/// What a fault does to the time of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// It takes so much longer.
    For(Duration),
    /// It takes for ever, or until whoever holds it lets it go.
    Held,
}

impl Fault {
    /// What it does to the time of a step; none when the step fails at once.
    pub fn stall(self) -> Option<Stall> {
        match self {
            Fault::Slow(time) => Some(Stall::For(time)),
            Fault::Stuck => Some(Stall::Held),
            Fault::Error | Fault::Lost | Fault::Panic | Fault::BadRows => None,
        }
    }

    /// The answer to a step that fails; none when it only takes longer.
    ///
    /// # Panics
    /// That is what [`Fault::Panic`] is for.
    pub fn answer(self, step: &Step) -> Option<Result<StepOutput, ExecutorError>> {
        match self {
            Fault::Error => Some(Err(ExecutorError::Step(WHY.into()))),
            Fault::Lost => Some(Err(ExecutorError::Lost(WHY.into()))),
            Fault::Panic => panic!("{WHY}"),
            Fault::BadRows => {
                let rows = step.rows.iter().map(|_| RowOutput::Failed(WHY.into())).collect();
                Some(Ok(StepOutput { rows }))
            }
            Fault::Slow(_) | Fault::Stuck => None,
        }
    }
}

/// Faults by step number, counted over all lives of the executor; its clones count together.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    at: Vec<(u64, Fault)>,
    every: Vec<(u64, Fault)>,
    steps: Arc<AtomicU64>,
}

impl FaultPlan {
    /// Faults at these steps; the first step is 0.
    pub fn new(at: Vec<(u64, Fault)>) -> Self {
        FaultPlan { at, ..FaultPlan::default() }
    }

    /// And this fault at every step whose number, from 1, can be divided by `every`, which is positive.
    pub fn and_every(mut self, every: u64, fault: Fault) -> Self {
        self.every.push((every, fault));
        self
    }

    /// Whether nothing was ordered.
    pub fn is_empty(&self) -> bool {
        self.at.is_empty() && self.every.is_empty()
    }

    /// A step begins: the fault of it.
    pub fn next(&self) -> Option<Fault> {
        self.of(self.steps.fetch_add(1, Ordering::Relaxed))
    }

    /// The fault of the step that begins next.
    pub fn upcoming(&self) -> Option<Fault> {
        self.of(self.steps.load(Ordering::Relaxed))
    }

    fn of(&self, step: u64) -> Option<Fault> {
        let once = self.at.iter().find(|(at, _)| *at == step);
        let again = self.every.iter().find(|(every, _)| (step + 1).checked_rem(*every) == Some(0));
        once.or(again).map(|(_, fault)| *fault)
    }
}

/// Makes the calling thread wait.
pub type Wait = Arc<dyn Fn(Stall) + Send + Sync>;

/// An executor with faults on order.
pub struct Faulty<E> {
    inner: E,
    plan: FaultPlan,
    wait: Wait,
}

impl<E> Faulty<E> {
    /// `inner` with the faults of `plan`; `wait` holds its steps up, there being no clock here.
    pub fn new(inner: E, plan: FaultPlan, wait: Wait) -> Self {
        Faulty { inner, plan, wait }
    }
}

impl<E: fmt::Debug> fmt::Debug for Faulty<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty").field("inner", &self.inner).field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl<E: Executor> Executor for Faulty<E> {
    fn limits(&self) -> ExecutorLimits {
        self.inner.limits()
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        let Some(fault) = self.plan.next() else { return self.inner.step(step) };
        if let Some(stall) = fault.stall() {
            (self.wait)(stall);
        }
        fault.answer(step).unwrap_or_else(|| self.inner.step(step))
    }
}

/// What goes wrong with a frame between two models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFault {
    /// It never arrives.
    Lost,
    /// It arrives twice.
    Duplicate,
    /// It arrives after the one that follows it.
    Reordered,
}

/// Faults of frames: each frame is struck with a chance of one in `every`, which is positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkFaults {
    /// What goes wrong.
    pub fault: LinkFault,
    /// One in so many frames.
    pub every: u32,
    /// Which ones.
    pub seed: u64,
}

impl LinkFaults {
    /// What happens to the frame of this number of a link.
    pub fn of(&self, frame: u64) -> Option<LinkFault> {
        (mix(self.seed ^ mix(frame)).checked_rem(u64::from(self.every)) == Some(0)).then_some(self.fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Debug)]
    struct Counts(u64);

    impl Executor for Counts {
        fn limits(&self) -> ExecutorLimits {
            ExecutorLimits { pages: 1, rows_max: 1, step_tokens_max: 64, context_len: 16, vocab_width: 8 }
        }

        fn step(&mut self, _: &Step) -> Result<StepOutput, ExecutorError> {
            self.0 += 1;
            Ok(StepOutput::default())
        }
    }

    #[test]
    fn faults_strike_where_they_were_ordered_over_all_lives() {
        let waits = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&waits);
        let wait: Wait = Arc::new(move |stall| told.lock().unwrap().push(stall));
        let slow = Fault::Slow(Duration::from_millis(3));
        let plan = FaultPlan::new(vec![(1, Fault::Error), (2, Fault::Stuck), (4, Fault::Lost)]).and_every(4, slow);
        let mut first = Faulty::new(Counts(0), plan.clone(), Arc::clone(&wait));
        assert!(first.step(&Step::default()).is_ok());
        assert!(matches!(first.step(&Step::default()), Err(ExecutorError::Step(_))));
        assert!(first.step(&Step::default()).is_ok() && first.inner.0 == 2, "a step that was held is right");
        let mut second = Faulty::new(Counts(0), plan.clone(), wait);
        assert_eq!(plan.upcoming(), Some(slow));
        assert!(second.step(&Step::default()).is_ok() && second.inner.0 == 1);
        assert!(matches!(second.step(&Step::default()), Err(ExecutorError::Lost(_))));
        assert_eq!(*waits.lock().unwrap(), [Stall::Held, Stall::For(Duration::from_millis(3))]);
    }

    #[test]
    fn frames_are_struck_as_often_as_ordered_and_the_same_each_time() {
        let faults = |seed| LinkFaults { fault: LinkFault::Lost, every: 10, seed };
        let struck = |seed| (0..10_000).filter(|&frame| faults(seed).of(frame).is_some()).collect::<Vec<_>>();
        assert_eq!(struck(1), struck(1));
        assert_ne!(struck(1), struck(2));
        assert!((800..1200).contains(&struck(3).len()), "{}", struck(3).len());
    }
}
