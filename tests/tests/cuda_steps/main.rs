//! The executor on a CUDA device, step by step, on the software device: what a step costs, which bits are promised, what it
//! writes, what it draws, and what it does when the device fails. Owner: the CUDA executor. Invariant: fresh inputs in every
//! run; the seed is printed, and `GPU_CHECK_SEED` repeats it.
#![cfg(target_os = "linux")]

mod bits;
mod draws;
mod failures;
mod lost;
mod pages;
mod rig;
mod steady;
