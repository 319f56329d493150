//! The routing port: three small functions from the view of one request, and the one list of algorithms.
//! Owner: one `Route` value per request and model. Invariant: a decision depends only on the request, its seed and
//! the step's signals; never on time, load or other requests.

use crate::executor::{Needs, Signals};
use crate::ids::{ModelIdx, RequestId, TokenId};
use crate::peer::{Known, PeerError, PeerReq};
use crate::text::TextCodec;
use serde::Serialize;
use serde_json::Value;
use std::fmt::Debug;
use std::sync::Arc;

pub mod always;
pub mod bernoulli;
pub mod catalog;
pub mod citer;
pub mod co_llm;
mod detour;
pub mod entropy;
pub mod me;
pub mod r2r;
pub mod r_stitch;
pub mod reload;
pub mod script;
pub mod stay;
pub mod token_trigger;

/// Every algorithm the server knows. A new one is a file and a line here.
const ALGORITHMS: &[&Entry] = &[
    &stay::ENTRY,
    &always::ENTRY,
    &bernoulli::ENTRY,
    &r2r::ENTRY,
    &citer::ENTRY,
    &co_llm::ENTRY,
    &r_stitch::ENTRY,
    &me::ENTRY,
    &entropy::ENTRY,
    &token_trigger::ENTRY,
    &script::ENTRY,
];

pub(crate) use detour::{Detour, Rule, Threshold};

/// The small model of a pair.
pub(crate) const SMALL: ModelIdx = ModelIdx(0);
/// The large model of a pair.
pub(crate) const LARGE: ModelIdx = ModelIdx(1);

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
    /// What values it takes.
    pub kind: Kind,
    /// Whether a request may bring its own value.
    pub per_request: bool,
    /// Default, as written in a launch file.
    pub default: &'static str,
    /// Meaning, range and direction of comparison.
    pub doc: &'static str,
}

/// Which values a parameter takes, in the words of JSON Schema.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Kind {
    /// A number within these bounds, both included.
    Number {
        /// Lowest value.
        minimum: f32,
        /// Highest value.
        maximum: f32,
    },
    /// A whole number.
    Integer {
        /// Lowest value.
        minimum: u32,
    },
    /// A text.
    String,
    /// A list.
    Array {
        /// What it lists.
        items: &'static str,
    },
    /// What the description says.
    Any,
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

/// Builds the algorithm of this name; a program with algorithms of its own uses its [`catalog::Catalog`].
///
/// # Errors
/// [`RoutingError`] naming the parameter and what is allowed.
pub fn build(name: &str, params: &Value, models: usize) -> Result<Arc<dyn Algorithm>, RoutingError> {
    catalog::Catalog::default().build(name, params, models)
}

/// Reads a parameter table into `T`; an unknown key or a wrong type is an error.
///
/// # Errors
/// [`RoutingError::Param`] of the algorithm `name`.
pub fn params<T: serde::de::DeserializeOwned>(name: &'static str, table: &Value) -> Result<T, RoutingError> {
    let table = if table.is_null() { Value::Object(serde_json::Map::new()) } else { table.clone() };
    serde_json::from_value(table).map_err(|error| RoutingError::Param { name, message: error.to_string() })
}

/// The one key a request may change of this algorithm, if it is among `overrides` (an object).
pub(crate) fn override_of<'a>(
    algorithm: &str,
    key: &str,
    overrides: &'a Value,
) -> Result<Option<&'a Value>, RoutingError> {
    let refused = |message: String| Err(RoutingError::Request { message });
    let Some(map) = overrides.as_object() else {
        return refused(format!("parameters per request must be an object such as {{\"{key}\": ...}}"));
    };
    match map.keys().find(|given| *given != key) {
        Some(unknown) => {
            refused(format!("`{unknown}` cannot be set per request; of algorithm `{algorithm}` only `{key}` can"))
        }
        None => Ok(map.get(key)),
    }
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

    /// Why greedy decoding (temperature 0) defeats this algorithm, if it does; logged once where requests come in.
    fn greedy_warning(&self) -> Option<&'static str> {
        None
    }

    /// Which version new requests follow; only [`reload::Reloadable`] has more than one.
    fn version(&self) -> u32 {
        0
    }

    /// The algorithm of a version that a request follows still; `None` = this one.
    fn at(&self, _version: u32) -> Option<Arc<dyn Algorithm>> {
        None
    }

    /// This algorithm with texts among its parameters turned into token ids; `None` = it has no such texts (any more).
    /// The launcher asks before anything is routed, because only there a vocabulary is known.
    ///
    /// # Errors
    /// [`RoutingError::Param`], its message beginning with the name of the parameter.
    fn in_vocabulary(&self, _codec: &dyn TextCodec) -> Result<Option<Arc<dyn Algorithm>>, RoutingError> {
        Ok(None)
    }

    /// This algorithm with other parameters for one request: an object with the keys to change.
    ///
    /// # Errors
    /// [`RoutingError::Request`] naming the key and what is allowed. Default: nothing can be changed.
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
mod tests;
