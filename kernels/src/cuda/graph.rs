//! Recorded work that is given to a device in one call. Owner: the executor that recorded it, in its thread. Invariant:
//! the memory that the work uses belongs to the same executor, which drops its graphs before it.

use super::error::CudaError;
use super::gpu::Gpu;
use super::stream::Stream;
use cudarc::driver::{result, sys};

/// Recorded work, ready to run.
#[derive(Debug)]
pub struct Graph {
    gpu: Gpu,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: graphs may move between threads; they must not be used in two at once, which `&mut self` of `launch` sees to.
unsafe impl Send for Graph {}

impl Graph {
    pub(super) fn new(gpu: &Gpu, graph: sys::CUgraph) -> Result<Self, CudaError> {
        let made = gpu.call("cuGraphInstantiate", || {
            // SAFETY: the graph was just recorded.
            unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) }
        });
        match made {
            Ok(executable) => Ok(Graph { gpu: gpu.clone(), graph, executable }),
            Err(error) => {
                Graph::discard(gpu, graph);
                Err(error)
            }
        }
    }

    pub(super) fn discard(gpu: &Gpu, graph: sys::CUgraph) {
        if !graph.is_null() {
            // SAFETY: nobody else has it.
            gpu.release("cuGraphDestroy", || unsafe { result::graph::destroy(graph) });
        }
    }

    /// Sends what the device needs to run it ahead of the first launch.
    ///
    /// # Errors
    /// What the driver says.
    pub fn upload(&mut self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both handles live.
        stream.call("cuGraphUpload", |raw| unsafe { result::graph::upload(self.executable, raw) })
    }

    /// Gives the recorded work to the stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both handles live.
        stream.call("cuGraphLaunch", |raw| unsafe { result::graph::launch(self.executable, raw) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `new` and destroyed here only.
        self.gpu.release("cuGraphExecDestroy", || unsafe { result::graph::exec_destroy(self.executable) });
        Graph::discard(&self.gpu, self.graph);
    }
}
