//! The rows of an ablation: the server as configured, and with one thing changed. Pure. Invariant: every row answers the
//! same prompts with the same seeds.

use clap::ValueEnum;
use tokenrouter_config::{Batching, Execution, Policy};
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::Target;

/// One way of running the models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Row {
    /// Asynchronous models, delayed batching.
    Full,
    /// Asynchronous models that start as soon as one request waits.
    Eager,
    /// One model steps at a time.
    ModelSync,
    /// All step together and wait for the slowest.
    StepSync,
    /// Each hop is a fresh request.
    StdServing,
    /// The last model makes every token.
    LargeOnly,
    /// The first model makes every token.
    SmallOnly,
}

impl Row {
    /// All of them, the one that others are compared with first.
    pub const ALL: [Row; 7] =
        [Row::Full, Row::Eager, Row::ModelSync, Row::StepSync, Row::StdServing, Row::LargeOnly, Row::SmallOnly];

    /// In tables.
    pub fn title(self) -> &'static str {
        match self {
            Row::Full => "full",
            Row::Eager => "- delayed batching",
            Row::ModelSync => "- async (model_sync)",
            Row::StepSync => "step_sync",
            Row::StdServing => "std_serving",
            Row::LargeOnly => "large only",
            Row::SmallOnly => "small only",
        }
    }

    /// Who answers, of so many models.
    pub fn target(self, models: usize) -> Target {
        match self {
            Row::LargeOnly => Target::Only(ModelIdx(models.saturating_sub(1) as u8)),
            Row::SmallOnly => Target::Only(ModelIdx(0)),
            _ => Target::Routed,
        }
    }

    /// How the models run beside each other.
    pub fn execution(self) -> Execution {
        match self {
            Row::ModelSync => Execution::ModelSync,
            Row::StepSync => Execution::StepSync,
            Row::StdServing => Execution::StdServing,
            _ => Execution::Async,
        }
    }

    /// The launch file's `[batching]` for this row. Only `full` holds requests back; where the file says `eager`, it is
    /// `adaptive`.
    pub fn batching(self, configured: &Batching) -> Batching {
        let mut batching = configured.clone();
        batching.execution = self.execution();
        batching.policy = match (self, configured.policy) {
            (Row::Full, Policy::Eager) => Policy::Adaptive,
            (Row::Full, policy) => policy,
            _ => Policy::Eager,
        };
        batching
    }
}

/// The rows from place `by` on, then those before it: no row always runs first, when a machine is cold, or last.
pub fn rotated(rows: &[Row], by: usize) -> Vec<Row> {
    let mut rows = rows.to_vec();
    let by = by % rows.len().max(1);
    rows.rotate_left(by);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_first_once_and_none_is_lost() {
        let firsts: Vec<Row> = (0..Row::ALL.len()).map(|by| rotated(&Row::ALL, by)[0]).collect();
        assert_eq!(firsts, Row::ALL);
        for by in 0..20 {
            let rows = rotated(&Row::ALL, by);
            assert!(Row::ALL.iter().all(|row| rows.contains(row)), "{by}: {rows:?}");
        }
        assert!(rotated(&[], 3).is_empty());
    }

    #[test]
    fn only_the_full_row_holds_requests_back() {
        let file: tokenrouter_config::LaunchFile = tokenrouter_config::LaunchFile::parse(
            "[[models]]\nname = \"a\"\npath = \".\"\n",
            std::path::Path::new("launch.toml"),
        )
        .expect("a valid file");
        for row in Row::ALL {
            for (configured, full) in
                [(Policy::Eager, Policy::Adaptive), (Policy::Optimal, Policy::Optimal), (Policy::Fixed, Policy::Fixed)]
            {
                let batching = row.batching(&Batching { policy: configured, ..file.batching.clone() });
                assert_eq!(batching.policy, if row == Row::Full { full } else { Policy::Eager }, "{row:?}");
                assert_eq!(batching.execution, row.execution());
            }
        }
        assert_eq!(Row::LargeOnly.target(3), Target::Only(ModelIdx(2)));
    }
}
