//! The small values everything else is named by. Owner: core. Invariant: plain data, cheap to copy.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Index into a vocabulary shared by all models of a router.
pub type TokenId = u32;

/// A request, unique within a server. Ids grow with arrival, so a smaller id is an older request:
/// this order is the seniority that decides who keeps memory when a pool runs short.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}

/// A model (and its subserver) by its place in the launch file; 0 is the entry model unless an algorithm says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ModelIdx(pub u8);

impl ModelIdx {
    /// As an index into per-model tables.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for ModelIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m{}", self.0)
    }
}

/// A moment, as nanoseconds since an origin the caller chose. Core has no clock: whoever calls brings the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Time(pub u64);

impl Time {
    /// The moment `wait` later; saturates at the end of time.
    pub fn after(self, wait: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// How long ago `earlier` was; zero if it lies ahead.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
