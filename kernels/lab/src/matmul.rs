//! Products of few rows of activations, for every layout of weights. Owner: `main`; `rows.rs` uses the weights. Invariant:
//! weights are made here in the layouts that `weights.cuh` describes, at random, and decoded by code of their own.

use crate::bench::{Lab, Run, worst};
use cust::memory::DeviceBuffer;
use half::{bf16, f16};
use tokenrouter_kernels::matmul::cuda::MATMUL;

/// Outputs of a tile, columns of a group.
const TILE: usize = 16;
const GROUP: usize = 64;
/// Values of a result that are compared.
const COMPARED: usize = 64;

/// How weights lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row-major.
    F32,
    /// Row-major.
    F16,
    /// Row-major.
    Bf16,
    /// Bytes in tiles.
    Q8,
    /// Nibbles in tiles.
    Q4,
}

/// What a record of scales holds, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two scales.
    Halves = 0,
    /// Two scales, two minima.
    HalvesMin = 1,
    /// Factors for 32 columns.
    Factors32 = 2,
    /// Signed factors for 16 columns.
    Factors16 = 3,
    /// Factors of scales and minima for 16 columns.
    Factors16Min = 4,
}

/// A layout of weights: what kernels call it, its kind of scales, and what is subtracted from codes.
pub const LAYOUTS: [(&str, Layout, Kind, u32); 12] = [
    ("f32", Layout::F32, Kind::Halves, 0),
    ("f16", Layout::F16, Kind::Halves, 0),
    ("bf16", Layout::Bf16, Kind::Halves, 0),
    ("q8_halves", Layout::Q8, Kind::Halves, 0),
    ("q8_halves_min", Layout::Q8, Kind::HalvesMin, 0),
    ("q8_factors_32", Layout::Q8, Kind::Factors32, 0),
    ("q8_factors_16", Layout::Q8, Kind::Factors16, 32),
    ("q4_halves", Layout::Q4, Kind::Halves, 8),
    ("q4_halves_min", Layout::Q4, Kind::HalvesMin, 0),
    ("q4_factors_32", Layout::Q4, Kind::Factors32, 0),
    ("q4_factors_16", Layout::Q4, Kind::Factors16, 4),
    ("q4_factors_16_min", Layout::Q4, Kind::Factors16Min, 0),
];

/// A matrix, here and on the device.
pub struct Weights {
    layout: Layout,
    kind: Kind,
    /// Subtracted from codes.
    pub zero: u32,
    /// Outputs.
    pub rows: usize,
    /// Inputs: a multiple of [`GROUP`].
    pub cols: usize,
    codes: Vec<u32>,
    scales: Vec<u32>,
    /// Its codes on the device.
    pub at_codes: DeviceBuffer<u32>,
    /// Its scales on the device.
    pub at_scales: DeviceBuffer<u32>,
}

/// Two 16-bit numbers in a word.
fn pack(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}

fn half_of(word: u32, upper: bool) -> f64 {
    f16::from_bits((if upper { word >> 16 } else { word }) as u16).to_f64()
}

impl Weights {
    /// Random ones.
    pub fn new(lab: &mut Lab, which: (Layout, Kind, u32), (rows, cols): (usize, usize)) -> Result<Weights, String> {
        let (layout, kind, zero) = which;
        let random = &mut lab.random;
        let groups = rows.div_ceil(TILE) * cols / GROUP;
        let mut two = |encode: fn(f32) -> u16| pack(encode(random.value()), encode(random.value()));
        let codes: Vec<u32> = match layout {
            Layout::F32 => (0..rows * cols).map(|_| random.value().to_bits()).collect(),
            Layout::F16 => (0..rows * cols / 2).map(|_| two(|x| f16::from_f32(x).to_bits())).collect(),
            Layout::Bf16 => (0..rows * cols / 2).map(|_| two(|x| bf16::from_f32(x).to_bits())).collect(),
            Layout::Q8 => {
                // Signed with plain scales, below 128 with others.
                let mask = if kind == Kind::Halves { u32::MAX } else { 0x7f7f_7f7f };
                (0..groups * 256).map(|_| random.bits() as u32 & mask).collect()
            }
            Layout::Q4 => (0..groups * 128).map(|_| random.bits() as u32).collect(),
        };
        let mut small = || f16::from_f32(0.01 + 0.005 * random.value()).to_bits();
        let mut scales = Vec::new();
        if matches!(layout, Layout::Q8 | Layout::Q4) {
            for _ in 0..groups * TILE {
                let halves = pack(small(), small());
                match kind {
                    Kind::Halves => scales.push(halves),
                    Kind::HalvesMin => scales.extend([halves, pack(small(), small())]),
                    _ => scales.extend([halves.wrapping_mul(0x9e37_79b9) & 0x3f3f_3f3f, halves]),
                }
            }
        }
        let (at_codes, at_scales) = (lab.put(&codes)?, lab.put(&scales)?);
        Ok(Weights { layout, kind, zero, rows, cols, codes, scales, at_codes, at_scales })
    }

    /// Its kind of scales as kernels get it.
    pub fn kind(&self) -> usize {
        self.kind as usize
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        4 * (self.codes.len() + self.scales.len())
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.bytes() / self.rows
    }

    /// The weight of an output and an input.
    pub fn value(&self, row: usize, col: usize) -> f64 {
        let (product, minimum) = self.terms(row, col);
        product - minimum
    }

