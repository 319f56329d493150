//! Whole requests to one model: who gets which problem, and the row that comes of it. Pure. Invariant: nothing is run;
//! the answers are those of the models alone, which a request that stays at one model would get token for token.

use super::classifier;
use super::report::LARGE;
use crate::cli::eval::measure::{Answers, Graded};
use crate::cli::eval::problems::Problem;
use crate::cli::eval::report::Row;
use tokenrouter_core::rng::{self, Stream};

/// The answers of both models to the same problems.
pub struct Alone {
    /// Of the small model.
    pub small: Answers,
    /// Of the large model.
    pub large: Answers,
}

impl Alone {
    /// The row of problems that go to the large model where `to_large` says so. Its time is computed: the tokens of each
    /// model at the speed of that model alone.
    pub fn row(&self, title: &str, models: usize, to_large: impl Fn(usize) -> bool) -> Row {
        let pick = |index: usize| -> &Graded {
            let answers = if to_large(index) { &self.large } else { &self.small };
            &answers.each[index]
        };
        let row = Row::of(title.to_owned(), models, (0..self.small.each.len()).map(pick));
        let (small, large) = (self.small.row("", models), self.large.row("", models));
        let seconds = |model: usize, alone: &Row| row.by_model[model] as f64 / alone.tokens_per_second().max(1e-9);
        let seconds = seconds(0, &small) + seconds(LARGE, &large);
        Row { seconds, ..row }
    }

    /// The problems from the one that a prompt classifier finds the small model most likely to get wrong to the least
    /// likely. A problem that the small model could not answer counts as wrong.
    pub fn ranked(&self, problems: &[Problem], seed: u64) -> Vec<usize> {
        let questions: Vec<&str> = problems.iter().map(|problem| problem.question.as_str()).collect();
        let right: Vec<bool> =
            self.small.each.iter().map(|answer| answer.as_ref().is_ok_and(|(_, right)| *right)).collect();
        classifier::most_doubtful(&classifier::doubts(&questions, &right, seed), seed)
    }
}

/// Whether a request goes to the large model, drawn from its seed: one that does at one share does at every greater one.
pub fn by_lot(seed: u64, share: f64) -> bool {
    rng::unit(seed, 0, Stream::Owner) < share
}

/// The first `share` of the ranked problems, to the nearest whole number.
pub fn first(ranked: &[usize], share: f64) -> Vec<bool> {
    let count = (share * ranked.len() as f64).round() as usize;
    let mut large = vec![false; ranked.len()];
    ranked.iter().take(count).for_each(|&index| large[index] = true);
    large
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::run::Outcome;
    use std::time::Duration;
    use tokenrouter_core::job::{FinishReason, Usage};

    #[test]
    fn lots_are_nested_and_near_their_share() {
        let large = |share: f64| -> Vec<u64> { (0..4000).filter(|&seed| by_lot(seed, share)).collect() };
        assert!(large(0.0).is_empty());
        assert_eq!(large(1.0).len(), 4000);
        let (quarter, half) = (large(0.25), large(0.5));
        assert!(quarter.iter().all(|index| half.contains(index)));
        // Four standard deviations of 4000 draws are below 0.032.
        assert!((quarter.len() as f64 / 4000.0 - 0.25).abs() < 0.032, "{}", quarter.len());
    }

    fn answers(model: usize, tokens: [u32; 4], right: [bool; 4], seconds: f64) -> Answers {
        let graded = |(tokens, right): (&u32, &bool)| -> Graded {
            let mut by_model = vec![0, 0];
            by_model[model] = *tokens;
            let usage = Usage { completion_tokens: *tokens, by_model, ..Usage::default() };
            let (text, reason) = (String::new(), FinishReason::EndOfText);
            let (first_token, total) = (Duration::ZERO, Duration::ZERO);
            Ok((Outcome { text, tokens: Vec::new(), reason, usage, first_token, total }, *right))
        };
        Answers { each: tokens.iter().zip(&right).map(graded).collect(), seconds }
    }

    fn alone() -> Alone {
        let small = answers(0, [10, 20, 30, 40], [true, false, false, false], 1.0);
        let mut large = answers(1, [5, 5, 5, 10], [true, true, true, false], 5.0);
        large.each[2] = Err("gone".to_owned());
        Alone { small, large }
    }

    #[test]
    fn rows_hold_the_answers_of_the_chosen_model() {
        let alone = alone();
        let row = alone.row("some", 2, |index| index % 2 == 1);
        assert_eq!((row.right, row.total, row.failed, row.hops), (2, 4, 0, 0));
        assert_eq!((row.by_model, row.each), (vec![40, 15], [true, true, false, false].map(Some).to_vec()));
        // 100 tokens a second, and 4.
        assert!((row.seconds - (0.4 + 3.75)).abs() < 1e-9, "{}", row.seconds);
        for (to_large, whole) in [(false, &alone.small), (true, &alone.large)] {
            let (row, whole) = (alone.row("all", 2, |_| to_large), whole.row("all", 2));
            assert_eq!((row.right, row.failed, &row.by_model), (whole.right, whole.failed, &whole.by_model));
            assert!((row.seconds - whole.seconds).abs() < 1e-9);
        }
    }

    #[test]
    fn the_most_doubtful_go_first() {
        assert_eq!(first(&[2, 0, 3, 1], 0.5), [true, false, true, false]);
        assert_eq!(first(&[2, 0, 3, 1], 0.0), [false; 4]);
        assert_eq!(first(&[2, 0, 3, 1], 1.0), [true; 4]);
        assert!(first(&[], 0.5).is_empty());
        let problem = |question: &str| Problem { question: question.to_owned(), ..Problem::default() };
        let mut ranked = alone().ranked(&["a", "b", "c", "d"].map(problem), 0);
        ranked.sort_unstable();
        assert_eq!(ranked, [0, 1, 2, 3]);
    }
}
