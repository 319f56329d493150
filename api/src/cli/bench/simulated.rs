//! Two models without weights that take as long as those of the TokenRouter evaluation (Qwen3-0.6B and 32B: 6.0 and
//! 27.9 ms a step), in real time, and what the throughput model says of them. Owner: the command. Invariant: a step takes
//! its time whatever the machine does meanwhile, unless the machine is too slow to be in time.

use super::rows::Row;
use super::shape::Corpus;
use crate::cli::CliError;
use crate::launch::LaunchError;
use serde_json::Value as Json;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tokenrouter_actors::bounds::Bounds;
use tokenrouter_actors::gpu_executor::Seat;
use tokenrouter_actors::link::process::{Process, Site};
use tokenrouter_actors::runtime::{self, ModelSpec, Placement, Runtime, RuntimeSpec};
use tokenrouter_config as config;
use tokenrouter_core::batching::{Batching, PolicySpec};
use tokenrouter_core::execution::Execution;
use tokenrouter_core::executor::{Executor, ExecutorError, ExecutorLimits, PAGE_TOKENS, Step, StepOutput};
use tokenrouter_core::faults::FaultPlan;
use tokenrouter_core::ids::TokenId;
use tokenrouter_core::job::Target;
use tokenrouter_core::rng::mix;
use tokenrouter_core::routing::{self, Algorithm};
use tokenrouter_core::sim::{Language, SimExecutor, Skill};
use tokenrouter_core::text::{SpecialTokens, TextCodec, TextError};
use tokenrouter_core::theory::chain::throughput;
use tokenrouter_core::theory::observe::Behaviour;
use tokenrouter_core::theory::search::Budget;
use tokenrouter_core::theory::system::System;
use tokenrouter_core::theory::table::Table;

/// What the models are called.
const NAMES: [&str; 2] = ["small (6.0 ms)", "large (27.9 ms)"];
/// A step of each, in ticks of 0.3 ms.
const TICKS: [u32; 2] = [20, 93];
const TICK: Duration = Duration::from_micros(300);
/// Words of the simulated language, single bytes.
const WORDS: u32 = 256;
/// No request waits longer for others: far beyond any wait of a planned threshold.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// The end of a wait that is spent looking at the clock, because a sleeping thread wakes late.
const SPIN: Duration = Duration::from_micros(80);

/// The simulated pair.
#[derive(Debug)]
pub struct Simulated {
    /// `bernoulli`.
    pub algorithm: Arc<dyn Algorithm>,
    /// Thresholds that the throughput model finds best.
    table: Table,
    limits: ExecutorLimits,
}

impl Simulated {
    /// A pair between which requests go with these probabilities (`bernoulli`'s parameters; p = 0.35 without), planned for
    /// up to `workers` live requests of at most `longest` tokens.
    ///
    /// # Errors
    /// A parameter of `bernoulli` is wrong, or there is no plan for these probabilities.
    pub fn new(params: &[(String, Json)], workers: u32, longest: u32) -> Result<Simulated, CliError> {
        let mut table = serde_json::Map::from_iter([("p".to_owned(), Json::from(0.35))]);
        table.extend(params.iter().cloned());
        let algorithm = routing::build("bernoulli", &Json::Object(table), NAMES.len())
            .map_err(|error| CliError::Usage(format!("--params: {error}")))?;
        let table = Table::plan(&behaviours(&*algorithm, workers), workers, Budget::default())
            .map_err(|error| CliError::Usage(format!("--params: no plan for these probabilities: {error}")))?;
        let pages = longest.div_ceil(PAGE_TOKENS as u32) + 2;
        let limits = ExecutorLimits {
            pages: pages * (workers + 1),
            rows_max: workers.max(64),
            step_tokens_max: 1 << 20,
            context_len: longest.max(PAGE_TOKENS as u32) + 1,
            vocab_width: WORDS,
        };
        Ok(Simulated { algorithm, table, limits })
    }

    /// Names of the models.
    pub fn names(&self) -> Vec<String> {
        NAMES.map(str::to_owned).to_vec()
    }

    /// Any words.
    pub fn corpus(&self) -> Corpus {
        Corpus::Ring((0..4096).map(|at| (mix(at) % u64::from(WORDS)) as TokenId).collect())
    }

    /// Starts a runtime for a row. Must be called within an actix system.
    ///
    /// # Errors
    /// The runtime refuses a setting.
    pub fn start(&self, row: Row) -> Result<Runtime, CliError> {
        let spec = RuntimeSpec {
            models: (0..NAMES.len()).map(|index| self.model(index)).collect(),
            codec: Arc::new(Words((0..WORDS).map(|id| b'a' + (id % 26) as u8).collect())),
            algorithm: self.algorithm.clone(),
            batching: Batching {
                policy: if row.holds_back() { PolicySpec::Planned(self.table.clone()) } else { PolicySpec::Eager },
                max_wait: MAX_WAIT,
                execution: execution(row),
                prefill_ahead: row.prefills_ahead(),
                ..Batching::default()
            },
            live_max: self.limits.rows_max,
            bounds: Bounds::default(),
            placement: Placement::OwnArbiter,
            process: Process::alone(),
        };
        runtime::start(spec).map_err(|error| CliError::Launch(LaunchError::Start(error)))
    }

