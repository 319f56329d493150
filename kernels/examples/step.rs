//! Weight bandwidth of one product for small batches: `cargo run -p tokenrouter-kernels --example step [THREADS [avx2]]`.
//!
//! Enough copies of the matrix are cycled through that the caches hold none. Flat columns mean that rows are free.

use std::error::Error;
use std::time::Instant;
use tokenrouter_kernels::matmul::{Linear, Matrix, QuantizedRows, linear};
use tokenrouter_kernels::quant::Format;
use tokenrouter_kernels::reduce::{Reducer, top_k};
use tokenrouter_kernels::sys::Isa;
use tokenrouter_kernels::{Bytes, Pool, PoolConfig};

const ROWS: usize = 4864;
const COLS: usize = 896;
const TOTAL_BYTES: usize = 160 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(0), |t| t.parse())?;
    let isa = (std::env::args().nth(2).as_deref() == Some("avx2")).then_some(Isa::Avx2);
    let pool = Pool::new(&PoolConfig { threads, isa, ..Default::default() })?;
    println!("{pool:?}; weights {ROWS} x {COLS}; time of one product in us, and GB/s of weights");
    for format in [Format::Q4_1, Format::Q4_0, Format::Q5_0, Format::Q8_0, Format::Q4_K, Format::Q6_K, Format::F16] {
        let cols = COLS.next_multiple_of(format.block_values());
        let bytes = vec![0x11; format.tensor_bytes(ROWS, cols)?];
        let copies = TOTAL_BYTES / bytes.len() + 1;
        let mut packing = f64::INFINITY;
        let mut matrices = Vec::new();
        for _ in 0..copies {
            let mut matrix = Matrix::new(format, ROWS, cols, Bytes::from(bytes.clone()))?;
            let started = Instant::now();
            matrix.prepare(&pool)?;
            packing = packing.min(started.elapsed().as_secs_f64());
            matrices.push(matrix);
        }
        let packing = bytes.len() as f64 / packing / 1e9;
        print!("{:5} (packing {packing:4.2} GB/s)", format.name());
        for rows in [1, 2, 4, 6, 7, 8, 12, 16, 32] {
            let (us, gb_s) = measure(&pool, &matrices, rows);
            print!(" | M={rows}: {us:6.0} {gb_s:5.1}");
        }
        println!();
    }
    let logits: Vec<f32> = (0..8 * 151_936).map(|i| (i * 7919 % 1000) as f32 * 0.01).collect();
    let (mut reducer, mut stats, mut best) = (Reducer::default(), Vec::new(), Vec::new());
    let mut top = Vec::new();
    println!("empty job of 16 tasks: {:.2} us", best_us(|| pool.run(16, &|_| ())));
    println!("statistics of 8 x 151936: {:.0} us", best_us(|| reducer.stats(&pool, (&logits, 151_936), &mut stats)));
    println!("argmax of 8 x 151936: {:.0} us", best_us(|| reducer.argmax(&pool, (&logits, 151_936), &mut best)));
    println!("top 20 of 151936: {:.0} us", best_us(|| top_k(&pool, &logits[..151_936], 20, &mut top)));
    Ok(())
}

/// Microseconds of the fastest of many calls.
fn best_us(mut work: impl FnMut()) -> f64 {
    let time = |work: &mut dyn FnMut()| {
        let started = Instant::now();
        work();
        started.elapsed().as_secs_f64()
    };
    (0..200).map(|_| time(&mut work)).fold(f64::INFINITY, f64::min) * 1e6
}

/// Best product of several rounds over all copies (a busy machine disturbs the others): microseconds, and GB/s.
fn measure(pool: &Pool, matrices: &[Matrix], rows: usize) -> (f64, f64) {
    let x = vec![0.5; rows * matrices[0].cols()];
    let mut y = vec![0.0; rows * matrices[0].rows()];
    let mut scratch = QuantizedRows::default();
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        for matrix in matrices {
            let started = Instant::now();
            let input = scratch.input(pool, &x, &[matrix]);
            linear(pool, &input, &mut [Linear { matrix, bias: None, y: &mut y }]);
            best = best.min(started.elapsed().as_secs_f64());
        }
    }
    (best * 1e6, matrices[0].weight_bytes() as f64 / best / 1e9)
}
