//! What machine this is. Owner: the program. Invariant: reads only; the copy is the yardstick of all shares of bandwidth.

use super::report::Report;
use super::text;
use tokenrouter_kernels::cuda::{Array, CudaError, Event, Gpu, Stream, compile_for};
use tokenrouter_kernels::matmul::cuda::MatmulKernels;
use tokenrouter_kernels::norm;

/// Bytes that are copied to measure.
const COPY_BYTES: usize = 1 << 30;
/// Copies that are timed together.
const COPIES: u16 = 8;

/// Rows about the device and the libraries.
///
/// # Errors
/// What the driver says, or the compiler to the kernels.
pub fn tell(gpu: &Gpu, report: &mut Report) -> Result<(), String> {
    let facts = gpu.facts().clone();
    let (free, total) = gpu.memory().map_err(text)?;
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let (major, minor) = facts.capability;
    report.fact("device", format!("{}, compute capability {major}.{minor}", facts.name));
    report.fact("multiprocessors", facts.multiprocessors.to_string());
    report.fact("memory", format!("{:.1} GiB, {:.1} GiB free", gib(total), gib(free)));
    report.fact("driver", format!("for CUDA {}.{}", facts.driver / 1000, facts.driver % 1000 / 10));
    let compiler = match compile_for(&norm::cuda::SOURCE, &facts.arch(), false) {
        Ok(_) => format!("found, compiles for {}", facts.arch()),
        Err(CudaError::NoCompiler { .. }) => "not found: kernels that were compiled ahead are needed".to_owned(),
        Err(error) => return Err(error.to_string()),
    };
    report.fact("NVRTC", compiler);
    let blas = MatmulKernels::load(gpu).map_err(text)?.has_blas();
    report.fact("cuBLASLt", if blas { "found" } else { "not found: the project's own products are used" });
    Ok(())
}

/// Bytes per second that a copy within the device reads and writes together.
///
/// # Errors
/// What the driver says.
pub fn copy_bandwidth(gpu: &Gpu) -> Result<f64, CudaError> {
    let stream = Stream::new(gpu, 0)?;
    let (free, _) = gpu.memory()?;
    let bytes = COPY_BYTES.min(free as usize / 8);
    let from = Array::<u8>::zeros(&stream, "copied", bytes)?;
    let to = Array::<u8>::zeros(&stream, "copied", bytes)?;
    let (start, end) = (Event::timed(gpu)?, Event::timed(gpu)?);
    from.copy_to(&stream, &to)?;
    start.record(&stream)?;
    for _ in 0..COPIES {
        from.copy_to(&stream, &to)?;
    }
    end.record(&stream)?;
    end.synchronize()?;
    let seconds = f64::from(start.elapsed_ms(&end)?).max(1e-6) / 1e3;
    Ok(2.0 * bytes as f64 * f64::from(COPIES) / seconds)
}
