//! A prompt classifier: logistic regression on the hashed words of a question, which says how likely the small model's
//! answer is wrong. Pure. Invariant: no question is judged by a classifier that saw its label (k-fold cross-validation),
//! and the same questions, labels and seed give the same numbers.

use std::collections::BTreeSet;
use tokenrouter_core::rng::{self, Stream};

/// Words fall into so many features.
const BUCKETS: usize = 4096;
/// Parts of the questions, each judged by a classifier trained on the others.
const FOLDS: usize = 10;
/// Weight of the squared weights in the loss: as strong as a classifier of words needs it with some dozen examples.
const RIDGE: f64 = 0.003;
/// Steps of gradient descent over all examples.
const STEPS: usize = 400;
/// Length of a step. The loss is convex with a curvature of at most 0.5 + [`RIDGE`], below 2 / RATE.
const RATE: f64 = 2.0;

/// For each question the probability that the small model answers it wrong, as told by a classifier that was trained on
/// other questions. `right` holds the labels: whether the small model alone is right. Where all labels of the training
/// part are the same, it is that label, 0 or 1; where there is nothing to train on, it is one half.
pub fn doubts(questions: &[&str], right: &[bool], seed: u64) -> Vec<f64> {
    let features: Vec<Vec<usize>> = questions.iter().map(|question| words(question)).collect();
    cross_validated(&features, right, &folds(right, seed))
}

fn cross_validated(features: &[Vec<usize>], right: &[bool], folds: &[usize]) -> Vec<f64> {
    let mut doubts = vec![0.5; features.len()];
    for fold in 0..FOLDS {
        let train: Vec<usize> = (0..features.len()).filter(|&index| folds[index] != fold).collect();
        let model = Model::fit(features, right, &train);
        for index in (0..features.len()).filter(|&index| folds[index] == fold) {
            doubts[index] = model.wrong(&features[index]);
        }
    }
    doubts
}

/// Indices by falling probability; equal ones in an order drawn from the seed.
pub fn most_doubtful(doubts: &[f64], seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..doubts.len()).collect();
    order.sort_by(|&a, &b| doubts[b].total_cmp(&doubts[a]).then(lot(seed, a).cmp(&lot(seed, b))));
    order
}

fn lot(seed: u64, index: usize) -> u64 {
    rng::bits(seed, index as u32, Stream::Owner)
}

/// The fold of each question, drawn from the seed. Each fold has the same share of right ones, as far as that goes:
/// otherwise a fold with more right ones would leave fewer to its classifier, which would be worse than chance.
fn folds(right: &[bool], seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..right.len()).collect();
    order.sort_by_key(|&index| (right[index], lot(seed, index)));
    let mut folds = vec![0; right.len()];
    for (place, &index) in order.iter().enumerate() {
        folds[index] = place % FOLDS;
    }
    folds
}

/// The features of a text: one for each different word, without case; numbers all count as the same word.
fn words(text: &str) -> Vec<usize> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    let words = words.map(|word| match word.chars().all(|c| c.is_ascii_digit()) {
        true => "0".to_owned(),
        false => word.to_lowercase(),
    });
    let buckets: BTreeSet<usize> = words.map(|word| (hash(&word) % BUCKETS as u64) as usize).collect();
    buckets.into_iter().collect()
}

