//! Everything the workspace promises, checked: the World harness here, scenarios and suites in `tests/`.

pub mod world;
