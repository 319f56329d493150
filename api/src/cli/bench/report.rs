//! What an ablation found, as JSON and as Markdown. Pure.

use super::drive::Seen;
use super::rows::Row;
use super::shape::Sizes;
use super::statistics::{Mean, Spread};
use serde_json::{Value as Json, json};
use std::fmt::Write;

/// Everything that was measured.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of the workload.
    pub shape: String,
    /// Its lengths.
    pub sizes: Sizes,
    /// What they were scaled by.
    pub scale: f64,
    /// The file of questions that prompts come from, where they are not cut to length.
    pub prompts: Option<String>,
    /// Conversations of a worker in a round.
    pub conversations: u32,
    /// Names of the models.
    pub models: Vec<String>,
    /// How requests are routed.
    pub routing: String,
    /// How the full row holds requests back.
    pub policy: String,
    /// What else must be known to read the numbers.
    pub note: Option<String>,
    /// Column by column, rows in order.
    pub cells: Vec<Cell>,
}

/// One row under one number of workers.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The row.
    pub row: Row,
    /// Live requests.
    pub workers: u32,
    /// Tokens per second, each round.
    pub speed: Vec<f64>,
    /// All rounds together.
    pub seen: Seen,
    /// Tokens per second that the throughput model expects.
    pub predicted: Option<f64>,
}

impl Cell {
    /// Nothing measured yet.
    pub fn new(row: Row, workers: u32, predicted: Option<f64>) -> Cell {
        Cell { row, workers, speed: Vec::new(), seen: Seen::default(), predicted }
    }

    /// Adds a round.
    pub fn add(&mut self, seen: Seen) {
        self.speed.push(seen.tokens_per_second());
        self.seen.add(seen);
    }
}

impl Report {
    /// Numbers of workers, in order.
    pub fn columns(&self) -> Vec<u32> {
        let mut columns: Vec<u32> = Vec::new();
        self.cells.iter().for_each(|cell| {
            if !columns.contains(&cell.workers) {
                columns.push(cell.workers);
            }
        });
        columns
    }

    /// Rows, in order.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = Vec::new();
        self.cells.iter().for_each(|cell| {
            if !rows.contains(&cell.row) {
                rows.push(cell.row);
            }
        });
        rows
    }

    /// A cell.
    pub fn cell(&self, row: Row, workers: u32) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.row == row && cell.workers == workers)
    }

    /// Speed over that of the first row, round by round.
    pub fn ratio(&self, cell: &Cell) -> Mean {
        let first = self.rows().first().and_then(|&first| self.cell(first, cell.workers));
        let first = first.map_or(&[][..], |first| &first.speed);
        Mean::of(cell.speed.iter().zip(first).map(|(speed, first)| speed / first).collect())
    }

    /// One object with all numbers.
    pub fn json(&self) -> Json {
        let cells: Vec<Json> = self.cells.iter().map(|cell| self.cell_json(cell)).collect();
        json!({
            "shape": self.shape, "sizes": self.sizes, "scale": self.scale, "prompts": self.prompts, "conversations": self.conversations,
            "models": self.models, "routing": self.routing, "policy": self.policy, "note": self.note, "cells": cells,
        })
    }

    fn cell_json(&self, cell: &Cell) -> Json {
        let [first, hop, between, whole] = cell.seen.latencies();
        let usage = &cell.seen.usage;
        json!({
            "row": cell.row.title(), "workers": cell.workers,
            "tokens_per_second": Mean::of(cell.speed.clone()), "ratio": self.ratio(cell),
            "predicted_tokens_per_second": cell.predicted,
            "ttft_ms": first, "first_hop_ms": hop, "itl_ms": between, "end_to_end_ms": whole,
            "tokens_by_model": usage.by_model, "hops": usage.hops,
            "prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens,
        })
    }
}

/// The tables.
pub fn markdown(report: &Report) -> String {
    let mut out = String::new();
    let Sizes { turns, prompt, output } = report.sizes;
    let turns = if turns > 1 { format!(" in {turns} turns") } else { String::new() };
    let (most, from) = match &report.prompts {
        Some(file) => ("up to ", format!(" (questions of `{file}`)")),
        None => ("", String::new()),
    };
    let rounds = report.cells.iter().map(|cell| cell.speed.len()).min().unwrap_or(0);
    let _ = writeln!(
        out,
        "{}, {most}{prompt} tokens in{from}, {output} out{turns} (scale {}); {}; routing: {}; full: {}; {rounds} rounds, \
         {} conversations a worker in each.",
        report.shape,
        report.scale,
        report.models.join(" + "),
        report.routing,
        report.policy,
        report.conversations
    );
    if let Some(note) = &report.note {
        let _ = writeln!(out, "{note}.");
    }
    let _ = writeln!(out, "\nTokens per second (mean and 95 % confidence):\n");
    by_column(&mut out, report, |cell| Mean::of(cell.speed.clone()).shown(1));
    let first = report.rows().first().map_or("", |row| row.title());
    let _ = writeln!(out, "\nRatio to `{first}`, round by round:\n");
    by_column(&mut out, report, |cell| report.ratio(cell).shown(3));
    if report.cells.iter().any(|cell| cell.predicted.is_some()) {
        let _ = writeln!(out, "\nTokens per second by the throughput model, and what was measured against it:\n");
        by_column(&mut out, report, |cell| match cell.predicted {
            Some(expected) => {
                let error = 100.0 * (Mean::of(cell.speed.clone()).mean / expected - 1.0);
                format!("{expected:.1} ({error:+.1} %)")
            }
            None => "-".to_owned(),
        });
    }
    latencies(&mut out, report);
    out
}

