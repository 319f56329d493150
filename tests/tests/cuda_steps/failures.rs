//! Every call of the driver fails once, in every phase: the answer is an error of the right kind, nothing is left over, and
//! what comes afterwards is right.

use crate::rig::{Random, Texts, all_needs, alone_on, executor, grid, model, options, sizes};
use std::collections::BTreeMap;
use tokenrouter_core::executor::{Draw, Executor, ExecutorError, Step};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_gpu::cuda::GraphGrid;
use tokenrouter_gpu::load::{AnyRunner, Device, LoadError, LoadedModel, load_files};
use tokenrouter_tests::conformance::{demo, open};
use tokenrouter_tests::cuda_sim::CudaSim;

/// Everything that an executor may call, but for `cuDevicePrimaryCtxRelease`: nobody can do anything about it, and the next
/// process starts afresh.
const CALLS: [&str; 33] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuMemGetInfo",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemsetD8Async",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "kernel",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
];

/// An invalid value, which a context survives, and an unknown error, which it does not.
const CODES: [i32; 2] = [1, 999];

/// Phases of an executor's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Load,
    Warm,
    Steps,
    Drop,
}

/// The model, its steps, and what they say when nothing fails.
struct Rig {
    device: fn() -> Device,
    steps: Vec<Step>,
    expected: Vec<String>,
}

fn load(rig: &Rig) -> Result<LoadedModel, LoadError> {
    load_files(&open(&demo("small")), &sizes((rig.device)()), &mut |_| ())
}

fn played() -> Device {
    alone_on(options(GraphGrid::new(vec![2], vec![2]), true))
}

fn given() -> Device {
    alone_on(options(GraphGrid::default(), true))
}

/// The answer to each step, or the first error.
fn answers(runner: &mut AnyRunner, steps: &[Step]) -> Result<Vec<String>, ExecutorError> {
    steps.iter().map(|step| Ok(format!("{:?}", runner.step(step)?))).collect()
}

/// An executor after something failed. What was lost by a call that belongs to no context is noticed at the next try.
fn again(loaded: &LoadedModel) -> Result<AnyRunner, String> {
    loaded.executor().or_else(|_| loaded.executor()).map_err(|error| format!("no executor afterwards: {error}"))
}

impl Rig {
    fn new(device: fn() -> Device, random: &mut Random) -> Rig {
        let texts = Texts::new(random, 2);
        let params = SamplingParams { logit_bias: vec![(5, 2.0)], ..SamplingParams::default() };
        let biased = Draw { params: params.into(), ..all_needs() };
        // More changes than there is room for: it grows.
        let many = SamplingParams { logit_bias: (0..400).map(|id| (id, 0.5)).collect(), ..SamplingParams::default() };
        let many = Draw { params: many.into(), ..all_needs() };
        let steps = vec![
            texts.step(&[(0, 0..12), (1, 0..7)], &all_needs()),
            texts.step(&[(0, 12..13), (1, 7..9)], &biased),
            texts.step(&[(0, 13..15)], &all_needs()),
            texts.step(&[(1, 9..10)], &many),
            texts.step(&[(0, 15..16), (1, 10..11)], &all_needs()),
        ];
        let mut rig = Rig { device, steps, expected: Vec::new() };
        let loaded = load(&rig).unwrap();
        rig.expected = answers(&mut executor(&loaded), &rig.steps).unwrap();
        rig
    }

    /// Calls of each phase of a life in which nothing fails.
    fn counts(&self, sim: &CudaSim) -> BTreeMap<(Phase, &'static str), u64> {
        let mut counts = BTreeMap::new();
        let mut count = |phase| {
            counts.extend(CALLS.iter().map(|&call| ((phase, call), sim.calls(call))));
            sim.reset_counters();
        };
        sim.reset_counters();
        let loaded = load(self).unwrap();
        count(Phase::Load);
        let mut runner = executor(&loaded);
        count(Phase::Warm);
        answers(&mut runner, &self.steps).unwrap();
        count(Phase::Steps);
        drop((runner, loaded));
        count(Phase::Drop);
        counts
    }

