//! What a workload looks like in tokens. Pure. Invariant: lengths are exact: prompts are made of tokens, and answers
//! neither end early nor late.

use clap::ValueEnum;
use serde::Serialize;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::mix;

/// Turns of a conversation of [`Shape::Agentic`].
const TURNS: u32 = 4;

/// A workload by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// 100 tokens in, 2048 out
    LowEffort,
    /// 100 tokens in, 8192 out
    HighEffort,
    /// Conversations of four turns: 8192 tokens in at the end, 1024 out in all, each turn on top of the last
    Agentic,
    /// 8192 tokens in, 256 out: long documents, where prefill counts
    LongPrompt,
}

/// A workload in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sizes {
    /// Requests of a conversation, each after the answer to the last.
    pub turns: u32,
    /// Tokens in at the last turn; in proportion before.
    pub prompt: u32,
    /// Tokens out, of all turns together.
    pub output: u32,
}

impl Shape {
    /// Its numbers, scaled; at least a token for each turn.
    pub fn sizes(self, scale: f64) -> Sizes {
        let (turns, prompt, output) = match self {
            Shape::LowEffort => (1, 100, 2048),
            Shape::HighEffort => (1, 100, 8192),
            Shape::Agentic => (TURNS, 8192, 1024),
            Shape::LongPrompt => (1, 8192, 256),
        };
        let scaled = |tokens: u32| ((f64::from(tokens) * scale).round() as u32).max(turns);
        let (prompt, output) = (scaled(prompt), scaled(output));
        // The conversation so far must fit into the next prompt with room for something new.
        Sizes { turns, prompt: if turns > 1 { prompt.max(output + 2 * turns) } else { prompt }, output }
    }
}

impl Sizes {
    /// Tokens in at this turn, counted from 0.
    pub fn prompt_at(self, turn: u32) -> u32 {
        (self.prompt * (turn + 1)).div_ceil(self.turns)
    }

    /// Tokens out at this turn.
    pub fn output_at(self, turn: u32) -> u32 {
        self.output * (turn + 1) / self.turns - self.output * turn / self.turns
    }

    /// Longest sequence.
    pub fn longest(self) -> u32 {
        let last = self.turns - 1;
        self.prompt_at(last) + self.output_at(last)
    }
}

/// Where prompts come from.
#[derive(Clone, Debug)]
pub enum Corpus {
    /// Tokens that they are cut from, as from a ring.
    Ring(Vec<TokenId>),
    /// They are these, at the lengths that they have.
    Whole(Vec<Vec<TokenId>>),
}

impl Corpus {
    /// The tokens for the request of this seed, `length` of them where prompts are cut; those of two seeds begin at
    /// different places.
    pub fn cut(&self, seed: u64, length: usize) -> Vec<TokenId> {
        let place = |len: usize| (mix(seed) % len.max(1) as u64) as usize;
        match self {
            Corpus::Ring(tokens) => tokens.iter().copied().cycle().skip(place(tokens.len())).take(length).collect(),
            Corpus::Whole(prompts) => prompts.get(place(prompts.len())).cloned().unwrap_or_default(),
        }
    }

    /// Tokens of the longest prompt, where they are not cut.
    pub fn longest(&self) -> Option<u32> {
        match self {
            Corpus::Ring(_) => None,
            Corpus::Whole(prompts) => prompts.iter().map(|prompt| prompt.len() as u32).max(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_names_and_scale() {
        assert_eq!(Shape::LowEffort.sizes(1.0), Sizes { turns: 1, prompt: 100, output: 2048 });
        assert_eq!(Shape::HighEffort.sizes(0.5), Sizes { turns: 1, prompt: 50, output: 4096 });
        assert_eq!(Shape::Agentic.sizes(1.0), Sizes { turns: 4, prompt: 8192, output: 1024 });
        assert_eq!(Shape::LongPrompt.sizes(0.25), Sizes { turns: 1, prompt: 2048, output: 64 });
        assert_eq!(Shape::LowEffort.sizes(1e-9), Sizes { turns: 1, prompt: 1, output: 1 });
    }

    #[test]
    fn turns_add_up_and_leave_room_for_what_was_said() {
        for scale in [1.0, 0.3, 0.01, 1e-6] {
            let sizes = Shape::Agentic.sizes(scale);
            let outputs: Vec<u32> = (0..sizes.turns).map(|turn| sizes.output_at(turn)).collect();
            assert_eq!(outputs.iter().sum::<u32>(), sizes.output);
            assert!(outputs.iter().all(|&out| out > 0), "{scale}: {outputs:?}");
            assert_eq!(sizes.prompt_at(sizes.turns - 1), sizes.prompt);
            for turn in 1..sizes.turns {
                let said = sizes.prompt_at(turn - 1) + sizes.output_at(turn - 1);
                assert!(sizes.prompt_at(turn) > said, "{scale}: turn {turn} has nothing new");
            }
        }
    }

    #[test]
    fn prompts_are_cut_to_length() {
        let corpus = Corpus::Ring((0..10).collect());
        let cut = corpus.cut(3, 25);
        assert_eq!(cut.len(), 25);
        assert_eq!(cut, corpus.cut(3, 25));
        assert!(cut.windows(2).all(|pair| pair[1] == (pair[0] + 1) % 10));
        let starts: std::collections::BTreeSet<u32> = (0..50).map(|seed| corpus.cut(seed, 1)[0]).collect();
        assert!(starts.len() > 5, "{starts:?}");
        assert_eq!(corpus.longest(), None);
        let whole = Corpus::Whole(vec![vec![1, 2], vec![3]]);
        let found: std::collections::BTreeSet<Vec<u32>> = (0..50).map(|seed| whole.cut(seed, 7)).collect();
        assert_eq!((found, whole.longest()), ([vec![1, 2], vec![3]].into(), Some(2)));
    }
}
