//! What a process takes the server for. Owner: made from the launch settings at the start. Invariant: two processes
//! talk only when they agree on all of it, because a request must go on the same way wherever it goes.

use crate::runtime::{ModelSpec, Server};
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use tokenrouter_core::batching::Batching;
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::rng::mix;
use tokenrouter_core::routing::Algorithm;

/// Characters of a description that are sent as they are.
const DESCRIPTION_CHARS_MAX: usize = 1000;

/// A model as every process knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelIdentity {
    /// Its name.
    pub name: String,
    /// What its device can do.
    pub limits: ExecutorLimits,
    /// Its end-of-text tokens.
    pub eos: Vec<TokenId>,
}

/// Everything the processes of a server must agree on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// Models in the router's order.
    pub models: Vec<ModelIdentity>,
    /// Tokens of the common vocabulary.
    pub vocab_size: u32,
    /// The routing algorithm and its parameters, as they describe themselves.
    pub algorithm: String,
    /// The batching policy and its thresholds, as they describe themselves.
    pub batching: String,
}

impl Identity {
    /// Of the process that was started with these settings.
    pub fn new(models: &[ModelSpec], vocab_size: u32, algorithm: &dyn Algorithm, batching: &Batching) -> Self {
        let model = |model: &ModelSpec| ModelIdentity {
            name: model.name.clone(),
            limits: model.limits,
            eos: model.eos.clone(),
        };
        Identity {
            models: models.iter().map(model).collect(),
            vocab_size,
            algorithm: describe(algorithm),
            batching: describe(&batching.policy),
        }
    }

    /// Of this process.
    pub fn of(server: &Server) -> Self {
        Identity::new(&server.models, server.codec.vocab_size(), &*server.algorithm, &server.batching)
    }

    /// The first thing the two disagree on, naming both values.
    pub fn difference(&self, theirs: &Identity) -> Option<String> {
        let names = |identity: &Identity| {
            let names: Vec<_> = identity.models.iter().map(|model| model.name.clone()).collect();
            names.join(", ")
        };
        let pair = |what: &str, ours: String, theirs: String| {
            (ours != theirs).then(|| format!("{what}: {ours} here, {theirs} at the peer"))
        };
        let model = |(ours, theirs): (&ModelIdentity, &ModelIdentity)| {
            let (limits, eos) = (format!("{:?}", theirs.limits), format!("{:?}", theirs.eos));
            pair(&format!("limits of model {}", ours.name), format!("{:?}", ours.limits), limits)
                .or_else(|| pair(&format!("end-of-text of model {}", ours.name), format!("{:?}", ours.eos), eos))
        };
        pair("models", names(self), names(theirs))
            .or_else(|| self.models.iter().zip(&theirs.models).find_map(model))
            .or_else(|| pair("vocabulary size", self.vocab_size.to_string(), theirs.vocab_size.to_string()))
            .or_else(|| pair("algorithm", self.algorithm.clone(), theirs.algorithm.clone()))
            .or_else(|| pair("batching", self.batching.clone(), theirs.batching.clone()))
    }
}

/// How a value describes itself; the end of a long description (weights, a script) is replaced by a digest of all of it.
fn describe(value: &dyn Debug) -> String {
    let mut text = format!("{value:?}");
    if text.chars().count() > DESCRIPTION_CHARS_MAX {
        let digest = text.bytes().fold(0, |digest, byte| mix(digest ^ u64::from(byte)));
        text = text.chars().take(DESCRIPTION_CHARS_MAX).collect();
        text.push_str(&format!("... (digest {digest:016x})"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_description_is_short_and_still_tells_all_apart() {
        let long = |end: &str| describe(&format!("{}{end}", "ü".repeat(40_000)));
        assert!(long("a").chars().count() < 2 * DESCRIPTION_CHARS_MAX);
        assert_eq!(long("a"), long("a"));
        assert_ne!(long("a"), long("b"));
        assert_eq!(describe(&Some(3)), "Some(3)");
    }

    #[test]
    fn a_difference_names_both_values() {
        let limits = ExecutorLimits { pages: 8, rows_max: 4, step_tokens_max: 64, context_len: 128, vocab_width: 100 };
        let model = |name: &str| ModelIdentity { name: name.to_owned(), limits, eos: vec![1] };
        let ours = Identity {
            models: vec![model("small"), model("large")],
            vocab_size: 100,
            algorithm: "Stay".to_owned(),
            batching: "Eager".to_owned(),
        };
        assert_eq!(ours.difference(&ours.clone()), None);
        let check = |change: &dyn Fn(&mut Identity), expected: &str| {
            let mut theirs = ours.clone();
            change(&mut theirs);
            let found = ours.difference(&theirs).expect("they differ");
            assert!(found.contains(expected), "{found}");
        };
        check(&|other| other.models.swap(0, 1), "models: small, large here, large, small at the peer");
        check(&|other| other.models[1].limits.pages = 9, "limits of model large: ExecutorLimits { pages: 8");
        check(&|other| other.models[1].eos = vec![2], "end-of-text of model large: [1] here, [2] at the peer");
        check(&|other| other.vocab_size = 99, "vocabulary size: 100 here, 99 at the peer");
        check(&|other| other.algorithm = "Other".to_owned(), "algorithm: Stay here, Other at the peer");
        check(&|other| other.batching = "Fixed".to_owned(), "batching: Eager here, Fixed at the peer");
    }
}
