//! What a finished row says besides its token: signals for routing, and log-probabilities for the user. Owner: the
//! runner. Invariant: everything here is from raw logits, and only what was asked for is computed.

use crate::batch::Target;
use crate::ops::{Ask, Reduced};
use crate::sampling::is_plain_greedy;
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
        real_top_k: draw.logprobs.map_or(0, usize::from),
        keep: !is_plain_greedy(draw),
        target: None,
    }
}

/// What a target's log-probability takes of the row of logits before it, beside the logit of the target itself.
pub fn ask_target(target: &Target, real_vocab: usize) -> Ask {
    let real_top_k = usize::from(target.alternatives);
    Ask { real_vocab, distribution: true, top_k: 0, real_top_k, keep: true, target: Some(target.token) }
}

/// The signals a draw needs, from the reduction of its row of `width` logits and from its hidden row, which is there only if
/// asked for. The score is the learned head's. No more of the highest logits are listed than were asked for: a head may have
/// read more.
pub fn signals(draw: &Draw, reduced: &mut Reduced, width: u32, hidden: Vec<f32>) -> Signals {
    let mut top = std::mem::take(&mut reduced.top);
    top.truncate(usize::from(draw.needs.top_k));
    Signals {
        entropy: draw.needs.entropy.then_some(Entropy { nats: reduced.entropy, width }),
        top,
        hidden,
        score: None,
    }
}

/// Log-softmax at the drawn token or the target, whose raw logit is given, and at the highest of the real vocabulary, as many as were
/// asked for.
pub fn logprobs(chosen: f32, reduced: &mut Reduced) -> TokenLogprobs {
    let mut top: Vec<(TokenId, f32)> = std::mem::take(&mut reduced.real_top);
    top.iter_mut().for_each(|(_, logit)| *logit -= reduced.log_sum_exp);
    TokenLogprobs { chosen: chosen - reduced.log_sum_exp, top }
}
