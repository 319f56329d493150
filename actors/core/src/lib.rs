//! What the actors think: state machine, routing, batching, KV book-keeping. No actix, no clock, no device, no files.
#![forbid(unsafe_code)]

pub mod batching;
pub mod constraint;
pub mod execution;
pub mod executor;
pub mod faults;
pub mod ids;
pub mod job;
pub mod kv;
pub mod live;
pub mod peer;
pub mod plan;
pub mod prefix;
pub mod request;
pub mod rng;
pub mod routing;
pub mod sampling;
pub mod sim;
pub mod text;
pub mod theory;
pub mod tombstones;
