//! Devices and calls: failures on order, losses, several devices, launches that are refused.

use super::*;

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
