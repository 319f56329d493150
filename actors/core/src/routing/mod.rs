//! The routing port: three small functions from the view of one request, and the one list of algorithms.
//! Owner: one `Route` value per request and model. Invariant: a decision depends only on the request, its seed and
//! the step's signals; never on time, load or other requests.

use crate::executor::{Needs, Signals};
use crate::ids::{ModelIdx, RequestId, TokenId};
use crate::peer::{Known, PeerError, PeerReq};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Debug;
use std::sync::Arc;

pub mod bernoulli;
pub mod r_stitch;
pub mod stay;

/// Every algorithm the server knows. A new one is a file and a line here.
const ALGORITHMS: &[&Entry] = &[&stay::ENTRY, &r_stitch::ENTRY, &bernoulli::ENTRY];

/// An algorithm as it is listed and built.
pub struct Entry {
    /// Its name in the launch file.
    pub name: &'static str,
    /// One line: what it does.
    pub summary: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// Its parameters.
    pub params: &'static [Param],
    /// How many models it routes between, smallest and largest.
    pub models: (usize, usize),
    /// Builds it from its parameter table (an object) for so many models.
    pub build: Build,
}

/// Builds an algorithm from its parameter table for so many models.
pub type Build = fn(&Value, usize) -> Result<Arc<dyn Algorithm>, RoutingError>;

/// A parameter of an algorithm, for documentation.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Param {
    /// Key in the parameter table.
    pub name: &'static str,
    /// Default, as written in a launch file.
    pub default: &'static str,
    /// Meaning, range and direction of comparison.
    pub doc: &'static str,
}

/// An algorithm could not be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoutingError {
    /// No algorithm has this name.
    #[error("unknown routing algorithm `{name}`; known are {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// All names.
        known: String,
    },
    /// The algorithm routes between another number of models.
    #[error("algorithm `{name}` routes between {least} to {most} models, not {models}")]
    Models {
        /// The algorithm.
        name: &'static str,
        /// Smallest number.
        least: usize,
        /// Largest number.
        most: usize,
        /// The number asked for.
        models: usize,
    },
    /// A request asks for a parameter that cannot be changed, or not to this.
    #[error("{message}")]
    Request {
        /// What is wrong and what would be right.
        message: String,
    },
    /// A parameter is unknown, of the wrong type or out of range.
    #[error("parameter of `{name}`: {message}")]
    Param {
        /// The algorithm.
        name: &'static str,
        /// What is wrong and what would be right.
        message: String,
    },
}

/// The list of algorithms.
pub fn list() -> impl Iterator<Item = &'static Entry> {
    ALGORITHMS.iter().copied()
}

/// Builds the algorithm of this name.
///
/// # Errors
/// [`RoutingError`] naming the parameter and what is allowed.
pub fn build(name: &str, params: &Value, models: usize) -> Result<Arc<dyn Algorithm>, RoutingError> {
    let entry = list().find(|entry| entry.name == name).ok_or_else(|| RoutingError::Unknown {
        name: name.to_owned(),
        known: list().map(|entry| entry.name).collect::<Vec<_>>().join(", "),
    })?;
    let (least, most) = entry.models;
    if models < least || models > most {
        return Err(RoutingError::Models { name: entry.name, least, most, models });
    }
    (entry.build)(params, models)
}

/// Reads a parameter table into `T`; an unknown key or a wrong type is an error.
pub(crate) fn params<T: serde::de::DeserializeOwned>(name: &'static str, table: &Value) -> Result<T, RoutingError> {
    let table = if table.is_null() { Value::Object(serde_json::Map::new()) } else { table.clone() };
    serde_json::from_value(table).map_err(|error| RoutingError::Param { name, message: error.to_string() })
}

/// A configured algorithm: shared by all requests and therefore without state.
pub trait Algorithm: Send + Sync + Debug {
    /// Signals `route` reads after a step of this model.
    fn needs(&self, model: ModelIdx) -> Needs;

