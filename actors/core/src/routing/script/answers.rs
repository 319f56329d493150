//! What functions of a script give back, read strictly: an unknown key, a wrong type or a number out of range is an
//! error that names the function. Owner: the algorithm.

use super::program::{ITEMS_MAX, Program};
use crate::executor::Needs;
use crate::ids::ModelIdx;
use crate::routing::{Decision, HeadSpec, Prior, Suffix};
use rhai::{Array, Blob, Dynamic, INT, ImmutableString, Map};
use serde::Deserialize;

/// Bytes of a note to a peer.
const NOTE_BYTES_MAX: usize = 64 << 10;

/// Highest logits a script may ask for.
const TOP_MAX: u16 = 256;

/// A model of the router.
pub(super) fn model(program: &Program, function: &str, answer: &Dynamic, models: usize) -> Result<ModelIdx, String> {
    match answer.as_int() {
        Ok(index) if (0..models as INT).contains(&index) => Ok(ModelIdx(index as u8)),
        Ok(index) => Err(program.wrong(function, format_args!("{index} is no model; there are 0 to {}", models - 1))),
        Err(kind) => Err(program.wrong(function, format_args!("must give the number of a model, not {kind}"))),
    }
}

/// What `route` gives: a model, or `#{to, keep}`. Who made the step is beside the number of models.
pub(super) fn decision(
    program: &Program,
    answer: &Dynamic,
    (me, models): (ModelIdx, usize),
) -> Result<Decision, String> {
    const FUNCTION: &str = "route(step)";
    let usual = |to: ModelIdx| to == me || me != ModelIdx(0);
    let Some(fields) = answer.read_lock::<Map>() else {
        let to = model(program, FUNCTION, answer, models)?;
        return Ok(Decision { to, keep: usual(to) });
    };
    only(program, FUNCTION, &fields, &["to", "keep"])?;
    let to = match fields.get("to") {
        Some(to) => model(program, FUNCTION, to, models)?,
        None => return Err(program.wrong(FUNCTION, "`to` is missing in #{ to, keep }")),
    };
    let keep = match fields.get("keep") {
        Some(keep) => keep
            .as_bool()
            .map_err(|kind| program.wrong(FUNCTION, format_args!("keep must be true or false, not {kind}")))?,
        None => usual(to),
    };
    Ok(Decision { to, keep })
}

