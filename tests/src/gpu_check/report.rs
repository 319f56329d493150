//! What a run found, row by row, and how much of its time is left. Owner: the program. Invariant: every row says what was
//! found and what was wanted; on a software device no number is judged; what did not run has a row that says why.

use serde::Serialize;
use serde_json::{Value, json};
use std::any::Any;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// What is said above the table of a device without hardware.
pub const SOFTWARE: &str = "software device, no measurement";

/// What a number should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// No more than this.
    AtMost(f64),
    /// No less than this.
    AtLeast(f64),
    /// From one to the other.
    Within(f64, f64),
}

impl Target {
    fn holds(self, value: f64) -> bool {
        match self {
            Target::AtMost(most) => value <= most,
            Target::AtLeast(least) => value >= least,
            Target::Within(least, most) => (least..=most).contains(&value),
        }
    }
}

/// What became of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// A check that holds, or a target that was met.
    Ok,
    /// A target that was not met.
    Miss,
    /// A check that does not hold.
    Failed,
    /// Did not run.
    Skipped,
    /// Nothing to hold.
    Told,
}

/// A line of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Which part of the run.
    pub part: &'static str,
    /// What was looked at.
    pub name: String,
    /// What was found, in words.
    pub found: String,
    /// The same as a number, where it is one that was measured.
    pub value: Option<f64>,
    /// What was wanted.
    pub target: String,
    /// Whether it is so.
    pub verdict: Verdict,
}

/// The rows so far.
#[derive(Debug)]
pub struct Report {
    rows: Vec<Row>,
    part: &'static str,
    software: bool,
    began: Instant,
    limit: Duration,
}

impl Report {
    /// No rows, and so much time for all of them.
    pub fn new(limit: Duration) -> Report {
        Report { rows: Vec::new(), part: "", software: false, began: Instant::now(), limit }
    }

    /// From here on nothing is judged that was measured.
    pub fn without_hardware(&mut self) {
        self.software = true;
    }

    /// The rows that follow belong to this part.
    pub fn part(&mut self, name: &'static str) {
        eprintln!("{:5.1} s  {name}", self.began.elapsed().as_secs_f64());
        self.part = name;
    }

    /// Something to know.
    pub fn fact(&mut self, name: &str, found: impl Into<String>) {
        self.push((name.to_owned(), found.into(), None), ("", Verdict::Told));
    }

    /// Something that must hold: what was found, or why it does not.
    pub fn check(&mut self, name: &str, outcome: Result<String, String>) {
        let (found, verdict) = match outcome {
            Ok(found) => (found, Verdict::Ok),
            Err(reason) => (reason, Verdict::Failed),
        };
        self.push((name.to_owned(), found, None), ("", verdict));
    }

    /// A number, with its unit, and what it should be.
    pub fn measured(&mut self, name: &str, (value, unit): (f64, &str), target: Option<Target>) {
        let number = |value: f64| match value.abs() {
            size if size >= 100.0 => format!("{value:.0}"),
            size if size >= 10.0 => format!("{value:.1}"),
            _ => format!("{value:.3}"),
        };
        let wanted = match target {
            None => String::new(),
            Some(Target::AtMost(most)) => format!("<= {}", number(most)),
            Some(Target::AtLeast(least)) => format!(">= {}", number(least)),
            Some(Target::Within(least, most)) => format!("{} to {}", number(least), number(most)),
        };
        let verdict = match target.filter(|_| !self.software) {
            None => Verdict::Told,
            Some(target) if target.holds(value) => Verdict::Ok,
            Some(_) => Verdict::Miss,
        };
        let found = format!("{} {unit}", number(value)).trim_end().to_owned();
        self.push((name.to_owned(), found, Some(value)), (&wanted, verdict));
    }

    /// Something that did not run.
    pub fn skip(&mut self, name: &str, why: &str) {
        self.push((name.to_owned(), why.to_owned(), None), ("", Verdict::Skipped));
    }

    fn push(&mut self, (name, found, value): (String, String, Option<f64>), (target, verdict): (&str, Verdict)) {
        self.rows.push(Row { part: self.part, name, found, value, target: target.to_owned(), verdict });
    }

    /// Time that is left.
    pub fn left(&self) -> Duration {
        self.limit.saturating_sub(self.began.elapsed())
    }

