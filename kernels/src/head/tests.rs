//! The fused head against its parts: logits by the ordinary product, and plain loops over them.

use super::*;
use crate::Bytes;
use crate::matmul::testing::random_rows;
use crate::matmul::{Linear, QuantizedRows, linear};
use crate::quant::Format;
use crate::sys::Isa;
use crate::testing::{Random, bits, pool, pools, rounds};

/// An outcome that can be compared bit for bit.
#[derive(Debug, Clone, PartialEq)]
struct Found {
    best: (u32, u32),
    distribution: Option<[u32; 2]>,
    top: Vec<(u32, u32)>,
    real_top: Vec<(u32, u32)>,
}

fn entries(list: &[Candidate]) -> Vec<(u32, u32)> {
    list.iter().map(|c| (c.id, c.logit.to_bits())).collect()
}

/// The definition of everything but the order of sums, which is that of chunks read one after the other.
fn unfused(row: &[f32], want: &Want) -> Result<Found, BadLogits> {
    let tokens = &row[..want.real.min(row.len())];
    let judged = if want.distribution { row } else { tokens };
    if judged.iter().any(|v| v.is_nan() || *v == f32::INFINITY) {
        return Err(BadLogits::NotFinite);
    }
    let highest = |of: &[f32], k: usize| {
        let mut all: Vec<(usize, f32)> =
            of.iter().copied().enumerate().filter(|(_, v)| *v > f32::NEG_INFINITY).collect();
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap());
        all.iter().take(k).map(|&(id, v)| (id as u32, v.to_bits())).collect::<Vec<_>>()
    };
    let best = *highest(tokens, 1).first().ok_or(BadLogits::Empty)?;
    let distribution = want.distribution.then(|| {
        let (mut state, all) = (State::default(), Want { real: row.len(), ..*want });
        let chunks = row.chunks(CHUNK).map(|chunk| state.read(Isa::Portable, (chunk, 0), &all));
        let Distribution { logsumexp, entropy } = reduce::distribution(&chunks.collect::<Vec<_>>());
        [logsumexp.to_bits(), entropy.to_bits()]
    });
    Ok(Found { best, distribution, top: highest(row, want.top), real_top: highest(tokens, want.real_top) })
}

/// A head over given weights, and its input.
struct Case {
    matrix: Matrix,
    x: Vec<f32>,
    apart: Option<usize>,
}

impl Case {
    /// Any format, ids that neither tiles nor chunks divide.
    fn random(format: Format, random: &mut Random) -> Case {
        let cols = format.block_values().max(8) * (1 + random.below(2));
        let most = [40, 3 * CHUNK][random.below(2)];
        let ids = 1 + random.below(most);
        let weights = random_rows(format, ids, cols, random);
        let mut matrix = Matrix::new(format, ids, cols, Bytes::from(weights)).unwrap();
        if random.below(8) > 0 {
            matrix.prepare(&pool(2, Isa::detect())).unwrap();
        }
        let rows = if cfg!(miri) { 2 } else { [1 + random.below(9), 60 + random.below(80)][random.below(2)] };
        let apart = (random.below(2) == 0).then(|| random.below(ids));
        Case { matrix, x: random.normals(rows * cols), apart }
    }

    /// One column and inputs of one value each: the logits of row m are exactly `x[m] * weights`.
    fn exact(weights: &[f32], x: Vec<f32>) -> Case {
        let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        let mut matrix = Matrix::new(Format::F32, weights.len(), 1, Bytes::from(bytes)).unwrap();
        matrix.prepare(&pool(1, Isa::detect())).unwrap();
        Case { matrix, x, apart: None }
    }

    fn rows(&self) -> usize {
        self.x.len() / self.matrix.cols()
    }

    /// What rows want at random.
    fn wants(&self, random: &mut Random) -> Vec<Want> {
        let ids = self.matrix.rows();
        let k = |random: &mut Random| [0, 1, 1 + random.below(20), 1 + random.below(ids + 5)][random.below(4)];
        let mut want = || Want {
            real: if random.below(2) == 0 { ids } else { 1 + random.below(ids + 3) },
            distribution: random.below(2) == 0,
            top: k(random),
            real_top: k(random),
            keep: random.below(2) == 0,
        };
        (0..self.rows()).map(|_| want()).collect()
    }

