//! The language of scenarios. One line, one fact:
//!
//! ```text
//! model small skill=small step=6ms pages=64     (also: row= token= rows= chunk= context=)
//! language hard=0.3 eos=0.02 vocab=200
//! route r_stitch {"threshold":0.1}
//! batch fixed 1,2 wait=50ms                      (or: batch eager)
//! execution model_sync                           (or: async, step_sync, std_serving)
//! prefill_ahead
//! live_max 16
//! prompt_tokens_max 100
//! time first=20ms whole=100ms step=50ms          (any may be left out)
//! fault large 3 panic                            (step number; error, lost, panic, bad_rows, stuck, slow=40ms)
//! link_fault lost 20 seed=7                      (one in so many frames; lost, duplicate, reordered)
//! at 0ms submit a prompt=5 max=8                 (also: seed= only=MODEL threshold=)
//! at 20ms abort a
//! at 25ms probe
//! ```

use std::time::Duration;
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_core::batching::{Batching, PolicySpec};
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_core::faults::{Fault, LinkFault, LinkFaults};
use tokenrouter_core::sim::{Language, Skill, TimeModel};

/// End-of-text in every simulated language.
pub const EOS: u32 = 1;

/// A parsed scenario.
#[derive(Clone, Debug)]
pub struct Script {
    /// Models in router order.
    pub models: Vec<Model>,
    /// What they speak.
    pub language: Language,
    /// Algorithm and parameters.
    pub route: (String, serde_json::Value),
    /// Batching.
    pub batching: Batching,
    /// Requests accepted at once.
    pub live_max: u32,
    /// Other bounds on requests.
    pub bounds: Bounds,
    /// What goes wrong with messages between models.
    pub link_faults: Vec<LinkFaults>,
    /// What happens when, in order of time.
    pub acts: Vec<(Duration, Act)>,
}

impl Script {
    /// All requests users send.
    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.acts.iter().filter_map(|(_, act)| match act {
            Act::Submit(request) => Some(request),
            _ => None,
        })
    }
}

/// A simulated model.
#[derive(Clone, Debug)]
pub struct Model {
    /// Name.
    pub name: String,
    /// How well it speaks.
    pub skill: Skill,
    /// How long it takes.
    pub time: TimeModel,
    /// What it holds.
    pub limits: ExecutorLimits,
    /// What goes wrong.
    pub faults: Vec<(u64, Fault)>,
}

/// Something the world does.
#[derive(Clone, Debug)]
pub enum Act {
    /// A user sends a request.
    Submit(Request),
    /// A user goes away.
    Abort(String),
    /// Print how the subservers are.
    Probe,
}

/// A request of a scenario.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name in the timeline.
    pub name: String,
    /// Tokens of the prompt; their values follow from the seed.
    pub prompt: u32,
    /// Tokens to generate.
    pub max: u32,
    /// Seed.
    pub seed: u64,
    /// A single model.
    pub only: Option<String>,
    /// A threshold of its own for the routing algorithm.
    pub threshold: Option<f64>,
}

impl Request {
    /// What it asks of the routing algorithm.
    pub fn routing(&self) -> Option<serde_json::Value> {
        self.threshold.map(|threshold| serde_json::json!({ "threshold": threshold }))
    }

    /// The prompt's tokens.
    pub fn tokens(&self, vocab: u32) -> Vec<u32> {
        (0..self.prompt)
            .map(|at| (tokenrouter_core::rng::mix(self.seed ^ u64::from(at)) % u64::from(vocab)) as u32)
            .collect()
    }
}

/// A line of a scenario is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScriptError {
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
}

/// Reads a scenario.
///
/// # Errors
/// [`ScriptError`] for a line that says nothing known.
pub fn parse(text: &str) -> Result<Script, ScriptError> {
    let mut script = Script {
        models: Vec::new(),
        language: Language { vocab: 200, hard: 0.0, eos: None },
        route: ("stay".into(), serde_json::Value::Null),
        batching: Batching { max_wait: Duration::from_secs(1), ..Batching::default() },
        live_max: 64,
        bounds: Bounds::default(),
        link_faults: Vec::new(),
        acts: Vec::new(),
    };
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            read(&mut script, line).map_err(|message| ScriptError { line: number + 1, message })?;
        }
    }
    script.acts.sort_by_key(|(time, _)| *time);
    Ok(script)
}

