//! The software CUDA device itself: that it computes what CUDA defines, and that it finds what it is there to find.
//! Owner: tests/cuda-sim. Invariant: every kind of mistake that it promises to show is made here once on purpose.
#![cfg(target_os = "linux")]

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

#[test]
fn vectors_are_added_in_any_order() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (x, y) = (numbers(1001), numbers(2002)[1001..].to_vec());
    let (at_x, at_y) = (bench.array(&x), bench.array(&y));
    for schedule in SCHEDULES {
        sim.set_schedule(schedule);
        let z = alloc(4 * 1001).expect("memory");
        let args = [Arg::Pointer(at_x), Arg::Pointer(at_y), Arg::Pointer(z), Arg::U32(1001)];
        bench.launch("add", (8, 128, 0), &args).expect("a launch");
        let z: Vec<f32> = bench.read(z, 1001);
        assert!(z.iter().zip(x.iter().zip(&y)).all(|(z, (x, y))| *z == x + y), "{schedule:?}");
    }
    assert_eq!(sim.calls("cuLaunchKernel"), 5);
    assert_eq!(sim.calls("kernel"), 5);
}

/// A tree over shared memory in a template; `SECOND` is the barrier that may be forgotten.
fn reduction(second: &str) -> String {
    format!(
        "template <u32 N> __device__ void reduce(const float* x, float* sums) {{
            __shared__ float part[N];
            part[threadIdx.x] = x[blockIdx.x * N + threadIdx.x];
            __syncthreads();
            for (u32 half = N / 2; half > 0; half /= 2) {{
                if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
                {second}
            }}
            if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
        }}
        KERNEL(128) sums(const float* x, float* sums) {{ reduce<128>(x, sums); }}"
    )
}

#[test]
fn a_missing_barrier_shows_in_some_order() {
    let sim = alone();
    let x = numbers(3 * 128);
    let expected: Vec<f32> = x.chunks(128).map(|block| block.iter().sum()).collect();
    let mut wrong = [0, 0];
    for (wrong, second) in wrong.iter_mut().zip(["__syncthreads();", ""]) {
        let bench = Bench::new(&reduction(second));
        let at = bench.array(&x);
        for schedule in SCHEDULES {
            sim.set_schedule(schedule);
            let sums = alloc(12).expect("memory");
            bench.launch("sums", (3, 128, 0), &[Arg::Pointer(at), Arg::Pointer(sums)]).expect("a launch");
            let sums: Vec<f32> = bench.read(sums, 3);
            *wrong += usize::from(sums.iter().zip(&expected).any(|(got, sum)| (got - sum).abs() > 1e-2));
        }
    }
    assert_eq!(wrong[0], 0, "right with all barriers");
    assert!(wrong[1] > 0, "without one, wrong in at least one order");
}

#[test]
fn lanes_exchange_values() {
    let (sim, bench) = (
        alone(),
        Bench::new(
            "template <class T> __device__ void all(T* out, T x) {
                out[threadIdx.x] = __shfl_xor_sync(~0u, x, 5);
                out[64 + threadIdx.x] = __shfl_down_sync(~0u, x, 3u);
                out[128 + threadIdx.x] = __shfl_sync(~0u, x, 7);
                out[192 + threadIdx.x] = __shfl_sync(~0u, x, 1, 8);
            }
            KERNEL(64) words(u32* out) { all(out, threadIdx.x * 3 + 1); }
            KERNEL(64) wide(unsigned long long* out) { all(out, (threadIdx.x * 3 + 1) * 0x100000001ull); }
            KERNEL(64) doubles(double* out) { all(out, threadIdx.x * 3 + 1.0); }
            KERNEL(64) votes(u32* out) {
                u32 odd = threadIdx.x & 1, mine = __ballot_sync(~0u, odd);
                out[threadIdx.x] = mine + __any_sync(~0u, threadIdx.x == 40) + 2 * __all_sync(~0u, threadIdx.x < 32);
            }",
        ),
    );
    let source = |i: usize, which: usize| {
        let (warp, lane) = (i / 32 * 32, i % 32);
        warp + [lane ^ 5, if lane + 3 < 32 { lane + 3 } else { lane }, 7, lane / 8 * 8 + 1][which]
    };
    let expected: Vec<u32> = (0..256).map(|i| source(i % 64, i / 64) as u32 * 3 + 1).collect();
    for schedule in SCHEDULES {
        sim.set_schedule(schedule);
        let (words, wide, doubles) = (alloc(1024), alloc(2048), alloc(2048));
        let [words, wide, doubles] = [words, wide, doubles].map(|at| at.expect("memory"));
        for (name, at) in [("words", words), ("wide", wide), ("doubles", doubles)] {
            bench.launch(name, (1, 64, 0), &[Arg::Pointer(at)]).expect("a launch");
        }
        assert_eq!(bench.read::<u32>(words, 256), expected, "{schedule:?}");
        assert!(bench.read::<u64>(wide, 256).iter().zip(&expected).all(|(a, b)| *a == u64::from(*b) * 0x1_0000_0001));
        assert!(bench.read::<f64>(doubles, 256).iter().zip(&expected).all(|(a, b)| *a == f64::from(*b)));
        bench.launch("votes", (1, 64, 0), &[Arg::Pointer(words)]).expect("a launch");
        let votes: Vec<u32> = bench.read(words, 64);
        assert!(votes[..32].iter().all(|&vote| vote == 0xaaaa_aaaa + 2), "{votes:?}");
        assert!(votes[32..].iter().all(|&vote| vote == 0xaaaa_aaaa + 1), "{votes:?}");
    }
}

