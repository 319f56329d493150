//! What a launch file may say: pure data, read from TOML and validated as far as the text alone allows.
//! Owner: whoever launches (`tokenrouter::launch`). Invariant: a [`LaunchFile`] that exists has no unknown key, no wrong
//! type, no duplicate or dangling name; nothing in a file is ever ignored. What needs the models themselves (token
//! tables, memory, an algorithm's parameters) is checked by the launcher, which reports through
//! [`LaunchFile::error_at`] so that those errors also name their line.

mod cuda;
mod error;
mod faults;
mod fields;
mod launch;
mod nearest;
mod quantity;
mod read;
pub mod schema;
mod source;
mod validate;

#[cfg(test)]
mod tests;

pub use cuda::{Cuda, CudaPriority, Device, ModelCuda};
pub use error::{ConfigError, Place};
pub use faults::{Faults, MessageFault, MessageFaultKind, StepFault, StepFaultKind};
pub use launch::{
    Batching, DEFAULT_KV_BYTES, Execution, KvBudget, KvFormat, LaunchFile, LogFormat, Model, Policy, Router, Server,
    Tls,
};
pub use nearest::nearest;
pub use quantity::Bytes;
pub use source::{HubSource, Source};
