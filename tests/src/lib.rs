//! Everything the workspace promises, checked: the World harness here, scenarios and suites in `tests/`.

pub mod assets;
pub mod clients;
pub mod conformance;
pub mod docs;
pub mod http_server;
pub mod processes;
pub mod raw_client;
pub mod scripted;
pub mod series;
pub mod soak;
pub mod world;