#[test]
fn fragments_of_the_tensor_cores_lie_as_defined() {
    // PTX ISA, mma.m16n8k16: a[row][k] row-major and b[column][k] as they lie in memory.
    let (sim, bench) = (
        alone(),
        Bench::new(
            "KERNEL(32) product(const u32* a, const u32* b, float* d, u32 bf16) {
                u32 g = threadIdx.x / 4, q = threadIdx.x % 4;
                u32 x[4] = {a[g * 8 + q], a[(g + 8) * 8 + q], a[g * 8 + q + 4], a[(g + 8) * 8 + q + 4]};
                u32 y[2] = {b[g * 8 + q], b[g * 8 + q + 4]};
                float z[4] = {1, 2, 3, 4};
                simt_mma_16816(z, x, y, bf16);
                d[g * 8 + 2 * q] = z[0] - 1; d[g * 8 + 2 * q + 1] = z[1] - 2;
                d[(g + 8) * 8 + 2 * q] = z[2] - 3; d[(g + 8) * 8 + 2 * q + 1] = z[3] - 4;
            }",
        ),
    );
    let values =
        |count: u32, seed: u32| -> Vec<f32> { (0..count).map(|i| ((i * 7919 + seed) % 31) as f32 - 15.0).collect() };
    let (a, b) = (values(256, 3), values(128, 11));
    let expected: Vec<f32> = (0..128).map(|i| (0..16).map(|k| a[i / 8 * 16 + k] * b[i % 8 * 16 + k]).sum()).collect();
    for bf16 in [0, 1] {
        let halves = |values: &[f32]| -> Vec<u16> {
            let half = |&x: &f32| if bf16 == 1 { (x.to_bits() >> 16) as u16 } else { half_bits(x) };
            values.iter().map(half).collect()
        };
        let (at_a, at_b) = (bench.array(&halves(&a)), bench.array(&halves(&b)));
        for schedule in SCHEDULES {
            sim.set_schedule(schedule);
            let d = alloc(512).expect("memory");
            let args = [Arg::Pointer(at_a), Arg::Pointer(at_b), Arg::Pointer(d), Arg::U32(bf16)];
            bench.launch("product", (1, 32, 0), &args).expect("a launch");
            assert_eq!(bench.read::<f32>(d, 128), expected, "bf16 {bf16}, {schedule:?}");
        }
    }
}

/// IEEE half precision of a small whole number.
fn half_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x == 0.0 {
        0
    } else {
        ((bits >> 16) & 0x8000 | (((bits >> 23) & 0xff) - 112) << 10 | (bits >> 13) & 0x3ff) as u16
    }
}

#[test]
fn collectives_that_not_all_reach_are_reported() {
    let sim = alone();
    let cases = [
        (
            "if (threadIdx.x < 64) __syncthreads();\n else\n __syncthreads();",
            "divergent barrier: __syncthreads at test.cu:6",
        ),
        ("if (threadIdx.x < 16) x[0] = __shfl_xor_sync(~0u, x[1], 1);", "returned while lanes 0000ffff"),
        ("if (threadIdx.x < 16) return;\n __syncwarp();", "lanes 0000ffff have returned"),
        ("x[0] = __shfl_xor_sync(0xffffu, x[1], 1);", "only the full mask"),
        (
            "if (threadIdx.x < 16) __syncwarp(); else __syncthreads();",
            "__syncwarp at test.cu:4 reached by lanes 0000ffff",
        ),
    ];
    for (body, expected) in cases {
        let bench = Bench::new(&format!("KERNEL(128) uneven(float* x) {{\n{body}\n}}"));
        let x = bench.array(&[0f32, 0.0]);
        bench.launch("uneven", (1, 128, 0), &[Arg::Pointer(x)]).expect("a launch");
        let code = bench.synchronize();
        let report = sim.last_report();
        assert!(report.starts_with("kernel uneven, block (0,0,0), thread ("), "{report}");
        assert!(report.contains(expected), "{body}: {report}");
        assert_eq!(code, Err(719), "{body}");
    }
}

