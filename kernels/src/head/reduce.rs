//! What is read of a chunk of logits while it lies in the cache, and how the chunks of a row are put together.
//!
//! Owner: [`super`]. Invariant: sums are those of whole chunks, added in the order of the chunks; the largest entries
//! are ordered by value, then by id, so it does not matter who found them. A row that is no distribution is an error,
//! never a number.

use crate::simd::math::exp;
use crate::simd::{self, Kernel, LANES, Simd};
use crate::sys::Isa;

/// What minus infinity counts as, relative to the largest entry: `exp` is 0 there and products stay finite.
const FAR: f32 = -200.0;

/// A row of logits that is no distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadLogits {
    /// At least one entry is NaN or plus infinity.
    #[error("logits contain nan or infinity; the weights of the model are damaged or overflow")]
    NotFinite,
    /// Every entry is minus infinity.
    #[error("every logit is minus infinity; the logit bias leaves no token")]
    Empty,
}

/// An entry of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Column.
    pub id: u32,
    /// Value.
    pub logit: f32,
}

impl Candidate {
    /// Larger, or of the same value with a lower id.
    fn precedes(&self, other: &Candidate) -> bool {
        self.logit > other.logit || self.logit == other.logit && self.id < other.id
    }
}

/// The softmax of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distribution {
    /// ln of the sum of `e^x`.
    pub logsumexp: f32,
    /// Entropy in nats; an entry with probability 0 adds 0.
    pub entropy: f32,
}

/// Sums over a chunk, relative to its own largest entry.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    max: f32,
    /// Sum of `e^(x - max)`.
    sum: f32,
    /// Sum of `(x - max) e^(x - max)`.
    weighted: f32,
}

/// With M the largest entry, Z the sum of `e^(x - M)` and W that of `(x - M) e^(x - M)`: logsumexp is `M + ln Z` and
/// the entropy `ln Z - W / Z`.
pub(super) fn distribution(chunks: &[Sums]) -> Distribution {
    let largest = f64::from(chunks.iter().fold(f32::NEG_INFINITY, |max, chunk| max.max(chunk.max)));
    let (mut sum, mut weighted) = (0.0_f64, 0.0_f64);
    for chunk in chunks.iter().filter(|chunk| chunk.max > f32::NEG_INFINITY) {
        let shift = f64::from(chunk.max) - largest;
        let factor = shift.exp();
        if factor > 0.0 {
            sum += factor * f64::from(chunk.sum);
            weighted += factor * (f64::from(chunk.weighted) + shift * f64::from(chunk.sum));
        }
    }
    Distribution { logsumexp: (largest + sum.ln()) as f32, entropy: (sum.ln() - weighted / sum).max(0.0) as f32 }
}

/// What is wanted of one row of logits, besides its largest entry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Want {
    /// Ids below this are tokens: the largest entry is sought among them. At least 1.
    pub real: usize,
    /// Compute [`Distribution`] over the whole row.
    pub distribution: bool,
    /// How many of the largest entries of the whole row to list.
    pub top: usize,
    /// How many of the largest entries among the tokens to list.
    pub real_top: usize,
    /// Write the row to memory.
    pub keep: bool,
}

/// What is known of a row after some of its chunks.
#[derive(Debug)]
pub(super) struct State {
    /// Neither NaN nor plus infinity in what was looked at: the tokens, and with a distribution the whole row.
    pub(super) finite: bool,
    pub(super) best: Candidate,
    pub(super) top: Highest,
    pub(super) real_top: Highest,
}

const NOTHING: Candidate = Candidate { id: 0, logit: f32::NEG_INFINITY };

impl Default for State {
    fn default() -> State {
        State { finite: true, best: NOTHING, top: Highest::default(), real_top: Highest::default() }
    }
}

impl State {
    /// Starts anew for a row of `ids` entries.
    pub(super) fn begin(&mut self, want: &Want, ids: usize) {
        (self.finite, self.best) = (true, NOTHING);
        self.top.begin(want.top.min(ids));
        self.real_top.begin(want.real_top.min(ids));
    }

    /// Reads a chunk that starts at id `first`; chunks come in ascending order. The sums mean something if a distribution
    /// is wanted.
    pub(super) fn read(&mut self, isa: Isa, (chunk, first): (&[f32], usize), want: &Want) -> Sums {
        let tokens = &chunk[..want.real.saturating_sub(first).min(chunk.len())];
        let (finite, sums) =
            if want.distribution { simd::run(isa, Scan::<true>(chunk)) } else { simd::run(isa, Scan::<false>(tokens)) };
        self.finite &= finite;
        if !finite {
            return sums;
        }
        let whole = tokens.len() == chunk.len();
        let highest_token =
            if whole || !want.distribution { sums.max } else { simd::run(isa, Scan::<false>(tokens)).1.max };
        if highest_token > self.best.logit {
            let id = simd::run(isa, Find(tokens, highest_token)) + first;
            self.best = Candidate { id: id as u32, logit: highest_token };
        }
        self.top.read(isa, (chunk, first), if whole || want.distribution { sums.max } else { f32::INFINITY });
        self.real_top.read(isa, (tokens, first), highest_token);
        sums
    }