    fn model(&self, index: usize) -> ModelSpec {
        let (limits, takes) = (self.limits, TICK * TICKS[index]);
        let factory = move || {
            let language = Language { vocab: WORDS, hard: 0.0, eos: None };
            let inner = SimExecutor::new(limits, language, Skill::Large, FaultPlan::default());
            Ok(Box::new(Paced { inner, takes }) as Box<dyn Executor>)
        };
        let site = Site::Here(Seat::Thread(Arc::new(factory)));
        ModelSpec { name: NAMES[index].to_owned(), limits, eos: Vec::new(), site }
    }

    /// Tokens per second of a row by the throughput model, without prefill and without any time of the runtime; none for
    /// rows it does not describe and systems beyond its reach.
    pub fn predicted(&self, row: Row, workers: u32) -> Option<f64> {
        if let Target::Only(model) = row.target(NAMES.len()) {
            return Some(f64::from(workers) / (TICK * TICKS[model.index()]).as_secs_f64());
        }
        let thresholds = match row {
            Row::Full | Row::PrefillAhead => tokenrouter_core::batching::clamp(self.table.thresholds(workers), workers),
            Row::Eager => vec![1; NAMES.len()],
            _ => return None,
        };
        let behaviours = behaviours(&*self.algorithm, workers);
        let system = System::new(
            workers,
            TICKS.map(|ticks| vec![ticks; workers as usize]).to_vec(),
            behaviours.iter().map(|behaviour| behaviour.moves.clone()).collect(),
            behaviours.iter().map(|behaviour| behaviour.tokens.clone()).collect(),
        );
        let exact = throughput(&system.ok()?, &thresholds, Budget::default().reach).ok()?;
        Some(exact.throughput / TICK.as_secs_f64())
    }

    /// The thresholds of the full row.
    pub fn thresholds(&self, workers: u32) -> Vec<u32> {
        tokenrouter_core::batching::clamp(self.table.thresholds(workers), workers)
    }
}

fn behaviours(algorithm: &dyn Algorithm, workers: u32) -> Vec<Behaviour> {
    let prior = algorithm.prior();
    let seconds = |index: usize| vec![(TICK * TICKS[index]).as_secs_f64(); workers as usize];
    let ways = prior.p.into_iter().zip(prior.c).enumerate();
    ways.map(|(index, (moves, tokens))| Behaviour { steps: 0.0, seconds: seconds(index), moves, tokens }).collect()
}

fn execution(row: Row) -> Execution {
    match row.execution() {
        config::Execution::Auto | config::Execution::Async => Execution::Async,
        config::Execution::ModelSync => Execution::ModelSync,
        config::Execution::StepSync => Execution::StepSync,
        config::Execution::StdServing => Execution::StdServing,
    }
}

/// A simulated model whose steps take their time.
struct Paced {
    inner: SimExecutor,
    takes: Duration,
}

impl Executor for Paced {
    fn limits(&self) -> ExecutorLimits {
        self.inner.limits()
    }

    fn step(&mut self, step: &Step) -> Result<StepOutput, ExecutorError> {
        let end = Instant::now() + self.takes;
        let output = self.inner.step(step);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match left.checked_sub(SPIN) {
                _ if left.is_zero() => return output,
                Some(sleep) => thread::park_timeout(sleep),
                None => std::hint::spin_loop(),
            }
        }
    }
}

/// A vocabulary of letters.
struct Words(Vec<u8>);

impl TextCodec for Words {
    fn encode(&self, text: &str, _special: SpecialTokens) -> Result<Vec<TokenId>, TextError> {
        Ok(text.bytes().map(TokenId::from).collect())
    }

    fn token_bytes(&self, id: TokenId) -> Option<&[u8]> {
        self.0.get(id as usize).map(std::slice::from_ref)
    }

    fn is_special(&self, _id: TokenId) -> bool {
        false
    }

    fn vocab_size(&self) -> u32 {
        WORDS
    }

    fn bos(&self) -> Option<TokenId> {
        None
    }

    fn strips_leading_space(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_core::ids::ModelIdx;

    #[test]
    fn the_papers_pair_gains_by_waiting() {
        let pair = Simulated::new(&[], 4, 100).expect("the paper's pair");
        for workers in [2, 3, 4] {
            let (full, eager) = (pair.predicted(Row::Full, workers), pair.predicted(Row::Eager, workers));
            assert!(full.expect("in reach") >= eager.expect("in reach"), "N = {workers}");
        }
        assert!(pair.predicted(Row::Full, 4) > pair.predicted(Row::Eager, 4));
        assert_eq!(pair.predicted(Row::StdServing, 4), None);
        // One request: 0.65 tokens from a small step, one from a large one in 0.35 of the cases; 6.0 + 0.35 * 27.9 ms.
        let one = pair.predicted(Row::Eager, 1).expect("in reach");
        assert!((one - 1000.0 / (6.0 + 0.35 * 27.9)).abs() < 1e-6, "{one}");
        assert!((pair.predicted(Row::LargeOnly, 8).expect("known") - 8000.0 / 27.9).abs() < 1e-6);
    }

    #[test]
    fn wrong_probabilities_are_refused() {
        let wrong = Simulated::new(&[("p".to_owned(), Json::from(2))], 2, 100);
        assert!(wrong.is_err_and(|error| error.to_string().starts_with("--params: ")));
    }

    #[test]
    fn model_indices_match_their_times() {
        assert_eq!(TICK * TICKS[0], Duration::from_micros(6_000));
        assert_eq!(TICK * TICKS[1], Duration::from_micros(27_900));
        assert_eq!(Row::LargeOnly.target(NAMES.len()), Target::Only(ModelIdx(1)));
    }
}
