//! Which CUDA devices there are, and the contexts on them. Owner: the launcher. Invariant: at most one living context per
//! device; models on one device share it, and a lost one is reset when the next model asks.

use super::error::CudaError;
use super::gpu::Gpu;
use cudarc::driver::{result, sys};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Oldest CUDA version whose driver has every function that is called here.
const DRIVER_MIN: i32 = 12_000;

/// How devices are opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DevicesConfig {
    /// Folder where compiled kernels are kept; none = they are compiled at each start.
    pub cache: Option<PathBuf>,
}

/// The CUDA devices of this machine.
#[derive(Debug, Default)]
pub struct Devices {
    config: DevicesConfig,
    open: Mutex<BTreeMap<usize, Gpu>>,
}

impl Devices {
    /// Touches nothing yet.
    pub fn new(config: DevicesConfig) -> Self {
        Devices { config, open: Mutex::default() }
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::OldDriver`], [`CudaError::NoDevice`].
    pub fn count() -> Result<usize, CudaError> {
        // SAFETY: only loads the library by its name; cudarc would panic at the first call if it were missing.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let mut found = 0;
        // SAFETY: writes one number; the driver allows this call before all others.
        let version = unsafe { sys::cuDriverGetVersion(&mut found) }.result();
        version.map_err(|error| CudaError::of("cuDriverGetVersion", error))?;
        if found < DRIVER_MIN {
            return Err(CudaError::OldDriver { found, needed: DRIVER_MIN });
        }
        let none = |error: result::DriverError| CudaError::NoDevice { reason: format!("{:?}", error.0) };
        result::init().map_err(none)?;
        match result::device::get_count().map_err(none)? {
            count if count > 0 => Ok(count as usize),
            _ => Err(CudaError::NoDevice { reason: "it counts 0".into() }),
        }
    }

    /// The context on a device: the one that is open, or a new one if there is none or it was lost.
    ///
    /// # Errors
    /// [`CudaError`] naming what is missing.
    pub fn open(&self, ordinal: usize) -> Result<Gpu, CudaError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(CudaError::Ordinal { asked: ordinal, count });
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = open.get(&ordinal) {
            if !gpu.is_lost() {
                return Ok(gpu.clone());
            }
            gpu.bury();
        }
        let gpu = Gpu::new(ordinal, self.config.cache.clone())?;
        open.insert(ordinal, gpu.clone());
        Ok(gpu)
    }
}
