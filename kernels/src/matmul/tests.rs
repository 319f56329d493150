//! All versions of the product on random inputs, against each other (bits) and against f64 (tolerance).

use super::quantize::{BlockMeta, quantize_block_reference};
use super::testing::random_rows;
use super::*;
use crate::testing::{Random, bits, isas, pool, pools, rounds};

fn matrix(format: Format, rows: usize, cols: usize, random: &mut Random) -> Matrix {
    Matrix::new(format, rows, cols, Bytes::from(random_rows(format, rows, cols, random))).unwrap()
}

/// A shape with tails: rows that no tile divides, columns that no larger block divides.
fn shape(format: Format, random: &mut Random) -> (usize, usize) {
    let rows = 1 + random.below(70);
    let cols = match format.block_values() {
        1 => 1 + random.below(300),
        32 => 32 * (1 + random.below(20)),
        _ => 256 * (1 + random.below(4)),
    };
    (rows, cols)
}

fn product(pool: &Pool, matrix: &Matrix, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let mut scratch = QuantizedRows::default();
    let input = scratch.input(pool, x, &[matrix]);
    let mut y = vec![f32::NAN; input.rows() * matrix.rows()];
    linear(pool, &input, &mut [Linear { matrix, bias, y: &mut y }]);
    y
}

/// The exact product of the decoded weights with the given activations.
fn exact(matrix: &Matrix, x: &[f32]) -> Vec<f64> {
    let mut weights = vec![0.0; matrix.cols()];
    let rows = x.len() / matrix.cols();
    let mut y = vec![0.0; rows * matrix.rows()];
    for n in 0..matrix.rows() {
        matrix.row(n, &mut weights);
        for m in 0..rows {
            let x = &x[m * matrix.cols()..][..matrix.cols()];
            y[m * matrix.rows() + n] = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        }
    }
    y
}

