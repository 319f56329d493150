//! World harness, scenarios, conformance and tidy tests of the whole workspace.
