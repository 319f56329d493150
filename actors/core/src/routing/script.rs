//! `script`: the algorithm is a Rhai script. One function decides, `route(step)`; the others have defaults: `needs()`,
//! `entry(seed)`, `prior()`, `send(handoff)`, `receive(message)`. Owner: the compiled script is shared by all requests;
//! each request has a state map of its own at each model, `this` in `route`, `send` and `receive`.
//! Invariant: a script sees its arguments, its parameters and its state, nothing of the system or of time; work and
//! memory of a call are bounded; an error fails the request it happens in and no other.
//!
//! | function | gets | gives | default |
//! |---|---|---|---|
//! | `route(step)` | `model`, `position`, `prompt_len`, `seed`, `candidate`, `token(i)`, `tail(n)`, and of what `needs` asks: `entropy` (0 to 1), `nats`, `top` (`#{token, logit}`), `hidden[i]`, `score` | a model, or `#{to, keep}`; by default the candidate is dropped when control leaves model 0 and kept otherwise | - |
//! | `needs()` | | `#{entropy, top_k, hidden, score, head}`; head is `#{family, path}` or `#{row}`, at model 0 | nothing |
//! | `entry(seed)` | | the first model | 0 |
//! | `prior()` | | `#{p, c}`, see [`Prior`] | stays seven times of ten |
//! | `send(handoff)` | `#{from, to, len, known}` | `()`, or `#{base, note}`: where the tokens sent start, and any value for `receive` | what the peer lacks |
//! | `receive(message)` | `#{from, base, len, note}`, after the tokens were appended | - | nothing |
//!
//! Everywhere: `params()`, the other keys of `[router.params]` with the changes of the request; `unit(seed, position)`, a
//! random number in `[0, 1)` that depends on nothing else.

mod answers;
mod program;
mod view;

use super::{Algorithm, Decision, Entry, Handoff, HeadSpec, Kind, Param, Prior, Route, RoutingError, StepView, Suffix};
use crate::executor::Needs;
use crate::ids::{ModelIdx, TokenId};
use crate::peer::{PeerError, PeerReq};
use program::{Call, Program};
use rhai::{Array, Dynamic, INT, Map};
use serde_json::Value;
use std::fmt;
use std::sync::Arc;

const NAME: &str = "script";

/// The list entry.
pub const ENTRY: Entry = Entry {
    name: NAME,
    summary: "functions of a Rhai script decide; read again on SIGHUP or POST /admin/reload",
    source: "your own file",
    params: &[
        Param {
            name: "file",
            kind: Kind::String,
            per_request: false,
            default: "required",
            doc: "the script; a relative path starts at the launch file",
        },
        Param {
            name: "*",
            kind: Kind::Any,
            per_request: true,
            default: "none",
            doc: "any other key is handed to the script, as params().key",
        },
    ],
    models: (1, 8),
    build: |table, models| Ok(Arc::new(Script::new(table, models)?)),
};

/// Key of the parameter table under which the launcher puts the text of the script; never written by users.
pub const SOURCE: &str = "source";

/// A compiled script with its parameters.
#[derive(Clone)]
struct Script {
    program: Arc<Program>,
    params: Dynamic,
    /// The same parameters, to check what a request may change.
    table: serde_json::Map<String, Value>,
    needs: Needs,
    head: Option<HeadSpec>,
    prior: Prior,
    models: usize,
}

impl fmt::Debug for Script {
    /// Equal for equal scripts and parameters: processes of one server compare this text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Script { program, table, .. } = self;
        write!(f, "Script {{ {:016x}, params: {} }}", program.fingerprint, Value::Object(table.clone()))
    }
}

fn wrong(message: String) -> RoutingError {
    RoutingError::Param { name: NAME, message }
}

impl Script {
    fn new(table: &Value, models: usize) -> Result<Self, RoutingError> {
        let mut table = table.as_object().cloned().unwrap_or_default();
        let mut text = |key: &str| match table.remove(key) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(wrong(format!("`{key}` is missing; name the script: file = \"my_router.rhai\""))),
        };
        let (file, source) = (text("file")?, text(SOURCE)?);
        let program = Arc::new(Program::compile(&file, &source).map_err(wrong)?);
        let params = dynamic(&table)?;
        let (needs, head) = match program.has("needs") {
            true => program.call_once("needs", (), &params).and_then(|answer| answers::needs(&program, answer)),
            false => Ok((Needs::default(), None)),
        }
        .map_err(wrong)?;
        let prior = match program.has("prior") {
            true => program.call_once("prior", (), &params).and_then(|told| answers::prior(&program, &told, models)),
            false => Ok(answers::usual_prior(models)),
        }
        .map_err(wrong)?;
        Ok(Script { program, params, table, needs, head, prior, models })
    }

    /// The entry model of a request.
    fn entry_of(&self, seed: u64) -> Result<ModelIdx, String> {
        if !self.program.has("entry") {
            return Ok(ModelIdx(0));
        }
        let answer = self.program.call_once("entry", (seed as INT,), &self.params)?;
        answers::model(&self.program, "entry(seed)", &answer, self.models)
    }
}

