//! Time of attention in one layer: `cargo run -p tokenrouter-kernels --example attention [THREADS [KV_FORMAT]]`.
//!
//! GFLOP/s count the products with keys and values; GB/s the keys and values read once per key head.

use std::error::Error;
use std::time::Instant;
use tokenrouter_kernels::attention::{Attend, KvCache, KvFormat, KvShape, PAGE_TOKENS, Segment, attend};
use tokenrouter_kernels::{Pool, PoolConfig};

/// Name, query heads, key heads, head size.
const MODELS: [(&str, usize, usize, usize); 4] =
    [("SmolLM2-135M", 9, 3, 64), ("Qwen2.5-0.5B", 14, 2, 64), ("Qwen2.5-1.5B", 12, 2, 128), ("Qwen3-0.6B", 16, 8, 128)];

fn main() -> Result<(), Box<dyn Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(0), |t| t.parse())?;
    let pool = Pool::new(&PoolConfig { threads, ..Default::default() })?;
    let format: KvFormat = std::env::args().nth(2).map_or(Ok(KvFormat::default()), |name| name.parse())?;
    println!("{pool:?} {format:?}; time of one layer in us, GFLOP/s, GB/s");
    for (name, heads, kv_heads, head_dim) in MODELS {
        for (context, rows) in [(128, 1), (1024, 1), (4096, 1), (1024, 4), (512, 512)] {
            let pages = context / PAGE_TOKENS;
            let cache = KvCache::new(KvShape { layers: 1, pages, kv_heads, head_dim, format })?;
            let table: Vec<u32> = (0..pages as u32).collect();
            let segments = [Segment { rows, position: context - rows, pages: &table }];
            let q = vec![0.1; rows * heads * head_dim];
            let mut out = vec![0.0; q.len()];
            let mut best = f64::INFINITY;
            for _ in 0..20 {
                let started = Instant::now();
                let (layer, scale) = (0, 0.125);
                attend(&pool, &cache, Attend { layer, heads, scale, q: &q, segments: &segments, out: &mut out });
                best = best.min(started.elapsed().as_secs_f64());
            }
            let seen: usize = (context - rows + 1..=context).sum();
            let gflop_s = 4.0 * (seen * heads * head_dim) as f64 / best / 1e9;
            let gb_s = (context * kv_heads * 2 * format.row_bytes(head_dim)) as f64 / best / 1e9;
            println!("{name:13} {rows:3} x {context:4}: {:8.1} us {gflop_s:6.1} {gb_s:5.1}", best * 1e6);
        }
    }
    Ok(())
}
