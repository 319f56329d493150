//! Plans of a measured launch file, in tokens per second and by the models' names. Pure.

use super::measure::{Run, Trial};
use super::report::{BAR, percent};
use crate::cli::counted::Seen;
use serde::Serialize;
use tokenrouter_core::theory::measured::{Measured, Outlook, Predicted};
use tokenrouter_core::theory::profile::Way;

/// Where the ways are known so badly that a prediction may be off by more than this part, a note says so.
const WAYS_ERROR: f64 = 0.02;

/// A prediction with what was measured under the same thresholds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// The prediction.
    pub predicted: Predicted,
    /// Run by run.
    pub runs: Vec<Checked>,
}

/// A run beside predictions that know more and more of it, in tokens per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Checked {
    /// What the run made.
    pub measured: f64,
    /// The prediction for requests that go the ways that they went in this run.
    pub with_ways: f64,
    /// The same for steps that take, on average, as long as they took in this run.
    pub with_steps: f64,
}

impl Checked {
    /// # Errors
    /// One line when the run's ways make no system.
    pub fn new(run: &Run, names: &[String], (known, trial): (&Measured, Trial<'_>)) -> Result<Checked, String> {
        let each = |of: fn(&Way) -> f64| -> Vec<Vec<f64>> {
            let row = |seen: &Seen| names.iter().map(|name| seen.ways.get(name).map_or(0.0, of)).collect();
            run.seen.iter().map(row).collect()
        };
        let known = known.with_ways(each(|way| way.share), each(|way| way.tokens));
        let with_ways = known.predict(trial.requests, trial.thresholds)?.throughput;
        let known = known.with_steps((trial.requests, trial.thresholds), &run.steps)?;
        let with_steps = known.predict(trial.requests, trial.thresholds)?.throughput;
        Ok(Checked { measured: run.tokens_per_second, with_ways, with_steps })
    }
}

impl Check {
    /// Nothing measured yet.
    pub fn new(predicted: Predicted) -> Check {
        Check { predicted, runs: Vec::new() }
    }