#[test]
fn threads_that_return_do_not_hold_up_a_barrier() {
    let (sim, bench) = (
        alone(),
        Bench::new(
            "KERNEL(128) early(u32* x, u32 n) {
        if (threadIdx.x >= n) return;
        x[threadIdx.x] = threadIdx.x;
        __syncthreads();
        u32 next = x[(threadIdx.x + 1) % n];
        __syncthreads();
        x[threadIdx.x] = next;
    }",
        ),
    );
    for schedule in SCHEDULES {
        sim.set_schedule(schedule);
        let x = alloc(4 * 50).expect("memory");
        bench.launch("early", (1, 128, 0), &[Arg::Pointer(x), Arg::U32(50)]).expect("a launch");
        assert_eq!(bench.read::<u32>(x, 50), (0..50).map(|i| (i + 1) % 50).collect::<Vec<_>>(), "{schedule:?}");
    }
}

#[test]
fn accesses_outside_of_memory_are_reported_and_lose_the_context() {
    let sim = alone();
    let source = "
KERNEL(32) store(float* x, u32 at) { x[at] = 1; }
KERNEL(32) load(float* x, u32 at) { x[0] = x[at]; }
KERNEL(32) shared(float* x, u32 at) { __shared__ float part[8]; part[at] = x[0]; x[1] = part[at]; }
KERNEL(32) dynamic(float* x, u32 at) { SHARED_DYNAMIC(float, part); part[at] = x[0]; x[1] = part[at]; }
KERNEL(32) unaligned(float* x, u32 at) { *(uint4*)(x + at) = make_uint4(1, 2, 3, 4); }
KERNEL(32) divide(u32* x, u32 by) { x[0] = 7 / by; }
KERNEL(32) deep(float* x, u32 n) { float many[20000]; for (u32 i = 0; i < n; i++) many[i] = x[i % 2]; x[0] = many[n / 2]; }
";
    let cases = [
        ("store", 8, 0, Err(700), "test.cu:4: write to"),
        ("store", 8, 0, Err(700), "0 bytes behind an allocation of 32 bytes"),
        ("load", 8, 0, Err(700), "test.cu:5: read of"),
        ("store", 7, 0, Ok(()), ""),
        ("shared", 8, 0, Err(716), "test.cu:6: misaligned address, index outside of an array"),
        ("shared", 7, 0, Ok(()), ""),
        ("dynamic", 4, 16, Err(700), "test.cu:7: write to"),
        ("dynamic", 3, 16, Ok(()), ""),
        ("unaligned", 1, 0, Err(716), "test.cu:8: misaligned address"),
        ("unaligned", 4, 0, Ok(()), ""),
        ("divide", 0, 0, Err(716), "test.cu:9"),
        ("deep", 19999, 0, Err(700), "kernel deep"),
    ];
    for (name, at, shared, expected, text) in cases {
        let bench = Bench::new(source);
        let x = bench.array(&[0f32; 8]);
        bench.launch(name, (2, 32, shared), &[Arg::Pointer(x), Arg::U32(at)]).expect("a launch");
        let (code, report) = (bench.synchronize(), sim.last_report());
        assert_eq!(code, expected, "{name} at {at}: {report}");
        if expected.is_ok() {
            continue;
        }
        assert!(report.starts_with(&format!("kernel {name}, block (0,0,0), thread (0,0,0)")), "{report}");
        assert!(report.contains(text), "{name}: {report}");
        // Lost for good: everything says so until the context is reset, which `Bench` does.
        assert_eq!(alloc(16), expected.map(|()| 0), "{name}");
        assert_eq!(bench.launch(name, (1, 32, 0), &[Arg::Pointer(x), Arg::U32(0)]), expected, "{name}");
    }
    let bench = Bench::new(source);
    let x = bench.array(&[2f32; 8]);
    bench.launch("load", (1, 32, 0), &[Arg::Pointer(x), Arg::U32(7)]).expect("a launch");
    assert_eq!(bench.read::<f32>(x, 1), [2.0]);
}

