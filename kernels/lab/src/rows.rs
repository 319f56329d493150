//! Rows of matrices, conversions, and what fills memory for measurements. Owner: `main`. Invariant: results are compared
//! value by value.

use crate::bench::{Lab, Run, worst};
use crate::matmul::{LAYOUTS, Layout, Weights};
use half::{bf16, f16};
use tokenrouter_kernels::matmul::cuda::ROWS;

/// Columns of a block.
const COLS: usize = 1024;
/// Most blocks of kernels that step through memory.
const BLOCKS_MAX: usize = 4096;
/// Rows of a matrix to look up in.
const TABLE: usize = 1000;

/// All of them.
pub fn all(lab: &mut Lab) -> Result<(), String> {
    for (name, layout, kind, zero) in LAYOUTS {
        let (embed, widen) = match layout {
            Layout::F32 => ("embed_f32", None),
            Layout::F16 => ("embed_f16", None),
            Layout::Bf16 => ("embed_bf16", None),
            Layout::Q8 => ("embed_q8", Some("widen_q8")),
            Layout::Q4 => ("embed_q4", Some("widen_q4")),
        };
        lab.case((&ROWS, embed), |lab| {
            lab.note = name.to_owned();
            embeddings(lab, (layout, kind, zero))
        })?;
        if let Some(widen) = widen {
            lab.case((&ROWS, widen), |lab| {
                lab.note = name.to_owned();
                widened(lab, (layout, kind, zero))
            })?;
        }
    }
    gather(lab)?;
    lab.case((&ROWS, "to_bf16"), |lab| halves(lab, false))?;
    lab.case((&ROWS, "to_f16"), |lab| halves(lab, true))?;
    add_bias(lab)?;
    fills(lab)
}

fn embeddings(lab: &mut Lab, which: (Layout, crate::matmul::Kind, u32)) -> Result<(f64, f64), String> {
    let (rows, cols) = (lab.options.rows, lab.options.width);
    let table = Weights::new(lab, which, (TABLE, cols))?;
    // Every third word is an id; the last is one that the table has not.
    let mut ids: Vec<u32> = (0..3 * rows).map(|_| lab.random.below(TABLE) as u32).collect();
    ids[3 * (rows - 1) + 1] = u32::MAX;
    let (at_ids, out) = (lab.put(&ids)?, lab.empty::<f32>(rows * cols)?);
    let run = Run::new((rows, cols.div_ceil(COLS)), 256).at(&table.at_codes).at(&table.at_scales);
    let run = run.size(TABLE).size(cols).size(table.kind()).size(table.zero as usize);
    let run = run.at(&at_ids).size(3).size(1).at(&out).moves(rows * (4 * cols + table.row_bytes()));
    let found = lab.first(&run, &out)?;
    let mut error: f64 = 0.0;
    for (i, found) in found.into_iter().enumerate() {
        let id = ids[3 * (i / cols) + 1] as usize;
        let (product, minimum) = if id < TABLE { table.terms(id, i % cols) } else { (0.0, 0.0) };
        let size = (product.abs() + minimum.abs()).max(f64::from(f32::MIN_POSITIVE));
        error = error.max(worst([found], [product - minimum], size));
    }
    lab.time(&run)?;
    // Two roundings of f32, each of half a last bit.
    Ok((error, 2.0 * f64::from(f32::EPSILON)))
}

fn widened(lab: &mut Lab, which: (Layout, crate::matmul::Kind, u32)) -> Result<(f64, f64), String> {
    let (first, count, cols) = (7, TABLE - 7, lab.options.width);
    let pitch = cols + 8;
    let table = Weights::new(lab, which, (TABLE, cols))?;
    let out = lab.empty::<u16>(count * pitch)?;
    let run = Run::new((count, pitch.div_ceil(COLS)), 256).at(&table.at_codes).at(&table.at_scales);
    let run = run.size(TABLE).size(cols).size(table.kind()).size(table.zero as usize);
    let run = run.size(first).at(&out).size(pitch).moves(count * (2 * pitch + table.row_bytes()));
    let found = lab.first(&run, &out)?;
    let mut error: f64 = 0.0;
    for (i, found) in found.into_iter().enumerate() {
        let (row, col) = (first + i / pitch, i % pitch);
        let expected = if col < cols { table.value(row, col) } else { 0.0 };
        // In halves of the last bit.
        error = error.max(worst([bf16::from_bits(found).to_f32()], [expected], expected.abs().max(1e-6) / 256.0));
    }
    lab.time(&run)?;
    Ok((error, 1.01))
}

