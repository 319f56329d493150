//! Memory of a device, and pinned memory of the host. Owner: whoever allocates. Invariant: an array belongs to one context
//! and is freed once; freeing waits for the work of the device, so no kernel outlives its arguments.

use super::error::CudaError;
use super::gpu::Gpu;
use super::stream::Stream;
use cudarc::driver::{result, sys};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::mem::size_of;

/// Values that may travel as bytes.
///
/// # Safety
/// Any bit pattern is a value, and there is no padding that a copy could miss.
pub unsafe trait Element: Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($t:ty),*) => { $(
        // SAFETY: plain numbers.
        unsafe impl Element for $t {}
    )* };
}
elements!(u8, i8, u16, u32, i32, u64, f32, f64);

/// Memory on a device.
#[derive(Debug)]
pub struct Array<T: Element> {
    gpu: Gpu,
    pointer: sys::CUdeviceptr,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> Array<T> {
    /// `len` values; what they are is not defined.
    ///
    /// # Errors
    /// [`CudaError::Memory`] with the numbers when the device has not so much left.
    pub fn new(gpu: &Gpu, what: &'static str, len: usize) -> Result<Self, CudaError> {
        let bytes = len.max(1).saturating_mul(size_of::<T>());
        // SAFETY: the pointer is freed once, by `Drop`.
        let made = gpu.call("cuMemAlloc", || unsafe { result::malloc_sync(bytes) });
        let pointer = made.map_err(|error| match error {
            CudaError::Call { code: 2, .. } => {
                let (free, total) = gpu.memory().unwrap_or_default();
                CudaError::Memory { what, bytes: bytes as u64, free, total }
            }
            other => other,
        })?;
        Ok(Array { gpu: gpu.clone(), pointer, len, element: PhantomData })
    }

    /// The values given, copied by the time this returns.
    ///
    /// # Errors
    /// As [`Array::new`], and what the driver says to the copy.
    pub fn from_host(stream: &Stream, what: &'static str, values: &[T]) -> Result<Self, CudaError> {
        let mut array = Array::new(stream.gpu(), what, values.len())?;
        array.write(stream, 0, values)?;
        Ok(array)
    }

    /// Zeros.
    ///
    /// # Errors
    /// As [`Array::from_host`].
    pub fn zeros(stream: &Stream, what: &'static str, len: usize) -> Result<Self, CudaError> {
        let array = Array::new(stream.gpu(), what, len)?;
        let bytes = len * size_of::<T>();
        if bytes > 0 {
            // SAFETY: the range is this array's.
            stream.call("cuMemsetD8Async", |raw| unsafe { result::memset_d8_async(array.pointer, 0, bytes, raw) })?;
            stream.synchronize()?;
        }
        Ok(array)
    }

    /// Copies values to `at..`, done by the time this returns. For loading; steps stage by [`Pinned`].
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the values do not fit.
    pub fn write(&mut self, stream: &Stream, at: usize, values: &[T]) -> Result<(), CudaError> {
        assert!(at + values.len() <= self.len, "{} values at {at} in an array of {}", values.len(), self.len);
        if values.is_empty() {
            return Ok(());
        }
        let to = self.pointer + (at * size_of::<T>()) as u64;
        // SAFETY: both ranges are valid, and the source is borrowed until the copy is done.
        stream.call("cuMemcpyHtoDAsync", |raw| unsafe { result::memcpy_htod_async(to, values, raw) })?;
        stream.settle()
    }

    /// Copies all values to an array of the same length on the same device, when the stream comes to it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, stream: &Stream, to: &Array<T>) -> Result<(), CudaError> {
        assert_eq!(self.len, to.len, "values copied from array to array");
        let bytes = self.len * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are valid as long as the arrays, whose dropping waits for the device.
        stream
            .call("cuMemcpyDtoDAsync", |raw| unsafe { result::memcpy_dtod_async(to.pointer, self.pointer, bytes, raw) })
    }

    /// The values `at..at + len` as host memory, after everything on the stream.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn read(&self, stream: &Stream, at: usize, len: usize) -> Result<Vec<T>, CudaError> {
        assert!(at + len <= self.len, "{len} values at {at} in an array of {}", self.len);
        let mut values: Vec<T> = Vec::with_capacity(len);
        if len == 0 {
            return Ok(values);
        }
        let from = self.pointer + (at * size_of::<T>()) as u64;
        // SAFETY: the range is this array's; the vector has room for `len` values, each a valid value for any bits, and it
        // is borrowed until the copy is done.
        unsafe {
            let room = std::slice::from_raw_parts_mut(values.as_mut_ptr(), len);
            stream.call("cuMemcpyDtoHAsync", |raw| result::memcpy_dtoh_async(room, from, raw))?;
            stream.settle()?;
            values.set_len(len);
        }
        Ok(values)
    }

    /// All values as host memory, after everything on the stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn to_host(&self, stream: &Stream) -> Result<Vec<T>, CudaError> {
        self.read(stream, 0, self.len)
    }

    /// Values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it lies, for launches.
    pub fn view(&self) -> View<T> {
        self.part(0, self.len)
    }

    /// Where a part of it lies.
    ///
    /// # Panics
    /// If it is no part.
    pub fn part(&self, at: usize, len: usize) -> View<T> {
        assert!(at + len <= self.len, "{len} values at {at} in an array of {}", self.len);
        View { pointer: self.pointer + (at * size_of::<T>()) as u64, len, element: PhantomData }
    }

    /// The context it lies in.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl<T: Element> Drop for Array<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` and freed here only.
        self.gpu.release("cuMemFree", || unsafe { result::free_sync(self.pointer) });
    }
}

