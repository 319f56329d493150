//! An OpenAI-compatible server in which several models write one answer, token by token.

pub mod hub;
pub mod progress;
pub mod http;

pub mod text;