fn by_column(out: &mut String, report: &Report, text: impl Fn(&Cell) -> String) {
    let columns = report.columns();
    let heads: Vec<String> = columns.iter().map(|n| format!("N = {n}")).collect();
    let _ = writeln!(out, "| row | {} |", heads.join(" | "));
    let _ = writeln!(out, "| --- |{}", " ---: |".repeat(columns.len()));
    for row in report.rows() {
        let texts: Vec<String> = columns.iter().map(|&n| report.cell(row, n).map_or_else(String::new, &text)).collect();
        let _ = writeln!(out, "| {} | {} |", row.title(), texts.join(" | "));
    }
}

fn latencies(out: &mut String, report: &Report) {
    let _ = writeln!(
        out,
        "\nLatencies in ms: mean / p50 / p99; share of tokens from the last model; cached prompt tokens:\n"
    );
    let _ = writeln!(out, "| N | row | first token | first hop | between tokens | end to end | large | cached |");
    let _ = writeln!(out, "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for cell in &report.cells {
        let spreads = cell.seen.latencies().map(|spread| match spread {
            Spread { count: 0, .. } => "-".to_owned(),
            Spread { mean, p50, p99, .. } => format!("{mean:.1} / {p50:.1} / {p99:.1}"),
        });
        let usage = &cell.seen.usage;
        let part = |part: u32, whole: u32| 100.0 * f64::from(part) / f64::from(whole.max(1));
        let large = part(usage.by_model.last().copied().unwrap_or(0), usage.completion_tokens);
        let cached = part(usage.cached_tokens, usage.prompt_tokens);
        let (n, row, times) = (cell.workers, cell.row.title(), spreads.join(" | "));
        let _ = writeln!(out, "| {n} | {row} | {times} | {large:.1} % | {cached:.1} % |");
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::cli::bench::shape::Shape;
    use tokenrouter_core::job::Usage;

    /// A report of two rows and two columns, the second row at half the speed of the first.
    pub fn example() -> Report {
        let mut cells = Vec::new();
        for workers in [1, 4] {
            for (row, speed) in [(Row::Full, 100.0), (Row::StepSync, 50.0)] {
                let mut cell = Cell::new(row, workers, (row == Row::Full).then_some(90.0));
                for round in 0..3 {
                    let seconds = 100.0 / (speed + f64::from(round));
                    let usage = Usage { completion_tokens: 100, by_model: vec![75, 25], ..Usage::default() };
                    cell.add(Seen { seconds, tokens: 100, whole: vec![seconds], usage, ..Seen::default() });
                }
                cells.push(cell);
            }
        }
        Report {
            shape: "low-effort".to_owned(),
            sizes: Shape::LowEffort.sizes(0.5),
            scale: 0.5,
            prompts: None,
            conversations: 1,
            models: vec!["a".to_owned(), "b".to_owned()],
            routing: "bernoulli p = 0.1".to_owned(),
            policy: "optimal".to_owned(),
            note: None,
            cells,
        }
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let report = example();
        let ratio = report.ratio(report.cell(Row::StepSync, 4).expect("measured"));
        assert!((ratio.rounds[1] - 51.0 / 101.0).abs() < 1e-12);
        assert!((report.ratio(&report.cells[0]).mean - 1.0).abs() < 1e-12);
        let json = report.json();
        assert_eq!(json["cells"].as_array().map(Vec::len), Some(4));
        assert_eq!(json["cells"][0]["tokens_by_model"], serde_json::json!([225, 75]));
        assert!(json["cells"][1]["predicted_tokens_per_second"].is_null());
    }

    #[test]
    fn tables_have_a_line_for_every_row() {
        let text = markdown(&example());
        assert!(text.starts_with("low-effort, 50 tokens in, 1024 out (scale 0.5); a + b; routing: bernoulli p = 0.1;"));
        assert!(text.contains("| full | 101.0 ± 2.5 | 101.0 ± 2.5 |"), "{text}");
        assert!(text.contains("90.0 (+12.2 %)") && text.contains("| 4 | step_sync |") && text.contains("| 25.0 % |"));
    }
}
