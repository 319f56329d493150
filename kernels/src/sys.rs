//! Facts about the machine: instruction set, cores, and where a thread runs.
//!
//! Owner: [`crate::Pool`] asks once at its construction. Invariant: an [`Isa`] that a pool carries was detected on
//! this machine, which is what makes the vector kernels sound to call.

use crate::KernelError;

/// Which family of vector kernels runs. All give bit-identical results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, left to the compiler.
    Portable,
    /// AArch64 with its vectors of 128 bits.
    Neon,
    /// AArch64 with dot products of bytes (`dotprod`, ARMv8.2).
    NeonDot,
    /// x86-64 AVX2 with FMA and F16C.
    Avx2,
    /// x86-64 AVX2 with FMA, F16C and VNNI on its 256 bits (`avx_vnni`).
    Avx2Vnni,
    /// x86-64 AVX-512 (F, BW, DQ, VL) with VNNI.
    Avx512,
}

impl Isa {
    /// All of them, the best last.
    pub const ALL: [Isa; 6] = [Isa::Portable, Isa::Neon, Isa::NeonDot, Isa::Avx2, Isa::Avx2Vnni, Isa::Avx512];

    /// The best instruction set of this machine.
    pub fn detect() -> Isa {
        Isa::ALL.into_iter().rfind(|isa| isa.available()).unwrap_or(Isa::Portable)
    }

    /// Whether this machine has it.
    pub fn available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni => is_x86_feature_detected!("avxvnni") && Isa::Avx2.available(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
                    && Isa::Avx2.available()
            }
            // Miri runs no inline assembly.
            #[cfg(all(target_arch = "aarch64", target_endian = "little", not(miri)))]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(all(target_arch = "aarch64", target_endian = "little", not(miri)))]
            Isa::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod") && Isa::Neon.available(),
            #[allow(unreachable_patterns, reason = "the instruction sets of other architectures")]
            _ => false,
        }
    }

    /// Name for logs and errors.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dotprod",
            Isa::Avx2 => "avx2",
            Isa::Avx2Vnni => "avx2-vnni",
            Isa::Avx512 => "avx512-vnni",
        }
    }
}

/// Cores that this process may use, in ascending order.
#[cfg(target_os = "linux")]
pub fn usable_cores() -> Vec<usize> {
    // SAFETY: `cpu_set_t` is a plain bit array, for which zeroes are a valid value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid for writes of the size that is passed.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    if rc != 0 {
        return (0..default_threads()).collect();
    }
    // SAFETY: every index is below CPU_SETSIZE, the number of bits of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Cores that this process may use, in ascending order.
#[cfg(not(target_os = "linux"))]
pub fn usable_cores() -> Vec<usize> {
    (0..default_threads()).collect()
}

/// Restricts the calling thread to these cores. The thread that calls a pool's `run` works as its first worker, so
/// it should be pinned to the first core of that pool.
///
/// Errors: a core outside of [`usable_cores`], or a system without thread affinity.
pub fn pin_current_thread(cores: &[usize]) -> Result<(), KernelError> {
    let usable = usable_cores();
    if let Some(&core) = cores.iter().find(|core| !usable.contains(core)) {
        return Err(KernelError::Core { core, reason: "it is not available to this process".into(), usable });
    }
    pin(cores).map_err(|reason| KernelError::Core { core: cores.first().copied().unwrap_or(0), reason, usable })
}

#[cfg(target_os = "linux")]
fn pin(cores: &[usize]) -> Result<(), String> {
    // SAFETY: `cpu_set_t` is a plain bit array, for which zeroes are a valid value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &core in cores {
        // SAFETY: usable cores come from a set of the same size, so the index is inside.
        unsafe { libc::CPU_SET(core, &mut set) };
    }
    // SAFETY: `set` is valid for reads of the size that is passed; 0 means the calling thread.
    match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().to_string()),
    }
}

#[cfg(not(target_os = "linux"))]
fn pin(_cores: &[usize]) -> Result<(), String> {
    Err("this system does not pin threads".into())
}

/// One thread per core that this process may use.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detected_isa_is_available() {
        assert!(Isa::detect().available());
    }

    #[test]
    fn a_thread_can_be_pinned_to_a_usable_core_and_to_no_other() {
        let cores = usable_cores();
        assert!(!cores.is_empty());
        let missing = cores[cores.len() - 1] + 1;
        let outcome = std::thread::spawn(move || (pin_current_thread(&cores[..1]), usable_cores())).join().unwrap();
        if cfg!(target_os = "linux") {
            assert_eq!(outcome.0, Ok(()));
            assert_eq!(outcome.1.len(), 1);
        }
        assert!(matches!(pin_current_thread(&[missing]), Err(KernelError::Core { core, .. }) if core == missing));
    }
}