/// Where values lie on a device. Plain data: who launches with it keeps the array alive until the work is done.
#[derive(Debug)]
pub struct View<T> {
    pointer: sys::CUdeviceptr,
    len: usize,
    element: PhantomData<T>,
}

impl<T> Clone for View<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<T> {}

impl<T: Element> View<T> {
    pub(super) fn new(pointer: sys::CUdeviceptr, len: usize) -> Self {
        View { pointer, len, element: PhantomData }
    }

    /// The first `len` values.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn first(self, len: usize) -> Self {
        assert!(len <= self.len, "{len} values of {}", self.len);
        View { len, ..self }
    }

    /// Address on the device.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Bytes per page of the host, or a multiple.
const PAGE_BYTES: usize = 4096;

/// Memory of the host that the device copies from and to by itself. It is the host's own and only registered with the
/// context, so that it outlives a context that is lost. Where the system lets nobody register memory, copies take longer.
#[derive(Debug)]
pub struct Pinned {
    gpu: Gpu,
    start: *mut u8,
    layout: Layout,
    registered: bool,
}

// SAFETY: owns its memory alone, like a `Vec`.
unsafe impl Send for Pinned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// At least so many zero bytes, aligned to a page.
    ///
    /// # Errors
    /// What the driver says; memory that the system refuses.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, CudaError> {
        let refused = || CudaError::Unsupported { what: format!("the system refused {bytes} bytes to stage steps in") };
        let rounded = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or_else(refused)?;
        let layout = Layout::from_size_align(rounded, PAGE_BYTES).map_err(|_| refused())?;
        // SAFETY: the size is not 0; freed once, by `Drop` or below.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(refused());
        }
        let registered = gpu.call("cuMemHostRegister", || {
            // SAFETY: the range was just allocated and stays until it is unregistered.
            unsafe { sys::cuMemHostRegister_v2(start.cast(), rounded, 0) }.result()
        });
        match registered {
            Ok(()) => Ok(Pinned { gpu: gpu.clone(), start, layout, registered: true }),
            // Not permitted, not supported: some sandboxes.
            Err(CudaError::Call { code: 800 | 801, .. }) => {
                Ok(Pinned { gpu: gpu.clone(), start, layout, registered: false })
            }
            Err(error) => {
                // SAFETY: allocated above with this layout.
                unsafe { dealloc(start, layout) };
                Err(error)
            }
        }
    }

    /// The bytes. The caller sees to it that the device does not write them meanwhile.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: valid and initialised.
        unsafe { std::slice::from_raw_parts(self.start, self.layout.size()) }
    }

    /// The bytes, to be changed. The caller sees to it that the device neither reads nor writes them meanwhile.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: valid and initialised, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
    }

    /// Copies the first `bytes` to the start of an array, when the stream comes to it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If they do not fit.
    pub(super) fn upload(&self, stream: &Stream, to: &Array<u8>, bytes: usize) -> Result<(), CudaError> {
        assert!(
            bytes <= self.layout.size() && bytes <= to.len,
            "{bytes} bytes from {} to {}",
            self.layout.size(),
            to.len
        );
        let source = &self.bytes()[..bytes];
        // SAFETY: both ranges are valid as long as their owners, who wait for the stream before they let go.
        stream.call("cuMemcpyHtoDAsync", |raw| unsafe { result::memcpy_htod_async(to.pointer, source, raw) })
    }

    /// Copies the first `bytes` of an array here, when the stream comes to it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If they do not fit.
    pub(super) fn download(&mut self, stream: &Stream, from: &Array<u8>, bytes: usize) -> Result<(), CudaError> {
        assert!(
            bytes <= self.layout.size() && bytes <= from.len,
            "{bytes} bytes from {} to {}",
            from.len,
            self.layout.size()
        );
        let room = &mut self.bytes_mut()[..bytes];
        // SAFETY: as in `upload`.
        stream.call("cuMemcpyDtoHAsync", |raw| unsafe { result::memcpy_dtoh_async(room, from.pointer, raw) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: registered in `new`; a lost context has forgotten it already.
        let call = || unsafe { sys::cuMemHostUnregister(self.start.cast()) }.result();
        if self.registered && self.gpu.call("cuMemHostUnregister", call).is_err_and(|error| !error.is_lost()) {
            // Still registered: whoever gets these addresses next could not register them.
            return;
        }
        // SAFETY: allocated in `new` with this layout. No copy is on its way: whoever staged waited for the stream.
        unsafe { dealloc(self.start, self.layout) };
    }
}
