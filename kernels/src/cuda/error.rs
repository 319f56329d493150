//! What can go wrong with a CUDA device. Owner: whoever opens or uses one. Invariant: the text says what to do where
//! there is something to do, and [`CudaError::is_lost`] says whether the context can still be used.

use cudarc::driver::DriverError;

/// Why a CUDA device cannot be used, or stopped working.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// No driver on this machine.
    #[error("no NVIDIA driver was found (libcuda.so.1); install one, or set device = \"cpu\"")]
    NoDriver,
    /// A driver older than the kernels need.
    #[error("the NVIDIA driver supports CUDA {}.{}, at least {}.{} is needed; update the driver", found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10)]
    OldDriver {
        /// As the driver numbers itself: 1000 * major + 10 * minor.
        found: i32,
        /// The oldest that works.
        needed: i32,
    },
    /// A driver, but nothing to drive.
    #[error("the NVIDIA driver finds no device ({reason}); set device = \"cpu\"")]
    NoDevice {
        /// As the driver says it.
        reason: String,
    },
    /// A device number that does not exist.
    #[error("device cuda:{asked} does not exist; this machine has {}", if *count == 1 { "cuda:0".to_owned() } else { format!("cuda:0 to cuda:{}", count - 1) })]
    Ordinal {
        /// As asked.
        asked: usize,
        /// Devices there are.
        count: usize,
    },
    /// A device that is too old.
    #[error("{name} has compute capability {}.{}, the kernels need 8.0 (Ampere) or newer; set device = \"cpu\"", found.0, found.1)]
    Capability {
        /// Name of the device.
        name: String,
        /// Its compute capability.
        found: (u32, u32),
    },
    /// Memory that the device does not have.
    #[error(
        "{what} needs {bytes} bytes, {free} of {total} are free on the device; lower the kv memory or use smaller weights"
    )]
    Memory {
        /// What the memory is for.
        what: &'static str,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes free now.
        free: u64,
        /// Bytes in all.
        total: u64,
    },
    /// No compiler for the kernels, and no kernels compiled before.
    #[error(
        "the kernels are not compiled for {arch} yet and the compiler (libnvrtc.so.12) was not found; install the CUDA 12 \
         toolkit or the package nvidia-cuda-nvrtc-cu12 and put its folder on LD_LIBRARY_PATH"
    )]
    NoCompiler {
        /// Architecture of the device, like `sm_90`.
        arch: String,
    },
    /// The compiler refused a kernel.
    #[error("{source_name} does not compile for {arch}: {log}")]
    Compile {
        /// File.
        source_name: &'static str,
        /// Architecture.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// A call failed; the context is sound.
    #[error("{call} failed with {name} ({code})")]
    Call {
        /// Function of the driver, or what was being done.
        call: &'static str,
        /// Number of the error.
        code: u32,
        /// Name of the error.
        name: String,
    },
    /// The context is lost, and everything in its memory with it.
    #[error("the device is lost: {reason}")]
    Lost {
        /// Which call said so, and how.
        reason: String,
    },
    /// Something that no CUDA kernel takes.
    #[error("{what}")]
    Unsupported {
        /// What, and the remedy.
        what: String,
    },
}

impl CudaError {
    /// Whether the context, and everything in it, is gone.
    pub fn is_lost(&self) -> bool {
        matches!(self, CudaError::Lost { .. })
    }

    /// From what the driver said to a call.
    pub(crate) fn of(call: &'static str, error: DriverError) -> CudaError {
        let (code, name) = (error.0 as u32, format!("{:?}", error.0));
        if leaves_context_usable(code) {
            return CudaError::Call { call, code, name };
        }
        CudaError::Lost { reason: format!("{call} failed with {name} ({code})") }
    }
}

/// Whether a context can be used after an error of this number (CUDA driver API, `CUresult`): wrong arguments, memory,
/// resources of a launch, peers, files and symbols, host memory that is registered twice or not at all, events that are not
/// ready, and what a capture does not allow. After all others, those of a kernel that broke off among them, nothing in the
/// context works any more.
fn leaves_context_usable(code: u32) -> bool {
    matches!(code, 1 | 2 | 34 | 100..=102 | 200 | 209 | 218 | 221..=225 | 300..=304 | 400 | 401 | 500 | 600 | 701 | 704..=706 | 712 | 713 | 800 | 801 | 900..=910)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys::CUresult;

    #[test]
    fn a_broken_kernel_loses_the_context_and_a_full_device_does_not() {
        let of = |code| CudaError::of("cuLaunchKernel", DriverError(code));
        for code in [
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_UNKNOWN,
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
        ] {
            assert!(of(code).is_lost(), "{code:?}");
        }
        for code in [
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        ] {
            assert!(!of(code).is_lost(), "{code:?}");
        }
        assert_eq!(
            of(CUresult::CUDA_ERROR_INVALID_VALUE).to_string(),
            "cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE (1)"
        );
    }
}
