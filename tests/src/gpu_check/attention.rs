//! Attention over paged KV memory: against its definition in f64, and against itself for other batches, chunks and ways
//! to share the work.

use super::rope::decode;
use super::{Finding, Random, bits, same, text};
use tokenrouter_kernels::attention::cuda::{AttendArgs, AttendShape, AttentionKernels, KvMemory, SPLIT_UNIT, Splits};
use tokenrouter_kernels::attention::{KvFormat, KvShape, PAGE_TOKENS};
use tokenrouter_kernels::cuda::{Array, CudaError, Gpu, NONE, Span, StepInput, StepLimits, StepMemory, Stream};

/// Not a number in either format.
const NOTHING: u16 = 0x7fff;
/// What padding has in the result.
const UNTOUCHED: f32 = -77.0;
/// Layer that is used, of three.
const LAYER: usize = 1;
/// Rows of queries from which fixed splits are done in turn.
const SERIAL_ROWS: usize = 2049;

/// Runs all checks.
///
/// # Errors
/// What differs where everything must be equal, or what the device says.
pub fn check(gpu: &Gpu, seed: u64) -> Result<Vec<Finding>, String> {
    let mut random = Random::new(seed);
    // Queries and weights are split into two parts of 8 or 11 bits; results are means of numbers up to 4.
    // Tensor cores cut off what does not fit where the processor rounds, in scores as well as in sums.
    let mut bf16 = Finding::new("attention: bf16", 2e-4);
    let mut f16 = Finding::new("attention: f16", 6e-5);
    // Every kind of remainder of 64, and a head that needs padding.
    let heads = [(64, 7), (128, 8), (80, 1), (100, 2), (256, 4), (16, 3), (96, 2), (128, 2)];
    for (index, heads) in heads.into_iter().enumerate() {
        let format = [KvFormat::BF16, KvFormat::F16][index % 3 % 2];
        let case = Case::new(&mut random, heads, format);
        let finding = if format == KvFormat::BF16 { &mut bf16 } else { &mut f16 };
        let bench = Bench::new(gpu, &case).map_err(text)?;
        bench.check(&case, finding).map_err(|error| format!("{error}, {:?}, {:?}", case.shape, case.requests))?;
    }
    let case = long(&mut random);
    Bench::new(gpu, &case).map_err(text)?.check(&case, &mut bf16)?;
    Ok(vec![bf16, f16])
}

/// A context and its newest tokens.
#[derive(Clone, Debug)]
struct Request {
    start: u32,
    len: u32,
    pages: Vec<u32>,
}

struct Case {
    shape: KvShape,
    heads: usize,
    /// Layer after layer as in KV memory.
    memory: Vec<u16>,
    requests: Vec<Request>,
    /// `[requests][len, heads * head_dim]`
    q: Vec<Vec<f32>>,
}

impl Case {
    /// Requests of awkward sizes, two of which share pages.
    fn new(random: &mut Random, (head_dim, group): (usize, usize), format: KvFormat) -> Case {
        let starts = [0, 1, 14, 15, 16, 17, 63, 64, 65, 200, 333];
        let mut sizes: Vec<(u32, u32)> = (0..2).map(|_| (random.of(&starts), random.of(&[1, 2, 3, 5, 19]))).collect();
        sizes.push((random.of(&[32, 40, 47]), 1));
        sizes.push((random.of(&[33, 64]), 4));
        let kv_heads = 1 + random.below(2);
        let shape = KvShape { layers: 3, pages: 90, kv_heads, head_dim, format };
        Case::of(random, (shape, group), &sizes)
    }

    fn of(random: &mut Random, (shape, group): (KvShape, usize), sizes: &[(u32, u32)]) -> Case {
        let mut free: Vec<u32> = (0..shape.pages as u32).collect();
        let mut requests: Vec<Request> = Vec::new();
        for &(start, len) in sizes {
            let count = (start + len).div_ceil(PAGE_TOKENS as u32);
            let pages = (0..count).map(|_| free.swap_remove(random.below(free.len()))).collect();
            requests.push(Request { start, len, pages });
        }
        // The last two have their first pages in common.
        if let [.., a, b] = &mut requests[..] {
            let shared = (a.start.min(b.start) as usize / PAGE_TOKENS).min(2);
            let (from, to) = (&a.pages[..shared], &mut b.pages[..shared]);
            to.copy_from_slice(from);
        }
        let heads = shape.kv_heads * group;
        let q = requests.iter().map(|request| {
            let scale = random.of(&[0.5, 1.0, 4.0]);
            (0..request.len as usize * heads * shape.head_dim).map(|_| random.normal() * scale).collect()
        });
        let q = q.collect();
        let mut case = Case { shape, heads, memory: Vec::new(), requests, q };
        case.remember(random);
        case
    }

    fn padded(&self) -> usize {
        let page = KvMemory::bytes_per_page(&self.shape).unwrap_or_else(|error| panic!("{error}")) as usize;
        page / (2 * 2 * PAGE_TOKENS * self.shape.layers * self.shape.kv_heads)
    }