#[test]
fn an_endless_loop_is_broken_off() {
    let (sim, bench) = (alone(), Bench::new("KERNEL(32) endless(float* x) { while (*(volatile float*)x == 0) {} }"));
    sim.set_seconds(1);
    let x = bench.array(&[0f32]);
    bench.launch("endless", (1, 32, 0), &[Arg::Pointer(x)]).expect("a launch");
    assert_eq!(bench.synchronize(), Err(719));
    assert!(sim.last_report().contains("test.cu:3: runs for too long"), "{}", sim.last_report());
}

#[test]
fn memory_that_nobody_wrote_is_not_a_number() {
    let (_sim, bench) = (
        alone(),
        Bench::new(
            "KERNEL(32) fresh(const float* x, float* y) {
        __shared__ float part[32];
        SHARED_DYNAMIC(float, more);
        if (threadIdx.x == 99) part[0] = more[0] = 1;
        y[threadIdx.x] = part[threadIdx.x];
        y[32 + threadIdx.x] = more[threadIdx.x];
        y[64 + threadIdx.x] = x[threadIdx.x];
    }",
        ),
    );
    let (x, y) = (alloc(128).expect("memory"), bench.array(&[0f32; 96]));
    bench.launch("fresh", (3, 32, 128), &[Arg::Pointer(x), Arg::Pointer(y)]).expect("a launch");
    assert!(bench.read::<f32>(y, 96).iter().all(|y| y.is_nan()));
}

#[test]
fn what_is_written_around_memory_is_found() {
    let (sim, bench) = (
        alone(),
        Bench::new(
            "KERNEL(32) before(float* x) { x[-1] = 1; }
        KERNEL(32) far(float* x) { x[-20] = 1; }
        KERNEL(32) behind(unsigned char* x) { x[3] = 1; }",
        ),
    );
    let small = alloc(3).expect("memory");
    bench.launch("behind", (1, 32, 0), &[Arg::Pointer(small)]).expect("a launch");
    assert_eq!(bench.synchronize(), Err(700));
    assert!(sim.last_report().contains("byte 0 behind their end was written (found at cuStreamSynchronize)"));
    drop(bench);
    let bench = Bench::new("KERNEL(32) before(float* x, u32 by) { x[-(int)by] = 1; }");
    for (by, at_synchronize) in [(1, Err(700)), (20, Ok(()))] {
        let bench =
            if by == 1 { &bench } else { &Bench::new("KERNEL(32) before(float* x, u32 by) { x[-(int)by] = 1; }") };
        let x = alloc(64).expect("memory");
        bench.launch("before", (1, 32, 0), &[Arg::Pointer(x), Arg::U32(by)]).expect("a launch");
        assert_eq!(bench.synchronize(), at_synchronize, "{by}");
        if by == 20 {
            // SAFETY: the memory is not used afterwards.
            assert_eq!(call(unsafe { sys::cuMemFree_v2(x) }), Err(700), "all of the zone is looked at");
        }
        assert!(sim.last_report().contains("in front of them was written"));
        // SAFETY: nothing of the context is used afterwards.
        unsafe { call(sys::cuDevicePrimaryCtxReset_v2(0)).expect("reset") };
    }
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

#[test]
fn a_graph_repeats_what_was_captured() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (source, result) = (pinned(&[1.0, 2.0, 3.0]), pinned(&[0.0; 3]));
    let (x, y) = (alloc(12).expect("memory"), alloc(12).expect("memory"));
    let work = || {
        let stream = bench.stream;
        // SAFETY: pinned memory of three values on both sides, which lives until the end.
        unsafe { call(sys::cuMemcpyHtoDAsync_v2(x, source.cast(), 12, stream)) }.expect("a copy");
        // SAFETY: memory of three values.
        unsafe { call(sys::cuMemsetD32Async(y, 10f32.to_bits(), 3, stream)) }.expect("a fill");
        bench.launch("scale", (1, 128, 0), &[Arg::Pointer(x), Arg::U32(3), Arg::U32(2)]).expect("a launch");
        let args = [Arg::Pointer(x), Arg::Pointer(y), Arg::Pointer(y), Arg::U32(3)];
        bench.launch("add", (1, 128, 0), &args).expect("a launch"); // the arguments are gone when it runs
        // SAFETY: as above.
        unsafe { call(sys::cuMemcpyDtoHAsync_v2(result.cast(), y, 12, stream)) }.expect("a copy");
    };
    // SAFETY: nothing writes to it while it is read.
    let values = || unsafe { [result.read(), result.add(1).read(), result.add(2).read()] };
    work();
    bench.synchronize().expect("done");
    assert_eq!(values(), [12.0, 14.0, 16.0]);
    let graph = capture(bench.stream, work).expect("a graph");
    assert_eq!((values(), sim.calls("kernel")), ([12.0, 14.0, 16.0], 2), "captured, not run");
    for first in [5.0, 7.0] {
        // SAFETY: no copy is queued that would read it now.
        unsafe { source.write(first) };
        // SAFETY: the graph and its memory live.
        unsafe { call(sys::cuGraphLaunch(graph, bench.stream)) }.expect("a launch");
        bench.synchronize().expect("done");
        assert_eq!(values(), [10.0 + 2.0 * first, 14.0, 16.0]);
    }
    assert_eq!((sim.calls("kernel"), sim.calls("cuGraphLaunch"), sim.calls("cuLaunchKernel")), (6, 2, 4));
    // Memory of a graph that was freed is missed when it runs, not used.
    // SAFETY: freed on purpose; the software device looks before it reads.
    unsafe {
        call(sys::cuMemFree_v2(y)).expect("freed");
        call(sys::cuGraphLaunch(graph, bench.stream)).expect("a launch");
    }
    assert_eq!(bench.synchronize(), Err(700));
}