    /// A life in which a call of a phase fails.
    fn live(&self, sim: &CudaSim, phase: Phase, failure: Failure) -> Result<(), String> {
        let arm = |now| {
            if now == phase {
                sim.reset_counters();
                sim.fail(failure.call, failure.nth, failure.code);
            }
        };
        arm(Phase::Load);
        let loaded = match load(self) {
            Ok(loaded) => loaded,
            Err(error) => return failure.told(&error.to_string()),
        };
        arm(Phase::Warm);
        let mut runner = match loaded.executor() {
            Ok(runner) => runner,
            Err(error) => {
                failure.told(&error.to_string())?;
                return self.is_right(&mut again(&loaded)?);
            }
        };
        arm(Phase::Steps);
        match answers(&mut runner, &self.steps) {
            Ok(found) if found == self.expected => {}
            Ok(found) => return Err(format!("wrong answers: {found:?}")),
            Err(ExecutorError::Step(reason)) => {
                if failure.code != CODES[0] {
                    return Err(format!("the device is lost, not only the step: {reason}"));
                }
                failure.told(&reason)?;
                self.is_right(&mut runner)?;
            }
            Err(ExecutorError::Lost(reason)) => {
                if failure.code == CODES[0] {
                    return Err(format!("the device is not lost: {reason}"));
                }
                failure.told(&reason)?;
                drop(runner);
                return self.is_right(&mut again(&loaded)?);
            }
        }
        arm(Phase::Drop);
        drop(runner);
        self.is_right(&mut again(&loaded)?)
    }

    fn is_right(&self, runner: &mut AnyRunner) -> Result<(), String> {
        match answers(runner, &self.steps) {
            Ok(found) if found == self.expected => Ok(()),
            Ok(found) => Err(format!("wrong answers afterwards: {found:?}")),
            Err(error) => Err(format!("no answers afterwards: {error}")),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Failure {
    call: &'static str,
    nth: u32,
    code: i32,
}

impl Failure {
    /// Whether the error says what failed: the call, or the kernel that was launched, and how.
    fn told(&self, error: &str) -> Result<(), String> {
        let name = if self.code == CODES[0] { "CUDA_ERROR_INVALID_VALUE" } else { "CUDA_ERROR_UNKNOWN" };
        let says = error.contains(name) && !error.contains('\n');
        if says { Ok(()) } else { Err(format!("the error does not say what failed: {error}")) }
    }
}

/// Which of so many calls of a name fail, and how: the first in each way, the last or one between in either.
fn chosen(random: &mut Random, call: &'static str, count: u64) -> Vec<Failure> {
    // What a kernel does wrong loses its context.
    let codes = if call == "kernel" { &CODES[1..] } else { &CODES };
    let mut failures: Vec<Failure> = codes.iter().map(|&code| Failure { call, nth: 1, code }).collect();
    let between = 2 + random.below((count as u32).max(3) - 2);
    failures.push(Failure { call, nth: random.pick(&[between, (count as u32).max(2)]), code: random.pick(codes) });
    failures.retain(|failure| u64::from(failure.nth) <= count);
    failures
}

fn check(device: fn() -> Device, phases: &[Phase]) {
    const KINDS: [&str; 7] = ["memory", "pinned", "stream", "event", "module", "graph", "context"];
    let sim = CudaSim::alone().unwrap();
    let live = || KINDS.map(|what| sim.live(what));
    let (at_start, mut random) = (live(), Random::fresh());
    let rig = Rig::new(device, &mut random);
    let (mut lives, mut wrong) = (0, Vec::new());
    let counts = rig.counts(&sim).into_iter().filter(|((phase, _), _)| phases.contains(phase));
    for ((phase, call), count) in counts {
        for failure in chosen(&mut random, call, count) {
            if let Err(reason) = rig.live(&sim, phase, failure) {
                wrong.push(format!("{phase:?} {failure:?}: {reason}"));
            }
            sim.reset_counters();
            if live() != at_start {
                wrong.push(format!("{phase:?} {failure:?}: {KINDS:?} left over: {:?}, {at_start:?}", live()));
            }
            lives += 1;
        }
    }
    eprintln!("{lives} lives");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
    assert!(lives > 15 * phases.len(), "{lives}");
}

#[test]
fn any_call_may_fail_with_graphs() {
    check(played, &[Phase::Load, Phase::Warm, Phase::Steps, Phase::Drop]);
}

#[test]
fn any_call_may_fail_without_graphs() {
    check(given, &[Phase::Steps]);
}

/// What the calls above leave out is not called.
#[test]
fn no_other_calls_are_made() {
    let sim = CudaSim::alone().unwrap();
    let loaded = model("small", sizes(alone_on(options(grid(), false))));
    drop(executor(&loaded));
    for call in
        ["cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemHostAlloc", "cuMemAllocAsync", "cuCtxSynchronize", "cuEventCreate"]
    {
        assert_eq!(sim.calls(call), 0, "{call}: is it to fail as well?");
    }
}