    /// Mean over the runs.
    pub fn mean(&self, of: fn(&Checked) -> f64) -> f64 {
        self.runs.iter().map(of).sum::<f64>() / self.runs.len().max(1) as f64
    }
}

/// `small 1, large 3`.
pub fn named(names: &[String], thresholds: &[u32]) -> String {
    let each = names.iter().zip(thresholds).map(|(name, threshold)| format!("{name} {threshold}"));
    each.collect::<Vec<_>>().join(", ")
}

/// A line per N.
pub fn many(names: &[String], outlooks: &[Outlook]) -> String {
    let all: Vec<String> = outlooks.iter().map(|one| named(names, &one.best.thresholds)).collect();
    let width = all.iter().map(String::len).max().unwrap_or(0).max(10);
    let mut text =
        format!("{:>4}  {:<width$}  {:>10}  {:>10}  {:>8}  overlap\n", "N", "thresholds", "tokens/s", "eager", "gain");
    for (one, thresholds) in outlooks.iter().zip(all) {
        let overlap: Vec<String> = one.overlap.iter().map(|x| format!("{:.0} %", 100.0 * x)).collect();
        text += &format!(
            "{:>4}  {thresholds:<width$}  {:>10.2}  {:>10.2}  {:>8}  {}\n",
            one.requests,
            one.best.tokens_per_second,
            one.eager.tokens_per_second,
            percent(one.best.tokens_per_second / one.eager.tokens_per_second - 1.0),
            overlap.join(", "),
        );
    }
    text
}

/// One N with every B that was simulated as a bar.
pub fn one(names: &[String], outlook: &Outlook) -> String {
    let mut text = many(names, std::slice::from_ref(outlook));
    let width = outlook.rows.iter().map(|row| named(names, &row.thresholds).len()).max().unwrap_or(0);
    text += &format!("\n{:<width$}  tokens/s\n", "thresholds");
    for row in &outlook.rows {
        let share = row.tokens_per_second / outlook.best.tokens_per_second;
        let bar = "#".repeat((share * BAR as f64).round() as usize);
        let name = named(names, &row.thresholds);
        text += &format!("{name:<width$}  {:>9.2} +- {:<6.2} {bar}\n", row.tokens_per_second, row.error);
    }
    text
}

/// Predicted against measured, and where the difference comes from.
pub fn checks(names: &[String], checks: &[Check]) -> String {
    let all: Vec<String> = checks.iter().map(|check| named(names, &check.predicted.thresholds)).collect();
    let width = all.iter().map(String::len).max().unwrap_or(0).max(10);
    let mut text = format!(
        "\n{:<width$}  {:>10}  {:>10}  {:>17}  {:>8}   {:>8}  {:>8}  {:>8}\n",
        "thresholds", "predicted", "measured", "runs", "error", "ways", "steps", "rest"
    );
    for (check, name) in checks.iter().zip(all) {
        let (predicted, measured) = (check.predicted.tokens_per_second, check.mean(|run| run.measured));
        let (with_ways, with_steps) = (check.mean(|run| run.with_ways), check.mean(|run| run.with_steps));
        let rates = || check.runs.iter().map(|run| run.measured);
        let range = format!("{:.2} to {:.2}", rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
        let [error, ways, steps, rest] =
            [(predicted, measured), (predicted, with_ways), (with_ways, with_steps), (with_steps, measured)]
                .map(|(more, less)| percent(more / less - 1.0));
        text += &format!("{name:<width$}  {predicted:>10.2}  {measured:>10.2}  {range:>17}  {error:>8} = ");
        text += &format!("{ways:>8}  {steps:>8}  {rest:>8}\n");
    }
    text + "error: ways, requests went other ways than in the profile; steps, they took longer or shorter; rest, all else\n"
}

/// What to know before a plan is relied on.
pub fn notes(outlooks: &[Outlook], bound: (f64, u64)) -> String {
    let worst = outlooks.iter().map(|one| one.ways_error).fold(0.0, f64::max);
    let ways = (worst > WAYS_ERROR).then(|| {
        format!(
            "note: ways were counted over so few rows that tokens/s may be off by {:.0} % (95 %); profile more tokens.\n",
            100.0 * worst
        )
    });
    ways.into_iter().chain(warning(outlooks, bound)).collect()
}

/// A word where the launch file's time bound is shorter than a step, so that it and not the thresholds would decide.
fn warning(outlooks: &[Outlook], (longest, max_wait_ms): (f64, u64)) -> Option<String> {
    let waits = outlooks.iter().any(|one| one.best.thresholds.iter().any(|&b| b > 1));
    let needed = (2e3 * longest).ceil() as u64;
    (waits && max_wait_ms < needed).then(|| {
        format!(
            "note: batching.max_wait_ms is {max_wait_ms} and a step takes up to {:.0} ms; batches would often be released \
             before their threshold. Set it to {needed} or more.\n",
            1e3 * longest
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use tokenrouter_core::theory::latency::Point;
    use tokenrouter_core::theory::profile::{ModelProfile, Profile, VERSION};
    use tokenrouter_core::theory::search::Budget;

    fn profile() -> (Vec<String>, Profile) {
        let model = |name: &str, seconds: f64, ways: &[(&str, f64, f64)]| ModelProfile {
            name: name.into(),
            rows_max: 8,
            alone: vec![Point { rows: 1, tokens: 1, seconds, spread: 0.0 }],
            beside: Vec::new(),
            ways: BTreeMap::from_iter(ways.iter().map(|&(to, share, tokens)| (to.to_owned(), Way { share, tokens }))),
            observations: 9,
        };
        let small = model("small", 0.0060, &[("small", 0.65, 1.0), ("large", 0.35, 0.0)]);
        let large = model("large", 0.0279, &[("small", 1.0, 1.0)]);
        (vec!["small".into(), "large".into()], Profile { version: VERSION, models: vec![small, large] })
    }

    /// The published system, in tokens per second and by name.
    #[test]
    fn a_profile_with_the_published_latencies_has_the_published_thresholds() {
        let (names, profile) = profile();
        let outlook = profile.measured(&names).and_then(|known| known.plan(4, Budget::default())).expect("a plan");
        assert_eq!(outlook.best.thresholds, [1, 3]);
        assert!((outlook.best.tokens_per_second / 207.954 - 1.0).abs() < 0.01, "{:?}", outlook.best);
        assert!((outlook.eager.tokens_per_second / 187.190 - 1.0).abs() < 0.01, "{:?}", outlook.eager);
        let text = one(&names, &outlook);
        assert!(text.contains("small 1, large 3") && text.contains("small 1, large 1") && text.contains('#'), "{text}");
        let note = warning(std::slice::from_ref(&outlook), (0.0279, 50)).expect("a note");
        assert!(note.contains("is 50") && note.contains("56 or more"), "{note}");
        assert_eq!(warning(std::slice::from_ref(&outlook), (0.0279, 60)), None);
        let notes = notes(&[outlook], (0.0279, 60));
        assert!(notes.contains("off by") && notes.lines().count() == 1, "nine rows are few: {notes}");
    }

    #[test]
    fn errors_are_against_the_mean_of_the_runs() {
        let predicted = Predicted { thresholds: vec![1, 2], tokens_per_second: 11.0, error: 0.1 };
        let run = |measured: f64| Checked { measured, with_ways: 8.8, with_steps: 9.0 };
        let check = Check { predicted, runs: [12.0, 9.0, 9.0].map(run).to_vec() };
        assert_eq!(check.mean(|run| run.measured), 10.0);
        let text = checks(&["a".into(), "b".into()], &[check]);
        assert!(text.contains("a 1, b 2") && text.contains("9.00 to 12.00"), "{text}");
        let errors: Vec<&str> = text.lines().nth(2).expect("a row").split("   ").map(str::trim).collect();
        let errors = errors.join(" ");
        assert!(["+10.0 % =", "+25.0 %", "-2.2 %", "-10.0 %"].iter().all(|error| errors.contains(error)), "{text}");
    }
}
