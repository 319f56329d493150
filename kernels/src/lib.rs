//! Device code: each operation as a reference and as fast versions, tested against each other.
//!
//! Owner: the executor of a model calls these operations with a [`Pool`]; nothing here knows models or requests.
//! Invariant: the value of an output row depends only on its own inputs. It is bit-identical for any number of rows
//! in the call, any position among them, any number of threads and any instruction set, because every reduction has
//! one fixed order that the reference spells out. This is the only crate of the project with `unsafe` code.

#![allow(clippy::needless_range_loop, reason = "kernels step through several register arrays with one index")]

pub mod activation;
pub mod attention;
pub mod cuda;
mod error;
pub mod head;
pub mod matmul;
mod memory;
pub mod norm;
mod pool;
pub mod quant;
pub mod roofline;
pub mod rope;
mod simd;
pub mod sys;

pub use error::KernelError;
pub use memory::Bytes;
pub use pool::{Pool, PoolConfig};

#[cfg(test)]
mod testing;
