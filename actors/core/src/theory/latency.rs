//! How long a step takes by its rows and the tokens that each consumes, from measured points. Pure. Invariant: within the
//! points it lies on the straight lines between them, and it never falls behind the last.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A step as measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Requests in the step.
    pub rows: u32,
    /// Tokens that each consumes: 1 is a decode, more an extend.
    pub tokens: u32,
    /// Mean of the repetitions.
    pub seconds: f64,
    /// Half the range from the 10th to the 90th percentile, as a part of `seconds`.
    pub spread: f64,
}

/// Seconds of a step of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Surface {
    /// (tokens of a row, `seconds[rows - 1]`), ascending in tokens.
    levels: Vec<(f64, Vec<f64>)>,
}

impl Surface {
    /// Through these points, for batches up to `rows_max`: along the rows first, then along the tokens.
    pub fn new(points: &[Point], rows_max: u32) -> Surface {
        let mut along: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
        for point in points {
            along.entry(point.tokens).or_default().push((f64::from(point.rows), point.seconds));
        }
        let level = |(tokens, mut along): (u32, Vec<(f64, f64)>)| {
            along.sort_by(|a, b| a.0.total_cmp(&b.0));
            (f64::from(tokens), (1..=rows_max).map(|rows| between(&along, f64::from(rows))).collect())
        };
        Surface { levels: along.into_iter().map(level).collect() }
    }

    /// The same whatever rows consume; `seconds[rows - 1]`.
    pub fn flat(seconds: Vec<f64>) -> Surface {
        Surface { levels: vec![(1.0, seconds)] }
    }

    /// So many times as long.
    pub fn scaled(&self, factor: f64) -> Surface {
        let level = |(tokens, seconds): &(f64, Vec<f64>)| (*tokens, seconds.iter().map(|s| s * factor).collect());
        Surface { levels: self.levels.iter().map(level).collect() }
    }

    /// Largest batch.
    pub fn rows_max(&self) -> u32 {
        self.levels.first().map_or(0, |(_, seconds)| seconds.len() as u32)
    }

    /// Seconds of a step with `rows` rows (1 to [`Surface::rows_max`]) that consume so many tokens each on average.
    pub fn seconds(&self, rows: u32, tokens: f64) -> f64 {
        let at = |index: usize| {
            let (level, seconds) = &self.levels[index];
            (*level, seconds[rows as usize - 1])
        };
        let after = self.levels.partition_point(|(level, _)| *level < tokens);
        // The line goes through the levels around it, or through the last two.
        let first = after.min(self.levels.len() - 1).saturating_sub(1);
        let near: Vec<_> = (first..self.levels.len().min(first + 2)).map(at).collect();
        between(&near, tokens)
    }
}

/// The value at x on the straight lines between (x, y) that ascend in x: constant before the first, the last slope behind
/// the last unless it falls.
fn between(along: &[(f64, f64)], x: f64) -> f64 {
    let after = along.partition_point(|&(known, _)| known < x);
    match (after.checked_sub(1).map(|before| along[before]), along.get(after)) {
        (_, Some(&(known, y))) if known == x => y,
        (Some((a, low)), Some(&(b, high))) => low + (high - low) * (x - a) / (b - a),
        (None, Some(&(_, y))) => y,
        (Some((last, y)), None) => {
            let slope = match along.len().checked_sub(2).map(|before| along[before]) {
                Some((before, low)) if last > before => ((y - low) / (last - before)).max(0.0),
                _ => 0.0,
            };
            y + slope * (x - last)
        }
        (None, None) => f64::NAN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Stream, unit};

    /// A plane with a product is reproduced anywhere within what was measured, and carried on behind it.
    #[test]
    fn latencies_between_the_points_lie_on_straight_lines() {
        for case in 0..50u64 {
            let [a, b, c, d] = [0, 1, 2, 3].map(|at| 0.001 + unit(case, at, Stream::Token));
            let seconds = |rows: f64, tokens: f64| a + b * rows + c * tokens + d * rows * tokens;
            let mut points = Vec::new();
            for tokens in [1, 4, 16] {
                points.extend([8, 1, 2].map(|rows| Point {
                    rows,
                    tokens,
                    seconds: seconds(f64::from(rows), f64::from(tokens)),
                    spread: 0.0,
                }));
            }
            let surface = Surface::new(&points, 12);
            assert_eq!(surface.rows_max(), 12);
            for rows in 1..=12 {
                let tokens = 1.0 + 20.0 * unit(case, 100 + rows, Stream::Token);
                let (found, expected) = (surface.seconds(rows, tokens), seconds(f64::from(rows), tokens));
                assert!((found / expected - 1.0).abs() < 1e-9, "{rows} {tokens}: {found} {expected}");
            }
        }
        let flat = Surface::flat(vec![0.1, 0.2]);
        assert_eq!((flat.seconds(2, 1.0), flat.seconds(2, 30.0), flat.seconds(1, 0.5)), (0.2, 0.2, 0.1));
    }
}
