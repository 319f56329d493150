//! Log-probabilities of a prompt, asked for with it. Owner: the request, at the model where it entered and nowhere else.
//! Invariant: each token of the prompt gets its log-probability once, from that model, whatever the chunks and however often its KV was
//! lost and computed again.

use crate::executor::{Targets, TokenLogprobs};
use crate::ids::{ModelIdx, TokenId};
use crate::job::TokenReport;
use std::ops::Range;

/// What is asked and what has come so far.
#[derive(Debug)]
pub(super) struct PromptLogprobs {
    alternatives: u8,
    /// Of the tokens from position 1 on; nothing comes before the first.
    done: Vec<TokenLogprobs>,
}

impl PromptLogprobs {
    pub(super) fn new(alternatives: u8) -> Self {
        PromptLogprobs { alternatives, done: Vec::new() }
    }

    /// What a row that consumes these positions of the prompt is asked: the tokens that it predicts and that have not
    /// been asked for yet.
    pub(super) fn ask(&self, prompt: &[TokenId], Range { start, end }: Range<usize>) -> Option<Targets> {
        let first = start.max(self.done.len());
        let tokens = prompt.get(first + 1..prompt.len().min(end + 1)).filter(|tokens| !tokens.is_empty())?;
        Some(Targets { first: (first - start) as u32, tokens: tokens.to_vec(), alternatives: self.alternatives })
    }

    pub(super) fn take(&mut self, answers: Vec<TokenLogprobs>) {
        self.done.extend(answers);
    }

    /// The whole prompt as its user is told it; its first token has no log-probability.
    ///
    /// # Errors
    /// What is missing or too much: a fault of the executor.
    pub(super) fn report(self, prompt: &[TokenId], by: ModelIdx) -> Result<Vec<TokenReport>, String> {
        let (done, due) = (self.done.len(), prompt.len().saturating_sub(1));
        if done != due {
            return Err(format!("{done} tokens of the prompt have log-probabilities instead of {due}"));
        }
        let logprobs = std::iter::once(None).chain(self.done.into_iter().map(Some));
        let report =
            |(&id, logprobs): (&TokenId, _)| TokenReport { id, model: by, entropy: None, dropped: None, logprobs };
        Ok(prompt.iter().zip(logprobs).map(report).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn answer(targets: &Targets) -> Vec<TokenLogprobs> {
        targets.tokens.iter().map(|&token| TokenLogprobs { chosen: -(token as f32), top: Vec::new() }).collect()
    }

    proptest! {
        /// Chunks of any size; after some of them the KV is lost and the prompt is consumed from its start again.
        #[test]
        fn each_token_is_asked_for_once(len in 1usize..40, chunks in prop::collection::vec((1usize..9, prop::bool::weighted(0.3)), 1..60)) {
            let prompt: Vec<TokenId> = (100..).take(len).collect();
            let mut prompt_logprobs = PromptLogprobs::new(3);
            let mut fed = 0;
            for (chunk, is_lost) in chunks.into_iter().chain(std::iter::repeat_n((9, false), 5)) {
                let end = (fed + chunk).min(len);
                if let Some(targets) = prompt_logprobs.ask(&prompt, fed..end) {
                    prop_assert!(targets.first as usize + targets.tokens.len() <= end - fed);
                    for (offset, target) in targets.tokens.iter().enumerate() {
                        prop_assert_eq!(*target, prompt[fed + targets.first as usize + offset + 1], "the token that follows");
                    }
                    prop_assert_eq!(targets.alternatives, 3);
                    prompt_logprobs.take(answer(&targets));
                }
                fed = if is_lost { 0 } else { end };
            }
            prop_assert!(prompt_logprobs.ask(&prompt, 0..len).is_none(), "nothing is asked again");
            let report = prompt_logprobs.report(&prompt, ModelIdx(1)).expect("all is there");
            prop_assert_eq!(report[0].logprobs.as_ref(), None);
            prop_assert_eq!(report.iter().map(|token| token.id).collect::<Vec<_>>(), prompt);
            for token in &report[1..] {
                prop_assert_eq!(token.logprobs.as_ref().map(|logprobs| logprobs.chosen), Some(-(token.id as f32)));
            }
        }
    }

    #[test]
    fn an_executor_that_answers_too_little_is_found_out() {
        let mut prompt_logprobs = PromptLogprobs::new(0);
        let targets = prompt_logprobs.ask(&[1, 2, 3], 0..3).expect("two tokens are predicted");
        prompt_logprobs.take(answer(&targets)[..1].to_vec());
        let fault = prompt_logprobs.report(&[1, 2, 3], ModelIdx(0)).expect_err("one is missing");
        assert_eq!(fault, "1 tokens of the prompt have log-probabilities instead of 2");
    }
}
