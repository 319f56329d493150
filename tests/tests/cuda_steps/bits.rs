//! Which bits are promised: with sums in a fixed order an answer does not depend on company, cutting, pages or graphs;
//! without, the same steps are the same bits again.

use crate::rig::{Random, Said, Texts, all_needs, alone_on, bits_of, executor, grid, model, options, say, sizes};
use std::collections::HashMap;
use tokenrouter_core::executor::Step;
use tokenrouter_gpu::cuda::GraphGrid;
use tokenrouter_gpu::load::LoadedModel;
use tokenrouter_tests::cuda_sim::{CudaSim, Schedule, Streams};

/// What a model says after every token of every text, each text alone and token by token.
fn alone(model: &LoadedModel, texts: &Texts) -> HashMap<(usize, usize), String> {
    let mut runner = executor(model);
    let mut bits = HashMap::new();
    for text in 0..texts.count() {
        for at in 0..texts.len(text) {
            let step = texts.step(&[(text, at..at + 1)], &all_needs());
            let said = say(&mut runner, &step).unwrap_or_else(|error| panic!("{error}"));
            bits.insert((text, at + 1), said[0].bits());
        }
    }
    bits
}

#[test]
fn deterministic_answers_do_not_depend_on_batch_chunks_pages_or_graphs() {
    let _sim = CudaSim::alone().unwrap();
    let mut random = Random::fresh();
    for (name, count) in [("small", 4), ("large", 2)] {
        let mut texts = Texts::new(&mut random, count);
        let expected = alone(&model(name, sizes(alone_on(options(GraphGrid::default(), true)))), &texts);
        for graphs in [grid(), GraphGrid::new(vec![3], vec![2, 3]), GraphGrid::default()] {
            let loaded = model(name, sizes(alone_on(options(graphs.clone(), true))));
            let mut runner = executor(&loaded);
            for _life in 0..2 {
                // The same executor again, with pages that hold what others left.
                texts.move_pages(&mut random);
                for parts in texts.steps(&mut random) {
                    let said = say(&mut runner, &texts.step(&parts, &all_needs())).unwrap();
                    for ((text, part), said) in parts.iter().zip(&said) {
                        let same = expected[&(*text, part.end)] == said.bits();
                        assert!(same, "{name} {graphs:?}: text {text} {part:?} in {parts:?}");
                    }
                }
            }
        }
    }
}

/// Orders of threads, times of streams and what memory held before are nothing to a step.
#[test]
fn the_same_steps_are_the_same_bits_whatever_the_device_does_meanwhile() {
    let sim = CudaSim::alone().unwrap();
    let mut random = Random::fresh();
    let texts = Texts::new(&mut random, 4);
    let steps: Vec<Step> = texts.steps(&mut random).iter().map(|parts| texts.step(parts, &all_needs())).collect();
    let seed = random.below(60_000) as u16;
    for (name, deterministic) in [("small", false), ("large", true)] {
        let said = || bits_of(&model(name, sizes(alone_on(options(grid(), deterministic)))), &steps);
        let expected = said();
        for (poison, schedule, streams) in [
            (0x00, Schedule::Reverse, Streams::Late),
            (0x7f, Schedule::Random(seed), Streams::Now),
            (0xff, Schedule::Random(seed / 2), Streams::OthersFirst),
        ] {
            sim.set_poison(poison);
            sim.set_schedule(schedule);
            sim.set_streams(streams);
            assert_eq!(expected, said(), "{name} {deterministic}: {poison:x} {schedule:?} {streams:?}");
        }
    }
}

/// Graphs of one size after those of another, steps without a graph between them: nothing of one is seen by the next.
#[test]
fn a_step_says_the_same_after_any_other() {
    let _sim = CudaSim::alone().unwrap();
    let mut random = Random::fresh();
    let texts = Texts::new(&mut random, 4);
    for deterministic in [false, true] {
        let loaded = model("small", sizes(alone_on(options(grid(), deterministic))));
        let mut runner = executor(&loaded);
        let mut step = |parts: &[(usize, std::ops::Range<usize>)]| -> Vec<String> {
            let said = say(&mut runner, &texts.step(parts, &all_needs())).unwrap();
            said.iter().map(Said::bits).collect()
        };
        let one = [(0, 0..1)];
        let padded = [(1, 0..3), (2, 0..1), (3, 0..2)];
        let full = [(0, 0..4), (1, 0..4), (2, 0..4), (3, 0..4)];
        let prompts = [(0, 0..16), (1, 0..16), (2, 0..16), (3, 0..16)];
        let all = [&one[..], &padded, &full, &prompts];
        let expected: Vec<_> = all.iter().map(|parts| step(parts)).collect();
        for _ in 0..12 {
            let which = random.below(4) as usize;
            assert_eq!(step(all[which]), expected[which], "{deterministic}: {:?}", all[which]);
        }
    }
}
