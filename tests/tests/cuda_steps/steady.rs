//! What steps cost once the executor is warm: counted calls of the driver.

use crate::rig::{Random, Texts, alone_on, executor, grid, model, options, sizes};
use std::sync::Arc;
use tokenrouter_core::constraint::Mask;
use tokenrouter_core::executor::{Draw, Executor, Needs, Step};
use tokenrouter_core::sampling::{SamplingParams, TokenCounts};
use tokenrouter_gpu::cuda::GraphGrid;
use tokenrouter_gpu::load::AnyRunner;
use tokenrouter_tests::cuda_sim::CudaSim;

/// Calls of a step: allocations, frees, registrations, copies that wait, copies up, launches, graphs, copies down, waits,
/// recordings.
fn count(sim: &CudaSim, runner: &mut AnyRunner, step: &Step) -> [u64; 9] {
    sim.reset_counters();
    runner.step(step).unwrap_or_else(|error| panic!("{error}"));
    let calls = |names: &[&str]| names.iter().map(|name| sim.calls(name)).sum::<u64>();
    [
        calls(&["cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc", "cuMemHostRegister", "cuModuleLoadData"]),
        calls(&["cuMemFree", "cuMemFreeAsync", "cuMemFreeHost", "cuMemHostUnregister", "cuModuleUnload"]),
        calls(&["cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpy", "pageable copy", "cuMemsetD8"]),
        calls(&["cuMemcpyHtoDAsync"]),
        calls(&["cuGraphLaunch"]),
        calls(&["cuMemcpyDtoHAsync"]),
        calls(&["cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"]),
        calls(&["cuStreamBeginCapture", "cuGraphInstantiateWithFlags"]),
        calls(&["cuLaunchKernel"]).min(1),
    ]
}

const PLAYED: [u64; 9] = [0, 0, 0, 1, 1, 1, 1, 0, 0];
const PLAYED_WITH_CHANGES: [u64; 9] = [0, 0, 0, 2, 1, 1, 1, 0, 0];
const GIVEN: [u64; 9] = [0, 0, 0, 1, 0, 1, 1, 0, 1];
const GIVEN_WITH_CHANGES: [u64; 9] = [0, 0, 0, 2, 0, 1, 1, 0, 1];

/// Everything that can be asked without changes to logits.
fn plain() -> Draw {
    let params = SamplingParams { temperature: 0.7, top_k: 9, top_p: 0.9, ..SamplingParams::default() };
    let needs = Needs { entropy: true, top_k: 4, hidden: false, score: false };
    Draw { params: Arc::new(params), needs, logprobs: Some(2), ..Draw::default() }
}

/// Draws that change logits, each in another way.
fn changed() -> Vec<Draw> {
    let bias = SamplingParams { logit_bias: vec![(3, 1.5), (9, -2.0)], ..SamplingParams::default() };
    let penalty = SamplingParams { repetition_penalty: 1.2, ..SamplingParams::default() };
    let history = Some(Arc::new(TokenCounts::of(&[5, 6, 7, 5], 2)));
    vec![
        Draw { params: Arc::new(bias), ..Draw::default() },
        Draw { params: Arc::new(penalty), history, ..Draw::default() },
        Draw { banned: Arc::from([0, 4]), ..Draw::default() },
        Draw { mask: Some(Mask::of(&[1, 2, 3, 40, 500])), ..Draw::default() },
    ]
}

