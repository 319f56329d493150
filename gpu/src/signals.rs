//! What a finished row says besides its token: signals for routing, and log-probabilities for the user. Owner: the
//! runner. Invariant: everything here is from raw logits, and only what was asked for is computed.

use crate::ops::{Ask, Reduced};
use tokenrouter_core::executor::{Draw, Entropy, Signals, TokenLogprobs};
use tokenrouter_core::ids::TokenId;

/// What a draw wants to know about its row of logits, of which the first `real_vocab` are tokens; a learned head that is
/// asked reads the `head_top` highest.
pub fn ask(draw: &Draw, real_vocab: usize, head_top: usize) -> Ask {
    let own = usize::from(draw.needs.top_k);
    Ask {
        real_vocab,
        distribution: draw.needs.entropy || draw.logprobs.is_some(),
        top_k: if draw.needs.score { own.max(head_top) } else { own },
    }
}

/// The signals a draw needs, from the reduction of its row of `width` logits; `hidden` is read only if asked for. The
/// score comes later, when all rows are drawn, and `top` is cut to what the draw asked for then.
pub fn signals<'a>(draw: &Draw, reduced: &mut Reduced, width: u32, hidden: impl FnOnce() -> &'a [f32]) -> Signals {
    Signals {
        entropy: draw.needs.entropy.then_some(Entropy { nats: reduced.entropy, width }),
        top: std::mem::take(&mut reduced.top),
        hidden: if draw.needs.hidden { hidden().to_vec() } else { Vec::new() },
        score: None,
    }
}

/// A row of raw logits with its normaliser.
#[derive(Clone, Copy, Debug)]
pub struct RawRow<'a> {
    /// The whole row.
    pub logits: &'a [f32],
    /// How many of them are tokens.
    pub real_vocab: usize,
    /// `ln sum exp(logit)` over the whole row.
    pub log_sum_exp: f32,
}

impl RawRow<'_> {
    /// Log-softmax at `token` and at the `count` highest of the real vocabulary.
    pub fn logprobs(&self, token: TokenId, count: u8) -> TokenLogprobs {
        let log_prob = |logit: f32| logit - self.log_sum_exp;
        let real = &self.logits[..self.real_vocab.min(self.logits.len())];
        TokenLogprobs {
            chosen: self.logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| log_prob(logit)),
            top: highest(real, usize::from(count)).into_iter().map(|(id, logit)| (id, log_prob(logit))).collect(),
        }
    }
}

/// The `count` highest values with their indices, descending, ties by lower index; one pass with a short sorted list.
fn highest(values: &[f32], count: usize) -> Vec<(TokenId, f32)> {
    let mut top: Vec<(TokenId, f32)> = Vec::with_capacity(count + 1);
    if count == 0 {
        return top;
    }
    for (id, &value) in values.iter().enumerate() {
        if top.len() < count || value > top[count - 1].1 {
            let place = top.partition_point(|&(_, kept)| kept >= value);
            top.insert(place, (id as TokenId, value));
            top.truncate(count);
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::rng::{Stream, unit};

    #[test]
    fn highest_equals_a_full_sort() {
        for case in 0..50u64 {
            let values: Vec<f32> = (0..97).map(|i| (unit(case, i, Stream::Owner) * 20.0) as i32 as f32).collect();
            let mut sorted: Vec<(TokenId, f32)> = values.iter().enumerate().map(|(i, &v)| (i as TokenId, v)).collect();
            sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            for count in [0, 1, 5, 97, 120] {
                assert_eq!(highest(&values, count), sorted[..count.min(97)], "case {case}, {count}");
            }
        }
    }

    #[test]
    fn logprobs_are_log_softmax_without_padding_tokens() {
        let logits = [1.0f32, 2.0, 0.5, 9.0];
        let log_sum_exp = logits.iter().map(|l| l.exp()).sum::<f32>().ln();
        let found = RawRow { logits: &logits, real_vocab: 3, log_sum_exp }.logprobs(2, 2);
        assert_eq!(found.chosen, 0.5 - log_sum_exp);
        assert_eq!(found.top, [(1, 2.0 - log_sum_exp), (0, 1.0 - log_sum_exp)]);
    }
}
