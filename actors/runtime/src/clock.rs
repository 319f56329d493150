//! The one clock of a server. Owner: the runtime. Invariant: it follows tokio's time, so a paused tokio clock makes
//! every actor live on virtual time.

use tokenrouter_core::ids::Time;
use tokio::time::Instant;

/// Reads the time since the server started.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Clock { origin: Instant::now() }
    }

    /// Now.
    pub fn now(&self) -> Time {
        Time(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}
