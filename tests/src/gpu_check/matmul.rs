//! Matrix products, embeddings and gathers: every format against products in f64 of the decoded weights, and rows of a
//! result against themselves in other company.

use super::{Finding, Random, bits, same, text};
use tokenrouter_kernels::cuda::{Answer, Array, CudaError, Gpu, Stream};
use tokenrouter_kernels::matmul::cuda::{
    DeviceMatrix, EmbedArgs, GatherArgs, Ids, Layout, LinearArgs, MatmulKernels, MatmulScratch, Product, ScratchSize,
    Weights, device_bytes,
};
use tokenrouter_kernels::quant::{Format, dequantize_row};

/// Rows that the kernels multiply themselves, whatever the layout.
const FEW: usize = 16;
/// Rows of the largest product here.
const ROWS_MAX: usize = 80;

/// Inputs below this have fewer digits beside f16 weights.
const F16_LEAST: f64 = 1e-3;

/// Runs all checks.
///
/// # Errors
/// What differs where everything must be equal, or what the device says.
pub fn check(gpu: &Gpu, seed: u64) -> Result<Vec<Finding>, String> {
    let mut random = Random::new(seed);
    let mut bench = Bench::new(gpu).map_err(text)?;
    let mut findings = Findings::new();
    for format in Format::ALL {
        for _ in 0..3 {
            let cols = columns(format, &mut random);
            let outputs = [1, 16, 37, 70][random.below(4)];
            let case = Case::new(&mut random, format, (outputs, cols));
            products(&mut bench, &mut random, &case, &mut findings)?;
            embeddings(&bench, &mut random, &case)?;
        }
        blocks_of_two_sizes(&mut bench, &mut random, format)?;
    }
    for _ in 0..8 {
        together(&mut bench, &mut random)?;
    }
    gathers(&bench, &mut random)?;
    random_weights(&mut bench, &mut random, &mut findings)?;
    refusals(&bench)?;
    Ok(findings.list())
}

/// What is needed for every check.
struct Bench {
    stream: Stream,
    kernels: MatmulKernels,
    /// The same without cuBLASLt.
    fixed: MatmulKernels,
    scratch: MatmulScratch,
    multiprocessors: usize,
}

impl Bench {
    fn new(gpu: &Gpu) -> Result<Bench, CudaError> {
        let kernels = MatmulKernels::load(gpu)?;
        Ok(Bench {
            stream: Stream::new(gpu, 0)?,
            fixed: kernels.clone().fixed_order(),
            kernels,
            scratch: MatmulScratch::new(gpu, ScratchSize { rows: ROWS_MAX, cols: 2048, quantized: true })?,
            multiprocessors: gpu.facts().multiprocessors as usize,
        })
    }