    /// What it is the difference of: the product of scale and code, and the minimum. A kernel rounds the first, then the
    /// difference.
    pub fn terms(&self, row: usize, col: usize) -> (f64, f64) {
        let at = row * self.cols + col;
        match self.layout {
            Layout::F32 => return (f64::from(f32::from_bits(self.codes[at])), 0.0),
            Layout::F16 => return (half_of(self.codes[at / 2], at % 2 == 1), 0.0),
            Layout::Bf16 => {
                let word = self.codes[at / 2];
                return (bf16::from_bits((if at % 2 == 1 { word >> 16 } else { word }) as u16).to_f64(), 0.0);
            }
            Layout::Q8 | Layout::Q4 => {}
        }
        // Column c of a group: slot c % 4 of quad lane c / 4 % 4 in unit c / 16.
        let group = row / TILE * (self.cols / GROUP) + col / GROUP;
        let (slot, unit) = (col % 4, col % GROUP / 16);
        let (lane, upper) = (4 * (row % 8) + col / 4 % 4, row % TILE / 8);
        let code = if self.layout == Layout::Q8 {
            // Bytes hold the slots 0, 2, 1, 3.
            let byte = [0, 2, 1, 3][slot];
            i32::from((self.codes[group * 256 + upper * 128 + 4 * lane + unit] >> (8 * byte)) as u8 as i8)
        } else {
            let nibble = 2 * (unit % 2) + slot / 2 + 4 * (slot % 2);
            (self.codes[group * 128 + 4 * lane + 2 * upper + unit / 2] >> (4 * nibble) & 15) as i32
        };
        let (scale, minimum) = self.scale(group * TILE + row % TILE, unit);
        (scale * f64::from(code - self.zero as i32), minimum)
    }

    /// Scale and minimum of a unit of 16 columns in a record.
    fn scale(&self, record: usize, unit: usize) -> (f64, f64) {
        if self.kind == Kind::Halves {
            return (half_of(self.scales[record], unit >= 2), 0.0);
        }
        let [first, second] = [self.scales[2 * record], self.scales[2 * record + 1]];
        let (d, dmin) = (half_of(second, false), half_of(second, true));
        let byte = |at: usize| f64::from((first >> (8 * at)) as u8);
        match self.kind {
            Kind::Halves | Kind::HalvesMin => (half_of(first, unit >= 2), if unit < 2 { d } else { dmin }),
            Kind::Factors32 => (d * byte(unit / 2), dmin * byte(2 + unit / 2)),
            Kind::Factors16 => (d * f64::from((first >> (8 * unit)) as u8 as i8), 0.0),
            Kind::Factors16Min => (d * (byte(unit) % 16.0), dmin * (byte(unit) / 16.0).floor()),
        }
    }
}

/// Outputs and rows of a block, as the names of kernels say.
const BLOCKS: [(usize, usize); 3] = [(16, 8), (16, 16), (32, 8)];

/// All of them.
pub fn all(lab: &mut Lab) -> Result<(), String> {
    for (name, layout, kind, zero) in LAYOUTS {
        for block in BLOCKS {
            let kernel = format!("linear_{name}_{}_{}", block.0, block.1);
            lab.case((&MATMUL, &kernel), |lab| linear(lab, (layout, kind, zero), block))?;
        }
    }
    Ok(())
}

/// Two products in one launch, the second of fewer outputs, and no third.
fn linear(lab: &mut Lab, which: (Layout, Kind, u32), block: (usize, usize)) -> Result<(f64, f64), String> {
    let (rows, cols) = (lab.options.rows, lab.options.width);
    let a = Weights::new(lab, which, (lab.options.outputs, cols))?;
    let b = Weights::new(lab, which, (21, cols))?;
    let (x, bias) = (lab.random.values(rows * cols), lab.random.values(b.rows));
    let (at_x, at_bias) = (lab.put(&x)?, lab.put(&bias)?);
    let (y_a, y_b) = (lab.empty::<f32>(rows * a.rows)?, lab.empty::<f32>(rows * b.rows)?);
    let blocks = a.rows.div_ceil(block.0) + b.rows.div_ceil(block.0);
    let run = Run::new((rows.div_ceil(block.1), blocks), 256);
    let run = run.at(&at_x).size(rows).size(cols).size(which.2 as usize);
    let run = run.at(&a.at_codes).at(&a.at_scales).size(a.rows).null().at(&y_a);
    let run = run.at(&b.at_codes).at(&b.at_scales).size(b.rows).at(&at_bias).at(&y_b);
    let run = run.null().null().size(0).null().null();
    let run = run.moves(a.bytes() + b.bytes() + 4 * rows * (cols + a.rows + b.rows));
    let found_a = lab.first(&run, &y_a)?;
    let found_b = lab.get(&y_b)?;
    let mut error: f64 = 0.0;
    let mut compare = |(weights, found): (&Weights, &[f32]), (row, output): (usize, usize), bias: f64| {
        let terms = (0..cols).map(|col| weights.value(output, col) * f64::from(x[row * cols + col]));
        let (sum, size) = terms.fold((bias, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
        error = error.max(worst([found[row * weights.rows + output]], [sum], size));
    };
    for _ in 0..COMPARED {
        compare((&a, &found_a), (lab.random.below(rows), lab.random.below(a.rows)), 0.0);
        let output = lab.random.below(b.rows);
        compare((&b, &found_b), (lab.random.below(rows), output), f64::from(bias[output]));
    }
    lab.time(&run)?;
    // Codes are multiplied with 15 to 17 bits of the activations, floats with 22 and more.
    let quantised = matches!(which.0, Layout::Q8 | Layout::Q4);
    Ok((error, if quantised { 5e-5 } else { 2e-6 }))
}
