//! Streams and events. Owner: one stream per model, in the thread of its executor. Invariant: work of a stream runs in the
//! order in which it was given; dropping a stream waits for it.

use super::error::CudaError;
use super::gpu::Gpu;
use super::graph::Graph;
use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::{DriverError, result, sys};

/// A queue of work on a device.
#[derive(Debug)]
pub struct Stream {
    gpu: Gpu,
    raw: Handle<sys::CUstream>,
}

/// A handle of the driver.
#[derive(Clone, Copy, Debug)]
struct Handle<T>(T);

// SAFETY: the driver lets any thread use these handles.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above; the driver locks.
unsafe impl<T> Sync for Handle<T> {}

impl Stream {
    /// A stream that waits for no other. `priority`: see [`Gpu::priorities`]; others are taken as the nearest.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(gpu: &Gpu, priority: i32) -> Result<Self, CudaError> {
        let raw = gpu.call("cuStreamCreateWithPriority", || {
            result::stream::create_with_priority(StreamKind::NonBlocking, priority)
        })?;
        Ok(Stream { gpu: gpu.clone(), raw: Handle(raw) })
    }

    /// The context it belongs to.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Calls the driver with the handle of this stream.
    pub(crate) fn call<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(sys::CUstream) -> Result<T, DriverError>,
    ) -> Result<T, CudaError> {
        self.gpu.call(name, || call(self.raw.0))
    }

    /// Waits for all work given so far.
    ///
    /// # Errors
    /// What the driver says, to work that broke off as well.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as `self`.
        self.call("cuStreamSynchronize", |raw| unsafe { result::stream::synchronize(raw) })
    }

    /// As [`Stream::synchronize`], for those who let go of memory that the work uses: where waiting fails twice, nobody knows
    /// when that is free, and the context counts as lost.
    ///
    /// # Errors
    /// What the driver says, the first time.
    pub fn settle(&self) -> Result<(), CudaError> {
        let first = self.synchronize();
        if first.as_ref().is_err_and(|error| !error.is_lost())
            && let Err(error) = self.synchronize()
        {
            self.gpu.lose(&error.to_string());
        }
        first
    }

    /// Records the work that `give` gives, instead of doing it.
    ///
    /// # Errors
    /// What `give` says, or the driver, for example to work that cannot be recorded. Nothing is left recording then.
    pub fn capture(&self, give: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        self.call("cuStreamBeginCapture", |raw| unsafe { result::stream::begin_capture(raw, mode) })?;
        let given = give();
        // SAFETY: as above.
        let end = || self.call("cuStreamEndCapture", |raw| unsafe { result::stream::end_capture(raw) });
        let graph = end().inspect_err(|_| {
            // The thread could do nothing else while its stream records.
            if let Ok(graph) = end() {
                Graph::discard(&self.gpu, graph);
            }
        });
        match (given, graph) {
            (Ok(()), Ok(graph)) => Graph::new(&self.gpu, graph),
            (Ok(()), Err(error)) => Err(error),
            (Err(error), graph) => {
                if let Ok(graph) = graph {
                    Graph::discard(&self.gpu, graph);
                }
                Err(error)
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed here only.
        self.gpu.release("cuStreamSynchronize", || unsafe { result::stream::synchronize(self.raw.0) });
        // SAFETY: as above.
        self.gpu.release("cuStreamDestroy", || unsafe { result::stream::destroy(self.raw.0) });
    }
}

/// A point in a stream that notes when it was reached.
#[derive(Debug)]
pub struct Event {
    gpu: Gpu,
    raw: Handle<sys::CUevent>,
}

impl Event {
    /// An event that notes when it was reached.
    ///
    /// # Errors
    /// What the driver says.
    pub fn timed(gpu: &Gpu) -> Result<Self, CudaError> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let raw = gpu.call("cuEventCreate", || result::event::create(flags))?;
        Ok(Event { gpu: gpu.clone(), raw: Handle(raw) })
    }

    /// Puts the event behind all work given to the stream so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both handles live.
        stream.call("cuEventRecord", |raw| unsafe { result::event::record(self.raw.0, raw) })
    }

    /// Waits until it is reached.
    ///
    /// # Errors
    /// What the driver says.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the handle lives.
        self.gpu.call("cuEventSynchronize", || unsafe { result::event::synchronize(self.raw.0) })
    }

    /// Milliseconds from this event to a later one; both timed and reached.
    ///
    /// # Errors
    /// What the driver says.
    pub fn elapsed_ms(&self, later: &Event) -> Result<f32, CudaError> {
        // SAFETY: both handles live.
        self.gpu.call("cuEventElapsedTime", || unsafe { result::event::elapsed(self.raw.0, later.raw.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `timed` and destroyed here only.
        self.gpu.release("cuEventDestroy", || unsafe { result::event::destroy(self.raw.0) });
    }
}