    /// `x` times the matrix, with a margin around the result that must stay as it was.
    fn linear(&mut self, kernels: Which, matrix: &DeviceMatrix, input: &Input) -> Result<Vec<f32>, String> {
        let kernels = if kernels == Which::Fixed { &self.fixed } else { &self.kernels };
        let (rows, outputs) = (input.x.len() / matrix.cols(), matrix.rows());
        let x = Array::from_host(&self.stream, "a check", &input.x).map_err(text)?;
        let bias = match &input.bias {
            Some(bias) => Some(Array::from_host(&self.stream, "a check", bias).map_err(text)?),
            None => None,
        };
        let margin = vec![7.0_f32; rows * outputs + 5];
        let mut y = Array::from_host(&self.stream, "a check", &margin).map_err(text)?;
        let args = LinearArgs { matrix, bias: bias.as_ref(), x: &x, rows, y: &mut y };
        kernels.linear(&self.stream, args, &mut self.scratch).map_err(text)?;
        let mut y = y.to_host(&self.stream).map_err(text)?;
        same("matmul: behind the result", &y.split_off(rows * outputs), &[7.0; 5])?;
        Ok(y)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Which {
    Fixed,
    Any,
}

struct Input {
    /// `[rows, cols]`
    x: Vec<f32>,
    bias: Option<Vec<f32>>,
}

/// What rounding does: to the input as it is taken apart, or to the 16-bit input of cuBLASLt.
struct Findings {
    few: [Finding; 5],
    many: [Finding; 5],
    variance: Finding,
}

impl Findings {
    fn new() -> Findings {
        // Relative to the root of the sum of squares of the products, the size of a sum of random signs. Tensor cores cut off
        // what does not fit where the processor rounds: up to a last bit at each step, always towards zero.
        let few = |name, tolerance| Finding::new(&format!("matmul: few rows, {name}"), tolerance);
        let many = |name, tolerance| Finding::new(&format!("matmul: many rows, {name}"), tolerance);
        Findings {
            few: [few("f32", 2e-5), few("f16", 1e-5), few("bf16", 1e-5), few("q8", 6e-5), few("q4", 6e-5)],
            many: [many("f32", 2e-5), many("f16", 3e-3), many("bf16", 1e-2), many("q8", 2e-2), many("q4", 2e-2)],
            variance: Finding::new("matmul: variance of random weights", 0.1),
        }
    }

    fn list(self) -> Vec<Finding> {
        self.few.into_iter().chain(self.many).chain([self.variance]).collect()
    }
}

/// A number of columns that the format can have, most of them awkward.
fn columns(format: Format, random: &mut Random) -> usize {
    match format.block_values() {
        1 => random.of(&[1, 4, 7, 8, 33, 64, 200, 516, 1001]),
        block => block * (1 + random.below(640 / block + 1)),
    }
}

/// A matrix on the host.
struct Case {
    format: Format,
    outputs: usize,
    cols: usize,
    stored: Vec<u8>,
    /// Decoded.
    weights: Vec<f32>,
}

impl Case {
    fn new(random: &mut Random, format: Format, (outputs, cols): (usize, usize)) -> Case {
        let stored = stored(random, format, outputs * cols);
        let mut weights = vec![0.0; outputs * cols];
        let bytes = stored.len() / outputs;
        for (row, bytes) in weights.chunks_exact_mut(cols).zip(stored.chunks_exact(bytes)) {
            dequantize_row(format, bytes, row).unwrap_or_else(|error| unreachable!("sizes fit: {error}"));
        }
        Case { format, outputs, cols, stored, weights }
    }

    /// The first rows alone.
    fn first(&self, outputs: usize) -> Case {
        Case {
            format: self.format,
            outputs,
            cols: self.cols,
            stored: self.stored[..self.stored.len() / self.outputs * outputs].to_vec(),
            weights: self.weights[..outputs * self.cols].to_vec(),
        }
    }

    fn upload(&self, stream: &Stream) -> Result<DeviceMatrix, String> {
        let Case { format, outputs: rows, cols, ref stored, .. } = *self;
        let matrix = DeviceMatrix::upload(stream, Weights { format, rows, cols, bytes: stored }).map_err(text)?;
        if matrix.bytes() != device_bytes(format, rows, cols) {
            return Err(format!("{} takes {} bytes, which was not planned", self.name(), matrix.bytes()));
        }
        Ok(matrix)
    }

    fn name(&self) -> String {
        format!("matmul: {} {} x {}", self.format.name(), self.outputs, self.cols)
    }

    fn input(&self, random: &mut Random, rows: usize) -> Input {
        let scale = random.of(&[1e-2, 1.0, 300.0]);
        let bias = (random.below(2) == 0).then(|| random.normals(self.outputs));
        Input { x: (0..rows * self.cols).map(|_| random.normal() * scale).collect(), bias }
    }

    fn note(&self, finding: &mut Finding, input: &Input, y: &[f32]) {
        // Beside f16 weights, inputs are taken apart into f16, which has no more than so many places behind the point.
        let least = if self.format == Format::F16 { F16_LEAST } else { 0.0 };
        for (x, y) in input.x.chunks_exact(self.cols).zip(y.chunks_exact(self.outputs)) {
            for (n, (weights, found)) in self.weights.chunks_exact(self.cols).zip(y).enumerate() {
                let bias = input.bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]));
                let (mut sum, mut squares) = (bias, bias * bias);
                for (&w, &x) in weights.iter().zip(x) {
                    let (w, x) = (f64::from(w), f64::from(x));
                    sum += w * x;
                    squares += (w * x.abs().max(least)).powi(2);
                }
                finding.note(*found, sum, squares.sqrt().max(f64::MIN_POSITIVE));
            }
        }
    }
}

