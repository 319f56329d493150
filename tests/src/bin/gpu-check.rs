//! `gpu-check`: everything that can only be known on an NVIDIA GPU, in one run. Owner: `tokenrouter_tests::gpu_check`.

use std::process::ExitCode;

fn main() -> ExitCode {
    tokenrouter_tests::gpu_check::program::main()
}
