//! Delayed batching in theory: from L(b), P and C to thresholds B*. Pure.
//!
//! [`system`] is the closed queueing system, [`space`] its states, [`chain`] and [`stationary`] the exact throughput,
//! [`simulate`] the same by simulation, [`decision`] a bound for all policies, [`search`] the best thresholds,
//! [`observe`] the estimates from a running model, [`table`] the thresholds for every N.

pub mod chain;
pub mod decision;
pub mod observe;
pub mod search;
pub mod simulate;
pub mod space;
mod stationary;
pub mod system;
pub mod table;