    /// Where the key (side 0) or value (side 1) of a position lies.
    fn place(&self, request: &Request, position: usize, (side, head): (usize, usize)) -> usize {
        let KvShape { pages, kv_heads, .. } = self.shape;
        let page = request.pages[position / PAGE_TOKENS] as usize;
        let head = ((2 * LAYER + side) * pages + page) * kv_heads + head;
        (head * PAGE_TOKENS + position % PAGE_TOKENS) * self.padded()
    }

    /// Keys and values of all positions; everything else is no number.
    fn remember(&mut self, random: &mut Random) {
        let KvShape { layers, pages, kv_heads, head_dim, format } = self.shape;
        let padded = self.padded();
        let mut memory = vec![NOTHING; 2 * layers * pages * kv_heads * PAGE_TOKENS * padded];
        for request in &self.requests {
            for position in 0..(request.start + request.len) as usize {
                for head in 0..2 * kv_heads {
                    let place = self.place(request, position, (head % 2, head / 2));
                    let row = &mut memory[place..place + padded];
                    row.fill(0);
                    row[..head_dim].fill_with(|| encode(format, random));
                }
            }
        }
        self.memory = memory;
    }

    /// The definition.
    fn reference(&self, index: usize) -> Vec<f64> {
        let KvShape { kv_heads, head_dim, format, .. } = self.shape;
        let (request, q) = (&self.requests[index], &self.q[index]);
        let stored = |position: usize, side: (usize, usize)| -> Vec<f64> {
            let place = self.place(request, position, side);
            self.memory[place..place + head_dim].iter().map(|&x| f64::from(decode(format, x))).collect()
        };
        let end = (request.start + request.len) as usize;
        let mut out = vec![0.0; q.len()];
        for head in 0..kv_heads {
            let keys: Vec<Vec<f64>> = (0..end).map(|position| stored(position, (0, head))).collect();
            let values: Vec<Vec<f64>> = (0..end).map(|position| stored(position, (1, head))).collect();
            for (row, (q, out)) in q.chunks(head_dim).zip(out.chunks_mut(head_dim)).enumerate() {
                if row % self.heads / (self.heads / kv_heads) != head {
                    continue;
                }
                let seen = request.start as usize + row / self.heads + 1;
                let dot = |key: &Vec<f64>| key.iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>();
                let scores: Vec<f64> = keys[..seen].iter().map(|key| dot(key) / (head_dim as f64).sqrt()).collect();
                let most = scores.iter().fold(f64::NEG_INFINITY, |most, score| most.max(*score));
                let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
                for (score, value) in scores.iter().zip(&values) {
                    let weight = (score - most).exp() / sum;
                    out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
                }
            }
        }
        out
    }
}

/// One request whose context is long for its pages, and short ones.
fn long(random: &mut Random) -> Case {
    let shape = KvShape { layers: 2, pages: 90, kv_heads: 1, head_dim: 64, format: KvFormat::BF16 };
    Case::of(random, (shape, 2), &[(1000, 1), (0, 1), (99, 1), (120, 2)])
}

/// Bits of a number of moderate size.
fn encode(format: KvFormat, random: &mut Random) -> u16 {
    let (bits, size) = (random.next() as u16, random.below(6) as u16);
    match format {
        // Exponents from -4 to 1.
        KvFormat::F16 => (bits & 0x83ff) | ((11 + size) << 10),
        _ => (bits & 0x807f) | ((123 + size) << 7),
    }
}

struct Bench {
    stream: Stream,
    kernels: AttentionKernels,
    memory: KvMemory,
}

/// Tokens of a request that are in a batch: which request, the first of its new tokens, how many.
type Part = (usize, u32, u32);

impl Bench {
    fn new(gpu: &Gpu, case: &Case) -> Result<Bench, CudaError> {
        let stream = Stream::new(gpu, 0)?;
        let kernels = AttentionKernels::load(gpu, case.shape.head_dim, case.shape.format)?;
        let mut memory = KvMemory::new(gpu, case.shape)?;
        memory.array_mut().write(&stream, 0, &case.memory)?;
        Ok(Bench { stream, kernels, memory })
    }