/// FNV-1a.
fn hash(word: &str) -> u64 {
    word.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Weights of the words and what is added to them.
struct Model {
    weights: Vec<f64>,
    bias: f64,
}

impl Model {
    fn fit(features: &[Vec<usize>], right: &[bool], train: &[usize]) -> Model {
        let mut model = Model { weights: vec![0.0; BUCKETS], bias: 0.0 };
        let wrong = train.iter().filter(|&&index| !right[index]).count();
        if wrong == 0 || wrong == train.len() {
            // Nothing tells one question from another.
            model.bias = if train.is_empty() { 0.0 } else { f64::INFINITY.copysign(wrong as f64 - 0.5) };
            return model;
        }
        let part = RATE / train.len() as f64;
        for _ in 0..STEPS {
            let misses: Vec<f64> =
                train.iter().map(|&index| f64::from(!right[index]) - model.wrong(&features[index])).collect();
            model.weights.iter_mut().for_each(|weight| *weight *= 1.0 - RATE * RIDGE);
            for (&index, miss) in train.iter().zip(&misses) {
                model.bias += part * miss;
                let own = &features[index];
                own.iter().for_each(|&word| model.weights[word] += part * miss * scale(own));
            }
        }
        model
    }

    /// The probability of a wrong answer.
    fn wrong(&self, words: &[usize]) -> f64 {
        let sum: f64 = words.iter().map(|&word| self.weights[word]).sum();
        1.0 / (1.0 + (-self.bias - scale(words) * sum).exp())
    }
}

/// The value of each word that is there: questions of any length have length one.
fn scale(words: &[usize]) -> f64 {
    1.0 / (words.len().max(1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` questions of 12 words drawn from 30; those of the second half hold one word more.
    fn questions(count: usize, seed: u64) -> (Vec<String>, Vec<bool>) {
        let drawn = |index: usize, place: usize| rng::bits(seed, (index * 16 + place) as u32, Stream::Token) % 30;
        let text = |index: usize| {
            let words: Vec<String> = (0..12).map(|place| format!("word{}", drawn(index, place))).collect();
            format!("{}{}?", words.join(" "), if index < count / 2 { "" } else { ", HARD" })
        };
        ((0..count).map(text).collect(), (0..count).map(|index| index < count / 2).collect())
    }

    fn judged((questions, right): &(Vec<String>, Vec<bool>), seed: u64) -> Vec<f64> {
        let questions: Vec<&str> = questions.iter().map(String::as_str).collect();
        doubts(&questions, right, seed)
    }

    /// How often a wrong one is doubted more than a right one: the area under the ROC curve.
    fn area(doubts: &[f64], right: &[bool]) -> f64 {
        let of = |wanted: bool| doubts.iter().zip(right).filter(move |(_, right)| **right == wanted).map(|(d, _)| *d);
        let pairs: Vec<f64> = of(false)
            .flat_map(|wrong| {
                of(true).map(move |right| (wrong > right) as u32 as f64 + 0.5 * (wrong == right) as u32 as f64)
            })
            .collect();
        pairs.iter().sum::<f64>() / pairs.len() as f64
    }

    #[test]
    fn one_word_that_decides_is_found() {
        for seed in 0..4 {
            let asked = questions(80, seed);
            let doubts = judged(&asked, seed);
            assert!(area(&doubts, &asked.1) > 0.98, "{}", area(&doubts, &asked.1));
            let wrong = most_doubtful(&doubts, seed)[..40].iter().filter(|&&index| !asked.1[index]).count();
            assert!(wrong >= 38, "{wrong} of the 40 most doubtful are wrong");
        }
    }

    #[test]
    fn shuffled_labels_teach_nothing() {
        let areas: Vec<f64> = (0..24)
            .map(|seed| {
                let (texts, mut right) = questions(80, seed);
                let mut order: Vec<usize> = (0..80).collect();
                order.sort_by_key(|&index| rng::bits(seed + 1000, index as u32, Stream::Token));
                right = order.iter().map(|&index| right[index]).collect();
                let doubts = judged(&(texts, right.clone()), seed);
                area(&doubts, &right)
            })
            .collect();
        let mean = areas.iter().sum::<f64>() / 24.0;
        // One area of 40 and 40 has a standard deviation of 0.065 under chance, the mean of 24 one of 0.013.
        assert!((mean - 0.5).abs() < 0.053, "{mean} {areas:?}");
        assert!(areas.iter().all(|area| (0.2..0.8).contains(area)), "{areas:?}");
    }

    #[test]
    fn the_same_seed_gives_the_same_numbers_and_another_seed_other_folds() {
        let asked = questions(40, 7);
        assert_eq!(judged(&asked, 1), judged(&asked, 1));
        assert_ne!(judged(&asked, 1), judged(&asked, 2));
        assert!(judged(&asked, 1).iter().all(|doubt| (0.0..=1.0).contains(doubt)));
    }

    #[test]
    fn no_question_is_judged_by_a_classifier_that_saw_its_label() {
        let (texts, mut right) = questions(40, 3);
        let features: Vec<Vec<usize>> = texts.iter().map(|text| words(text)).collect();
        let folds = folds(&right, 5);
        let before = cross_validated(&features, &right, &folds);
        right[7] = !right[7];
        let after = cross_validated(&features, &right, &folds);
        for index in 0..40 {
            assert_eq!(before[index] == after[index], folds[index] == folds[7], "{index}");
        }
        assert!((0..FOLDS).all(|fold| folds.iter().filter(|own| **own == fold).count() == 4), "{folds:?}");
    }

    #[test]
    fn equal_labels_and_few_questions() {
        let (texts, _) = questions(20, 1);
        assert!(judged(&(texts.clone(), vec![true; 20]), 0).iter().all(|doubt| *doubt == 0.0));
        assert!(judged(&(texts.clone(), vec![false; 20]), 0).iter().all(|doubt| *doubt == 1.0));
        assert_eq!(judged(&(texts[..1].to_vec(), vec![true]), 0), [0.5]);
        assert!(judged(&(Vec::new(), Vec::new()), 0).is_empty());
        assert_eq!(judged(&(vec!["a".into(), "b".into()], vec![true, false]), 0), [1.0, 0.0]);
        assert_eq!(judged(&(vec![String::new(), "?".into()], vec![true, true]), 0), [0.0, 0.0]);
    }

    #[test]
    fn ties_are_broken_by_lot() {
        let order = most_doubtful(&[0.5; 50], 3);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        assert_ne!(order, sorted, "the order of the file is no rank");
        assert_ne!(order, most_doubtful(&[0.5; 50], 4));
        assert_eq!(most_doubtful(&[0.2, 0.9, 0.4], 0), [1, 2, 0]);
    }

    #[test]
    fn words_have_no_case_and_numbers_are_one_word() {
        assert_eq!(words("Two 17 apples, two 5."), words("apples two 99"));
        assert_ne!(words("x1"), words("x2"));
        assert!(words("?!").is_empty());
        assert_eq!(hash(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash("a"), 0xaf63_dc4c_8601_ec8c, "the published value");
    }
}
