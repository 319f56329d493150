//! Weight bandwidth of one product for small batches: `cargo run -p tokenrouter-kernels --example step [THREADS [avx2]]`.
//!
//! Enough copies of the matrix are cycled through that the caches hold none. Flat columns mean that rows are free. Then
//! the same for an output head, which reads its logits as it makes them, beside the bare product.

use std::error::Error;
use std::time::Instant;
use tokenrouter_kernels::head::{Head, Product, Want};
use tokenrouter_kernels::matmul::{Linear, Matrix, QuantizedRows, linear};
use tokenrouter_kernels::quant::Format;
use tokenrouter_kernels::sys::Isa;
use tokenrouter_kernels::{Bytes, Pool, PoolConfig};

const ROWS: usize = 4864;
const COLS: usize = 896;
const TOTAL_BYTES: usize = 160 << 20;
/// Outputs of the head.
const IDS: usize = 151_936;

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
    let empty = (0..200).map(|_| us(|| pool.run(16, &|_| ()))).fold(f64::INFINITY, f64::min);
    println!("empty job of 16 tasks: {empty:.2} us");
    let mut matrix = Matrix::new(Format::Q8_0, IDS, COLS, Bytes::from(weights(Format::Q8_0.tensor_bytes(IDS, COLS)?)))?;
    matrix.prepare(&pool)?;
    println!("head {IDS} x {COLS} in Q8_0; time in us");
    let best = Want { real: IDS, ..Want::default() };
    let stats = Want { distribution: true, ..best };
    let wants = [
        ("best", best),
        ("best, kept", Want { keep: true, ..best }),
        ("top 20", Want { top: 20, ..best }),
        ("entropy", stats),
        ("entropy, top 20", Want { top: 20, ..stats }),
    ];
    for rows in [1, 8, 32] {
        let x: Vec<f32> = (0..rows * COLS).map(|i| (i * 7919 % 1000) as f32 * 0.002 - 1.0).collect();
        let (mut codes, mut head, mut logits) = (QuantizedRows::default(), Head::default(), vec![0.0; rows * IDS]);
        let input = &codes.input(&pool, &x, &[&matrix]);
        let (mut alone, mut fused) = (f64::INFINITY, [f64::INFINITY; 5]);
        for _ in 0..60 {
            let product = || linear(&pool, input, &mut [Linear { matrix: &matrix, bias: None, y: &mut logits }]);
            alone = alone.min(us(product));
            for ((_, want), best) in wants.iter().zip(&mut fused) {
                let wants = &vec![*want; rows];
                let run = || {
                    let (matrix, logits) = (&matrix, &mut logits[..]);
                    head.run(&pool, Product { input, matrix, wants, apart: None, logits });
                    (0..rows).for_each(|row| assert!(head.row(row).is_ok()));
                };
                *best = best.min(us(run));
            }
        }
        print!("M={rows}: product alone {alone:.0}");
        wants.iter().zip(fused).for_each(|((name, _), us)| print!(" | {name} {us:.0}"));
        println!();
    }
    Ok(())
}

/// Blocks of Q8_0 with scales of 0.0078 to 0.0098 and any codes.
fn weights(len: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let random = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let mut bytes: Vec<u8> = (0..len).map(random).collect();
    bytes.chunks_exact_mut(34).for_each(|block| block[1] = 0x20);
    bytes
}

/// Microseconds of one call.
fn us(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64() * 1e6
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