fn dynamic(table: &serde_json::Map<String, Value>) -> Result<Dynamic, RoutingError> {
    rhai::serde::to_dynamic(table).map_err(|error| wrong(format!("parameters for the script: {error}")))
}

impl Algorithm for Script {
    fn needs(&self, model: ModelIdx) -> Needs {
        // The head is at model 0; elsewhere there is no score to compute.
        Needs { score: self.needs.score && model == ModelIdx(0), ..self.needs }
    }

    /// An error in the script shows in the first step of the request, which asks again.
    fn entry(&self, seed: u64) -> ModelIdx {
        self.entry_of(seed).unwrap_or(ModelIdx(0))
    }

    fn prior(&self) -> Prior {
        self.prior.clone()
    }

    fn start(&self) -> Box<dyn Route> {
        Box::new(Follower { script: self.clone(), state: Dynamic::from_map(Map::new()) })
    }

    fn head(&self, model: ModelIdx) -> Option<HeadSpec> {
        self.head.clone().filter(|_| model == ModelIdx(0))
    }

    /// A request may change what the launch file sets, to a value of the same kind.
    fn with(&self, overrides: &Value) -> Result<Box<dyn Algorithm>, RoutingError> {
        let refused = |message: String| RoutingError::Request { message };
        let Some(overrides) = overrides.as_object() else {
            return Err(refused("routing must be an object of parameters".into()));
        };
        let mut table = self.table.clone();
        for (key, value) in overrides {
            let Some(old) = table.get_mut(key) else {
                let known: Vec<&str> = self.table.keys().map(String::as_str).collect();
                return Err(refused(format!(
                    "parameter `{key}` is not set in the launch file; set are: {}",
                    if known.is_empty() { "none".to_owned() } else { known.join(", ") }
                )));
            };
            if std::mem::discriminant(&*old) != std::mem::discriminant(value) {
                return Err(refused(format!("parameter `{key}`: {value} is not of the kind of {old}")));
            }
            *old = value.clone();
        }
        Ok(Box::new(Script { params: dynamic(&table)?, table, ..self.clone() }))
    }
}

/// Follows one request at one model.
#[derive(Debug)]
struct Follower {
    script: Script,
    /// `this` of the script.
    state: Dynamic,
}

impl Follower {
    fn call(&mut self, function: &str, argument: impl Into<Dynamic>) -> Result<Dynamic, String> {
        let call = Call { state: &mut self.state, params: &self.script.params };
        let answer = self.script.program.call(function, (argument.into(),), call)?;
        answers::weigh(&self.state)
            .map_err(|reason| self.script.program.wrong(function, format_args!("this holds too much: {reason}")))?;
        Ok(answer)
    }
}

impl Route for Follower {
    fn route(&mut self, step: &StepView<'_>) -> Result<Decision, String> {
        if step.position() == step.prompt_len {
            self.script.entry_of(step.seed)?;
        }
        let answer = self.call("route", view::Step::of(step))?;
        answers::decision(&self.script.program, &answer, (step.model, self.script.models))
    }

    fn send(&mut self, handoff: &Handoff<'_>) -> Result<Suffix, String> {
        let base = handoff.known[handoff.to.index()];
        if !self.script.program.has("send") {
            return Ok(Suffix { base, ext: Vec::new() });
        }
        let known: Array = handoff.known.iter().map(|&known| Dynamic::from_int(known.into())).collect();
        let argument = view::map([
            ("from", Dynamic::from_int(handoff.from.0.into())),
            ("to", Dynamic::from_int(handoff.to.0.into())),
            ("len", Dynamic::from_int(handoff.tokens.len() as INT)),
            ("known", known.into()),
        ]);
        let answer = self.call("send", argument)?;
        answers::suffix(&self.script.program, answer, base)
    }

    fn receive(&mut self, tokens: &mut Vec<TokenId>, message: &PeerReq) -> Result<(), PeerError> {
        message.append_to(tokens)?;
        if !self.script.program.has("receive") {
            return Ok(());
        }
        let note = answers::note(&self.script.program, &message.ext).map_err(PeerError::Routing)?;
        let argument = view::map([
            ("from", Dynamic::from_int(message.from.0.into())),
            ("base", Dynamic::from_int(message.base.into())),
            ("len", Dynamic::from_int(tokens.len() as INT)),
            ("note", note),
        ]);
        self.call("receive", argument).map(drop).map_err(PeerError::Routing)
    }
}

#[cfg(test)]
mod tests;
