//! What an evaluation found: rows, as a table or as JSON. Pure.

use crate::cli::run::Outcome;
use serde_json::{Map, Value as Json, json};

/// One row: one way of answering all problems.
#[derive(Clone, Debug)]
pub struct Row {
    /// What was measured.
    pub title: String,
    /// Problems answered right.
    pub right: u32,
    /// Problems tried.
    pub total: u32,
    /// Problems that could not be answered.
    pub failed: u32,
    /// Why the first of them failed.
    pub failure: Option<String>,
    /// Generated tokens by model.
    pub by_model: Vec<u64>,
    /// Moves between models.
    pub hops: u64,
    /// Wall-clock time.
    pub seconds: f64,
}

impl Row {
    /// An empty row for so many models.
    pub fn new(title: String, models: usize) -> Row {
        Row { title, right: 0, total: 0, failed: 0, failure: None, by_model: vec![0; models], hops: 0, seconds: 0.0 }
    }

    /// Counts an answer.
    pub fn add(&mut self, outcome: &Outcome, right: bool) {
        self.total += 1;
        self.right += u32::from(right);
        self.hops += u64::from(outcome.usage.hops);
        for (sum, count) in self.by_model.iter_mut().zip(&outcome.usage.by_model) {
            *sum += u64::from(*count);
        }
    }

    /// Counts a problem that could not be answered.
    pub fn fail(&mut self, why: String) {
        self.total += 1;
        self.failed += 1;
        self.failure.get_or_insert(why);
    }

    /// Right answers of all problems, 0 to 1.
    pub fn accuracy(&self) -> f64 {
        f64::from(self.right) / f64::from(self.total.max(1))
    }

    /// Generated tokens of all models.
    pub fn tokens(&self) -> u64 {
        self.by_model.iter().sum()
    }

    /// Share of a model in them, 0 to 1.
    pub fn share(&self, model: usize) -> f64 {
        self.by_model[model] as f64 / self.tokens().max(1) as f64
    }

    /// Generated tokens per second of wall-clock time.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens() as f64 / self.seconds.max(1e-9)
    }

    /// Moves between models, per problem.
    pub fn hops_per_problem(&self) -> f64 {
        self.hops as f64 / f64::from(self.total.max(1))
    }
}

/// The rows as one JSON object.
pub fn json(rows: &[Row], models: &[String]) -> Json {
    let per_model = |value: &dyn Fn(usize) -> Json| -> Map<String, Json> {
        models.iter().enumerate().map(|(index, name)| (name.clone(), value(index))).collect()
    };
    let rows: Vec<Json> = rows
        .iter()
        .map(|row| {
            json!({
                "run": row.title,
                "accuracy": row.accuracy(),
                "right": row.right,
                "total": row.total,
                "failed": row.failed,
                "tokens": row.tokens(),
                "by_model": per_model(&|index| json!(row.by_model[index])),
                "share": per_model(&|index| json!(row.share(index))),
                "hops": row.hops,
                "hops_per_problem": row.hops_per_problem(),
                "tokens_per_s": row.tokens_per_second(),
                "seconds": row.seconds,
            })
        })
        .collect();
    json!({ "models": models, "rows": rows })
}

/// The rows as a table.
pub fn table(rows: &[Row], models: &[String]) -> String {
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut head = vec!["run".to_owned(), "accuracy".to_owned(), "right".to_owned()];
    head.extend(models.iter().cloned());
    head.extend(["tokens", "hops", "tokens/s", "seconds"].map(str::to_owned));
    lines.push(head);
    for row in rows {
        let mut line =
            vec![row.title.clone(), format!("{:.1} %", 100.0 * row.accuracy()), format!("{}/{}", row.right, row.total)];
        line.extend((0..models.len()).map(|model| format!("{:.1} %", 100.0 * row.share(model))));
        line.push(row.tokens().to_string());
        line.push(format!("{:.1}", row.hops_per_problem()));
        line.push(format!("{:.0}", row.tokens_per_second()));
        line.push(format!("{:.1}", row.seconds));
        lines.push(line);
    }
    let widths: Vec<usize> = (0..lines[0].len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokenrouter_core::job::{FinishReason, Usage};

    fn rows() -> (Vec<Row>, Vec<String>) {
        let outcome = |by_model: [u32; 2], hops| Outcome {
            text: String::new(),
            tokens: Vec::new(),
            reason: FinishReason::EndOfText,
            usage: Usage {
                completion_tokens: by_model.iter().sum(),
                by_model: by_model.to_vec(),
                hops,
                ..Usage::default()
            },
            first_token: Duration::ZERO,
            total: Duration::from_secs(1),
        };
        let mut routed = Row::new("r_stitch".into(), 2);
        routed.add(&outcome([30, 10], 4), true);
        routed.add(&outcome([50, 10], 2), false);
        routed.fail("first".into());
        routed.fail("second".into());
        routed.seconds = 2.0;
        (vec![Row::new("empty".into(), 2), routed], vec!["small".into(), "large".into()])
    }

    #[test]
    fn the_table_is_aligned() {
        let (rows, models) = rows();
        assert_eq!(
            table(&rows, &models),
            "run       accuracy  right   small   large  tokens  hops  tokens/s  seconds\n\
             empty        0.0 %    0/0   0.0 %   0.0 %       0   0.0         0      0.0\n\
             r_stitch    25.0 %    1/4  80.0 %  20.0 %     100   1.5        50      2.0\n"
        );
    }

    #[test]
    fn the_object_names_the_models() {
        let (rows, models) = rows();
        let object = json(&rows, &models);
        let row = &object["rows"][1];
        assert_eq!((row["accuracy"].as_f64(), row["failed"].as_u64()), (Some(0.25), Some(2)));
        assert_eq!(row["by_model"], json!({"small": 80, "large": 20}));
        assert_eq!(row["share"]["large"].as_f64(), Some(0.2));
        assert_eq!(rows[1].failure.as_deref(), Some("first"));
    }
}
