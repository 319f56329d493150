//! What a head is worth on rows it was not trained on, and the threshold it gets. Pure. Invariant: a row is routed here
//! exactly when the algorithm of the family would route it, equality included.

use std::cmp::Ordering;
use tokenrouter_gpu::heads::Family;

/// Scores with whether the candidate was divergent.
pub type Scored = [(f32, bool)];

/// A threshold with what it does on some rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The threshold.
    pub threshold: f64,
    /// Share of the divergent rows that are routed.
    pub recall: f64,
    /// Share of all rows that are routed: the predicted-positive rate.
    pub routed: f64,
}

/// Whether the algorithm sends a candidate of this score to the large model. (R2R: score >= threshold, the score being
/// the probability of divergence; CITER: score < threshold, the score being the probability that all is well.)
pub fn routes(family: Family, score: f32, threshold: f32) -> bool {
    match family {
        Family::R2r => score >= threshold,
        Family::Citer => score < threshold,
    }
}

/// The 100 thresholds that are tried: even steps from 0.01 to 0.99, five digits of each.
pub fn grid() -> impl Iterator<Item = f64> {
    (0..100).map(|step| ((0.01 + 0.98 * f64::from(step) / 99.0) * 1e5).round() / 1e5)
}

/// What a threshold does.
pub fn at(family: Family, rows: &Scored, threshold: f64) -> Choice {
    let divergent = rows.iter().filter(|(_, divergent)| *divergent).count();
    let routed = rows.iter().filter(|(score, _)| routes(family, *score, threshold as f32));
    let (count, hits) = routed.fold((0, 0), |(count, hits), (_, hit)| (count + 1, hits + usize::from(*hit)));
    let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
    Choice { threshold, recall: share(hits, divergent), routed: share(count, rows.len()) }
}

/// Of the thresholds of [`grid`] with at least this recall the one that routes the fewest rows; the first of equals.
/// `None` when there is none. (R2R, choice of the threshold.)
pub fn choose(family: Family, rows: &Scored, recall: f64) -> Option<Choice> {
    let tried = grid().map(|threshold| at(family, rows, threshold));
    tried.filter(|choice| choice.recall >= recall).min_by(|a, b| a.routed.total_cmp(&b.routed))
}

/// Area under the curve of true over false positives: the probability that a divergent row looks more divergent than
/// another one, equal scores counting half. (Mann and Whitney, 1947.) NaN where a class is empty.
pub fn auroc(family: Family, rows: &Scored) -> f64 {
    let mut sorted: Vec<(f32, bool)> = rows.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut below, mut wins) = (0.0, 0.0);
    for equal in sorted.chunk_by(|a, b| a.0.total_cmp(&b.0) == Ordering::Equal) {
        let positives = equal.iter().filter(|(_, divergent)| *divergent).count() as f64;
        let negatives = equal.len() as f64 - positives;
        wins += positives * (below + negatives / 2.0);
        below += negatives;
    }
    let positives = rows.len() as f64 - below;
    let area = wins / (positives * below);
    if family == Family::R2r { area } else { 1.0 - area }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equality_follows_the_algorithm() {
        assert!(routes(Family::R2r, 0.5, 0.5) && !routes(Family::R2r, 0.499, 0.5));
        assert!(!routes(Family::Citer, 0.5, 0.5) && routes(Family::Citer, 0.499, 0.5));
    }

    #[test]
    fn the_grid_is_that_of_the_authors() {
        let grid: Vec<f64> = grid().collect();
        assert_eq!((grid.len(), grid[0], grid[40], grid[99]), (100, 0.01, 0.40596, 0.99));
        assert!(grid.windows(2).all(|two| two[0] < two[1]));
    }

    #[test]
    fn the_fewest_rows_with_enough_recall_are_routed() {
        // Scores on the grid, so that equality decides: 0.40596 is grid point 40, 0.0199 point 1.
        let rows = [(0.9, true), (0.8, false), (0.40596, true), (0.3, false), (0.0199, true), (0.005, false)];
        let r2r = |recall| choose(Family::R2r, &rows, recall).expect("a threshold");
        assert_eq!(r2r(0.3), Choice { threshold: 0.80192, recall: 1.0 / 3.0, routed: 1.0 / 6.0 });
        assert_eq!(r2r(0.6), Choice { threshold: 0.30697, recall: 2.0 / 3.0, routed: 0.5 });
        assert_eq!(at(Family::R2r, &rows, 0.40596).recall, 2.0 / 3.0, "a score at the threshold is routed");
        assert_eq!(r2r(1.0), Choice { threshold: 0.01, recall: 1.0, routed: 5.0 / 6.0 });
        assert_eq!(at(Family::R2r, &rows, 0.0199).recall, 1.0);

        let rows = rows.map(|(score, divergent)| (score, !divergent));
        let citer = |recall| choose(Family::Citer, &rows, recall).expect("a threshold");
        assert_eq!(citer(0.3), Choice { threshold: 0.01, recall: 1.0 / 3.0, routed: 1.0 / 6.0 });
        assert_eq!(at(Family::Citer, &rows, 0.0199).routed, 1.0 / 6.0, "a score at the threshold stays");
        assert_eq!(citer(1.0), Choice { threshold: 0.80192, recall: 1.0, routed: 5.0 / 6.0 });

        assert_eq!(choose(Family::R2r, &[(0.001, true)], 0.5), None, "out of reach of the grid");
        assert_eq!(choose(Family::R2r, &[(0.9, false)], 0.5), None, "nothing divergent");
        assert_eq!(choose(Family::R2r, &[(f32::NAN, true)], 0.5), None);
    }

    #[test]
    fn the_area_counts_pairs() {
        let rows = [(0.9, true), (0.8, false), (0.7, true), (0.7, false), (0.1, false)];
        // Pairs of (divergent, other): 0.9 wins 3 of 3, 0.7 loses one, ties one, wins one.
        assert!((auroc(Family::R2r, &rows) - 4.5 / 6.0).abs() < 1e-12);
        assert!((auroc(Family::Citer, &rows) - 1.5 / 6.0).abs() < 1e-12);
        assert!(auroc(Family::R2r, &[(0.5, true)]).is_nan());
    }
}
