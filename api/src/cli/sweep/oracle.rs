//! The oracle: a router that knows the large model's own answer and lends it exactly the tokens at which the small
//! model's candidate differs. Owner: one sweep. Invariant: the text is the large model's, so its accuracy is that of the
//! large model by construction; what the oracle shows is the share of large tokens below which that cannot be had one
//! token at a time.

use std::collections::HashMap;
use std::sync::Arc;
use tokenrouter_core::executor::Needs;
use tokenrouter_core::ids::{ModelIdx, TokenId};
use tokenrouter_core::routing::{Algorithm, Decision, Prior, Route, StepView};

const SMALL: ModelIdx = ModelIdx(0);
const LARGE: ModelIdx = ModelIdx(1);

/// Answers of the large model alone, end-of-text included, by the seeds of their requests: each problem has its own.
pub type Answers = HashMap<u64, Vec<TokenId>>;

/// The router over these answers.
#[derive(Clone, Debug)]
pub struct Oracle(pub Arc<Answers>);

impl Algorithm for Oracle {
    fn needs(&self, _model: ModelIdx) -> Needs {
        Needs::default()
    }

    fn prior(&self) -> Prior {
        Prior { p: vec![vec![0.95, 0.05], vec![1.0, 0.0]], c: vec![vec![1.0, 0.0], vec![1.0, 0.0]] }
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(self.clone())
    }
}

impl Route for Oracle {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        if step.model != SMALL {
            return Ok(Decision { to: SMALL, keep: true });
        }
        let answer = self.0.get(&step.seed).ok_or("the large model alone has no answer to this problem")?;
        let written = step.tokens.len().saturating_sub(step.prompt_len as usize);
        let same = answer.get(written) == Some(&step.candidate);
        Ok(if same { Decision { to: SMALL, keep: true } } else { Decision { to: LARGE, keep: false } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::executor::Signals;
    use tokenrouter_core::ids::RequestId;

    #[test]
    fn only_different_tokens_are_lent() {
        let mut oracle = Oracle(Arc::new(HashMap::from([(5, vec![1, 2, 0])])));
        let signals = Signals::default();
        let mut decide = |model, seed, tokens: &[TokenId], candidate| {
            let request = RequestId(0);
            let step = StepView { request, model, seed, prompt_len: 2, tokens, candidate, signals: &signals };
            oracle.route(&step)
        };
        let (stay, lend) = (Decision { to: SMALL, keep: true }, Decision { to: LARGE, keep: false });
        for (tokens, candidate, expected) in [
            (&[7, 8][..], 1, stay),
            (&[7, 8], 2, lend),
            (&[7, 8, 1], 2, stay),
            (&[7, 8, 1, 2], 0, stay),
            (&[7, 8, 1, 2], 1, lend),
        ] {
            assert_eq!(decide(SMALL, 5, tokens, candidate), Ok(expected), "{tokens:?} {candidate}");
        }
        assert_eq!(decide(LARGE, 5, &[7, 8], 1), Ok(stay));
        assert!(decide(SMALL, 6, &[7, 8], 1).is_err(), "an unknown problem is no reason to guess");
    }
}