#[test]
fn a_step_is_one_copy_to_the_device_one_graph_one_copy_back_and_one_wait() {
    let sim = CudaSim::alone().unwrap();
    let mut random = Random::fresh();
    let texts = Texts::new(&mut random, 4);
    for deterministic in [false, true] {
        let loaded = model("small", sizes(alone_on(options(grid(), deterministic))));
        let mut runner = executor(&loaded);
        let mut fed = [0; 4];
        let mut step = |parts: &[usize], draw: &Draw| {
            let parts: Vec<_> = parts
                .iter()
                .enumerate()
                .map(|(text, &len)| {
                    fed[text] = if fed[text] + len > texts.len(text) { 0 } else { fed[text] };
                    fed[text] += len;
                    (text, fed[text] - len..fed[text])
                })
                .collect();
            texts.step(&parts, draw)
        };
        // Every recorded shape, filled and padded; then shapes that are not recorded.
        let recorded: [&[usize]; 9] =
            [&[1], &[1, 1], &[1, 1, 1], &[1, 1, 1, 1], &[4], &[2], &[4, 1], &[3, 1, 2], &[4, 4, 4, 4]];
        let unrecorded: [&[usize]; 3] = [&[5], &[1, 9], &[16, 16, 16, 16]];
        for (shapes, without, with) in
            [(&recorded[..], PLAYED, PLAYED_WITH_CHANGES), (&unrecorded[..], GIVEN, GIVEN_WITH_CHANGES)]
        {
            for parts in shapes {
                for draw in [Draw::default(), plain()] {
                    for _ in 0..2 {
                        let found = count(&sim, &mut runner, &step(parts, &draw));
                        assert_eq!(found, without, "{parts:?} {draw:?}");
                    }
                }
                for draw in changed() {
                    assert_eq!(count(&sim, &mut runner, &step(parts, &draw)), with, "{parts:?} {draw:?}");
                }
            }
        }
    }
}

#[test]
fn a_model_without_graphs_gives_each_launch() {
    let sim = CudaSim::alone().unwrap();
    let texts = Texts::new(&mut Random::fresh(), 2);
    let loaded = model("small", sizes(alone_on(options(GraphGrid::default(), false))));
    let mut runner = executor(&loaded);
    for at in 0..6 {
        let step = texts.step(&[(0, at..at + 1), (1, 2 * at..2 * at + 2)], &plain());
        assert_eq!(count(&sim, &mut runner, &step), GIVEN);
    }
}

/// Room for changes to logits grows once; what was recorded reads the old place and is recorded again.
#[test]
fn many_changes_to_logits_make_room_once() {
    let sim = CudaSim::alone().unwrap();
    let texts = Texts::new(&mut Random::fresh(), 4);
    let loaded = model("small", sizes(alone_on(options(grid(), false))));
    let mut runner = executor(&loaded);
    let logit_bias = (0..500).map(|id| (id, if id == 77 { 1e4 } else { -1.0 })).collect();
    let params = Arc::new(SamplingParams { logit_bias, ..SamplingParams::default() });
    let draw = Draw { params, mask: Some(Mask::of(&[77, 78])), ..Draw::default() };
    let parts = |at: usize| [(0, at..at + 1), (1, at..at + 1), (2, at..at + 1)];
    assert_eq!(count(&sim, &mut runner, &texts.step(&parts(0), &Draw::default())), PLAYED);
    let [made, freed, waiting, .., recorded, _] = count(&sim, &mut runner, &texts.step(&parts(1), &draw));
    assert_eq!((made, freed, waiting, recorded), (2, 2, 0, 2), "an array and its staging, one shape");
    assert_eq!(count(&sim, &mut runner, &texts.step(&parts(2), &draw)), PLAYED_WITH_CHANGES);
    assert_eq!(count(&sim, &mut runner, &texts.step(&parts(3), &Draw::default())), PLAYED);
    // Another shape is recorded when it comes next, and then is there as before.
    let one = |at: usize| texts.step(&[(0, at..at + 1)], &draw);
    let [made, freed, .., recorded, _] = count(&sim, &mut runner, &one(4));
    assert_eq!((made, freed, recorded), (0, 0, 2));
    assert_eq!(count(&sim, &mut runner, &one(5)), PLAYED_WITH_CHANGES);
    let output = runner.step(&one(6)).unwrap().rows.remove(0);
    assert!(format!("{output:?}").contains("token: 77"), "{output:?}");
}