fn read(script: &mut Script, line: &str) -> Result<(), String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words.as_slice() {
        ["model", name, rest @ ..] => script.models.push(model(name, rest)?),
        ["language", rest @ ..] => {
            for (key, value) in rest.iter().map(|word| pair(word)).collect::<Result<Vec<_>, _>>()? {
                match key {
                    "hard" => script.language.hard = number(value)?,
                    "eos" => script.language.eos = Some((EOS, number(value)?)),
                    "vocab" => script.language.vocab = number(value)?,
                    _ => return Err(format!("unknown {key}")),
                }
            }
        }
        ["route", name, json @ ..] => {
            let json = if json.is_empty() { "null".to_owned() } else { json.concat() };
            script.route = ((*name).to_owned(), serde_json::from_str(&json).map_err(|error| error.to_string())?);
        }
        ["batch", "eager"] => script.batching.policy = PolicySpec::Eager,
        ["batch", "fixed", thresholds, rest @ ..] => {
            let thresholds = thresholds.split(',').map(number).collect::<Result<_, _>>()?;
            script.batching.policy = PolicySpec::Fixed(thresholds);
            for word in rest {
                script.batching.max_wait = time(pair(word).map(|(_, value)| value)?)?;
            }
        }
        ["execution", mode] => {
            let mode = serde_json::from_value(serde_json::json!(mode));
            script.batching.execution = mode.map_err(|error| error.to_string())?;
        }
        ["prefill_ahead"] => script.batching.prefill_ahead = true,
        ["live_max", limit] => script.live_max = number(limit)?,
        ["prompt_tokens_max", limit] => script.bounds.prompt_tokens_max = Some(number(limit)?),
        ["time", rest @ ..] => {
            for word in rest {
                match pair(word)? {
                    ("first", limit) => script.bounds.first_token = Some(time(limit)?),
                    ("whole", limit) => script.bounds.whole = Some(time(limit)?),
                    ("step", limit) => script.bounds.step = Some(time(limit)?),
                    _ => return Err(format!("unknown {word}")),
                }
            }
        }
        ["fault", name, step, kind] => {
            let kind = fault(kind)?;
            let model = script.models.iter_mut().find(|model| model.name == *name);
            model.ok_or_else(|| format!("no model {name}"))?.faults.push((number(step)?, kind));
        }
        ["link_fault", kind, every, seed] => script.link_faults.push(link_fault((kind, every, seed))?),
        ["at", moment, act @ ..] => script.acts.push((time(moment)?, read_act(act)?)),
        _ => return Err(format!("not understood: {line}")),
    }
    Ok(())
}

fn fault(kind: &str) -> Result<Fault, String> {
    Ok(match kind {
        "error" => Fault::Error,
        "lost" => Fault::Lost,
        "panic" => Fault::Panic,
        "bad_rows" => Fault::BadRows,
        "stuck" => Fault::Stuck,
        other => match pair(other)? {
            ("slow", by) => Fault::Slow(time(by)?),
            _ => return Err(format!("unknown fault {other}")),
        },
    })
}

fn link_fault((kind, every, seed): (&str, &str, &str)) -> Result<LinkFaults, String> {
    let fault = match kind {
        "lost" => LinkFault::Lost,
        "duplicate" => LinkFault::Duplicate,
        "reordered" => LinkFault::Reordered,
        other => return Err(format!("unknown link fault {other}")),
    };
    Ok(LinkFaults { fault, every: number(every)?, seed: number(pair(seed)?.1)? })
}

fn model(name: &str, words: &[&str]) -> Result<Model, String> {
    let mut model = Model {
        name: name.to_owned(),
        skill: Skill::Large,
        time: TimeModel::default(),
        limits: ExecutorLimits { pages: 64, rows_max: 16, step_tokens_max: 256, context_len: 1024, vocab_width: 1000 },
        faults: Vec::new(),
    };
    for word in words {
        let (key, value) = pair(word)?;
        match key {
            "skill" if value == "small" => model.skill = Skill::Small,
            "skill" if value == "large" => model.skill = Skill::Large,
            "step" => model.time.base = time(value)?,
            "row" => model.time.per_row = time(value)?,
            "token" => model.time.per_token = time(value)?,
            "pages" => model.limits.pages = number(value)?,
            "rows" => model.limits.rows_max = number(value)?,
            "chunk" => model.limits.step_tokens_max = number(value)?,
            "context" => model.limits.context_len = number(value)?,
            _ => return Err(format!("unknown {word}")),
        }
    }
    Ok(model)
}

fn read_act(words: &[&str]) -> Result<Act, String> {
    match words {
        ["probe"] => Ok(Act::Probe),
        ["abort", name] => Ok(Act::Abort((*name).to_owned())),
        ["submit", name, rest @ ..] => {
            let seed = name.bytes().fold(0u64, |seed, byte| seed * 31 + u64::from(byte));
            let mut request =
                Request { name: (*name).to_owned(), prompt: 4, max: 8, seed, only: None, threshold: None };
            for word in rest {
                let (key, value) = pair(word)?;
                match key {
                    "prompt" => request.prompt = number(value)?,
                    "max" => request.max = number(value)?,
                    "seed" => request.seed = number(value)?,
                    "threshold" => request.threshold = Some(number(value)?),
                    "only" => request.only = Some(value.to_owned()),
                    _ => return Err(format!("unknown {key}")),
                }
            }
            Ok(Act::Submit(request))
        }
        _ => Err(format!("unknown act {words:?}")),
    }
}

fn pair(word: &str) -> Result<(&str, &str), String> {
    word.split_once('=').ok_or_else(|| format!("{word} should be key=value"))
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text} is not a number of the right kind"))
}

fn time(text: &str) -> Result<Duration, String> {
    let text = text.strip_suffix("ms").ok_or_else(|| format!("{text} should end in ms"))?;
    number::<f64>(text).map(|ms| Duration::from_secs_f64(ms / 1e3))
}
