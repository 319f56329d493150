//! The executor actor: the only one that touches a device. Owner: device memory of one model. Invariant: a panic or an
//! error of the device ends in a `Stepped` answer, never in a dead thread.

use crate::mailbox::{Mailbox, Meter, Outlet, takes_metered};
use crate::messages::{RunStep, Stepped};
use actix::prelude::*;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokenrouter_core::executor::{Executor, ExecutorError, Step, StepOutput};
use tokio::time::Instant;
use tracing::debug;

/// Builds an executor with empty memory. Called in the thread that will use it, again after every loss.
pub type ExecutorFactory = Arc<dyn Fn() -> Result<Box<dyn Executor>, ExecutorError> + Send + Sync>;

/// How long a step is to take.
pub type Latency = Arc<dyn Fn(&Step) -> Duration + Send + Sync>;

/// Where an executor lives.
#[derive(Clone)]
pub enum Seat {
    /// In a thread of its own: a real device.
    Thread(ExecutorFactory),
    /// Beside the control actors, answering after a time given by a model: simulations on a virtual clock.
    Timed(ExecutorFactory, Latency),
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Seat::Thread(_) => "Thread",
            Seat::Timed(..) => "Timed",
        })
    }
}

impl Seat {
    /// Starts the executor actor. `Timed` must be called within the arbiter of the control actors.
    pub fn start(&self, count: &Executors, meter: Meter) -> Outlet<RunStep> {
        let count = count.clone();
        match self.clone() {
            Seat::Thread(factory) => {
                let start = move || GpuExecutor { device: Device::build(&factory, &count) };
                Mailbox::new(SyncArbiter::start(1, start), meter).outlet()
            }
            Seat::Timed(factory, latency) => {
                let executor = TimedExecutor { device: Device::build(&factory, &count), latency };
                Mailbox::new(executor.start(), meter).outlet()
            }
        }
    }
}

/// How many executors of a model hold memory. One that was given up in the middle of a step still does until the step
/// ends.
#[derive(Clone, Debug, Default)]
pub struct Executors(Arc<AtomicU32>);

impl Executors {
    /// So many now.
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    fn one_more(&self) -> Counted {
        self.0.fetch_add(1, Ordering::Relaxed);
        Counted(self.clone())
    }
}

/// An executor that holds memory.
struct Counted(Executors);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An executor, or why there is none.
struct Device(Result<(Box<dyn Executor>, Counted), ExecutorError>);

impl Device {
    fn build(factory: &ExecutorFactory, count: &Executors) -> Self {
        let built = catch_unwind(AssertUnwindSafe(|| factory())).unwrap_or_else(|panic| Err(lost(&panic)));
        Device(built.map(|executor| (executor, count.one_more())))
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        let (executor, _) = self.0.as_mut().map_err(|error| error.clone())?;
        let result = catch_unwind(AssertUnwindSafe(|| executor.step(step))).unwrap_or_else(|panic| Err(lost(&panic)));
        if let Err(error @ ExecutorError::Lost(_)) = &result {
            self.0 = Err(error.clone());
        }
        result
    }
}

fn lost(panic: &Box<dyn std::any::Any + Send>) -> ExecutorError {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    ExecutorError::Lost(format!("panicked: {}", text.unwrap_or("no message")))
}

fn answer(reply: &Outlet<Stepped>, stepped: Stepped) {
    if reply.try_send(stepped).is_err() {
        // It was stopped, or belongs to a previous life; nobody misses the answer.
        debug!("a step's answer found no Decode");
    }
}

/// An executor in its own thread.
struct GpuExecutor {
    device: Device,
}

impl Actor for GpuExecutor {
    type Context = SyncContext<Self>;
}

takes_metered!(GpuExecutor: RunStep);

impl Handler<RunStep> for GpuExecutor {
    type Result = ();

    fn handle(&mut self, message: RunStep, _: &mut Self::Context) {
        let begin = std::time::Instant::now();
        let result = self.device.step(&message.step);
        answer(&message.reply, Stepped { epoch: message.epoch, result, took: begin.elapsed() });
    }
}

/// An executor on the control actors' clock.
struct TimedExecutor {
    device: Device,
    latency: Latency,
}

impl Actor for TimedExecutor {
    type Context = Context<Self>;
}

takes_metered!(TimedExecutor: RunStep);

impl Handler<RunStep> for TimedExecutor {
    type Result = ();

    fn handle(&mut self, message: RunStep, ctx: &mut Self::Context) {
        let begin = Instant::now();
        let wait = (self.latency)(&message.step);
        let result = self.device.step(&message.step);
        ctx.run_later(wait, move |_, _| {
            answer(&message.reply, Stepped { epoch: message.epoch, result, took: begin.elapsed() });
        });
    }
}
