//! Every operation of every instruction set against plain Rust, on random and on special values.

use super::*;
use crate::testing::{Random, isas, rounds};

/// Inputs of all operations.
#[derive(Debug, Clone)]
struct Inputs {
    a: [f32; 16],
    b: [f32; 16],
    c: [f32; 16],
    /// In the range that `store_i8` takes.
    small: [f32; 16],
    /// Integers that `exp2` takes.
    power: [f32; 16],
    bytes: [u8; 64],
    more: [u8; 64],
    values: [i8; 4],
}

/// The results of floats, with one pattern for every NaN; and the other results.
type Results = (Vec<[u32; 16]>, Vec<i64>);

struct All<'a>(&'a Inputs);

impl Kernel for All<'_> {
    type Output = Results;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Results {
        let x = self.0;
        let (a, b, c) = (s.load(&x.a), s.load(&x.b), s.load(&x.c));
        let floats = [
            s.splat(x.a[0]),
            a,
            s.load_f32(&x.bytes),
            s.load_f16(x.bytes.first_chunk().unwrap()),
            s.load_bf16(x.bytes.first_chunk().unwrap()),
            s.load_u8(x.bytes.first_chunk().unwrap()),
            s.load_i8(x.bytes.first_chunk().unwrap()),
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.fma(a, b, c),
            s.max(a, b),
            s.abs(a),
            s.round(a),
            s.exp2(s.load(&x.power)),
            s.select_lt((a, b), c, a),
            s.splat(s.sum(s.load(&x.small))),
            s.splat(s.largest(s.load(&x.small))),
        ];
        let mut out: Vec<[f32; 16]> = Vec::new();
        for v in floats {
            out.push([0.0; 16]);
            s.store(v, out.last_mut().unwrap());
        }
        let (codes, more) = (s.load_b(&x.bytes), s.load_b(&x.more));
        let seven = s.and_b(codes, 0x7f);
        // A lane of a sum is below 2^24, so that the float holds it exactly.
        for bytes in [
            seven,
            s.and_b(s.or_b(codes, more), 0x7f),
            s.shr_b::<1>(codes, 0x7f),
            s.shr_b::<4>(codes, 0x0f),
            s.shr_b::<6>(codes, 0x03),
            s.shl_b::<2>(codes, 0x3c),
            s.shl_b::<4>(codes, 0x70),
        ] {
            // One value at a time shows each byte by itself.
            for values in [x.values, [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]] {
                out.push([0.0; 16]);
                s.store(s.to_f(s.dot7(s.dot7(s.zero_i(), seven, x.values), bytes, values)), out.last_mut().unwrap());
            }
        }
        out.push([0.0; 16]);
        s.store(s.to_f(s.dot8(s.dot8(s.zero_i(), codes, x.values), more, x.values)), out.last_mut().unwrap());
        let mut codes = [0; 16];
        s.store_i8(s.load(&x.small), &mut codes);
        s.prefetch(&x.bytes, 1 << 20);
        let others = codes.iter().map(|&v| i64::from(v)).chain([i64::from(s.mask_gt(a, b))]).collect();
        let pattern = |v: f32| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() };
        (out.into_iter().map(|v| v.map(pattern)).collect(), others)
    }
}

fn inputs(random: &mut Random) -> Inputs {
    const SPECIAL: [f32; 10] =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-40, 2.5, -0.5];
    let mut floats = || -> [f32; 16] {
        std::array::from_fn(|_| match random.below(4) {
            0 => SPECIAL[random.below(SPECIAL.len())],
            1 => f32::from_bits(random.next() as u32),
            _ => random.normal() * 10.0,
        })
    };
    let (a, b, c) = (floats(), floats(), floats());
    let mut byte = |_| random.next() as u8;
    let (bytes, more) = (std::array::from_fn(&mut byte), std::array::from_fn(&mut byte));
    Inputs {
        a,
        b,
        c,
        small: std::array::from_fn(|_| [random.below(509) as f32 / 2.0 - 127.0, random.normal()][random.below(2)]),
        power: std::array::from_fn(|_| random.below(254) as f32 - 126.0),
        bytes,
        more,
        values: std::array::from_fn(|_| (random.below(255) as i16 - 127) as i8),
    }
}

#[test]
fn every_operation_is_the_scalar_one_on_each_lane() {
    let mut random = Random::new(40);
    for _ in 0..rounds(5_000) {
        let inputs = inputs(&mut random);
        let expected = run(crate::sys::Isa::Portable, All(&inputs));
        for isa in isas() {
            assert_eq!(run(isa, All(&inputs)), expected, "{isa:?} {inputs:?}");
        }
    }
}

#[test]
fn the_largest_codes_and_values_do_not_overflow() {
    for (byte, value) in [(255, 127), (255, -127), (127, 127), (127, -127), (128, -127)] {
        let inputs = Inputs {
            a: [1.0; 16],
            b: [2.0; 16],
            c: [3.0; 16],
            small: [127.4; 16],
            power: [127.0; 16],
            bytes: [byte; 64],
            more: [byte; 64],
            values: [value; 4],
        };
        let expected = run(crate::sys::Isa::Portable, All(&inputs));
        let sum = 8 * i32::from(byte) * i32::from(value);
        assert_eq!(expected.0.last(), Some(&[(sum as f32).to_bits(); 16]));
        for isa in isas() {
            assert_eq!(run(isa, All(&inputs)), expected, "{isa:?} {byte} {value}");
        }
    }
}
