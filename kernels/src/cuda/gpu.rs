//! The context of one device. Owner: everything on the device holds a clone. Invariant: when a call reports that the
//! context is lost, no later call reaches the driver with a handle of it; [`Gpu::bury`] waits for calls on their way.

use super::compile::{self, Compiled, Source};
use super::error::CudaError;
use super::launch::Module;
use cudarc::driver::{DriverError, result, sys};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

/// Oldest architecture with the 16-bit products that the kernels use.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// What is known of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its number.
    pub ordinal: usize,
    /// As its maker calls it.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory in all.
    pub memory: u64,
    /// CUDA version of the driver: 1000 * major + 10 * minor.
    pub driver: i32,
}

impl Facts {
    /// As compilers name the architecture: `sm_90`.
    pub fn arch(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }
}

/// The context of a device; clones share it.
#[derive(Clone, Debug)]
pub struct Gpu(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: sys::CUdevice,
    context: Context,
    facts: Facts,
    cache: Option<PathBuf>,
    state: RwLock<State>,
    /// Weak, because a module holds the context.
    modules: Mutex<HashMap<&'static str, Weak<Module>>>,
}

/// The handle of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Context(sys::CUcontext);

// SAFETY: a context may be current in several threads at once; the driver locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

#[derive(Debug)]
enum State {
    Alive,
    /// Lost, and not reset yet.
    Lost(String),
    /// Lost and reset: its handles mean nothing any more.
    Buried(String),
}

impl Gpu {
    pub(super) fn new(ordinal: usize, cache: Option<PathBuf>) -> Result<Gpu, CudaError> {
        let device = result::device::get(ordinal as i32).map_err(|error| CudaError::of("cuDeviceGet", error))?;
        let facts = facts(device, ordinal)?;
        if facts.capability < CAPABILITY_MIN {
            return Err(CudaError::Capability { name: facts.name, found: facts.capability });
        }
        // SAFETY: the device exists; `Drop` and `bury` release the context exactly once.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|error| CudaError::of("cuDevicePrimaryCtxRetain", error))?;
        let state = RwLock::new(State::Alive);
        Ok(Gpu(Arc::new(Inner { device, context: Context(context), facts, cache, state, modules: Mutex::default() })))
    }

    /// What is known of the device.
    pub fn facts(&self) -> &Facts {
        &self.0.facts
    }

    /// Whether both are one context, in one life of the device.
    pub fn is_same(&self, other: &Gpu) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether the context was lost.
    pub fn is_lost(&self) -> bool {
        !matches!(*self.0.state.read().unwrap_or_else(PoisonError::into_inner), State::Alive)
    }

    /// Calls the driver with this context current in the thread.
    ///
    /// # Errors
    /// What the driver said. After an error that loses the context, every call is [`CudaError::Lost`].
    pub fn call<T>(&self, name: &'static str, call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, CudaError> {
        let error = {
            let state = self.0.state.read().unwrap_or_else(PoisonError::into_inner);
            if let State::Lost(reason) | State::Buried(reason) = &*state {
                return Err(CudaError::Lost { reason: reason.clone() });
            }
            // SAFETY: the context is alive while the lock is held.
            let current = unsafe { result::ctx::set_current(self.0.context.0) };
            match current.map_err(|error| ("cuCtxSetCurrent", error)) {
                Ok(()) => match call() {
                    Ok(value) => return Ok(value),
                    Err(error) => CudaError::of(name, error),
                },
                Err((name, error)) => CudaError::of(name, error),
            }
        };
        if let CudaError::Lost { reason } = &error {
            self.lose(reason);
        }
        Err(error)
    }

    /// As [`Gpu::call`] for destructors: nothing to do in a context that is gone, and nobody to tell.
    pub(super) fn release(&self, name: &'static str, call: impl FnOnce() -> Result<(), DriverError>) {
        // The driver frees everything with the context when it is reset.
        let _gone_with_its_context = self.call(name, call);
    }

    /// From here on the context counts as lost.
    pub fn lose(&self, reason: &str) {
        let mut state = self.0.state.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Alive) {
            *state = State::Lost(reason.to_owned());
        }
    }

    /// Resets a lost context, which frees its memory; nobody can use it any more.
    pub(super) fn bury(&self) {
        let mut state = self.0.state.write().unwrap_or_else(PoisonError::into_inner);
        let State::Lost(reason) = &*state else { return };
        let reason = reason.clone();
        // SAFETY: no call is on its way (the lock is held for writing) and none comes later (the state says so). Errors
        // mean that the driver holds on to what is lost anyway.
        unsafe {
            let _reset = sys::cuDevicePrimaryCtxReset_v2(self.0.device).result();
            let _released = result::primary_ctx::release(self.0.device);
        }
        *state = State::Buried(reason);
    }

    /// Free bytes and bytes in all.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (free, total) = self.call("cuMemGetInfo", result::mem_get_info)?;
        Ok((free as u64, total as u64))
    }

    /// The kernels of a source, compiled for this device once.
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`], [`CudaError::Compile`], or what the driver says to the result.
    pub fn module(&self, source: &'static Source) -> Result<Arc<Module>, CudaError> {
        let mut modules = self.0.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(source.name).and_then(Weak::upgrade) {
            return Ok(module);
        }
        let Compiled { image, .. } = compile::compile_cached(source, &self.0.facts.arch(), self.0.cache.as_deref())?;
        let module = Arc::new(Module::load(self, &image)?);
        modules.insert(source.name, Arc::downgrade(&module));
        Ok(module)
    }

    /// Lowest and highest priority of streams; the higher, the smaller the number.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn priorities(&self) -> Result<(i32, i32), CudaError> {
        self.call("cuCtxGetStreamPriorityRange", result::stream::get_priority_range)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !matches!(state, State::Buried(_)) {
            // SAFETY: retained once in `new`, and everything that held the context is gone.
            let _released = unsafe { result::primary_ctx::release(self.device) };
        }
    }
}

fn facts(device: sys::CUdevice, ordinal: usize) -> Result<Facts, CudaError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let attribute = |which| {
        // SAFETY: the device exists.
        let value = unsafe { result::device::get_attribute(device, which) };
        value.map(|value| value.max(0) as u32).map_err(|error| CudaError::of("cuDeviceGetAttribute", error))
    };
    let mut driver = 0;
    // SAFETY: writes one number.
    let version = unsafe { sys::cuDriverGetVersion(&mut driver) }.result();
    version.map_err(|error| CudaError::of("cuDriverGetVersion", error))?;
    // SAFETY: the device exists.
    let memory = unsafe { result::device::total_mem(device) };
    Ok(Facts {
        ordinal,
        name: result::device::get_name(device).map_err(|error| CudaError::of("cuDeviceGetName", error))?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1),
        memory: memory.map_err(|error| CudaError::of("cuDeviceTotalMem", error))? as u64,
        driver,
    })
}
