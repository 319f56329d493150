//! Prometheus' text format, version 0.0.4, for numbers that others count. Owner: one answer to `GET /metrics`. Invariant: a
//! family is declared once, right before its samples.

use super::metrics::{ENGINE, VLLM};
use std::fmt::{Arguments, Write};
use tokenrouter_actors::histogram::Counts;

/// Labels of one sample.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// A histogram of any origin: how many were at most so large by bound, in order; how many in all, and their sum.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cumulative {
    /// Bound and count.
    pub buckets: Vec<(f64, u64)>,
    /// All.
    pub count: u64,
    /// Of what was observed.
    pub sum: f64,
}

impl Cumulative {
    /// Of measured times; the bounds must be among [`Counts::doublings`].
    pub fn of(counts: &Counts, bounds: impl Iterator<Item = f64>) -> Self {
        let buckets = bounds.map(|bound| (bound, counts.at_most(bound))).collect();
        Cumulative { buckets, count: counts.count, sum: counts.sum_seconds }
    }
}

/// The text so far.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// All of it.
    pub fn finish(self) -> String {
        self.0
    }

    /// Declares a family.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.push(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    /// A sample; vLLM's carry its engine.
    pub fn line(&mut self, name: &str, labels: Labels<'_>, value: f64) {
        let engine = Some(&ENGINE).filter(|_| name.starts_with(VLLM));
        let labels = engine.into_iter().chain(labels).map(|(key, value)| format!("{key}=\"{}\"", escaped(value)));
        match labels.collect::<Vec<_>>() {
            none if none.is_empty() => self.push(format_args!("{name} {value}\n")),
            some => self.push(format_args!("{name}{{{}}} {value}\n", some.join(","))),
        }
    }

    /// The samples of a histogram.
    pub fn histogram(&mut self, name: &str, labels: Labels<'_>, counted: &Cumulative) {
        let bounds = counted.buckets.iter().map(|(bound, count)| (bound.to_string(), *count));
        for (bound, count) in bounds.chain([("+Inf".to_owned(), counted.count)]) {
            self.line(&format!("{name}_bucket"), &[labels, &[("le", &bound)]].concat(), count as f64);
        }
        self.line(&format!("{name}_sum"), labels, counted.sum);
        self.line(&format!("{name}_count"), labels, counted.count as f64);
    }

    fn push(&mut self, text: Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = self.0.write_fmt(text);
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