    /// The model that makes the first token of a request.
    fn entry(&self, _seed: u64) -> ModelIdx {
        ModelIdx(0)
    }

    /// Expected behaviour, for the planner before counters warm up.
    fn prior(&self) -> Prior;

    /// The value that follows one request at one model.
    fn start(&self) -> Box<dyn Route>;

    /// The learned head that the executor of this model must carry, if `needs` asks for its score.
    fn head(&self, _model: ModelIdx) -> Option<HeadSpec> {
        None
    }

    /// This algorithm with other parameters for one request: an object with the keys to change.
    ///
    /// # Errors
    /// [`RoutingError::Param`] naming the key and what is allowed. Default: nothing can be changed.
    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        let keys: Vec<&str> =
            overrides.as_object().map_or_else(Vec::new, |map| map.keys().map(String::as_str).collect());
        let message = format!("the server's algorithm takes no parameters per request (given: {})", keys.join(", "));
        Err(RoutingError::Request { message })
    }
}

/// A learned head: a small network, or one row of the output layer, that scores the step of a model on its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeadSpec {
    /// A converted checkpoint (see `tokenrouter convert-router`), named as in the launch file.
    Checkpoint {
        /// The folder.
        path: String,
        /// Which network it must be: `r2r` or `citer`.
        family: &'static str,
    },
    /// The logistic function of the logit of one token, which is never drawn. The token is named by its text.
    Row {
        /// Text of the token.
        token: String,
    },
}

/// Routing probabilities and commits: `p[i][j]` = a step of i hands control to j; `c[i][j]` = tokens committed then.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prior {
    /// Rows sum to 1.
    pub p: Vec<Vec<f64>>,
    /// 0 or 1.
    pub c: Vec<Vec<f64>>,
}

/// What a routing decision may look at.
#[derive(Clone, Copy, Debug)]
pub struct StepView<'a> {
    /// The request.
    pub request: RequestId,
    /// The model that made the step.
    pub model: ModelIdx,
    /// Seed of the request.
    pub seed: u64,
    /// Tokens of the prompt.
    pub prompt_len: u32,
    /// Committed tokens, prompt included; the candidate would be at position `tokens.len()`.
    pub tokens: &'a [TokenId],
    /// The token just drawn, not committed.
    pub candidate: TokenId,
    /// Signals of the step, those `needs` asked for.
    pub signals: &'a Signals,
}

impl StepView<'_> {
    /// Absolute position of the candidate.
    pub fn position(&self) -> u32 {
        self.tokens.len() as u32
    }
}

/// Where control goes and whether the candidate is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The model that makes the next token; the current one = stay.
    pub to: ModelIdx,
    /// Commit the candidate. Staying without committing would never end and is an error.
    pub keep: bool,
}

/// What `send` may look at. `known` is what each model holds already.
#[derive(Clone, Copy, Debug)]
pub struct Handoff<'a> {
    /// The request.
    pub request: RequestId,
    /// The model that hands over.
    pub from: ModelIdx,
    /// The model that takes over.
    pub to: ModelIdx,
    /// Committed tokens, prompt included.
    pub tokens: &'a [TokenId],
    /// Length of the prefix each model holds as ids.
    pub known: &'a Known,
}

/// Follows one request at one model.
pub trait Route: Send + Debug {
    /// Decides after a step of this model.
    ///
    /// # Errors
    /// Why there is no decision; the request fails with it, and no other.
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String>;

    /// Chooses what the peer is sent: where the suffix starts and a private note. Default: exactly what the peer has
    /// not seen, and no note.
    ///
    /// # Errors
    /// Why nothing can be sent; the request fails with it.
    fn send(&mut self, handoff: &Handoff<'_>) -> Result<Suffix, String> {
        Ok(Suffix { base: handoff.known[handoff.to.index()], ext: Vec::new() })
    }