    /// Adds what another worker knows of the same row.
    pub(super) fn absorb(&mut self, other: &State) {
        self.finite &= other.finite;
        if other.best.precedes(&self.best) {
            self.best = other.best;
        }
        self.top.absorb(&other.top);
        self.real_top.absorb(&other.real_top);
    }

    pub(super) fn fault(&self) -> Option<BadLogits> {
        match (self.finite, self.best.logit == f32::NEG_INFINITY) {
            (false, _) => Some(BadLogits::NotFinite),
            (true, true) => Some(BadLogits::Empty),
            (true, false) => None,
        }
    }
}

/// Whether a chunk has neither NaN nor plus infinity, its largest entry, and with `SUMS` also the sums. The numbers mean
/// nothing where it has one.
struct Scan<'a, const SUMS: bool>(&'a [f32]);

impl<const SUMS: bool> Kernel for Scan<'_, SUMS> {
    type Output = (bool, Sums);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (bool, Sums) {
        let (vectors, tail) = padded(self.0);
        let (zero, infinity) = (s.splat(0.0), s.splat(f32::NEG_INFINITY));
        // Negative entries count as 0 in the probe, which stays 0 unless there is a NaN or plus infinity.
        let (mut max, mut probe) = (infinity, zero);
        for v in vectors.iter().chain([&tail]) {
            let v = s.load(v);
            max = s.max(v, max);
            probe = s.fma(s.select_lt((v, zero), zero, v), zero, probe);
        }
        let mut sums = Sums { max: s.largest(max), sum: 0.0, weighted: 0.0 };
        let finite = s.sum(probe) == 0.0;
        if SUMS && finite && sums.max > f32::NEG_INFINITY {
            let (m, far) = (s.splat(sums.max), s.splat(FAR));
            let (mut sum, mut weighted) = (zero, zero);
            for v in vectors.iter().chain([&tail]) {
                let shift = s.max(s.sub(s.load(v), m), far);
                let p = exp(s, shift);
                sum = s.add(sum, p);
                weighted = s.fma(p, shift, weighted);
            }
            (sums.sum, sums.weighted) = (s.sum(sum), s.sum(weighted));
        }
        (finite, sums)
    }
}

/// The whole vectors of a chunk, and what is left, padded with minus infinity.
#[inline(always)]
fn padded(chunk: &[f32]) -> (&[[f32; LANES]], [f32; LANES]) {
    let (vectors, rest) = chunk.as_chunks::<LANES>();
    let mut tail = [f32::NEG_INFINITY; LANES];
    tail[..rest.len()].copy_from_slice(rest);
    (vectors, tail)
}

/// Where the largest entry of a chunk stands: the first that is not below it.
struct Find<'a>(&'a [f32], f32);

impl Kernel for Find<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        let (vectors, tail) = padded(self.0);
        for (index, v) in vectors.iter().chain([&tail]).enumerate() {
            let equal = !s.mask_gt(s.splat(self.1), s.load(v));
            if equal != 0 {
                return index * LANES + equal.trailing_zeros() as usize;
            }
        }
        0
    }
}

/// The `k` largest entries in descending order, equal ones by ascending id. NaN and minus infinity are left out, so there
/// may be fewer.
#[derive(Debug, Default)]
pub(super) struct Highest {
    k: usize,
    list: Vec<Candidate>,
}

impl Highest {
    /// Starts anew, with room for all there will be.
    fn begin(&mut self, k: usize) {
        self.k = k;
        self.list.clear();
        self.list.reserve(k);
    }

    pub(super) fn list(&self) -> &[Candidate] {
        &self.list
    }

    /// What an entry with a higher id than all of these must exceed.
    fn bar(&self) -> f32 {
        if self.list.len() < self.k { f32::NEG_INFINITY } else { self.list.last().map_or(f32::INFINITY, |c| c.logit) }
    }

    /// Looks through a chunk of which no entry exceeds `bound`.
    fn read(&mut self, isa: Isa, (chunk, first): (&[f32], usize), bound: f32) {
        if bound > self.bar() {
            simd::run(isa, TopK { chunk, first, highest: self });
        }
    }

    fn insert(&mut self, candidate: Candidate) {
        let at = self.list.partition_point(|kept| kept.precedes(&candidate));
        if self.list.len() == self.k {
            self.list.pop();
        }
        self.list.insert(at, candidate);
    }

    fn absorb(&mut self, other: &Highest) {
        for candidate in &other.list {
            if self.list.len() == self.k && self.list.last().is_none_or(|last| last.precedes(candidate)) {
                return;
            }
            self.insert(*candidate);
        }
    }
}

struct TopK<'a> {
    chunk: &'a [f32],
    first: usize,
    highest: &'a mut Highest,
}

impl Kernel for TopK<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (vectors, tail) = padded(self.chunk);
        let mut bar = self.highest.bar();
        for (index, v) in vectors.iter().chain([&tail]).enumerate() {
            let mut above = s.mask_gt(s.load(v), s.splat(bar));
            while above != 0 {
                let lane = above.trailing_zeros() as usize;
                above &= above - 1;
                if v[lane] > bar {
                    let id = (self.first + index * LANES + lane) as u32;
                    self.highest.insert(Candidate { id, logit: v[lane] });
                    bar = self.highest.bar();
                }
            }
        }
    }
}
