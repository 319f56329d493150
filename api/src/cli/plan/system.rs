//! A system as JSON: what `--system` reads. Owner: the command. Invariant: what is read is a well-formed [`System`].

use crate::cli::CliError;
use serde::Deserialize;
use serde_json::Value as Json;
use std::path::Path;
use tokenrouter_core::theory::system::{Affine, System};

/// The fields of the file. What `plan --json` adds to a system may stay in it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "results are accepted, so that a printed plan can be planned again, but not read")]
struct File {
    name: Option<String>,
    #[serde(rename = "N")]
    requests: u32,
    latency_ticks: Vec<Latency>,
    #[serde(rename = "P")]
    moves: Vec<Vec<f64>>,
    #[serde(rename = "C")]
    tokens: Vec<Vec<f64>>,
    #[serde(rename = "best_B")]
    best_thresholds: Option<Json>,
    best: Option<Json>,
    table: Option<Json>,
}

/// Latency of a model.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Latency {
    /// `base + per_request * b`.
    Line(Affine),
    /// For b = 1, 2, ...; the length is the largest batch.
    Table(Vec<u32>),
    /// Whatever b is.
    Constant(u32),
}

/// A system that is planned for several N.
#[derive(Debug)]
pub struct Source {
    name: String,
    file: File,
}

/// What a file holds.
///
/// # Errors
/// [`CliError::Usage`] in one line that names the file and the field.
pub fn read(path: &Path) -> Result<Source, CliError> {
    let name = path.display().to_string();
    let wrong = |problem: &dyn std::fmt::Display| CliError::Usage(format!("{name}: {problem}"));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let file: File = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
    Ok(Source { name, file })
}

impl Source {
    /// The system of so many requests, of the file's N when none is given.
    ///
    /// # Errors
    /// [`CliError::Usage`] in one line that names the file and the field.
    pub fn system(&self, requests: Option<u32>) -> Result<System, CliError> {
        let requests = requests.unwrap_or(self.file.requests);
        let latency = self.file.latency_ticks.iter().enumerate().map(|(i, entry)| match entry {
            Latency::Table(ticks) => Ok(ticks.clone()),
            Latency::Constant(ticks) => Affine { base: f64::from(*ticks), per_request: 0.0 }.table(i, requests),
            Latency::Line(line) => line.table(i, requests),
        });
        latency
            .collect::<Result<_, _>>()
            .and_then(|latency| System::new(requests, latency, self.file.moves.clone(), self.file.tokens.clone()))
            .map_err(|problem| CliError::Usage(format!("{}: {problem}", self.name)))
    }
}