    /// Takes what a peer sent. Default: append, trim overlap, refuse gaps.
    ///
    /// # Errors
    /// [`PeerError`] when the message does not fit; the request fails then.
    fn receive(&mut self, tokens: &mut Vec<TokenId>, message: &PeerReq) -> Result<(), PeerError> {
        message.append_to(tokens)
    }
}

/// What goes to the peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suffix {
    /// Absolute position of the first token sent.
    pub base: u32,
    /// A private note for the algorithm at the peer.
    pub ext: Vec<u8>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::Entropy;
    use serde_json::json;

    fn decide(algorithm: &dyn Algorithm, model: u8, entropy: f32) -> (u8, bool) {
        let width = 100u32;
        let entropy = Some(Entropy { nats: entropy * (width as f32).ln(), width });
        let signals = Signals { entropy, ..Signals::default() };
        let step = StepView {
            request: RequestId(1),
            model: ModelIdx(model),
            seed: 3,
            prompt_len: 1,
            tokens: &[5],
            candidate: 6,
            signals: &signals,
        };
        let Decision { to, keep } = algorithm.start().route(&step).unwrap();
        (to.0, keep)
    }

    #[test]
    fn r_stitch_leaves_above_the_threshold_and_returns_at_it() {
        let algorithm = build("r_stitch", &json!({"threshold": 0.5}), 2).unwrap();
        assert_eq!(decide(&*algorithm, 0, 0.6), (1, false));
        assert_eq!(decide(&*algorithm, 0, 0.5), (0, true), "equality stays");
        assert_eq!(decide(&*algorithm, 1, 0.6), (1, true));
        assert_eq!(decide(&*algorithm, 1, 0.5), (0, true), "equality returns, and the token is kept");
        assert_eq!(decide(&*algorithm, 0, f32::NAN), (1, false), "not a number is not certain");
    }

    #[test]
    fn bernoulli_walks_as_often_as_it_is_told() {
        let algorithm = build("bernoulli", &json!({"p": 0.35}), 2).unwrap();
        let mut left = 0;
        for position in 0..20_000u32 {
            let tokens = vec![0; position as usize % 50 + 1];
            let signals = Signals::default();
            let step = StepView {
                request: RequestId(1),
                model: ModelIdx(0),
                seed: u64::from(position / 50),
                prompt_len: 1,
                tokens: &tokens,
                candidate: 0,
                signals: &signals,
            };
            left += u32::from(algorithm.start().route(&step).unwrap().to == ModelIdx(1));
        }
        let expected = 0.35 * 20_000.0;
        let sigma = (20_000.0f64 * 0.35 * 0.65).sqrt();
        assert!((f64::from(left) - expected).abs() < 4.0 * sigma, "{left} of 20000");
    }

    #[track_caller]
    fn refused(name: &str, params: Value, models: usize, expected: &str) {
        let error = build(name, &params, models).map(drop).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn wrong_parameters_are_named() {
        refused("r_stich", json!({}), 2, "unknown routing algorithm `r_stich`; known are stay, r_stitch, bernoulli");
        refused("r_stitch", json!({"treshold": 0.1}), 2, "unknown field `treshold`, expected `threshold`");
        refused("r_stitch", json!({"threshold": "high"}), 2, "invalid type: string");
        refused("r_stitch", json!({}), 3, "between 2 to 2 models, not 3");
        refused("bernoulli", json!({"p": 1.5}), 2, "within 0 and 1");
        refused("bernoulli", json!({"p": [[0.5, 0.4], [1.0, 0.0]]}), 2, "row 0 must hold probabilities that sum to 1");
        refused(
            "bernoulli",
            json!({"p": [[0.5, 0.5], [1.0, 0.0]], "keep": [[true, false], [false, true]]}),
            2,
            "both drop",
        );
        refused("bernoulli", json!({"p": [[1.0]]}), 2, "2 x 2");
    }
}
