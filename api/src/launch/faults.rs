//! Faults on order in the real server, so that a test can see what its clients see. Owner: the launcher. Invariant: a launch
//! file with `[faults]` is refused unless the environment says that this is meant.

use super::environment::Environment;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_config::{ConfigError, Faults, LaunchFile, MessageFaultKind, StepFaultKind};
use tokenrouter_core::executor::Executor;
use tokenrouter_core::faults::{Fault, FaultPlan, Faulty, LinkFault, LinkFaults, Stall};

/// Refuses faults that were not meant.
///
/// # Errors
/// An error at the table.
pub(super) fn check(file: &LaunchFile, environment: &Environment) -> Result<(), ConfigError> {
    if file.faults.is_none() || environment.faults {
        return Ok(());
    }
    let message =
        "[faults] makes the server fail on purpose; remove the table, or set TOKENROUTER_FAULTS=1 to test with it";
    Err(file.error_at("faults", message))
}

/// The faults of a model's steps.
pub(super) fn plan(file: &LaunchFile, model: &str) -> FaultPlan {
    let orders = file.faults.iter().flat_map(|faults: &Faults| &faults.steps).filter(|fault| fault.model == model);
    let (mut once, mut again) = (Vec::new(), Vec::new());
    for order in orders {
        let fault = match order.kind {
            StepFaultKind::Error => Fault::Error,
            StepFaultKind::Lost => Fault::Lost,
            StepFaultKind::Panic => Fault::Panic,
            StepFaultKind::BadRows => Fault::BadRows,
            StepFaultKind::Slow => Fault::Slow(Duration::from_millis(order.ms)),
            StepFaultKind::Stuck => Fault::Stuck,
        };
        once.extend(order.at.map(|at| (at, fault)));
        again.extend(order.every.map(|every| (every, fault)));
    }
    again.into_iter().fold(FaultPlan::new(once), |plan, (every, fault)| plan.and_every(every, fault))
}

/// The faults of messages between models.
pub(super) fn messages(file: &LaunchFile) -> Vec<LinkFaults> {
    let orders = file.faults.iter().flat_map(|faults| &faults.messages);
    let order = |order: &tokenrouter_config::MessageFault| LinkFaults {
        fault: match order.kind {
            MessageFaultKind::Lost => LinkFault::Lost,
            MessageFaultKind::Duplicate => LinkFault::Duplicate,
            MessageFaultKind::Reordered => LinkFault::Reordered,
        },
        every: order.every,
        seed: order.seed,
    };
    orders.map(order).collect()
}

/// The executor with these faults, if there are any.
pub(super) fn on(executor: impl Executor + 'static, plan: &FaultPlan) -> Box<dyn Executor> {
    if plan.is_empty() {
        return Box::new(executor);
    }
    Box::new(Faulty::new(executor, plan.clone(), Arc::new(wait)))
}

/// A step that is held never goes on: its thread ends with the process.
#[allow(clippy::disallowed_methods, reason = "a slow device blocks its own thread and nobody else's")]
fn wait(stall: Stall) {
    match stall {
        Stall::For(time) => std::thread::sleep(time),
        Stall::Held => loop {
            std::thread::park();
        },
    }
}
