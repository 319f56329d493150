//! Everything the workspace promises, checked: the World harness here, scenarios and suites in `tests/`.

pub mod assets;
pub mod clients;
pub mod conformance;
#[cfg(target_os = "linux")]
pub mod cuda_sim;
pub mod docs;
pub mod gpu_check;
pub mod http_server;
pub mod processes;
pub mod raw_client;
pub mod scripted;
pub mod series;
pub mod soak;
pub mod world;
