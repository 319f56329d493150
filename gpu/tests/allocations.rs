//! A step that a runner has seen before allocates the answer and nothing else, whatever its size and its draws, on any
//! thread. This file has one test, because the counter counts for the whole process.

mod common;

use common::gguf::quantised;
use common::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokenrouter_core::executor::{Draw, Executor, Needs, PAGE_TOKENS, PageId, Step};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_gpu::load::{KvMemory, LoadOptions, load};
use tokenrouter_gpu::ops::KvFormat;
use tokenrouter_kernels::quant::Format;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counted.
struct Counting;

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CONTEXT: usize = 20;

/// Every request appends `tokens` tokens to the `CONTEXT` that it has.
fn step(requests: u64, tokens: usize, draw: &Draw) -> Step {
    let row = |request: u64| {
        let table: Vec<PageId> = (0..4).map(|page| 4 * request as PageId + page).collect();
        assert!(CONTEXT + tokens <= 4 * PAGE_TOKENS);
        let mut row = row(request, CONTEXT, &random_tokens(request, tokens, 150), &table);
        row.draw = Some(draw.clone());
        row
    };
    Step { rows: (0..requests).map(row).collect() }
}

#[test]
fn a_step_allocates_its_answer_and_nothing_else() {
    let entropy = Draw { needs: Needs { entropy: true, ..Needs::default() }, ..greedy() };
    let top = Draw { needs: Needs { top_k: 5, ..Needs::default() }, ..greedy() };
    let sampled = draw_with(SamplingParams { temperature: 0.8, ..SamplingParams::default() });
    let cut = draw_with(SamplingParams { temperature: 0.8, top_k: 20, top_p: 0.9, ..SamplingParams::default() });
    // Each top-k list is a part of the answer.
    let draws =
        [("greedy", greedy(), 0), ("entropy", entropy, 0), ("top", top, 1), ("sampled", sampled, 0), ("cut", cut, 0)];
    let (path, _) = quantised("qwen3", Format::Q4_K, 500);
    for quantised in [true, false] {
        for threads in [1, 3] {
            let options = LoadOptions {
                kv: KvMemory::Pages(4 * 64),
                rows_max: 64,
                step_tokens_max: 512,
                ..options(threads, if quantised { KvFormat::Q8 } else { KvFormat::F16 })
            };
            let model = match quantised {
                true => load(&path, &options, &mut |_| ()).unwrap(),
                false => Tiny::new("llama").model(7).load(&options),
            };
            let mut runner = model.executor().unwrap();
            for (requests, tokens) in [(1, 1), (4, 4), (8, 1), (64, 1), (64, 8), (1, 40)] {
                for (name, draw, lists) in &draws {
                    let step = step(requests, tokens, draw);
                    let mut counts = [0; 9];
                    for found in &mut counts {
                        let before = ALLOCATIONS.load(Ordering::Relaxed);
                        let output = runner.step(&step);
                        *found = ALLOCATIONS.load(Ordering::Relaxed) - before;
                        assert_eq!(output.unwrap().rows.len(), requests as usize);
                    }
                    // The first may grow scratch, and a worker thread may start late, which takes some memory once.
                    counts.sort_unstable();
                    let expected = 1 + lists * requests as usize;
                    assert_eq!(counts[4], expected, "{name} {requests} x {tokens}, {threads} threads, {quantised}");
                }
            }
        }
    }
    // The counter counts.
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(Arc::new(7)));
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 1);
}
