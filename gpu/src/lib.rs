//! Models on a device: weights, operations, the runner that implements the executor port.

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod heads;
pub mod load;
pub mod models;
pub mod ops;
pub mod runner;
pub mod sampling;
pub mod signals;
pub mod weights;
pub mod work;
