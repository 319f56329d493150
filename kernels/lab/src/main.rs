//! The workbench of the CUDA kernels: every kernel of `tokenrouter-kernels`, launched one by one on random inputs by a
//! binding (`cust`) and code of its own, compared with plain loops in f64, and timed.
//!
//! Owner: whoever writes or tunes a kernel on a machine with a GPU; nothing depends on it, and the server does not link
//! `cust`. Invariant: it shares the sources and the compiler with the server and nothing else: arguments are packed here
//! from what the `.cu` files say, so that a wrapper and its check cannot be wrong in the same way.
//!
//! On a machine with a driver and NVRTC (or a cache folder that has been filled, `--cache`):
//!
//! ```text
//! cd kernels/lab
//! cargo run --release                                  # finds CUDA in /usr/local/cuda or /opt/cuda
//! CUDA_LIBRARY_PATH=FOLDER cargo run --release         # links FOLDER/lib64/libcuda.so, for example a toolkit's stubs
//! cargo run --release -- linear_bf16 --rows 16 --width 8192 --outputs 28672
//! ```
//!
//! A filter is a part of `SOURCE/KERNEL`, as `--list` shows them. The share is that of the bandwidth with which the device
//! copies its own memory; what is read twice, or from caches, may be above it.
//!
//! On a machine without CUDA it can be checked but not linked: `DOCS_RS=1 cargo check`. `tests/tests/lab.rs` links it to the
//! software device and runs it there.

mod attention;
mod bench;
mod head;
mod matmul;
mod rows;
mod small;

use bench::{Lab, Options};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    match measure(Options::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("{wrong} kernels are wrong");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// All kernels that are wanted; returns how many were wrong.
fn measure(options: Options) -> Result<usize, String> {
    if let Some(arch) = &options.list {
        return bench::list(arch).map(|()| 0);
    }
    let mut lab = Lab::open(options)?;
    small::all(&mut lab)?;
    attention::all(&mut lab)?;
    matmul::all(&mut lab)?;
    rows::all(&mut lab)?;
    head::all(&mut lab)?;
    lab.finish()
}
