//! `[faults]`: a server that fails on order. Owner: tests; the launcher refuses the table unless the environment asks for it.
//! Invariant: a fault that cannot strike (an unknown model, never) is an error of the file.

use crate::error::ConfigError;
use crate::fields::{Document, Fields, Value};
use crate::launch::Model;
use crate::nearest::hint;
use crate::schema;
use serde::Serialize;
use toml::de::DeValue;

/// `[faults]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Faults {
    /// `[[faults.steps]]`
    pub steps: Vec<StepFault>,
    /// `[[faults.messages]]`
    pub messages: Vec<MessageFault>,
}

/// `[[faults.steps]]`: something goes wrong with steps of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StepFault {
    /// Name of the model. Required.
    pub model: String,
    /// What goes wrong. Required.
    pub kind: StepFaultKind,
    /// In this step, the first being 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<u64>,
    /// In one of so many steps. One of `at` and `every` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every: Option<u64>,
    /// How much longer a slow step takes.
    pub ms: u64,
}

/// What goes wrong in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepFaultKind {
    /// It is refused.
    Error,
    /// The device is lost.
    Lost,
    /// The executor panics.
    Panic,
    /// Its rows fail.
    BadRows,
    /// It takes `ms` longer.
    Slow,
    /// It never ends.
    Stuck,
}

/// `[[faults.messages]]`: something goes wrong with messages between models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MessageFault {
    /// What goes wrong. Required.
    pub kind: MessageFaultKind,
    /// With one of so many messages. Required.
    pub every: u32,
    /// Which ones; default 0.
    pub seed: u64,
}

/// What goes wrong with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MessageFaultKind {
    /// It never arrives.
    Lost,
    /// It arrives twice.
    Duplicate,
    /// It arrives after the next one.
    Reordered,
}

/// Reads the table.
pub(crate) fn faults(
    doc: &mut Document<'_>,
    value: Option<&Value<'_>>,
    models: &[Model],
) -> Result<Option<Faults>, ConfigError> {
    let Some(value) = value else { return Ok(None) };
    let fields = Fields::open(doc, ("[faults]", "faults"), value, schema::FAULTS.names())?;
    let steps = items(doc, (&fields, "steps"), |doc, path, item| step(doc, (path, item), models))?;
    let messages = items(doc, (&fields, "messages"), message)?;
    Ok(Some(Faults { steps, messages }))
}

/// An array of tables.
fn items<T>(
    doc: &mut Document<'_>,
    (fields, key): (&Fields<'_, '_>, &str),
    read: impl Fn(&mut Document<'_>, &str, &Value<'_>) -> Result<T, ConfigError>,
) -> Result<Vec<T>, ConfigError> {
    let Some(value) = fields.raw(key) else { return Ok(Vec::new()) };
    let DeValue::Array(items) = value.get_ref() else {
        return Err(doc.error(value.span(), format!("faults.{key} must be an array of tables; write [[faults.{key}]]")));
    };
    items.iter().enumerate().map(|(index, item)| read(doc, &format!("faults.{key}[{index}]"), item)).collect()
}

fn step(doc: &mut Document<'_>, (path, item): (&str, &Value<'_>), models: &[Model]) -> Result<StepFault, ConfigError> {
    let fields = Fields::open(doc, ("[[faults.steps]]", path), item, schema::STEP_FAULT.names())?;
    let model: String = fields.required(doc, "model", "\"small\"")?;
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    if !names.contains(&model.as_str()) {
        let key = format!("{path}.model");
        let message = format!("{key} names the unknown model `{model}`; {}", hint(&model, &names));
        return Err(doc.places.error(&key, message));
    }
    let kinds = [
        ("error", StepFaultKind::Error),
        ("lost", StepFaultKind::Lost),
        ("panic", StepFaultKind::Panic),
        ("bad_rows", StepFaultKind::BadRows),
        ("slow", StepFaultKind::Slow),
        ("stuck", StepFaultKind::Stuck),
    ];
    let _: String = fields.required(doc, "kind", "\"error\"")?;
    let kind = fields.choice(doc, "kind", &kinds)?.unwrap_or(StepFaultKind::Error);
    let (at, every) = (fields.optional(doc, "at")?, fields.optional(doc, "every")?);
    if at.is_some() == every.is_some() || every == Some(0) {
        let message = format!("{path} must say when: give at = a step from 0 on, or every = 1 or more, not both");
        return Err(doc.error(item.span(), message));
    }
    Ok(StepFault { model, kind, at, every, ms: fields.or(doc, "ms", 1000)? })
}

fn message(doc: &mut Document<'_>, path: &str, item: &Value<'_>) -> Result<MessageFault, ConfigError> {
    let fields = Fields::open(doc, ("[[faults.messages]]", path), item, schema::MESSAGE_FAULT.names())?;
    let kinds = [
        ("lost", MessageFaultKind::Lost),
        ("duplicate", MessageFaultKind::Duplicate),
        ("reordered", MessageFaultKind::Reordered),
    ];
    let _: String = fields.required(doc, "kind", "\"lost\"")?;
    let kind = fields.choice(doc, "kind", &kinds)?.unwrap_or(MessageFaultKind::Lost);
    let every = fields.required(doc, "every", "20")?;
    if every < 2 {
        // When nothing arrives at all nothing can be missed.
        let key = format!("{path}.every");
        return Err(doc.places.error(&key, format!("{key} = {every} leaves nothing to go on with; give 2 or more")));
    }
    Ok(MessageFault { kind, every, seed: fields.or(doc, "seed", 0)? })
}
