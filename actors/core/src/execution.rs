//! Execution modes: which models may step at the same time, and what a hop keeps. Owner: the launch file. Invariant: the
//! text of a request is the same in every mode.

use serde::{Deserialize, Serialize};

/// How the models of a process run beside each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Execution {
    /// Every model steps when it may; a hop keeps the KV of its request.
    #[default]
    Async,
    /// One model steps at a time.
    ModelSync,
    /// All models that may step do so together, and wait for the slowest.
    StepSync,
    /// Every model steps when it may, but each hop is a fresh request: KV is released at the hop and found again, as far
    /// as it is, in the prefix cache.
    StdServing,
}
