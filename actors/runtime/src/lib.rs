//! How the actors talk: one subserver per model, each supervising Client, Batcher, Decode, InterModel and a GPU
//! executor. Actors carry; what they decide is in `tokenrouter-core`.
#![forbid(unsafe_code)]

pub mod admission;
pub mod batcher;
pub mod board;
pub mod bounds;
pub mod client;
pub mod clock;
pub mod conductor;
pub mod decode;
pub mod gpu_executor;
pub mod histogram;
pub mod instruments;
pub mod inter_model;
pub mod journal;
pub mod link;
pub mod mailbox;
pub mod messages;
pub mod place;
pub mod planner;
pub mod runtime;
pub mod stream;
pub mod subserver;
