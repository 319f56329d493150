//! Streams, events and recorded work: what is late, what is ordered, what a recording allows.

use super::*;

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
