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
    /// Full, and idle models prefill the prompts of requests that may come; not among the default rows
    PrefillAhead,
    /// Full, with every kernel launched by itself: models on a GPU only; not among the default rows
    NoGraphs,
}

impl Row {
    /// Those of the ablation, the one that others are compared with first.
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
            Row::PrefillAhead => "+ prefill ahead",
            Row::NoGraphs => "- graphs",
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

    /// Whether models wait for more requests before they start.
    pub fn holds_back(self) -> bool {
        matches!(self, Row::Full | Row::PrefillAhead | Row::NoGraphs)
    }

    /// Whether models on a GPU play recorded steps.
    pub fn plays_graphs(self) -> bool {
        self != Row::NoGraphs
    }

    /// Whether idle models prefill what may come.
    pub fn prefills_ahead(self) -> bool {
        self == Row::PrefillAhead
    }

    /// The launch file's `[batching]` for this row. Where the file says `eager`, rows that hold requests back are
    /// `adaptive`; whatever it says of `prefill_ahead`, that is for its own row.
    pub fn batching(self, configured: &Batching) -> Batching {
        let mut batching = configured.clone();
        batching.execution = self.execution();
        batching.prefill_ahead = self.prefills_ahead();
        batching.policy = match (self.holds_back(), configured.policy) {
            (true, Policy::Eager) => Policy::Adaptive,
            (true, policy) => policy,
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
    fn rows_differ_from_full_in_what_they_are_called() {
        let file: tokenrouter_config::LaunchFile = tokenrouter_config::LaunchFile::parse(
            "[[models]]\nname = \"a\"\npath = \".\"\n",
            std::path::Path::new("launch.toml"),
        )
        .expect("a valid file");
        for row in Row::ALL.into_iter().chain([Row::PrefillAhead, Row::NoGraphs]) {
            for (configured, full) in
                [(Policy::Eager, Policy::Adaptive), (Policy::Optimal, Policy::Optimal), (Policy::Fixed, Policy::Fixed)]
            {
                let asked = Batching { policy: configured, prefill_ahead: true, ..file.batching.clone() };
                let batching = row.batching(&asked);
                let holds = matches!(row, Row::Full | Row::PrefillAhead | Row::NoGraphs);
                assert_eq!(row.plays_graphs(), row != Row::NoGraphs);
                assert_eq!(batching.policy, if holds { full } else { Policy::Eager }, "{row:?}");
                assert_eq!(batching.execution, row.execution());
                assert_eq!(batching.prefill_ahead, row == Row::PrefillAhead, "{row:?}");
            }
        }
        assert_eq!(Row::LargeOnly.target(3), Target::Only(ModelIdx(2)));
    }
}
