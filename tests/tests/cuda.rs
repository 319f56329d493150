//! Every CUDA kernel against its reference, on the software device. Owner: `gpu_check`, which real hardware runs as well.
//! Invariant: fresh inputs in every run; the seed is printed, and `GPU_CHECK_SEED` repeats it.
#![cfg(target_os = "linux")]

use tokenrouter_kernels::cuda::{Devices, DevicesConfig, Gpu};
use tokenrouter_tests::cuda_sim::{CudaSim, Schedule};
use tokenrouter_tests::gpu_check::{self, Finding};

/// Runs a check with threads in the order of `schedule`.
fn run(schedule: Schedule, check: fn(&Gpu, u64) -> Result<Vec<Finding>, String>) {
    let sim = CudaSim::alone().unwrap();
    sim.set_schedule(schedule);
    let seed = match std::env::var("GPU_CHECK_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed,
        None => std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_nanos() as u64),
    };
    eprintln!("GPU_CHECK_SEED={seed}");
    let gpu = Devices::new(DevicesConfig::default()).open(0).unwrap();
    let findings = check(&gpu, seed).unwrap_or_else(|error| panic!("{error}; the device says {:?}", sim.last_report()));
    assert!(!findings.is_empty());
    for finding in findings {
        eprintln!("{}: {:.2e} of {:.0e}", finding.name, finding.max_error, finding.tolerance);
        assert!(finding.is_good(), "{finding:?}");
    }
}

#[test]
fn norms() {
    run(Schedule::Forward, gpu_check::norm::check);
}

#[test]
fn rotation_and_storage() {
    run(Schedule::Reverse, gpu_check::rope::check);
}

#[test]
fn attention() {
    run(Schedule::Random(7), gpu_check::attention::check);
}

#[test]
fn activations() {
    run(Schedule::Reverse, gpu_check::activation::check);
}

#[test]
fn matrix_products() {
    run(Schedule::Random(3), gpu_check::matmul::check);
}

#[test]
fn reductions_and_draws() {
    run(Schedule::Random(11), gpu_check::head::check);
}
