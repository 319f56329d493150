//! Device code: each operation as a reference and as fast versions, tested against each other.
