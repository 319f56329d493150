//! Memory: what is outside of it, what nobody wrote, where it ends.

use super::*;

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
