//! How long plans take: the table for N = 1 .. 16, one plan for N = 64, three models with N = 8, and a batcher's lookup.

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;
use tokenrouter_core::theory::search::{Budget, plan};
use tokenrouter_core::theory::system::{Affine, System};
use tokenrouter_core::theory::table::Table;

fn line(base: f64, per_request: f64) -> Affine {
    Affine { base, per_request }
}

/// Two models of latency ratio 10, p = 0.3.
fn pair(requests: u32) -> System {
    let (moves, tokens) = (vec![vec![0.7, 0.3], vec![1.0, 0.0]], vec![vec![1.0, 0.0], vec![1.0, 1.0]]);
    System::affine(requests, &[line(1.0, 0.0), line(10.0, 0.0)], moves, tokens).expect("a well-formed system")
}

/// Three models of latency 1, 4 and 10.
fn three(requests: u32) -> System {
    let moves = vec![vec![0.7, 0.2, 0.1], vec![0.8, 0.0, 0.2], vec![0.9, 0.1, 0.0]];
    let latency = [line(1.0, 0.0), line(4.0, 0.0), line(10.0, 0.0)];
    System::affine(requests, &latency, moves, vec![vec![1.0; 3]; 3]).expect("a well-formed system")
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(5));
    group.bench_function("two models, every N from 1 to 16", |b| {
        b.iter(|| (1..=16).map(|n| plan(&pair(n), Budget::default()).tokens_per_tick).sum::<f64>());
    });
    group.bench_function("two models, N = 64", |b| b.iter(|| plan(&pair(64), Budget::default()).tokens_per_tick));
    group.bench_function("three models, N = 8", |b| b.iter(|| plan(&three(8), Budget::default()).tokens_per_tick));
    group.finish();
    let rows = [1u32, 2, 4, 8, 16, 32].map(|n| (n, vec![1, n.div_ceil(2)])).to_vec();
    let table = Table::new(rows).expect("ascending rows");
    c.bench_function("thresholds for one N", |b| b.iter(|| table.thresholds(black_box(21))));
}

criterion_group!(planner, benches);
criterion_main!(planner);
