//! Two servers against each other: ratios with confidence intervals. Pure. Invariant: what is divided was measured next to
//! each other, block beside block, so that what slows the machine down slows both.

use super::super::statistics::Mean;
use super::summary::{Measured, Summary};
use schemars::JsonSchema;
use serde::Serialize;

/// Whose turn each block is: the first, the second, the second, the first, and so on.
pub fn turns(blocks: u32) -> impl Iterator<Item = usize> {
    (0..blocks).flat_map(|pair| if pair.is_multiple_of(2) { [0, 1] } else { [1, 0] })
}

/// The second server's figure over the first one's.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Ratio {
    /// What is divided.
    pub name: String,
    /// Mean of the ratios of the pairs of blocks, with its 95 % interval.
    pub ratio: Mean,
}

type Figure = (&'static str, fn(&Summary) -> f64);

const FIGURES: [Figure; 6] = [
    ("request throughput", |summary| summary.request_throughput),
    ("output token throughput", |summary| summary.output_throughput),
    ("mean TTFT", |summary| summary.ttft_ms.mean),
    ("mean TPOT", |summary| summary.tpot_ms.mean),
    ("mean ITL", |summary| summary.itl_ms.mean),
    ("mean E2EL", |summary| summary.e2el_ms.mean),
];

/// The ratios over all pairs of blocks in which both servers answered something.
pub fn ratios(first: &Measured, second: &Measured) -> Vec<Ratio> {
    let alone = |measured: &Measured| -> Vec<Summary> {
        let one = |block| Measured { blocks: vec![block] }.summary(&[], &[]);
        measured.blocks.iter().cloned().map(one).collect()
    };
    let (first, second) = (alone(first), alone(second));
    let of = |(name, figure): Figure| {
        let pairs = first.iter().zip(&second).map(|(first, second)| (figure(first), figure(second)));
        let rounds: Vec<f64> = pairs.filter(|(a, b)| *a > 0.0 && *b > 0.0).map(|(a, b)| b / a).collect();
        Ratio { name: name.to_owned(), ratio: Mean::of(rounds) }
    };
    FIGURES.into_iter().map(of).filter(|ratio| !ratio.ratio.rounds.is_empty()).collect()
}

/// The ratios for people.
pub fn text(ratios: &[Ratio]) -> String {
    let mut out = format!("{:=^50}\n", " Second server over the first ");
    if ratios.is_empty() {
        out.push_str("No pair of blocks in which both answered\n");
    }
    for Ratio { name, ratio } in ratios {
        out.push_str(&format!("{:<40} {}\n", format!("{name}:"), ratio.shown(3)));
    }
    if !ratios.is_empty() {
        out.push_str("95 % intervals over pairs of blocks\n");
    }
    out.push_str(&format!("{}\n", "=".repeat(50)));
    out
}

#[cfg(test)]
mod tests {
    use super::super::drive::{Block, Sent};
    use super::super::summary::tests::answer;
    use super::*;

    #[test]
    fn turns_are_fair() {
        assert_eq!(turns(4).collect::<Vec<_>>(), [0, 1, 1, 0, 0, 1, 1, 0]);
    }

    #[test]
    fn ratios_are_those_of_the_pairs() {
        let block = |ttft, seconds| Block {
            sent: vec![Sent { at: 0.0, outcome: Some(Ok(answer(ttft, 3))) }],
            seconds,
            ..Block::default()
        };
        let failed = || Block { sent: Vec::new(), seconds: 1.0, ..Block::default() };
        let first = Measured { blocks: vec![block(0.1, 1.0), block(0.2, 2.0), failed()] };
        let second = Measured { blocks: vec![block(0.2, 2.0), block(0.6, 4.0), block(0.1, 1.0)] };
        let ratios = ratios(&first, &second);
        let rounds = |name: &str| &ratios.iter().find(|ratio| ratio.name == name).expect(name).ratio.rounds;
        assert_eq!(rounds("request throughput").as_slice(), [0.5, 0.5]);
        assert!((rounds("mean TTFT")[1] - 3.0).abs() < 1e-9 && rounds("mean TTFT").len() == 2);
        assert!(text(&ratios).contains("request throughput:                      0.500 ± 0.000"), "{}", text(&ratios));
        let nothing = text(&super::ratios(&first, &Measured::default()));
        assert!(nothing.contains("No pair") && !nothing.contains("95 %"), "{nothing}");
    }
}
