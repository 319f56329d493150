//! What an evaluation found: rows, as a table or as JSON. Pure.

use super::measure::Graded;
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
    /// Which problems are right, in their order; none where one could not be answered.
    pub each: Vec<Option<bool>>,
    /// Wall-clock time.
    pub seconds: f64,
}

impl Row {
    /// An empty row for so many models.
    pub fn new(title: String, models: usize) -> Row {
        let by_model = vec![0; models];
        Row { title, right: 0, total: 0, failed: 0, failure: None, by_model, hops: 0, each: Vec::new(), seconds: 0.0 }
    }

    /// A row of these answers; its time is not known.
    pub fn of<'a>(title: String, models: usize, answers: impl IntoIterator<Item = &'a Graded>) -> Row {
        let mut row = Row::new(title, models);
        for answer in answers {
            match answer {
                Ok((outcome, right)) => row.add(outcome, *right),
                Err(why) => row.fail(why.clone()),
            }
        }
        row
    }

    /// Counts an answer.
    fn add(&mut self, outcome: &Outcome, right: bool) {
        self.total += 1;
        self.right += u32::from(right);
        self.each.push(Some(right));
        self.hops += u64::from(outcome.usage.hops);
        for (sum, count) in self.by_model.iter_mut().zip(&outcome.usage.by_model) {
            *sum += u64::from(*count);
        }
    }

    /// Counts a problem that could not be answered.
    fn fail(&mut self, why: String) {
        self.total += 1;
        self.each.push(None);
        self.failed += 1;
        self.failure.get_or_insert(why);
    }

    /// Right answers of all problems, 0 to 1.
    pub fn accuracy(&self) -> f64 {
        f64::from(self.right) / f64::from(self.total.max(1))
    }

    /// Where the accuracy on more such problems lies with 95 % confidence, both ends 0 to 1. Wilson's interval (E. B.
    /// Wilson, "Probable inference", 1927), which holds near 0 and 1 and for few problems too.
    pub fn interval(&self) -> (f64, f64) {
        const Z: f64 = 1.959_964;
        let (n, p) = (f64::from(self.total.max(1)), self.accuracy());
        let middle = p + Z * Z / (2.0 * n);
        let half = Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
        let scale = 1.0 + Z * Z / n;
        (((middle - half) / scale).max(0.0), ((middle + half) / scale).min(1.0))
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
                "interval": row.interval(),
                "right": row.right,
                "total": row.total,
                "failed": row.failed,
                "each": row.each,
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
        let failed = ["first", "second"].map(|why| Err(why.to_owned()));
        let answers = [Ok((outcome([30, 10], 4), true)), Ok((outcome([50, 10], 2), false))];
        let routed = Row::of("r_stitch".into(), 2, answers.iter().chain(&failed));
        let routed = Row { seconds: 2.0, ..routed };
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
        assert_eq!(row["each"], json!([true, false, null, null]));
        assert_eq!(rows[1].failure.as_deref(), Some("first"));
    }

    #[test]
    fn intervals_are_wilsons() {
        // Values of the closed form, computed with other software.
        for (right, total, low, high) in
            [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (40, 80, 0.3930, 0.6070), (200, 200, 0.9812, 1.0)]
        {
            let found = Row { right, total, ..Row::new(String::new(), 2) }.interval();
            assert!((found.0 - low).abs() < 1e-4 && (found.1 - high).abs() < 1e-4, "{right}/{total}: {found:?}");
        }
    }
}
