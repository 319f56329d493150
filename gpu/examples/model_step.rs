//! Times steps: `model_step MODEL [THREADS] [CONTEXT] [REQUESTS TOKENS]` prints milliseconds per step (median) for several shapes,
//! or for one, greedy with entropy.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tokenrouter_core::executor::{Draw, Executor, Needs, Row, Step};
use tokenrouter_core::ids::RequestId;
use tokenrouter_gpu::load::{KvMemory, LoadOptions, load};

/// Requests and tokens of each.
const SHAPES: [(u32, u32); 8] = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (1, 4), (4, 4), (1, 512)];
const ROUNDS: usize = 20;
const ROUNDS_OF_ONE: usize = 300;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let model = arguments.first().ok_or("usage: model_step MODEL [THREADS] [CONTEXT] [REQUESTS TOKENS]")?;
    let threads = arguments.get(1).map_or(Ok(0), |text| text.parse())?;
    let context: u32 = arguments.get(2).map_or(Ok(128), |text| text.parse())?;
    let pages = (context + 512).div_ceil(16);
    let options = LoadOptions { threads, kv: KvMemory::Pages(16 * pages), ..LoadOptions::default() };
    let began = Instant::now();
    let model = load(Path::new(model), &options, &mut |_| ())?;
    println!("loaded in {:.2} s: {:?}", began.elapsed().as_secs_f64(), model.info());
    let mut runner = model.executor()?;
    let draw = Draw {
        params: Arc::default(),
        history: None,
        banned: Arc::from([]),
        needs: Needs { entropy: true, ..Needs::default() },
        logprobs: None,
    };
    let (shapes, rounds) = match arguments.get(3..5) {
        Some([requests, tokens]) => (vec![(requests.parse()?, tokens.parse()?)], ROUNDS_OF_ONE),
        _ => (SHAPES.to_vec(), ROUNDS),
    };
    for (requests, tokens) in shapes {
        let row = |request: u32, start: u32, len: u32| Row {
            request: RequestId(u64::from(request)),
            start,
            tokens: (0..len).map(|i| 100 + 7 * i + request).collect(),
            pages: (request * pages..(request + 1) * pages).collect(),
            draw: Some(draw.clone()),
        };
        for request in 0..requests {
            runner.step(&Step { rows: vec![row(request, 0, context)] })?;
        }
        let step = Step { rows: (0..requests).map(|request| row(request, context, tokens)).collect() };
        let mut times = Vec::new();
        for _ in 0..if tokens > 64 { 3 } else { rounds } {
            let began = Instant::now();
            runner.step(&step)?;
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        let rate = f64::from(requests * tokens) / median * 1e3;
        println!("{requests:3} x {tokens:<4} {median:9.3} ms (min {:.3})  {rate:9.1} tokens/s", times[0]);
    }
    Ok(())
}