#[test]
fn a_capture_allows_nothing_that_waits_or_allocates() {
    let (_sim, bench) = (alone(), Bench::new(ADD));
    let (x, done) = (bench.array(&[1f32]), event());
    type Forbidden<'a> = (&'a str, &'a dyn Fn() -> Result<(), u32>, u32);
    let forbidden: [Forbidden; 6] = [
        ("an allocation", &|| alloc(16).map(|_| ()), 900),
        // SAFETY: memory of the test.
        ("a free", &|| call(unsafe { sys::cuMemFree_v2(x) }), 900),
        ("waiting for the stream", &|| bench.synchronize(), 900),
        // SAFETY: takes nothing.
        ("waiting for the device", &|| call(unsafe { sys::cuCtxSynchronize() }), 900),
        // SAFETY: room for one value.
        ("a copy", &|| call(unsafe { sys::cuMemcpyDtoH_v2([0f32].as_mut_ptr().cast(), x, 4) }), 900),
        // SAFETY: handles that live.
        ("a wait for work outside", &|| call(unsafe { sys::cuStreamWaitEvent(bench.stream, done, 0) }), 905),
    ];
    let other = stream();
    // SAFETY: handles that live.
    call(unsafe { sys::cuEventRecord(done, other) }).expect("recorded");
    for (what, act, code) in forbidden {
        let captured = capture(bench.stream, || assert_eq!(act(), Err(code), "{what}"));
        assert_eq!(captured.err(), Some(901), "{what}");
    }
    capture(bench.stream, || ()).expect("and the stream can be captured again");
}

#[test]
fn another_stream_joins_a_capture_by_events() {
    let (_sim, bench) = (alone(), Bench::new(ADD));
    let (x, other) = (bench.array(&[3f32]), stream());
    let [fork, join] = [event(), event()];
    let scale = |stream| {
        bench.launch_on(stream, "scale", (1, 128, 0), &[Arg::Pointer(x), Arg::U32(1), Arg::U32(2)]).expect("a launch");
    };
    // SAFETY: handles that live.
    let edge = |from, event, to| unsafe {
        call(sys::cuEventRecord(event, from)).expect("recorded");
        call(sys::cuStreamWaitEvent(to, event, 0)).expect("a wait");
    };
    let left_open = capture(bench.stream, || {
        edge(bench.stream, fork, other);
        scale(other);
    });
    assert_eq!(left_open.err(), Some(904));
    let graph = capture(bench.stream, || {
        edge(bench.stream, fork, other);
        scale(other);
        edge(other, join, bench.stream);
        scale(bench.stream);
    });
    // SAFETY: the graph and its memory live.
    unsafe { call(sys::cuGraphLaunch(graph.expect("a graph"), bench.stream)) }.expect("a launch");
    assert_eq!(bench.read::<f32>(x, 1), [12.0]);
}

