//! An OpenAI-compatible server in which several models write one answer, token by token.

pub mod cli;
pub mod http;
pub mod hub;
pub mod launch;
pub mod progress;
pub mod telemetry;
pub mod text;