    /// Logits by the ordinary product, without those that are set apart, and those.
    fn logits(&self) -> (Vec<f32>, Vec<f32>) {
        let (mut codes, pool, ids) = (QuantizedRows::default(), pool(1, Isa::Portable), self.matrix.rows());
        let mut y = vec![f32::NAN; self.rows() * ids];
        let input = codes.input(&pool, &self.x, &[&self.matrix]);
        linear(&pool, &input, &mut [Linear { matrix: &self.matrix, bias: None, y: &mut y }]);
        let mut apart = vec![0.0; self.rows()];
        if let Some(id) = self.apart {
            for (row, apart) in y.chunks_mut(ids).zip(&mut apart) {
                *apart = row[id];
                if row[id] < f32::INFINITY {
                    row[id] = f32::NEG_INFINITY;
                }
            }
        }
        (y, apart)
    }

    /// Outcomes, kept rows and what was set apart; rows that are not kept stay NaN.
    fn fused(&self, pool: &Pool, head: &mut Head, wants: &[Want]) -> (Vec<Result<Found, BadLogits>>, Vec<f32>) {
        let mut codes = QuantizedRows::default();
        let mut logits = vec![f32::NAN; self.rows() * self.matrix.rows()];
        let input = codes.input(pool, &self.x, &[&self.matrix]);
        let product = Product { input: &input, matrix: &self.matrix, wants, apart: self.apart, logits: &mut logits };
        head.run(pool, product);
        let found = (0..self.rows()).map(|row| {
            head.row(row).map(|outcome| Found {
                best: entries(&[outcome.best])[0],
                distribution: outcome.distribution.map(|d| [d.logsumexp.to_bits(), d.entropy.to_bits()]),
                top: entries(outcome.top),
                real_top: entries(outcome.real_top),
            })
        });
        (found.collect(), logits)
    }

    /// Every pool finds what the parts find, and writes the rows that are kept and no others.
    fn check(&self, wants: &[Want]) {
        let ((logits, apart), ids) = (self.logits(), self.matrix.rows());
        let expected: Vec<_> = logits.chunks(ids).zip(wants).map(|(row, want)| unfused(row, want)).collect();
        let mut head = Head::default();
        for pool in pools() {
            let (found, kept) = self.fused(&pool, &mut head, wants);
            assert_eq!(found, expected, "{pool:?} {} ids, {wants:?}", ids);
            assert_eq!(bits(head.apart()), bits(&apart));
            for ((kept, row), want) in kept.chunks(ids).zip(logits.chunks(ids)).zip(wants) {
                if want.keep {
                    assert_eq!(bits(kept), bits(row));
                } else {
                    assert!(kept.iter().all(|v| v.is_nan()), "a row that nobody reads was written");
                }
            }
        }
    }
}

#[test]
fn the_fused_head_equals_its_parts_bit_for_bit() {
    let mut random = Random::new(30);
    for round in 0..rounds(60) {
        let case = Case::random(Format::ALL[round % Format::ALL.len()], &mut random);
        case.check(&case.wants(&mut random));
    }
}

/// Few distinct values (ties), minus infinities, and rows that are no distribution, in any place.
#[test]
fn ties_and_faults_are_found_wherever_they_are() {
    let mut random = Random::new(31);
    for round in 0..rounds(60) {
        let ids = 1 + random.below([40, 4 * CHUNK][round % 2]);
        let mut weights: Vec<f32> = (0..ids).map(|_| random.below(30) as f32 - 15.0).collect();
        let special = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY][random.below(3)];
        for _ in 0..random.below(3) {
            weights[random.below(ids)] = special;
        }
        if random.below(3) == 0 {
            weights.fill(f32::NEG_INFINITY);
            let at = random.below(ids);
            weights[at] = [1.0, f32::NEG_INFINITY][random.below(2)];
        }
        // Of opposite infinities; zero makes NaN of them.
        let x = (0..1 + random.below(6)).map(|_| [1.0, -1.0, 0.5, 0.0][random.below(4)]).collect();
        let mut case = Case::exact(&weights, x);
        case.apart = (random.below(2) == 0).then(|| random.below(ids));
        case.check(&case.wants(&mut random));
    }
}

