//! Compiled kernels and their launches. Owner: a context keeps its modules; operations keep functions. Invariant: a
//! function keeps its module loaded.

use super::error::CudaError;
use super::gpu::Gpu;
use super::memory::{Element, View};
use super::stream::Stream;
use cudarc::driver::{result, sys};
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// Most arguments of a kernel.
const ARGS_MAX: usize = 32;

/// Compiled kernels in a context.
#[derive(Debug)]
pub struct Module {
    gpu: Gpu,
    raw: sys::CUmodule,
}

// SAFETY: the driver lets any thread use a module.
unsafe impl Send for Module {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn load(gpu: &Gpu, image: &[u8]) -> Result<Self, CudaError> {
        let start = image.as_ptr().cast::<c_void>();
        // SAFETY: the image is what the compiler made, complete as its checksum says; the driver copies it.
        let raw = gpu.call("cuModuleLoadData", || unsafe { result::module::load_data(start) })?;
        Ok(Module { gpu: gpu.clone(), raw })
    }

    /// The kernel of a name.
    ///
    /// # Errors
    /// What the driver says, for example that there is none.
    pub fn function(self: &Arc<Self>, name: &'static str) -> Result<Function, CudaError> {
        let text = CString::new(name).map_err(|_| CudaError::Unsupported { what: format!("kernel name {name:?}") })?;
        // SAFETY: the module is loaded as long as `self`.
        let found = self.gpu.call("cuModuleGetFunction", || unsafe { result::module::get_function(self.raw, text) });
        let raw = found.map_err(|error| match error {
            CudaError::Call { code, name: error, .. } => CudaError::Call { call: name, code, name: error },
            other => other,
        })?;
        Ok(Function { _module: self.clone(), raw, name })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load` and unloaded here only.
        self.gpu.release("cuModuleUnload", || unsafe { result::module::unload(self.raw) });
    }
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Function {
    /// Loaded as long as its functions.
    _module: Arc<Module>,
    raw: sys::CUfunction,
    name: &'static str,
}

// SAFETY: as for modules.
unsafe impl Send for Function {}
// SAFETY: as for modules.
unsafe impl Sync for Function {}

/// Size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: (u32, u32, u32),
    /// Threads of a block: what its `KERNEL(...)` says.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

impl Launch {
    /// Blocks in a row, without dynamic shared memory.
    pub fn blocks(count: u32, block: u32) -> Self {
        Launch { grid: (count, 1, 1), block, shared: 0 }
    }
}

/// Arguments of a kernel in order.
#[derive(Debug, Default)]
pub struct Args {
    words: [u64; ARGS_MAX],
    len: usize,
}

impl Args {
    /// None yet.
    pub fn new() -> Self {
        Args::default()
    }

    fn push(mut self, word: u64) -> Self {
        self.words[self.len] = word;
        self.len += 1;
        self
    }

    /// A pointer to values on the device.
    pub fn view<T: Element>(self, view: View<T>) -> Self {
        self.push(view.pointer())
    }

    /// A pointer that may be null.
    pub fn option<T: Element>(self, view: Option<View<T>>) -> Self {
        self.push(view.map_or(0, |view| view.pointer()))
    }

    /// A `u32`. (Arguments are read from the lower bytes of their words: devices and hosts are little-endian.)
    pub fn u32(self, value: u32) -> Self {
        self.push(u64::from(value))
    }

    /// A size, as `u32`.
    ///
    /// # Panics
    /// If it has more than 32 bits.
    pub fn size(self, value: usize) -> Self {
        assert!(value <= u32::MAX as usize, "{value} as an argument of 32 bits");
        self.push(value as u64)
    }

    /// A `u64`.
    pub fn u64(self, value: u64) -> Self {
        self.push(value)
    }

    /// A `float`.
    pub fn f32(self, value: f32) -> Self {
        self.push(u64::from(value.to_bits()))
    }
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Gives a launch to the stream. An empty grid is nothing to do.
    ///
    /// # Errors
    /// What the driver says to the launch; what the kernel does wrong shows at a later call.
    ///
    /// # Safety
    /// The arguments must be those of the kernel, and its accesses with them must stay inside of arrays that live until
    /// the work is done and that nothing else uses in a conflicting way meanwhile.
    pub unsafe fn launch(&self, stream: &Stream, launch: Launch, mut args: Args) -> Result<(), CudaError> {
        let Launch { grid, block, shared } = launch;
        if grid.0 == 0 || grid.1 == 0 || grid.2 == 0 {
            return Ok(());
        }
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGS_MAX];
        for (pointer, word) in pointers.iter_mut().zip(&mut args.words) {
            *pointer = std::ptr::from_mut(word).cast();
        }
        // SAFETY: the function and the stream live; the rest is the caller's promise. The driver copies the arguments.
        let launched = stream.call("cuLaunchKernel", |raw| unsafe {
            result::launch_kernel(self.raw, grid, (block, 1, 1), shared, raw, &mut pointers[..args.len])
        });
        launched.map_err(|error| match error {
            CudaError::Lost { reason } => CudaError::Lost { reason: format!("{}: {reason}", self.name) },
            CudaError::Call { code, name, .. } => CudaError::Call { call: self.name, code, name },
            other => other,
        })
    }
}
