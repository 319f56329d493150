//! How long something takes, counted by buckets that anybody may read at any time. Owner: whoever observes; several threads
//! may. Invariant: observing takes no lock and allocates nothing; a bucket is at most a quarter wider than its lower bound.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buckets in each doubling.
const PER_OCTAVE: u32 = 4;
/// `PER_OCTAVE` of these units are a microsecond, below which nothing is told apart.
const UNIT_NANOS: u64 = 250;
/// Doublings above a microsecond: up to 134 s.
const OCTAVES: u32 = 27;
/// Those below a microsecond, those of each doubling, and those above all.
const BUCKETS: usize = (OCTAVES * PER_OCTAVE) as usize + 2;

/// Counts durations.
#[derive(Debug)]
pub struct Histogram {
    nanos: AtomicU64,
    counts: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { nanos: AtomicU64::new(0), counts: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl Histogram {
    /// One more.
    pub fn observe(&self, took: Duration) {
        self.observe_times(took, 1);
    }

    /// So many more that took as long each.
    pub fn observe_times(&self, took: Duration, times: u64) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanos)].fetch_add(times, Ordering::Relaxed);
        self.nanos.fetch_add(nanos.saturating_mul(times), Ordering::Relaxed);
    }

    /// As it is now.
    pub fn read(&self) -> Counts {
        let found = self.counts.iter().enumerate().map(|(index, count)| (index, count.load(Ordering::Relaxed)));
        let buckets: Vec<(f64, u64)> =
            found.filter(|(_, count)| *count > 0).map(|(index, count)| (upper(index), count)).collect();
        Counts {
            count: buckets.iter().map(|(_, count)| count).sum(),
            sum_seconds: self.nanos.load(Ordering::Relaxed) as f64 / 1e9,
            buckets,
        }
    }
}

/// What a [`Histogram`] has counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Counts {
    /// How many.
    pub count: u64,
    /// Seconds of all together.
    pub sum_seconds: f64,
    /// Upper bound in seconds and count of each bucket that is not empty, in order; the last may have no bound
    /// (infinity).
    pub buckets: Vec<(f64, u64)>,
}

impl Counts {
    /// Counts what another histogram counted too.
    pub fn add(&mut self, other: &Counts) {
        self.count += other.count;
        self.sum_seconds += other.sum_seconds;
        for &(upper, count) in &other.buckets {
            match self.buckets.binary_search_by(|(own, _)| own.total_cmp(&upper)) {
                Ok(index) => self.buckets[index].1 += count,
                Err(index) => self.buckets.insert(index, (upper, count)),
            }
        }
    }

    /// How many took at most so many seconds, if that is a bound between buckets.
    pub fn at_most(&self, seconds: f64) -> u64 {
        self.buckets.iter().take_while(|(upper, _)| *upper <= seconds).map(|(_, count)| count).sum()
    }

    /// The bounds for [`Counts::at_most`]: 1 µs and its doublings, up to 134 s.
    pub fn doublings() -> impl Iterator<Item = f64> {
        (0..=OCTAVES).map(|octave| upper((octave * PER_OCTAVE) as usize))
    }
}

/// Which bucket: within a doubling they are equally wide.
fn bucket(nanos: u64) -> usize {
    let units = nanos / UNIT_NANOS;
    let Some(octave) = units.checked_ilog2().and_then(|log| log.checked_sub(PER_OCTAVE.ilog2())) else { return 0 };
    let quarter = (units >> octave) as usize - PER_OCTAVE as usize;
    (1 + octave as usize * PER_OCTAVE as usize + quarter).min(BUCKETS - 1)
}

/// In seconds; what is in the bucket is below it.
fn upper(index: usize) -> f64 {
    if index == BUCKETS - 1 {
        return f64::INFINITY;
    }
    let (octave, quarter) = (index as u32 / PER_OCTAVE, index as u64 % u64::from(PER_OCTAVE));
    (((u64::from(PER_OCTAVE) + quarter) << octave) * UNIT_NANOS) as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_value_lies_below_the_bound_of_its_bucket_and_not_far(nanos in 0u64..140_000_000_000) {
            let index = bucket(nanos);
            let seconds = nanos as f64 / 1e9;
            prop_assert!(seconds < upper(index));
            if index > 0 {
                let lower = upper(index - 1);
                prop_assert!(lower <= seconds);
                prop_assert!(index == BUCKETS - 1 || upper(index) <= 1.2501 * lower, "{lower} {}", upper(index));
            }
        }

        #[test]
        fn all_are_counted_and_summed(took in prop::collection::vec(0u64..200_000_000_000, 0..100)) {
            let histogram = Histogram::default();
            took.iter().for_each(|nanos| histogram.observe(Duration::from_nanos(*nanos)));
            let counts = histogram.read();
            let (mut sum, [some, others]) = (Counts::default(), [Histogram::default(), Histogram::default()]);
            took.iter().for_each(|nanos| [&some, &others][(nanos % 2) as usize].observe(Duration::from_nanos(*nanos)));
            [some, others].iter().for_each(|part| sum.add(&part.read()));
            prop_assert_eq!((sum.count, &sum.buckets), (counts.count, &counts.buckets), "parts add up");
            prop_assert_eq!(counts.count, took.len() as u64);
            prop_assert!((counts.sum_seconds - took.iter().sum::<u64>() as f64 / 1e9).abs() < 1e-6);
            prop_assert!(counts.buckets.is_sorted_by(|a, b| a.0 < b.0));
            for bound in Counts::doublings() {
                let below = took.iter().filter(|nanos| (**nanos as f64 / 1e9) < bound).count();
                prop_assert_eq!(counts.at_most(bound), below as u64, "{}", bound);
            }
        }
    }

    #[test]
    fn bounds_are_microseconds_and_their_doublings() {
        let bounds: Vec<f64> = Counts::doublings().collect();
        assert_eq!(bounds[..4], [1e-6, 2e-6, 4e-6, 8e-6]);
        assert_eq!(bounds.last(), Some(&134.217728));
        let histogram = Histogram::default();
        histogram.observe_times(Duration::from_secs(1000), 3);
        assert_eq!(histogram.read().buckets, [(f64::INFINITY, 3)]);
    }
}
