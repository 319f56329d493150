//! What clients send and get, as types. Owner: the HTTP layer. Invariant: a request type that exists is valid; every
//! field of a request is honoured or was refused with a 400 naming it.

pub mod chat;
pub mod completions;
pub mod fields;
pub mod generation;
pub mod logprobs;
pub mod messages;
pub mod response;
pub mod response_format;
pub mod schema;
pub mod tokens;
pub mod tools;