fn gather(lab: &mut Lab) -> Result<(), String> {
    let (rows, cols) = (lab.options.rows, lab.options.width);
    lab.case((&ROWS, "gather_rows"), |lab| {
        let x = lab.random.values(rows * cols);
        let index: Vec<u32> = (0..rows).map(|_| lab.random.below(rows + 1) as u32).collect();
        let (at_x, at_index, out) = (lab.put(&x)?, lab.put(&index)?, lab.empty::<f32>(rows * cols)?);
        let run = Run::new((rows, cols.div_ceil(COLS)), 256).at(&at_x).size(rows).size(cols).at(&at_index).at(&out);
        let run = run.moves(8 * rows * cols);
        let found = lab.first(&run, &out)?;
        let expected = (0..rows * cols).map(|i| {
            let row = index[i / cols] as usize;
            if row < rows { f64::from(x[row * cols + i % cols]) } else { 0.0 }
        });
        lab.time(&run)?;
        Ok((worst(found, expected, 1.0), 0.0))
    })
}

fn halves(lab: &mut Lab, is_f16: bool) -> Result<(f64, f64), String> {
    let (rows, cols, scale) = (lab.options.rows, lab.options.width - 3, 0.0625);
    let pitch = cols.next_multiple_of(8);
    let x = lab.random.values(rows * cols);
    let (at_x, out) = (lab.put(&x)?, lab.empty::<u16>(rows * pitch)?);
    let run = Run::new((rows, pitch.div_ceil(COLS)), 256).at(&at_x).float(scale).at(&out).size(cols).size(pitch);
    let run = run.moves(rows * (4 * cols + 2 * pitch));
    let found = lab.first(&run, &out)?.into_iter();
    let found = found.map(|bits| if is_f16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() });
    let expected = (0..rows * pitch).map(|i| {
        let (row, col) = (i / pitch, i % pitch);
        let value = if col < cols { x[row * cols + col] * scale } else { 0.0 };
        if is_f16 { f16::from_f32(value).to_f64() } else { bf16::from_f32(value).to_f64() }
    });
    lab.time(&run)?;
    Ok((worst(found, expected, 1.0), 0.0))
}

fn add_bias(lab: &mut Lab) -> Result<(), String> {
    let (rows, cols) = (lab.options.rows, lab.options.width);
    lab.case((&ROWS, "add_bias"), |lab| {
        let (y, bias) = (lab.random.values(rows * cols), lab.random.values(cols));
        let (at_y, at_bias) = (lab.put(&y)?, lab.put(&bias)?);
        let run = Run::new((rows, cols.div_ceil(COLS)), 256).at(&at_y).at(&at_bias).size(cols).moves(8 * rows * cols);
        let found = lab.first(&run, &at_y)?;
        let expected = y.iter().zip(bias.iter().cycle()).map(|(y, bias)| f64::from(y + bias));
        lab.time(&run)?;
        Ok((worst(found, expected, 1.0), 0.0))
    })
}

/// Number `i` of splitmix64.
fn random_at(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Counts what differs.
fn differing<T: PartialEq>(found: &[T], expected: impl Fn(u64) -> T) -> f64 {
    found.iter().enumerate().filter(|(i, found)| **found != expected(*i as u64)).count() as f64
}

fn fills(lab: &mut Lab) -> Result<(), String> {
    let count = lab.options.outputs * 256 + 77;
    let blocks = (count.div_ceil(256).min(BLOCKS_MAX), 1);
    let seed = lab.options.seed;
    lab.case((&ROWS, "random_bf16"), |lab| {
        let (out, limit) = (lab.empty::<u16>(count)?, 0.5);
        let run = Run::new(blocks, 256).at(&out).long(count as u64).long(seed).float(limit).moves(2 * count);
        let found = lab.first(&run, &out)?;
        let expected = |i| {
            let unit = (random_at(seed, i) >> 40) as f32 * (2.0 / 16_777_216.0) - 1.0;
            bf16::from_f32(unit * limit).to_bits()
        };
        lab.time(&run)?;
        Ok((differing(&found, expected), 0.0))
    })?;
    lab.case((&ROWS, "random_words"), |lab| {
        let out = lab.empty::<u32>(count)?;
        let run = Run::new(blocks, 256).at(&out).long(count as u64).long(seed).moves(4 * count);
        let found = lab.first(&run, &out)?;
        lab.time(&run)?;
        Ok((differing(&found, |i| (random_at(seed, i) >> 32) as u32), 0.0))
    })?;
    lab.case((&ROWS, "fill_words"), |lab| {
        let out = lab.empty::<u32>(count)?;
        let run = Run::new(blocks, 256).at(&out).long(count as u64).size(12345).moves(4 * count);
        let found = lab.first(&run, &out)?;
        lab.time(&run)?;
        Ok((differing(&found, |_| 12345), 0.0))
    })
}
