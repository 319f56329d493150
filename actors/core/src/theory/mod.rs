//! Delayed batching in theory: from L(b), P and C to thresholds B*. Pure.
//!
//! [`system`] is the closed queueing system, [`space`] its states, [`chain`] and `stationary` the exact throughput,
//! [`simulate`] the same by simulation, [`shared`] where models slow each other down, [`decision`] a bound for all policies,
//! [`search`] the best thresholds, [`observe`] the estimates from a running model, [`profile`] what was measured beforehand
//! ([`latency`] of its steps) and [`measured`] what follows, [`table`] the thresholds for every N, [`adapt`] when they are
//! planned again.

pub mod adapt;
pub mod chain;
pub mod decision;
pub mod latency;
pub mod measured;
pub mod observe;
pub mod profile;
pub mod search;
pub mod shared;
pub mod simulate;
pub mod space;
mod stationary;
pub mod system;
pub mod table;