#[test]
fn work_is_late_so_that_a_missing_wait_shows() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (x, host) = (bench.array(&[4f32]), pinned(&[-1.0]));
    let give = || {
        bench.launch("scale", (1, 128, 0), &[Arg::Pointer(x), Arg::U32(1), Arg::U32(2)]).expect("a launch");
        // SAFETY: pinned memory of one value, which lives.
        call(unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), x, 4, bench.stream) }).expect("a copy");
    };
    // SAFETY: nothing writes to it while it is read: all work is done in calls of this thread.
    let seen = || unsafe { host.read() };
    give();
    assert_eq!(seen(), -1.0, "not waited for");
    // SAFETY: the stream lives.
    let query = || call(unsafe { sys::cuStreamQuery(bench.stream) });
    assert_eq!((query(), seen()), (Err(600), -1.0));
    assert_eq!((query(), seen()), (Ok(()), 8.0));
    sim.set_streams(Streams::Now);
    give();
    assert_eq!(seen(), 16.0);
    assert_eq!(sim.calls("pageable copy"), 1, "only that of `Bench::array`");
    let mut pageable = [0f32];
    // SAFETY: room for one value until the stream is waited for.
    call(unsafe { sys::cuMemcpyDtoHAsync_v2(pageable.as_mut_ptr().cast(), x, 4, bench.stream) }).expect("a copy");
    bench.synchronize().expect("done");
    assert_eq!((pageable, sim.calls("pageable copy")), ([16.0], 2));
}

#[test]
fn events_order_streams() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (first, second) = (bench.stream, stream());
    for (streams, ordered, expected) in [
        (Streams::Late, true, 10.0),
        (Streams::Late, false, 1.0),
        (Streams::OthersFirst, true, 10.0),
        (Streams::OthersFirst, false, 10.0),
    ] {
        sim.set_streams(streams);
        let [x, y] = [1f32, 0.0].map(|value| bench.array(&[value]));
        let done = event();
        bench.launch_on(first, "scale", (1, 128, 0), &[Arg::Pointer(x), Arg::U32(1), Arg::U32(10)]).expect("a launch");
        // SAFETY: handles and memory that live.
        unsafe {
            call(sys::cuEventRecord(done, first)).expect("recorded");
            if ordered {
                call(sys::cuStreamWaitEvent(second, done, 0)).expect("a wait");
            }
            call(sys::cuMemcpyDtoDAsync_v2(y, x, 4, second)).expect("a copy");
            call(sys::cuStreamSynchronize(second)).expect("done");
        }
        assert_eq!(bench.read::<f32>(y, 1), [expected], "{streams:?}, ordered: {ordered}");
    }
    let [start, end] = [event(), event()];
    let mut milliseconds = -1.0;
    // SAFETY: handles that live; one number is written.
    unsafe {
        call(sys::cuEventRecord(start, first)).expect("recorded");
        call(sys::cuEventRecord(end, first)).expect("recorded");
        assert_eq!(call(sys::cuEventElapsedTime_v2(&mut milliseconds, start, end)), Err(600));
        assert_eq!(call(sys::cuEventQuery(end)), Err(600));
        call(sys::cuEventSynchronize(end)).expect("done");
        assert_eq!(call(sys::cuEventQuery(end)), Ok(()));
        call(sys::cuEventElapsedTime_v2(&mut milliseconds, start, end)).expect("a time");
    }
    assert!((0.0..1e4).contains(&milliseconds));
}

#[test]
fn calls_fail_when_the_test_asks_for_it() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let x = bench.array(&[1f32]);
    let scale = || bench.launch("scale", (1, 128, 0), &[Arg::Pointer(x), Arg::U32(1), Arg::U32(2)]);
    sim.fail("cuMemAlloc", 2, 2);
    assert!(alloc(16).is_ok());
    assert_eq!(alloc(16), Err(2));
    assert!(alloc(16).is_ok(), "once");
    sim.fail("cuLaunchKernel", 1, 701);
    assert_eq!((scale(), scale()), (Err(701), Ok(())), "the context lives on");
    sim.fail("kernel", 2, 719);
    scale().expect("a launch");
    assert_eq!(bench.synchronize(), Err(719), "the second that runs");
    assert_eq!(sim.last_report(), "kernel scale: made to fail by the test");
    assert_eq!(alloc(16), Err(719));
    drop(bench);
    let bench = Bench::new(ADD);
    sim.fail("cuStreamSynchronize", 1, 700);
    assert_eq!(bench.synchronize(), Err(700));
    assert_eq!(alloc(16), Err(700));
}

