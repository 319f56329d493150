//! The software CUDA device itself: that it computes what CUDA defines, and that it finds what it is there to find.
//! Owner: tests/cuda-sim. Invariant: every kind of mistake that it promises to show is made here once on purpose.
#![cfg(target_os = "linux")]

mod devices;
mod kernels;
mod memory;
mod streams;

use cudarc::cublaslt::{result as blas, sys as blas_sys};
use cudarc::driver::sys::{self, CUresult};
use cudarc::nvrtc::{result as nvrtc, sys as nvrtc_sys};
use std::ffi::{CString, c_void};
use std::process::Command;
use std::ptr::{from_mut, null_mut};
use tokenrouter_tests::cuda_sim::{Alone, CudaSim, Schedule, Streams};

const PRELUDE: &str = "#define KERNEL(n) extern \"C\" __global__ void __launch_bounds__(n)\ntypedef unsigned u32;\n";
const SCHEDULES: [Schedule; 5] =
    [Schedule::Forward, Schedule::Reverse, Schedule::Random(1), Schedule::Random(2), Schedule::Random(3)];

/// `Err` holds the number of the error.
fn call(code: CUresult) -> Result<(), u32> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(code as u32) }
}

fn compile(source: &str) -> Result<Vec<u8>, String> {
    let text = CString::new(format!("{PRELUDE}{source}")).expect("a text");
    let program = nvrtc::create_program(&text, Some(c"test.cu")).expect("a program");
    // SAFETY: the program lives until it is destroyed below; sizes are asked for before the texts.
    unsafe {
        let done = nvrtc::compile_program(program, &["--gpu-architecture=sm_90"]);
        let log = nvrtc::get_program_log(program).expect("a log");
        let log: String = log.iter().map(|&byte| byte as u8 as char).collect();
        let mut bytes = 0;
        nvrtc_sys::nvrtcGetCUBINSize(program, &mut bytes).result().expect("a size");
        let mut image = vec![0u8; bytes];
        nvrtc_sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()).result().expect("an image");
        nvrtc::destroy_program(program).expect("destroyed");
        if done.is_err() { Err(log) } else { Ok(image) }
    }
}

/// A context with a stream and the kernels of a source.
struct Bench {
    context: sys::CUcontext,
    stream: sys::CUstream,
    module: sys::CUmodule,
}

enum Arg {
    Pointer(u64),
    U32(u32),
}

impl Bench {
    fn new(source: &str) -> Bench {
        let image = compile(source).expect("it compiles");
        let (mut context, mut module) = (null_mut(), null_mut());
        // SAFETY: every pointer is to a variable of the right type.
        unsafe {
            call(sys::cuInit(0)).expect("initialised");
            call(sys::cuDevicePrimaryCtxRetain(&mut context, 0)).expect("a context");
            call(sys::cuCtxSetCurrent(context)).expect("current");
            call(sys::cuModuleLoadData(&mut module, image.as_ptr().cast())).expect("a module");
        }
        Bench { context, stream: stream(), module }
    }

    fn array<T: Copy>(&self, values: &[T]) -> u64 {
        let at = alloc(size_of_val(values)).expect("memory");
        // SAFETY: the ranges are as long as the values.
        call(unsafe { sys::cuMemcpyHtoD_v2(at, values.as_ptr().cast(), size_of_val(values)) }).expect("a copy");
        at
    }