/// Bits of an f16 of either sign and a magnitude from 2^(exponent - 15) to 8 times that.
fn small_f16(random: &mut Random, exponent: u16) -> u16 {
    (random.next() as u16 & 0x83ff) | (exponent + random.below(3) as u16) << 10
}

/// Random weights as stored: any codes and factors, and scales that models could have.
fn stored(random: &mut Random, format: Format, values: usize) -> Vec<u8> {
    let scales: &[usize] = match format {
        Format::F32 => return random.normals(values).iter().flat_map(|v| v.to_le_bytes()).collect(),
        Format::F16 => return (0..values).flat_map(|_| small_f16(random, 14).to_le_bytes()).collect(),
        Format::BF16 => {
            return random.normals(values).iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect();
        }
        Format::Q8_0 | Format::Q4_0 | Format::Q5_0 => &[0],
        Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => &[0, 2],
        Format::Q2_K => &[80, 82],
        Format::Q3_K => &[108],
        Format::Q6_K => &[208],
    };
    let mut bytes: Vec<u8> =
        (0..values / format.block_values() * format.block_bytes()).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        for at in scales {
            block[*at..at + 2].copy_from_slice(&small_f16(random, 7).to_le_bytes());
        }
    }
    bytes
}

/// Few and many rows against f64; a row alone, and a row beside one that is not a number, against the same in a batch.
fn products(bench: &mut Bench, random: &mut Random, case: &Case, findings: &mut Findings) -> Result<(), String> {
    let matrix = case.upload(&bench.stream)?;
    let layout = matrix.layout() as usize;
    let rows = random.of(&[1, 2, 7, 8, 9, 13, FEW]);
    let input = case.input(random, rows);
    let few = bench.linear(Which::Any, &matrix, &input)?;
    case.note(&mut findings.few[layout], &input, &few);

    let rows = 1 + FEW + random.below(24);
    let mut input = case.input(random, rows);
    let batch = bench.linear(Which::Fixed, &matrix, &input)?;
    case.note(&mut findings.few[layout], &input, &batch);
    let many = bench.linear(Which::Any, &matrix, &input)?;
    case.note(&mut findings.many[layout], &input, &many);

    let row = random.below(rows);
    let range = row * case.outputs..(row + 1) * case.outputs;
    let alone = Input { x: input.x[row * case.cols..][..case.cols].to_vec(), bias: input.bias.clone() };
    for which in [Which::Fixed, Which::Any] {
        let y = bench.linear(which, &matrix, &alone)?;
        same(&format!("{}, row {row} of {rows} alone", case.name()), &bits(&y), &bits(&batch[range.clone()]))?;
    }
    input.x[row * case.cols + random.below(case.cols)] = f32::NAN;
    let mut damaged = bench.linear(Which::Fixed, &matrix, &input)?;
    if !damaged[range.clone()].iter().all(|y| y.is_nan()) {
        return Err(format!("{}: row {row} of {rows} hides that it is not a number", case.name()));
    }
    damaged[range.clone()].copy_from_slice(&batch[range]);
    same(&format!("{}, rows beside one that is not a number", case.name()), &bits(&damaged), &bits(&batch))?;

    if matrix.layout() == Layout::Q8 || matrix.layout() == Layout::Q4 {
        let input = case.input(random, ROWS_MAX);
        let widened = bench.linear(Which::Any, &matrix, &input)?;
        case.note(&mut findings.many[layout], &input, &widened);
    }
    Ok(())
}