#[test]
fn a_lost_device_is_lost_until_it_is_reset() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (x, done) = (bench.array(&[1f32]), event());
    let scale = |bench: &Bench| bench.launch("scale", (1, 128, 0), &[Arg::Pointer(x), Arg::U32(1), Arg::U32(2)]);
    sim.lose(0, 999);
    assert_eq!((scale(&bench), alloc(16), bench.synchronize()), (Err(999), Err(999), Err(999)));
    let (context, old) = (bench.context, bench.stream);
    drop(bench);
    assert_eq!(["memory", "stream", "event", "module", "context"].map(|what| sim.live(what)), [0; 5]);
    let bench = Bench::new(ADD);
    assert_ne!(bench.context, context);
    // SAFETY: stale on purpose: the software device knows its handles.
    unsafe {
        assert_eq!(call(sys::cuCtxSetCurrent(context)), Err(201));
        assert_eq!(call(sys::cuStreamSynchronize(old)), Err(400));
        assert_eq!(call(sys::cuEventQuery(done)), Err(400));
        assert_eq!(call(sys::cuMemFree_v2(x)), Err(1));
    }
    scale(&bench).expect("a launch");
    assert_eq!(bench.synchronize(), Err(700), "a pointer into memory of the old context");
    assert!(sim.last_report().contains("argument 0 points to memory of another context"), "{}", sim.last_report());
}

#[test]
fn two_devices_have_nothing_in_common() {
    let sim = alone();
    sim.set_devices(2);
    let bench = Bench::new(ADD);
    let x = bench.array(&[1f32]);
    let mut other = null_mut();
    // SAFETY: writes one handle; contexts that live are made current.
    unsafe {
        call(sys::cuDevicePrimaryCtxRetain(&mut other, 1)).expect("a context");
        call(sys::cuCtxSetCurrent(other)).expect("current");
    }
    let (y, stream) = (alloc(4).expect("memory"), stream());
    // SAFETY: what belongs to the other context is refused, which is what is tested.
    unsafe {
        assert_eq!(call(sys::cuMemcpyDtoDAsync_v2(y, x, 4, stream)), Err(1));
        assert_eq!(call(sys::cuStreamSynchronize(bench.stream)), Err(400));
        assert_eq!(call(sys::cuMemFree_v2(x)), Err(1));
        sim.lose(1, 700);
        assert_eq!(call(sys::cuStreamSynchronize(stream)), Err(700));
        call(sys::cuCtxSetCurrent(bench.context)).expect("current");
    }
    let scale = |at| bench.launch("scale", (1, 128, 0), &[Arg::Pointer(at), Arg::U32(1), Arg::U32(2)]);
    scale(x).expect("a launch");
    assert_eq!(bench.read::<f32>(x, 1), [2.0], "the other device works on");
    scale(y).expect("a launch");
    assert_eq!(bench.synchronize(), Err(700));
    assert_eq!(sim.last_report(), "kernel scale: argument 0 points to memory of another context");
    // SAFETY: nothing of it is used afterwards.
    call(unsafe { sys::cuDevicePrimaryCtxReset_v2(1) }).expect("reset");
}

#[test]
fn memory_ends_where_it_is_said_to() {
    let sim = alone();
    sim.set_memory(1 << 20);
    let _bench = Bench::new(ADD);
    let info = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        call(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }).expect("numbers");
        (free, total)
    };
    let x = alloc(1 << 19).expect("half of it");
    assert_eq!(info(), (1 << 19, 1 << 20));
    assert_eq!(alloc((1 << 19) + 1), Err(2));
    let y = alloc(1 << 19).expect("the other half");
    // SAFETY: not used afterwards, but for the second free, which is refused.
    unsafe {
        call(sys::cuMemFree_v2(x)).expect("freed");
        call(sys::cuMemFree_v2(y)).expect("freed");
        assert_eq!(call(sys::cuMemFree_v2(y)), Err(1));
    }
    assert_eq!((info(), sim.live("memory")), ((1 << 20, 1 << 20), 0));
}

#[test]
fn pinned_memory_is_not_freed_under_a_copy() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (x, host) = (bench.array(&[1f32]), pinned(&[2.0]));
    // SAFETY: freed too early on purpose, which is refused; the copy then runs before it is freed.
    unsafe {
        call(sys::cuMemcpyHtoDAsync_v2(x, host.cast(), 4, bench.stream)).expect("a copy");
        assert_eq!(call(sys::cuMemFreeHost(host.cast())), Err(1));
        assert!(sim.last_report().contains("a queued cuMemcpyHtoDAsync uses"));
        bench.synchronize().expect("done");
        call(sys::cuMemFreeHost(host.cast())).expect("freed");
    }
    // SAFETY: a range that is too long by one byte, which is refused.
    let long = unsafe { call(sys::cuMemcpyDtoDAsync_v2(x, x, 5, bench.stream)) };
    assert_eq!(long, Err(1));
    assert_eq!(bench.read::<f32>(x, 1), [2.0]);
}

