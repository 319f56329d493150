//! Every CUDA kernel against its reference, on whatever device there is: the software one in tests, real hardware in
//! `gpu-check`. Owner: those two. Invariant: inputs are fresh for every seed; what must be equal bit by bit is an error
//! where it is not, and what may be rounded is a [`Finding`].

pub mod activation;
pub mod attention;
mod facts;
pub mod head;
pub mod matmul;
mod measure;
pub mod norm;
mod pair;
pub mod program;
mod report;
pub mod rope;
mod sanitize;
pub mod whole;

pub use report::SOFTWARE;

/// How far a result is from its reference.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Kernel, and what of it.
    pub name: String,
    /// Largest difference that was seen, in the unit of the tolerance.
    pub max_error: f64,
    /// What rounding may do.
    pub tolerance: f64,
}

impl Finding {
    /// Nothing seen yet.
    pub fn new(name: &str, tolerance: f64) -> Finding {
        Finding { name: name.to_owned(), max_error: 0.0, tolerance }
    }

    /// Whether rounding explains it.
    pub fn is_good(&self) -> bool {
        self.max_error <= self.tolerance
    }

    /// Takes note of a result: its difference counts in units of what may be lost at `scale`. What is not a number on one
    /// side only is infinitely far off.
    pub fn note(&mut self, found: f32, expected: f64, scale: f64) {
        let found = f64::from(found);
        let error = if found.is_nan() || expected.is_nan() {
            if found.is_nan() && expected.is_nan() { 0.0 } else { f64::INFINITY }
        } else if found == expected {
            0.0
        } else {
            (found - expected).abs() / scale
        };
        self.max_error = self.max_error.max(error);
    }

    /// Takes note of rows and their reference, each relative to the largest of its row.
    pub fn note_rows(&mut self, (found, expected): (&[f32], &[f64]), width: usize) {
        for (found, expected) in found.chunks(width).zip(expected.chunks(width)) {
            let scale = expected.iter().fold(f64::MIN_POSITIVE, |scale, x| scale.max(x.abs()));
            found.iter().zip(expected).for_each(|(&found, &expected)| self.note(found, expected, scale));
        }
    }
}

/// Xorshift64*: the same numbers everywhere for a seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Random {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..8).for_each(|_| {
            random.next();
        });
        random
    }

    /// Any 64 bits.
    #[allow(clippy::should_implement_trait, reason = "it never ends, so it is no iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// One of these.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// In `0..1`.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Roughly normal.
    pub fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.unit()).sum::<f32>() * 2.0_f32.sqrt() - 3.0 * 2.0_f32.sqrt()
    }

    /// `n` of them.
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// The text of an error of a device.
pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// The bits of values, which tell apart what `==` does not.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// An error that names the first place where two lists differ.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: &[T], expected: &[T]) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{what}: {} values, not {}", found.len(), expected.len()));
    }
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None => Ok(()),
        Some(at) => Err(format!("{what}: value {at} is {:?}, not {:?}", found[at], expected[at])),
    }
}