/// Several matrices for the same rows, of formats that share launches and of others, are as each of them alone.
fn together(bench: &mut Bench, random: &mut Random) -> Result<(), String> {
    let (rows, cols) = (random.of(&[1, 6, 13, 30, ROWS_MAX]), 256 * (1 + random.below(2)));
    let formats = [random.of(&Format::ALL), random.of(&Format::ALL)];
    let mut cases = Vec::new();
    for _ in 0..1 + random.below(6) {
        let (format, outputs) = (random.of(&formats), 1 + random.below(90));
        cases.push(Case::new(random, format, (outputs, cols)));
    }
    let matrices: Vec<DeviceMatrix> = cases.iter().map(|case| case.upload(&bench.stream)).collect::<Result<_, _>>()?;
    let x = cases[0].input(random, rows).x;
    for which in [Which::Any, Which::Fixed] {
        let (mut alone, mut biases, mut y) = (Vec::new(), Vec::new(), Vec::new());
        for (case, matrix) in cases.iter().zip(&matrices) {
            let input = Input { x: x.clone(), bias: case.input(random, 0).bias };
            alone.push(bench.linear(which, matrix, &input)?);
            let bias = input.bias.map(|bias| Array::from_host(&bench.stream, "a check", &bias).map_err(text));
            biases.push(bias.transpose()?);
            y.push(Array::new(bench.stream.gpu(), "a check", rows * case.outputs).map_err(text)?);
        }
        let x = Array::from_host(&bench.stream, "a check", &x).map_err(text)?;
        let operands = matrices.iter().zip(&biases).zip(&mut y);
        let mut products: Vec<Product<'_>> =
            operands.map(|((matrix, bias), y)| Product { matrix, bias: bias.as_ref(), y }).collect();
        let kernels = if which == Which::Fixed { &bench.fixed } else { &bench.kernels };
        kernels.linear_together(&bench.stream, (&x, rows), &mut products, &mut bench.scratch).map_err(text)?;
        for ((case, alone), y) in cases.iter().zip(&alone).zip(&y) {
            let found = y.to_host(&bench.stream).map_err(text)?;
            same(&format!("{}, {rows} rows, with others", case.name()), &bits(&found), &bits(alone))?;
        }
    }
    Ok(())
}

/// With so many outputs that blocks take 32 of them, the first ones are as with blocks of 16.
fn blocks_of_two_sizes(bench: &mut Bench, random: &mut Random, format: Format) -> Result<(), String> {
    let outputs = 32 * bench.multiprocessors - random.below(16);
    let case = Case::new(random, format, (outputs, format.block_values().max(24)));
    let few = case.first(33);
    let (all, few) = (case.upload(&bench.stream)?, few.upload(&bench.stream)?);
    for rows in [3, FEW] {
        let mut input = case.input(random, rows);
        let wide = bench.linear(Which::Any, &all, &input)?;
        input.bias = input.bias.map(|bias| bias[..33].to_vec());
        let narrow = bench.linear(Which::Any, &few, &input)?;
        for (row, (wide, narrow)) in wide.chunks_exact(outputs).zip(narrow.chunks_exact(33)).enumerate() {
            let name = format!("{}, row {row} of {rows}, in blocks of two sizes", case.name());
            same(&name, &bits(&wide[..33]), &bits(narrow))?;
        }
    }
    Ok(())
}

/// Rows of the table by ids and by the tokens of answers; ids that the table has not.
fn embeddings(bench: &Bench, random: &mut Random, case: &Case) -> Result<(), String> {
    let table = case.upload(&bench.stream)?;
    let count = 1 + random.below(5);
    let ids: Vec<u32> = (0..count).map(|_| random.below(case.outputs + 1) as u32).collect();
    let rows = ids.iter().flat_map(|id| match case.weights.chunks_exact(case.cols).nth(*id as usize) {
        Some(row) => row.to_vec(),
        None => vec![0.0; case.cols],
    });
    let expected: Vec<f32> = rows.collect();
    let embed = |ids: Ids| -> Result<Vec<f32>, CudaError> {
        let mut out = Array::new(bench.stream.gpu(), "a check", count * case.cols)?;
        bench.kernels.embed(&bench.stream, EmbedArgs { table: &table, ids, count, out: &mut out })?;
        out.to_host(&bench.stream)
    };
    let tokens = Array::from_host(&bench.stream, "a check", &ids).map_err(text)?;
    let found = embed(Ids::Tokens(tokens.view())).map_err(text)?;
    same(&format!("{}, rows by tokens", case.name()), &bits(&found), &bits(&expected))?;
    let answers: Vec<Answer> = ids.iter().map(|id| Answer { token: *id, ..Answer::default() }).collect();
    let answers = Array::from_host(&bench.stream, "a check", &answers).map_err(text)?;
    let found = embed(Ids::Answers(answers.view())).map_err(text)?;
    same(&format!("{}, rows by answers", case.name()), &bits(&found), &bits(&expected))
}