#[test]
fn launches_are_checked() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let x = bench.array(&[1f32]);
    let scale = |size| bench.launch("scale", size, &[Arg::Pointer(x), Arg::U32(1), Arg::U32(2)]);
    assert_eq!(scale((1, 256, 0)), Err(1), "more threads than it says");
    assert_eq!(scale((0, 128, 0)), Err(1));
    assert_eq!(scale((1, 128, 49 << 10)), Err(1), "more shared memory than it may");
    assert_eq!(bench.launch("missing", (1, 128, 0), &[]), Err(500));
    assert_eq!(sim.calls("kernel"), 0);
    let error = compile("KERNEL(32) broken(float* x) { x[0] = nothing; }").expect_err("it does not compile");
    assert!(error.contains("test.cu:3") && error.contains("nothing"), "{error}");
}

#[test]
fn products_of_matrices_are_those_of_the_definition() {
    let (sim, bench) = (alone(), Bench::new(ADD));
    let (m, n, k) = (37, 5, 70);
    let halves = |values: &[f32]| values.iter().map(|x| (x.to_bits() >> 16) as u16).collect::<Vec<u16>>();
    let exact = |values: Vec<f32>| -> Vec<f32> { values.iter().map(|x| x.round()).collect() };
    let (a, b, c) = (exact(numbers(m * k)), exact(numbers(n * k)), exact(numbers(m * n)));
    let (at_a, at_b, at_d) = (bench.array(&halves(&a)), bench.array(&halves(&b)), bench.array(&c));
    let scratch = alloc(1 << 16).expect("memory");
    // a as m rows of k values, b as n rows of k values, d as n rows of m values: column-major, a transposed.
    let layout = |kind, rows, columns| {
        blas::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64).expect("a layout")
    };
    use blas_sys::cudaDataType::{CUDA_R_16BF, CUDA_R_32F};
    let [la, lb, ld] = [layout(CUDA_R_16BF, k, m), layout(CUDA_R_16BF, k, n), layout(CUDA_R_32F, m, n)];
    let product = || {
        let handle = blas::create_handle().expect("a handle");
        let what =
            blas::create_matmul_desc(blas_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F).expect("a product");
        let preference = blas::create_matmul_pref().expect("a preference");
        let (transposed, room) = (1i32, 1usize << 16);
        let (alpha, beta) = (2f32, 3f32);
        // SAFETY: handles that live, sizes of the arrays above.
        unsafe {
            use blas_sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            use blas_sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            blas::set_matmul_desc_attribute(what, CUBLASLT_MATMUL_DESC_TRANSA, (&raw const transposed).cast(), 4)
                .expect("set");
            blas::set_matmul_pref_attribute(
                preference,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const room).cast(),
                8,
            )
            .expect("set");
            let found =
                blas::get_matmul_algo_heuristic(handle, what, la, lb, ld, ld, preference).expect("an algorithm");
            let (alpha, beta) = ((&raw const alpha).cast(), (&raw const beta).cast());
            let (pa, pb, pd) = (at_a as *const c_void, at_b as *const c_void, at_d as *mut c_void);
            let (algorithm, scratch) = (&raw const found.algo, scratch as *mut c_void);
            let stream = bench.stream.cast();
            blas::matmul(handle, what, alpha, beta, pa, la, pb, lb, pd, ld, pd, ld, algorithm, scratch, room, stream)
                .expect("a product");
        }
    };
    let expected = |c: &[f32]| -> Vec<f32> {
        (0..m * n)
            .map(|i| 2.0 * (0..k).map(|l| a[i % m * k + l] * b[i / m * k + l]).sum::<f32>() + 3.0 * c[i])
            .collect()
    };
    product();
    let once = expected(&c);
    assert_eq!(bench.read::<f32>(at_d, m * n), once);
    let graph = capture(bench.stream, product).expect("a graph");
    // SAFETY: the graph and its memory live.
    unsafe { call(sys::cuGraphLaunch(graph, bench.stream)) }.expect("a launch");
    assert_eq!(bench.read::<f32>(at_d, m * n), expected(&once), "captured too");
    assert_eq!(sim.calls("cublasLtMatmul"), 2);
}

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
