//! Models on a device: weights, operations, the runner that implements the executor port.