    fn read<T: Copy + Default>(&self, at: u64, len: usize) -> Vec<T> {
        let mut values = vec![T::default(); len];
        self.synchronize().expect("the stream");
        // SAFETY: there is room for so many values.
        call(unsafe { sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), at, len * size_of::<T>()) }).expect("a copy");
        values
    }

    fn synchronize(&self) -> Result<(), u32> {
        // SAFETY: the stream lives as long as the bench.
        call(unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    fn launch(&self, name: &str, (grid, block, shared): (u32, u32, u32), args: &[Arg]) -> Result<(), u32> {
        self.launch_on(self.stream, name, (grid, block, shared), args)
    }

    fn launch_on(&self, stream: sys::CUstream, name: &str, size: (u32, u32, u32), args: &[Arg]) -> Result<(), u32> {
        let mut function = null_mut();
        let name = CString::new(name).expect("a name");
        let mut words: Vec<u64> = args
            .iter()
            .map(|arg| match *arg {
                Arg::Pointer(at) => at,
                Arg::U32(value) => u64::from(value),
            })
            .collect();
        let mut params: Vec<*mut c_void> = words.iter_mut().map(|word| from_mut(word).cast()).collect();
        // SAFETY: arguments are copied by the call; they are those of the kernel, which the tests write next to it.
        unsafe {
            call(sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()))?;
            let (grid, block, shared) = size;
            let params = params.as_mut_ptr();
            call(sys::cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, stream, params, null_mut()))
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // SAFETY: the reset invalidates all handles, and nothing uses them afterwards.
        unsafe {
            let _ = sys::cuDevicePrimaryCtxReset_v2(0);
        }
    }
}

fn alone() -> Alone {
    CudaSim::alone().expect("the software device")
}

fn alloc(bytes: usize) -> Result<u64, u32> {
    let mut at = 0;
    // SAFETY: writes one pointer.
    call(unsafe { sys::cuMemAlloc_v2(&mut at, bytes) }).map(|()| at)
}

fn stream() -> sys::CUstream {
    let mut stream = null_mut();
    // SAFETY: writes one handle.
    call(unsafe { sys::cuStreamCreateWithPriority(&mut stream, 1, 0) }).expect("a stream");
    stream
}

fn event() -> sys::CUevent {
    let mut event = null_mut();
    // SAFETY: writes one handle.
    call(unsafe { sys::cuEventCreate(&mut event, 0) }).expect("an event");
    event
}

/// Records what is given to `stream` by `work` as a graph.
fn capture(stream: sys::CUstream, work: impl FnOnce()) -> Result<sys::CUgraphExec, u32> {
    let (mut graph, mut exec) = (null_mut(), null_mut());
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the handles are those that the driver just gave.
    unsafe {
        call(sys::cuStreamBeginCapture_v2(stream, mode)).expect("a capture");
        work();
        call(sys::cuStreamEndCapture(stream, &mut graph))?;
        call(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
        call(sys::cuGraphDestroy(graph))?;
    }
    Ok(exec)
}

/// Pinned memory for as many values; the tests never free it, but for the one about freeing.
fn pinned(values: &[f32]) -> *mut f32 {
    let mut at = null_mut();
    // SAFETY: the memory is as long as the values that are copied to it.
    unsafe {
        call(sys::cuMemHostAlloc(&mut at, size_of_val(values), 0)).expect("pinned memory");
        at.cast::<f32>().copy_from_nonoverlapping(values.as_ptr(), values.len());
    }
    at.cast()
}

/// Different numbers each time the tests run would not help here: the kernels are fixed, so a simple sequence will do.
fn numbers(count: usize) -> Vec<f32> {
    (0..count as u32).map(|i| (i.wrapping_mul(2654435761) >> 20) as f32 / 64.0 - 32.0).collect()
}

const ADD: &str = "
KERNEL(128) add(const float* x, const float* y, float* z, u32 n) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) z[i] = x[i] + y[i];
}
KERNEL(128) scale(float* x, u32 n, u32 by) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}";

/// Runs itself as another program, which finds the device by the environment alone.
#[test]
fn another_process_finds_the_device_by_its_environment() {
    const NAME: &str = "another_process_finds_the_device_by_its_environment";
    if std::env::var_os("CUDASIM_DEVICES").is_some() {
        let mut count = 0;
        // SAFETY: writes one number.
        unsafe {
            assert_eq!(call(sys::cuInit(0)), Ok(()));
            assert_eq!(call(sys::cuDeviceGetCount(&mut count)), Err(101), "CUDASIM_FAIL");
            assert_eq!(call(sys::cuDeviceGetCount(&mut count)), Ok(()));
        }
        assert_eq!(count, 3);
        return;
    }
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", NAME]).envs(CudaSim::environment().expect("built"));
    child.env("CUDASIM_DEVICES", "3").env("CUDASIM_FAIL", "cuDeviceGetCount:1:101");
    let output = child.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
