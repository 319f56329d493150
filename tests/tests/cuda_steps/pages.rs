//! What steps write: the keys and values of their own tokens, and nothing else of KV memory.

use crate::rig::{PAGES, Random, Texts, all_needs, alone_on, executor, grid, model, options, sizes};
use std::collections::HashSet;
use tokenrouter_core::executor::{Executor, PAGE_TOKENS, Step};
use tokenrouter_gpu::load::AnyRunner;
use tokenrouter_kernels::cuda::Stream;
use tokenrouter_tests::cuda_sim::{CudaSim, Schedule};

/// All keys and values.
fn kv(runner: &AnyRunner) -> Vec<u16> {
    let AnyRunner::Cuda(runner) = runner else { panic!("on the device") };
    let array = runner.kv().memory().array();
    let stream = Stream::new(array.gpu(), 0).unwrap();
    array.to_host(&stream).unwrap()
}

/// Layers, heads and width of a head in [`kv`].
fn shape(runner: &AnyRunner) -> (usize, usize, usize) {
    let AnyRunner::Cuda(runner) = runner else { panic!("on the device") };
    let memory = runner.kv().memory();
    (memory.shape().layers, memory.shape().kv_heads, memory.padded())
}

/// Places in [`kv`] of one token.
fn places(slot: usize, (layers, heads, width): (usize, usize, usize)) -> impl Iterator<Item = usize> {
    let (page, position) = (slot / PAGE_TOKENS, slot % PAGE_TOKENS);
    (0..2 * layers).flat_map(move |side| {
        (0..heads).flat_map(move |head| {
            let start = (((side * PAGES as usize + page) * heads + head) * PAGE_TOKENS + position) * width;
            start..start + width
        })
    })
}

/// Slots that a step is to write.
fn slots(step: &Step) -> impl Iterator<Item = usize> + '_ {
    step.rows.iter().flat_map(|row| {
        let positions = row.start as usize..row.start as usize + row.tokens.len();
        positions.map(|position| row.pages[position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS)
    })
}

#[test]
fn a_step_writes_the_keys_and_values_of_its_tokens_and_no_others() {
    let sim = CudaSim::alone().unwrap();
    let mut random = Random::fresh();
    for (name, poison, schedule) in [("small", 0xff, Schedule::Forward), ("large", 0x11, Schedule::Random(5))] {
        sim.set_poison(poison);
        sim.set_schedule(schedule);
        let loaded = model(name, sizes(alone_on(options(grid(), false))));
        let mut runner = executor(&loaded);
        let shape = shape(&runner);
        let untouched = u16::from_le_bytes([poison, poison]);
        assert!(kv(&runner).iter().all(|&value| value == untouched), "recording wrote keys or values");
        let texts = Texts::new(&mut random, 4);
        for parts in texts.steps(&mut random) {
            let step = texts.step(&parts, &all_needs());
            let before = kv(&runner);
            runner.step(&step).unwrap();
            let after = kv(&runner);
            let own: HashSet<usize> = slots(&step).flat_map(|slot| places(slot, shape)).collect();
            let wrong = (0..after.len()).find(|place| !own.contains(place) && before[*place] != after[*place]);
            assert_eq!(wrong, None, "{name}: {parts:?} wrote where it has no token");
            if poison == 0xff {
                // A poisoned value is no number.
                let unwritten = own.iter().find(|place| after[**place] == untouched);
                assert_eq!(unwritten, None, "{name}: {parts:?} did not write all of its tokens");
            }
            // Reading logits again writes nothing at all.
            runner.last_logits(0).expect("it drew");
            assert!(kv(&runner) == after, "{name}: {parts:?}");
        }
    }
}