/// Rows of an array, some twice, one that is not there.
fn gathers(bench: &Bench, random: &mut Random) -> Result<(), String> {
    for cols in [1, 64, 1023, 2500] {
        let rows = 1 + random.below(6);
        let x = random.normals(rows * cols);
        let index: Vec<u32> = (0..7).map(|i| if i == 3 { rows as u32 } else { random.below(rows) as u32 }).collect();
        let expected: Vec<f32> = index
            .iter()
            .flat_map(|i| x.chunks_exact(cols).nth(*i as usize).map_or(vec![0.0; cols], <[f32]>::to_vec))
            .collect();
        let gathered = || -> Result<Vec<f32>, CudaError> {
            let x = Array::from_host(&bench.stream, "a check", &x)?;
            let index = Array::from_host(&bench.stream, "a check", &index)?;
            let mut out = Array::new(bench.stream.gpu(), "a check", expected.len())?;
            let args = GatherArgs { x: &x, cols, index: index.view(), out: &mut out };
            bench.kernels.gather_rows(&bench.stream, args)?;
            out.to_host(&bench.stream)
        };
        same(&format!("gather of rows of {cols}"), &bits(&gathered().map_err(text)?), &bits(&expected))?;
    }
    Ok(())
}

/// Weights made on the device: of the size that keeps activations as they are, the same for a seed.
fn random_weights(bench: &mut Bench, random: &mut Random, findings: &mut Findings) -> Result<(), String> {
    let (outputs, cols) = (64, 256);
    let identity: Vec<f32> = (0..cols * cols).map(|i| f32::from(i % (cols + 1) == 0)).collect();
    let input = Input { x: identity[..ROWS_MAX.min(cols) * cols].to_vec(), bias: None };
    for format in [Format::BF16, Format::Q8_0, Format::Q4_0] {
        let seed = random.next();
        let mut made = |seed: u64| -> Result<Vec<f32>, String> {
            let made = DeviceMatrix::random(&bench.stream, &bench.kernels, format, (outputs, cols, seed));
            bench.linear(Which::Fixed, &made.map_err(text)?, &input)
        };
        let values = made(seed)?;
        same("matmul: random weights of a seed", &bits(&made(seed)?), &bits(&values))?;
        if bits(&made(seed ^ 1)?) == bits(&values) {
            return Err(format!("random {} weights do not depend on the seed", format.name()));
        }
        let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
        findings.variance.note((squares / values.len() as f64 * cols as f64) as f32, 1.0, 1.0);
    }
    Ok(())
}

/// Shapes that do not fit their bytes are refused, and formats that cannot be made.
fn refusals(bench: &Bench) -> Result<(), String> {
    let refused = |format, rows, cols, bytes: &[u8]| {
        DeviceMatrix::upload(&bench.stream, Weights { format, rows, cols, bytes }).is_err()
    };
    let random = DeviceMatrix::random(&bench.stream, &bench.kernels, Format::Q6_K, (16, 256, 1));
    if refused(Format::Q8_0, 2, 32, &[0; 67])
        && refused(Format::Q8_0, 1, 33, &[0; 34])
        && refused(Format::F32, 0, 4, &[])
        && random.is_err()
    {
        return Ok(());
    }
    Err("a matrix of a shape that does not fit was taken".into())
}
