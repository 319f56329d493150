//! What the actors think: state machine, routing, batching, KV book-keeping. No actix, no clock, no device, no files.
#![forbid(unsafe_code)]

pub mod executor;
pub mod ids;
pub mod job;
pub mod rng;
pub mod sampling;
pub mod text;