#[test]
fn distributions_equal_their_definition() {
    let mut random = Random::new(32);
    let mut head = Head::default();
    for round in 0..rounds(24) {
        let ids = [1 + random.below(50), 1 + random.below(20_000)][round % 2];
        let mut weights = random.normals(ids);
        (0..random.below(ids)).for_each(|_| weights[random.below(ids)] = f32::NEG_INFINITY);
        weights[random.below(ids)] = 1.5;
        let case = Case::exact(&weights, vec![0.01, 1.0, 30.0]);
        let want = Want { real: ids, distribution: true, ..Want::default() };
        let pool = pool(1 + random.below(4), Isa::detect());
        case.fused(&pool, &mut head, &[want; 3]);
        for (row, logits) in case.logits().0.chunks(ids).enumerate() {
            let found = head.row(row).unwrap();
            let max = logits.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
            assert_eq!(
                (found.best.logit, found.best.id as usize),
                (max, logits.iter().position(|v| *v == max).unwrap())
            );
            let max = f64::from(max);
            let lse = max + logits.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln();
            let logs = logits.iter().map(|x| f64::from(*x) - lse).filter(|l| *l > -700.0);
            let entropy: f64 = logs.map(|l| -l.exp() * l).sum();
            let Distribution { logsumexp, entropy: nats } = found.distribution.unwrap();
            assert!((f64::from(logsumexp) - lse).abs() < 1e-6 * (1.0 + lse.abs()), "{logsumexp} {lse}");
            assert!((f64::from(nats) - entropy).abs() < 2e-6 * (1.0 + entropy), "{nats} {entropy}");
        }
    }
}

#[test]
fn certainty_and_ignorance_have_the_entropies_they_should() {
    let (pool, mut head) = (pool(2, Isa::detect()), Head::default());
    let mut entropy = |weights: &[f32]| {
        let want = Want { real: weights.len(), distribution: true, ..Want::default() };
        Case::exact(weights, vec![1.0]).fused(&pool, &mut head, &[want]);
        head.row(0).unwrap().distribution.unwrap()
    };
    let mut one = vec![f32::NEG_INFINITY; 5000];
    one[3777] = 3.0;
    assert_eq!(entropy(&one), Distribution { logsumexp: 3.0, entropy: 0.0 });
    for ids in [2, 100, 49_152] {
        assert!((entropy(&vec![-3.0; ids]).entropy - (ids as f32).ln()).abs() < 1e-5, "{ids}");
    }
}

#[test]
fn a_row_says_the_same_alone_and_beside_others() {
    let mut random = Random::new(33);
    for format in [Format::Q8_0, Format::Q6_K, Format::BF16] {
        let case = Case::random(format, &mut random);
        let wants = case.wants(&mut random);
        let (together, _) = case.fused(&pool(3, Isa::detect()), &mut Head::default(), &wants);
        let mut head = Head::default();
        for (row, x) in case.x.chunks(case.matrix.cols()).enumerate() {
            let pool = pool(1, Isa::detect());
            let mut codes = QuantizedRows::default();
            let input = codes.input(&pool, x, &[&case.matrix]);
            let (wants, apart) = (&[Want { keep: false, ..wants[row] }], case.apart);
            head.run(&pool, Product { input: &input, matrix: &case.matrix, wants, apart, logits: &mut [] });
            let alone = head.row(0).map(|outcome| (entries(&[outcome.best])[0], entries(outcome.top)));
            assert_eq!(alone, together[row].clone().map(|found| (found.best, found.top)), "{format:?} row {row}");
        }
    }
}