fn only(program: &Program, function: &str, fields: &Map, known: &[&str]) -> Result<(), String> {
    match fields.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => {
            Err(program.wrong(function, format_args!("unknown key `{key}`, expected one of {}", known.join(", "))))
        }
        None => Ok(()),
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Asked {
    entropy: bool,
    top_k: u16,
    hidden: bool,
    score: bool,
    head: Option<AskedHead>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AskedHead {
    family: Option<String>,
    path: Option<String>,
    row: Option<String>,
}

/// What `needs` gives.
pub(super) fn needs(program: &Program, answer: Dynamic) -> Result<(Needs, Option<HeadSpec>), String> {
    const FUNCTION: &str = "needs()";
    let wrong = |message: String| program.wrong(FUNCTION, message);
    let Asked { entropy, top_k, hidden, score, head } =
        rhai::serde::from_dynamic(&answer).map_err(|error| wrong(error.to_string()))?;
    if top_k > TOP_MAX {
        return Err(wrong(format!("top_k is {top_k}; at most {TOP_MAX} are given")));
    }
    let head = match head {
        None => None,
        Some(AskedHead { family: None, path: None, row: Some(token) }) => Some(HeadSpec::Row { token }),
        Some(AskedHead { family: Some(family), path: Some(path), row: None }) => {
            let known = ["r2r", "citer"].into_iter().find(|known| *known == family);
            let family = known.ok_or_else(|| wrong(format!("head.family is `{family}`; known are r2r and citer")))?;
            Some(HeadSpec::Checkpoint { path, family })
        }
        Some(_) => return Err(wrong("head must be #{ family, path } or #{ row }".into())),
    };
    if score != head.is_some() {
        return Err(wrong(
            "score and head go together: #{ score: true, head: #{ family: \"citer\", path: ... } }".into(),
        ));
    }
    Ok((Needs { entropy, top_k, hidden, score }, head))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Told {
    p: Vec<Vec<f64>>,
    c: Vec<Vec<f64>>,
}

/// What `prior` gives.
pub(super) fn prior(program: &Program, answer: &Dynamic, models: usize) -> Result<Prior, String> {
    const FUNCTION: &str = "prior()";
    let Told { p, c } = rhai::serde::from_dynamic(answer).map_err(|error| program.wrong(FUNCTION, error))?;
    let square = |matrix: &[Vec<f64>]| matrix.len() == models && matrix.iter().all(|row| row.len() == models);
    let within = |matrix: &[Vec<f64>]| matrix.iter().flatten().all(|value| (0.0..=1.0).contains(value));
    let sums = |row: &Vec<f64>| (row.iter().sum::<f64>() - 1.0).abs() < 1e-6;
    if !square(&p) || !square(&c) || !within(&p) || !within(&c) || !p.iter().all(sums) {
        let shape = format!("p and c must be {models} x {models}, within 0 and 1, rows of p summing to 1");
        return Err(program.wrong(FUNCTION, shape));
    }
    Ok(Prior { p, c })
}

/// Without `prior`: control stays seven times of ten; leaving model 0 drops the candidate.
pub(super) fn usual_prior(models: usize) -> Prior {
    let others = models.saturating_sub(1).max(1) as f64;
    let stay = if models < 2 { 1.0 } else { 0.7 };
    let chance = |i: usize, j: usize| if i == j { stay } else { (1.0 - stay) / others };
    let kept = |i: usize, j: usize| if i == j || i != 0 { 1.0 } else { 0.0 };
    let matrix =
        |of: &dyn Fn(usize, usize) -> f64| (0..models).map(|i| (0..models).map(|j| of(i, j)).collect()).collect();
    Prior { p: matrix(&chance), c: matrix(&kept) }
}

/// How deep values may lie within values that are kept or sent.
const DEPTH_MAX: usize = 64;

/// Bytes of text that weigh as much as an item.
const ITEM_BYTES: usize = 64;

/// How many items a value holds that is to be kept or sent.
///
/// # Errors
/// When there are more than a value may hold, or they lie too deep.
pub(super) fn weigh(value: &Dynamic) -> Result<usize, String> {
    fn within(value: &Dynamic, depth: usize) -> Result<usize, String> {
        if depth > DEPTH_MAX {
            return Err(format!("values lie more than {DEPTH_MAX} deep within values"));
        }
        let mut sum = 1;
        let mut add = |value: &Dynamic| -> Result<(), String> {
            sum += within(value, depth + 1)?;
            if sum > ITEMS_MAX { Err(format!("more than {ITEMS_MAX} items")) } else { Ok(()) }
        };
        if let Some(items) = value.read_lock::<Array>() {
            items.iter().try_for_each(&mut add)?;
        } else if let Some(fields) = value.read_lock::<Map>() {
            fields.values().try_for_each(&mut add)?;
        } else if let Some(text) = value.read_lock::<ImmutableString>() {
            sum += text.len() / ITEM_BYTES;
        } else if let Some(bytes) = value.read_lock::<Blob>() {
            sum += bytes.len() / ITEM_BYTES;
        }
        if sum > ITEMS_MAX { Err(format!("more than {ITEMS_MAX} items")) } else { Ok(sum) }
    }
    within(value, 0)
}

/// What `send` gives; `base` is where the peer's tokens end.
pub(super) fn suffix(program: &Program, answer: Dynamic, base: u32) -> Result<Suffix, String> {
    const FUNCTION: &str = "send(handoff)";
    let wrong = |message: String| program.wrong(FUNCTION, message);
    if answer.is_unit() {
        return Ok(Suffix { base, ext: Vec::new() });
    }
    let kind = answer.type_name();
    let fields =
        answer.try_cast::<Map>().ok_or_else(|| wrong(format!("must give () or #{{ base, note }}, not {kind}")))?;
    only(program, FUNCTION, &fields, &["base", "note"])?;
    let base = match fields.get("base") {
        None => base,
        Some(given) => {
            let given = given.as_int().ok().and_then(|given| u32::try_from(given).ok());
            given.ok_or_else(|| wrong("base must be a position".into()))?
        }
    };
    let ext = match fields.get("note") {
        None => Vec::new(),
        Some(note) => weigh(note)
            .and_then(|_| serde_json::to_vec(note).map_err(|error| error.to_string()))
            .map_err(|error| wrong(format!("note: {error}")))?,
    };
    if ext.len() > NOTE_BYTES_MAX {
        return Err(wrong(format!("the note takes {} bytes; at most {NOTE_BYTES_MAX} are sent", ext.len())));
    }
    Ok(Suffix { base, ext })
}

/// The note of a peer, `()` when there is none.
pub(super) fn note(program: &Program, ext: &[u8]) -> Result<Dynamic, String> {
    if ext.is_empty() {
        return Ok(Dynamic::UNIT);
    }
    if ext.len() > NOTE_BYTES_MAX {
        return Err(program.wrong("receive(message)", format_args!("a note of {} bytes", ext.len())));
    }
    serde_json::from_slice(ext).map_err(|error| program.wrong("receive(message)", format_args!("note: {error}")))
}