#[test]
fn packed_products_equal_the_reference_bit_for_bit() {
    let mut random = Random::new(3);
    for format in Format::ALL {
        for _ in 0..4 {
            let (rows, cols) = shape(format, &mut random);
            let mut matrix = matrix(format, rows, cols, &mut random);
            let m = 1 + random.below(21);
            let x = random.normals(m * cols);
            let bias = random.normals(rows);
            let expected = product(&pool(1, crate::sys::Isa::Portable), &matrix, &x, Some(&bias));
            matrix.prepare(&pool(2, crate::sys::Isa::detect())).unwrap();
            for pool in pools() {
                let found = product(&pool, &matrix, &x, Some(&bias));
                assert_eq!(bits(&found), bits(&expected), "{format:?} {rows} x {cols}, {m} rows, {pool:?}");
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_batch_or_the_threads() {
    let mut random = Random::new(4);
    for format in Format::ALL {
        let (rows, cols) = shape(format, &mut random);
        let mut matrix = matrix(format, rows, cols, &mut random);
        let x = random.normals(150 * cols);
        for isa in isas() {
            matrix.prepare(&pool(1, isa)).unwrap();
            let alone: Vec<u32> =
                x.chunks(cols).flat_map(|row| bits(&product(&pool(1, isa), &matrix, row, None))).collect();
            for m in (2..=17).chain([63, 64, 65, 150]) {
                let start = random.below(150 - m + 1);
                for threads in 1..=3 {
                    let found = product(&pool(threads, isa), &matrix, &x[start * cols..][..m * cols], None);
                    assert_eq!(
                        bits(&found),
                        &alone[start * rows..][..m * rows],
                        "{format:?} {rows} x {cols}, {m} rows, {isa:?}, {threads} threads"
                    );
                }
            }
        }
    }
}

/// Anything that a model could ask for, at random: 1 to 64 input rows (or some more than one pass takes) through one to
/// three matrices of any formats and heights, with or without bias, on any instruction set and number of threads. Each
/// result equals the product of the unpacked matrix, one row at a time on one thread.
#[test]
fn fuzzed_products_equal_the_reference() {
    let mut random = Random::new(9);
    let slow = pool(1, crate::sys::Isa::Portable);
    let isas = isas();
    for _ in 0..rounds(300) {
        let pool = pool(1 + random.below(8), isas[random.below(isas.len())]);
        let cols =
            if cfg!(miri) { 256 } else { [32 * (1 + random.below(24)), 256 * (1 + random.below(3))][random.below(2)] };
        let m = if cfg!(miri) {
            2
        } else {
            [1 + random.below(64), 1 + random.below(80)][usize::from(random.below(8) == 0)]
        };
        let formats: Vec<Format> = Format::ALL.into_iter().filter(|f| cols.is_multiple_of(f.block_values())).collect();
        let mut matrices = Vec::new();
        for _ in 0..1 + random.below(3) {
            let rows = 1 + random.below(if cfg!(miri) { 18 } else { 40 });
            matrices.push(matrix(formats[random.below(formats.len())], rows, cols, &mut random));
        }
        let x = random.normals(m * cols);
        let biases: Vec<Option<Vec<f32>>> =
            matrices.iter().map(|w| (random.below(2) == 0).then(|| random.normals(w.rows()))).collect();
        let expected: Vec<Vec<f32>> = (matrices.iter().zip(&biases))
            .map(|(w, b)| x.chunks(cols).flat_map(|row| product(&slow, w, row, b.as_deref())).collect())
            .collect();
        for w in &mut matrices {
            w.prepare(&pool).unwrap();
        }
        let mut scratch = QuantizedRows::default();
        let input = scratch.input(&pool, &x, &matrices.iter().collect::<Vec<_>>());
        let mut found: Vec<Vec<f32>> = matrices.iter().map(|w| vec![f32::NAN; m * w.rows()]).collect();
        let mut products: Vec<Linear<'_>> = (matrices.iter().zip(&biases).zip(&mut found))
            .map(|((matrix, bias), y)| Linear { matrix, bias: bias.as_deref(), y })
            .collect();
        linear(&pool, &input, &mut products);
        for ((w, found), expected) in matrices.iter().zip(&found).zip(&expected) {
            assert_eq!(bits(found), bits(expected), "{:?} {} x {cols}, {m} rows, {pool:?}", w.format(), w.rows());
        }
    }
}

#[test]
fn products_are_close_to_exact_ones() {
    let mut random = Random::new(5);
    for format in Format::ALL {
        let (rows, cols) = shape(format, &mut random);
        let mut matrix = matrix(format, rows, cols, &mut random);
        let pool = pool(2, crate::sys::Isa::detect());
        matrix.prepare(&pool).unwrap();
        let x = random.normals(5 * cols);
        let found = product(&pool, &matrix, &x, None);
        // With the activations as quantised only rounding remains; with the true ones also half a step of 1/127.
        let quantized: Vec<f32> = match format.is_quantized() {
            false => x.clone(),
            true => {
                let decode = |b: &[f32; 32]| {
                    let (codes, meta) = quantize_block_reference(b);
                    codes.map(|c| f32::from(c) * meta.scale)
                };
                x.as_chunks::<32>().0.iter().flat_map(decode).collect()
            }
        };
        let magnitude: f64 = exact(&matrix, &x).iter().map(|v| v * v).sum::<f64>().sqrt() + 1e-9;
        let distance = |to: Vec<f64>| {
            let squares = found.iter().zip(to).map(|(a, b)| (f64::from(*a) - b).powi(2));
            squares.sum::<f64>().sqrt() / magnitude
        };
        let rounding = distance(exact(&matrix, &quantized));
        assert!(rounding < 1e-5, "{format:?} {rows} x {cols}: {rounding}");
        let total = distance(exact(&matrix, &x));
        assert!(total < if format.is_quantized() { 0.03 } else { 1e-5 }, "{format:?} {rows} x {cols}: {total}");
    }
}

#[test]
fn several_matrices_share_one_input() {
    let mut random = Random::new(6);
    let pool = pool(3, crate::sys::Isa::detect());
    let formats = [Format::Q4_K, Format::Q6_K, Format::F16, Format::Q5_0];
    let mut all: Vec<Matrix> = formats.into_iter().map(|f| matrix(f, 1 + random.below(60), 512, &mut random)).collect();
    all[..3].iter_mut().for_each(|m| m.prepare(&pool).unwrap());
    let x = random.normals(7 * 512);
    let mut scratch = QuantizedRows::default();
    let input = scratch.input(&pool, &x, &all.iter().collect::<Vec<_>>());
    let mut results: Vec<Vec<f32>> = all.iter().map(|m| vec![f32::NAN; 7 * m.rows()]).collect();
    let mut products: Vec<Linear<'_>> =
        all.iter().zip(&mut results).map(|(matrix, y)| Linear { matrix, bias: None, y }).collect();
    linear(&pool, &input, &mut products);
    for (matrix, y) in all.iter().zip(&results) {
        assert_eq!(bits(y), bits(&product(&pool, matrix, &x, None)));
    }
}

#[test]
fn quantized_activations_equal_their_definition() {
    let mut random = Random::new(7);
    let matrix = matrix(Format::Q8_0, 1, 96, &mut random);
    let mut x = random.normals(4 * 96);
    for special in [f32::NAN, f32::INFINITY, 1e-38, 0.0, -3e38, f32::NEG_INFINITY] {
        let at = random.below(x.len());
        x[at] = special;
        let zeros = random.below(x.len() / 32) * 32;
        x[zeros..zeros + 32].fill(0.0);
        for pool in pools() {
            let mut rows = QuantizedRows::default();
            rows.input(&pool, &x, &[&matrix]);
            for (index, values) in x.as_chunks::<32>().0.iter().enumerate() {
                let (codes, meta) = quantize_block_reference(values);
                let (row_codes, row_meta) = rows.row(index / 3);
                assert_eq!(row_codes[index % 3], codes, "{pool:?} {values:?}");
                let same = |a: &BlockMeta, b: &BlockMeta| a == b || (a.scale.is_nan() && b.scale.is_nan());
                assert!(same(&row_meta[index % 3], &meta), "{pool:?} {values:?}");
            }
        }
    }
}

#[test]
fn a_nan_stays_in_its_row() {
    let mut random = Random::new(8);
    for format in [Format::Q8_0, Format::Q4_1, Format::F32] {
        let pool = pool(2, crate::sys::Isa::detect());
        let mut matrix = matrix(format, 20, 64, &mut random);
        matrix.prepare(&pool).unwrap();
        let mut x = random.normals(3 * 64);
        let before = product(&pool, &matrix, &x, None);
        x[64 + 5] = f32::NAN;
        let after = product(&pool, &matrix, &x, None);
        assert!(after[20..40].iter().all(|v| v.is_nan()));
        assert_eq!(bits(&before[..20]), bits(&after[..20]));
        assert_eq!(bits(&before[40..]), bits(&after[40..]));
    }
}

#[test]
fn wrong_byte_counts_are_refused() {
    let short = Matrix::new(Format::Q4_0, 2, 64, Bytes::from(vec![0; 71]));
    assert!(matches!(short, Err(KernelError::ByteLength { expected: 72, found: 71, .. })));
    assert!(Matrix::new(Format::F32, 0, 64, Bytes::from(vec![])).is_err());
}