    /// Whether so much time is left; if not, a row says that this did not run.
    pub fn has_time(&mut self, name: &str, seconds: u64) -> bool {
        let enough = self.left() >= Duration::from_secs(seconds);
        if !enough {
            let why = format!("needs {seconds} s, {} s are left of {}", self.left().as_secs(), self.limit.as_secs());
            self.skip(name, &why);
        }
        enough
    }

    /// Runs a part whose failure is a row, and what it panics with as well.
    pub fn run<T>(&mut self, name: &str, part: impl FnOnce(&mut Report) -> Result<T, String>) -> Option<T> {
        match guarded(|| part(self)) {
            Ok(value) => Some(value),
            Err(reason) => {
                self.check(name, Err(reason));
                None
            }
        }
    }

    /// Whether a check does not hold.
    pub fn has_failed(&self) -> bool {
        self.rows.iter().any(|row| row.verdict == Verdict::Failed)
    }

    /// The table.
    pub fn text(&self) -> String {
        let mut out = String::new();
        if self.software {
            out.push_str(SOFTWARE);
            out.push('\n');
        }
        let width = self.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
        let found = self.rows.iter().map(|row| row.found.chars().count()).filter(|&n| n <= 60).max().unwrap_or(0);
        let mut part = "";
        for row in &self.rows {
            if part != row.part {
                part = row.part;
                // Writing to a string does not fail, here and below.
                let _written = writeln!(out, "\n{part}");
            }
            let verdict = match row.verdict {
                Verdict::Ok => "ok",
                Verdict::Miss => "MISS",
                Verdict::Failed => "FAILED",
                Verdict::Skipped => "skipped",
                Verdict::Told => "",
            };
            let line = format!("  {:width$}  {:found$}  {:>14}  {verdict}", row.name, row.found, row.target);
            let _written = writeln!(out, "{}", line.trim_end());
        }
        let count = |wanted: Verdict| self.rows.iter().filter(|row| row.verdict == wanted).count();
        let [ok, miss, failed, skipped] = [Verdict::Ok, Verdict::Miss, Verdict::Failed, Verdict::Skipped].map(count);
        let seconds = self.began.elapsed().as_secs();
        let _written = writeln!(out, "\n{ok} ok, {miss} missed, {failed} failed, {skipped} skipped, {seconds} s");
        out
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        json!({ "software_device": self.software, "seconds": self.began.elapsed().as_secs_f64(), "rows": self.rows })
    }
}

/// What it returns, or the text that it panics with.
///
/// # Errors
/// Its own, or the panic's.
pub fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_text(&*panic)))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without words").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_judged_by_their_targets() {
        let mut report = Report::new(Duration::from_secs(60));
        report.part("numbers");
        report.measured("quick", (1.1, "ms"), Some(Target::AtMost(1.2)));
        report.measured("slow", (1.3, "ms"), Some(Target::AtMost(1.2)));
        report.measured("many", (850.0, "tokens/s"), Some(Target::AtLeast(850.0)));
        report.measured("nothing", (f64::NAN, ""), Some(Target::AtLeast(0.0)));
        report.measured("near", (0.95, ""), Some(Target::Within(0.9, 1.1)));
        report.fact("device", "one");
        assert!(!report.has_time("late", 61));
        let verdicts: Vec<Verdict> = report.rows.iter().map(|row| row.verdict).collect();
        use Verdict::{Miss, Ok, Skipped, Told};
        assert_eq!(verdicts, [Ok, Miss, Ok, Miss, Ok, Told, Skipped]);
        assert!(!report.has_failed(), "a target that is missed is no check that fails");
        let text = report.text();
        assert!(text.contains("3 ok, 2 missed, 0 failed, 1 skipped"), "{text}");
        assert!(!text.contains(SOFTWARE));
        assert_eq!(report.run("broken", |_| -> Result<(), String> { panic!("by {}", 1) }), None);
        assert!(report.has_failed() && report.text().contains("by 1"));
    }

    #[test]
    fn without_hardware_nothing_is_judged() {
        let mut report = Report::new(Duration::from_secs(60));
        report.without_hardware();
        report.measured("slow", (9.0, "ms"), Some(Target::AtMost(1.2)));
        report.check("wrong", Err("no".into()));
        assert_eq!(report.rows[0].verdict, Verdict::Told);
        assert!(report.has_failed() && report.text().starts_with(SOFTWARE));
        assert_eq!(report.json()["software_device"], true);
    }
}