    fn check(&self, case: &Case, finding: &mut Finding) -> Result<(), String> {
        let all: Vec<Part> = (0..case.requests.len()).map(|index| (index, 0, case.requests[index].len)).collect();
        let expected: Vec<Vec<f64>> = (0..all.len()).map(|index| case.reference(index)).collect();
        let fixed = Splits::Fixed { positions: 2 * SPLIT_UNIT };
        let filled = self.kernels.fill((case.heads, case.shape.kv_heads), shape_of(case, &all));
        for splits in [Splits::Fill { count: 1 }, Splits::Fill { count: 3 }, filled, fixed] {
            let found = self.run(case, &all, (splits, 0))?;
            for (found, expected) in found.iter().zip(&expected) {
                found.iter().zip(expected).for_each(|(&found, &expected)| finding.note(found, expected, 1.0));
            }
        }
        let batch = self.run(case, &all, (fixed, 0))?;
        let turns = self.run(case, &all, (fixed, SERIAL_ROWS.div_ceil(case.heads)))?;
        for (index, (batch, turns)) in batch.iter().zip(&turns).enumerate() {
            same(&format!("attention: request {index}, splits in turn"), &bits(turns), &bits(batch))?;
            let alone = self.run(case, &all[index..=index], (fixed, 0))?;
            same(&format!("attention: request {index} alone"), &bits(&alone[0]), &bits(batch))?;
            let cut: Vec<Part> = (0..case.requests[index].len).map(|token| (index, token, 1)).collect();
            let cut = self.run(case, &cut, (fixed, 0))?.concat();
            same(&format!("attention: request {index} token by token"), &bits(&cut), &bits(batch))?;
        }
        let after = self.memory.array().to_host(&self.stream).map_err(text)?;
        same("attention: kv memory", &after, &case.memory)
    }

    /// Results of the parts, in a batch with rows of padding: one, or up to so many tokens.
    fn run(&self, case: &Case, parts: &[Part], (splits, tokens): (Splits, usize)) -> Result<Vec<Vec<f32>>, String> {
        let width = case.heads * case.shape.head_dim;
        let (input, mut q) = input_of(case, parts, tokens);
        let tokens = input.tokens.len();
        let real = q.len() / width;
        q.resize(tokens * width, f32::NAN);
        let shape = AttendShape { tokens, spans: input.spans.len(), ..shape_of(case, parts) };
        let out = self.attend(case, (&input, &q), (shape, splits)).map_err(text)?;
        if let Some(at) = out[real * width..].iter().position(|x| x.to_bits() != UNTOUCHED.to_bits()) {
            return Err(format!("attention: padding was written, value {at}"));
        }
        let mut rest = &out[..];
        let results = parts.iter().map(|(_, _, len)| {
            let (own, others) = rest.split_at(*len as usize * width);
            rest = others;
            own.to_vec()
        });
        Ok(results.collect())
    }

    fn attend(
        &self,
        case: &Case,
        (input, q): (&StepInput, &[f32]),
        (shape, splits): (AttendShape, Splits),
    ) -> Result<Vec<f32>, CudaError> {
        let stream = &self.stream;
        let limits = StepLimits {
            tokens: shape.tokens,
            rows: shape.spans,
            row_pages: case.shape.pages,
            pages: case.shape.pages as u32,
            vocab: 1,
        };
        let mut step = StepMemory::new(stream, limits)?;
        step.upload(stream, input)?;
        let heads = (case.heads, case.shape.kv_heads);
        let scratch: Array<f32> = Array::new(stream.gpu(), "a check", self.kernels.scratch_len(heads, shape, splits))?;
        let (q, out) = (Array::from_host(stream, "a check", q)?, vec![UNTOUCHED; q.len()]);
        let out = Array::from_host(stream, "a check", &out)?;
        self.kernels.attend(
            stream,
            &AttendArgs {
                q: q.view(),
                out: out.view(),
                heads: case.heads,
                layer: LAYER,
                kv: &self.memory,
                step: &step,
                shape,
                splits,
                scratch: scratch.view(),
            },
        )?;
        out.to_host(stream)
    }
}

/// Size of a batch without padding.
fn shape_of(case: &Case, parts: &[Part]) -> AttendShape {
    let longest = parts.iter().map(|part| part.2).max().unwrap_or(1);
    let context = case.requests.iter().map(|request| request.start + request.len).max().unwrap_or(1);
    let tokens = parts.iter().map(|part| part.2 as usize).sum();
    AttendShape { tokens, spans: parts.len(), longest: longest as usize, context: context as usize }
}

/// A batch of parts with a row of padding between requests and tokens, or more tokens, and its queries.
fn input_of(case: &Case, parts: &[Part], tokens: usize) -> (StepInput, Vec<f32>) {
    let width = case.heads * case.shape.head_dim;
    let (mut input, mut q) = (StepInput::default(), Vec::new());
    for (row, &(index, first, len)) in parts.iter().enumerate() {
        let request = &case.requests[index];
        let start = request.start + first;
        let (at, table) = (input.positions.len() as u32, input.pages.len() as u32);
        input.spans.push(Span { first: at, len, start, table });
        input.positions.extend(start..start + len);
        input.row_of.extend((0..len).map(|_| row as u32));
        input.pages.extend(&request.pages);
        q.extend_from_slice(&case.q[index][first as usize * width..(first + len) as usize * width]);
    }
    input.spans.push(Span::default());
    let tokens = tokens.max(input.positions.len() + 1);
    input.positions.resize(tokens, NONE);
    input.row_of.resize(tokens, 0);
    input.tokens = vec![0; tokens];
    input.slots = vec![NONE; tokens];
    (input, q)
}
