//! Delayed batching as a launch file asks for it: thresholds as given, planned from a profile, or planned from what the
//! algorithm expects. Owner: the launcher. Invariant: where thresholds come from is said in the log.

use super::cores;
use std::time::{Duration, Instant};
use tokenrouter_config::{ConfigError, LaunchFile, Policy};
use tokenrouter_core::batching::{Batching, PolicySpec};
use tokenrouter_core::routing::Algorithm;
use tokenrouter_core::theory::adapt::{PLANNED_MAX, budget};
use tokenrouter_core::theory::observe::Behaviour;
use tokenrouter_core::theory::profile::Profile;
use tokenrouter_core::theory::table::Table;

/// Where nothing was measured: a step takes this part longer with every further request. A device that is limited by
/// its memory needs nothing more, one that is limited by its arithmetic a whole step.
const EXPECTED_PER_REQUEST: f64 = 0.25;

/// The key of the profile.
const KEY: &str = "batching.profile";

/// The profile that a launch file names, if it names one.
///
/// # Errors
/// An error at `batching.profile` when it cannot be read or is of other models.
pub(super) fn profile(file: &LaunchFile) -> Result<Option<Profile>, ConfigError> {
    let Some(path) = &file.batching.profile else { return Ok(None) };
    let profile = Profile::read(path).map_err(|problem| file.error_at(KEY, problem))?;
    profile.models(&file.router.models).map_err(|problem| file.error_at(KEY, problem))?;
    Ok(Some(profile))
}

/// What is known of the models when thresholds are planned.
pub(super) struct Known<'a> {
    /// What was measured.
    pub profile: Option<&'a Profile>,
    /// What the algorithm expects.
    pub algorithm: &'a dyn Algorithm,
    /// Bytes of the weights, in the router's order.
    pub weight_bytes: Vec<u64>,
}

/// `[batching]` for the runtime.
///
/// # Errors
/// An error at the key because of which no thresholds can be planned.
pub(super) fn batching(file: &LaunchFile, known: &Known<'_>) -> Result<Batching, ConfigError> {
    let asked = &file.batching;
    let threshold = |name: &String| asked.thresholds.get(name).copied().unwrap_or(1);
    let policy = match asked.policy {
        Policy::Eager => PolicySpec::Eager,
        Policy::Fixed => PolicySpec::Fixed(file.router.models.iter().map(threshold).collect()),
        Policy::Optimal | Policy::Adaptive => PolicySpec::Planned(planned(file, known)?),
    };
    Ok(Batching {
        policy,
        max_wait: Duration::from_millis(asked.max_wait_ms),
        execution: cores::execution(file),
        prefill_ahead: asked.prefill_ahead,
        adaptive: asked.policy == Policy::Adaptive,
    })
}

fn planned(file: &LaunchFile, known: &Known<'_>) -> Result<Table, ConfigError> {
    let begin = Instant::now();
    let live_max = file.server.live_max.min(PLANNED_MAX);
    let table = match known.profile {
        Some(profile) => profile.measured(&file.router.models).and_then(|known| known.table(live_max, budget())),
        None => Table::plan(&expected(file, known), live_max, budget()),
    };
    let key = if known.profile.is_some() { KEY } else { "batching.policy" };
    let table = table.map_err(|problem| file.error_at(key, problem))?;
    let from = match known.profile {
        Some(_) => "the profile",
        None => "what the algorithm expects and the sizes of the models, for want of a profile",
    };
    let (took, most) = (begin.elapsed(), table.thresholds(live_max));
    tracing::info!(from, live_max, thresholds_at_live_max = ?most, ?took, "thresholds planned");
    Ok(table)
}

/// What the algorithm expects, with latencies in proportion to the bytes that a step reads and growing with the batch:
/// only their ratios matter.
fn expected(file: &LaunchFile, known: &Known<'_>) -> Vec<Behaviour> {
    let prior = known.algorithm.prior();
    let least = known.weight_bytes.iter().copied().min().unwrap_or(1).max(1) as f64;
    let one = |(index, bytes): (usize, &u64)| {
        let row = |matrix: &[Vec<f64>]| matrix.get(index).cloned().unwrap_or_default();
        let rows_max = file.models.get(index).map_or(1, |model| model.rows_max);
        let seconds = |b: u32| *bytes as f64 / least * (1.0 + EXPECTED_PER_REQUEST * f64::from(b - 1));
        Behaviour {
            steps: 0.0,
            seconds: (1..=rows_max).map(seconds).collect(),
            moves: row(&prior.p),
            tokens: row(&prior.c),
        }
    };
    known.weight_bytes.iter().enumerate().map(one).collect()
}
