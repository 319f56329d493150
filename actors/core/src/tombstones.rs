//! Requests that ended a short while ago, so that messages still on their way to them are recognised and dropped.
//! Owner: Decode and InterModel keep one each. Invariant: never more than [`TOMBSTONES_MAX`] ids; the oldest go first.

use crate::ids::RequestId;
use std::collections::{HashSet, VecDeque};

/// Ids remembered. A message outlives its request by microseconds; this many requests take far longer to end.
pub const TOMBSTONES_MAX: usize = 4096;

/// The set of recently ended requests.
#[derive(Debug, Default)]
pub struct Tombstones {
    set: HashSet<RequestId>,
    order: VecDeque<RequestId>,
}

impl Tombstones {
    /// This request has ended.
    pub fn bury(&mut self, request: RequestId) {
        if self.set.insert(request) {
            self.order.push_back(request);
        }
        if self.order.len() > TOMBSTONES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
    }

    /// Whether it ended a short while ago.
    pub fn holds(&self, request: RequestId) -> bool {
        self.set.contains(&request)
    }
}
