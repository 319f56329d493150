//! One row of a comparison: all problems answered one way by models in memory. Owner: the command. Invariant: rows differ
//! in nothing but their algorithm and their targets; a problem that fails counts as wrong.

use super::problems::{self, Check, Problem};
use super::report::Row;
use crate::cli::options::Generation;
use crate::cli::run::{self, Outcome};
use crate::cli::{CliError, Context};
use crate::http::Served;
use crate::http::types::chat::{Message, Role};
use crate::launch::{self, Loaded};
use futures_util::StreamExt;
use futures_util::stream;
use indicatif::ProgressBar;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_core::job::{Job, Prompt, StopRules, Target};
use tokenrouter_core::routing::Algorithm;

/// What is answered and how; the same for every row.
#[derive(Clone, Debug, clap::Args)]
pub struct Settings {
    /// Problems, one JSON object a line with `question` and `answer`; without it those of the embedded pair
    problems: Option<PathBuf>,
    /// Requests at once
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65536))]
    concurrency: u32,
    /// Take only the first problems
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Tokens of an answer at most
    #[arg(long, short = 'n', value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 = always the likeliest token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// The same seed gives the same answers; each problem draws from a seed of its own after it
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// What counts as the answer
    #[arg(long, value_enum, default_value_t)]
    check: Check,
    /// Give the question as plain text, without the chat template
    #[arg(long)]
    raw: bool,
}

impl Settings {
    /// Reads the problems.
    pub fn problems(&self, context: &Context) -> Result<Vec<Problem>, CliError> {
        let path = match (&self.problems, &context.common.config) {
            (Some(path), _) => path.clone(),
            (None, None) => launch::embedded::lay_out(&context.environment.cache)?.join(launch::embedded::PROBLEMS),
            (None, Some(_)) => {
                return Err(CliError::Usage("name a file of problems: with --config there is no default".into()));
            }
        };
        problems::read(&path, self.limit)
    }

    /// The seed of the problem of this index: no two draw the same way, and no two have the same.
    pub fn seed_of(&self, index: usize) -> u64 {
        self.seed.wrapping_add(index as u64)
    }

    fn prompt(&self, served: &Served, problem: &Problem) -> Result<Prompt, CliError> {
        if self.raw {
            return Ok(run::raw_prompt(&problem.question));
        }
        run::chat_prompt(served, &[Message { role: Role::User, content: problem.question.clone() }])
    }

    fn job(&self, (prompt, seed): (Prompt, u64), (served, target): (&Served, Target)) -> Job {
        let generation = Generation {
            model: None,
            max_tokens: Some(self.max_tokens),
            temperature: Some(self.temperature),
            top_p: None,
            top_k: None,
            min_p: None,
            seed,
            stop: Vec::new(),
        };
        Job {
            prompt,
            target,
            routing: None,
            sampling: generation.sampling(served.defaults),
            stop: StopRules { max_tokens: Some(self.max_tokens), ..StopRules::default() },
            logprobs: None,
            entropy: false,
        }
    }
}

/// One row to be measured.
pub struct Run<'a> {
    /// What the row is called.
    pub title: &'a str,
    /// Whose chat template and sampling defaults are used.
    pub served: &'a Served,
    /// Who answers the problem of this index.
    pub target: &'a dyn Fn(usize) -> Target,
    /// Routes what is put to all models.
    pub algorithm: Arc<dyn Algorithm>,
}

/// Models in memory and what is put to them.
pub struct Bench<'a> {
    /// The models.
    pub loaded: &'a Loaded,
    /// The problems.
    pub problems: &'a [Problem],
    /// How they are answered.
    pub settings: &'a Settings,
}

impl Bench<'_> {
    /// Answers all problems one way; `see` gets each answer with the index of its problem.
    ///
    /// # Errors
    /// The runtime does not start. A problem that fails is counted in the row instead.
    pub fn measure(&self, run: &Run<'_>, bar: &ProgressBar, see: impl FnMut(usize, &Outcome)) -> Result<Row, CliError> {
        actix_rt::System::new().block_on(self.answer_all(run, bar, see))
    }

    async fn answer_all(
        &self,
        run: &Run<'_>,
        bar: &ProgressBar,
        mut see: impl FnMut(usize, &Outcome),
    ) -> Result<Row, CliError> {
        let runtime = self.loaded.start_with(run.algorithm.clone())?;
        let at_once = self.settings.concurrency.min(self.loaded.file.server.live_max) as usize;
        let started = Instant::now();
        let mut answers = stream::iter(self.problems.iter().enumerate())
            .map(|(index, problem)| {
                let runtime = &runtime;
                async move { (index, problem, self.answer(run, runtime, (index, problem)).await) }
            })
            .buffer_unordered(at_once);
        let mut row = Row::new(run.title.to_owned(), self.loaded.members.len());
        while let Some((index, problem, answer)) = answers.next().await {
            match answer {
                Ok(outcome) => {
                    row.add(&outcome, self.settings.check.matches(&outcome.text, &problem.answer));
                    see(index, &outcome);
                }
                Err(error) => row.fail(error.to_string()),
            }
            bar.inc(1);
            bar.set_message(format!("{} {:.1} %", row.title, 100.0 * row.accuracy()));
        }
        drop(answers);
        row.seconds = started.elapsed().as_secs_f64();
        runtime.drain(Duration::ZERO).await;
        Ok(row)
    }

    async fn answer(
        &self,
        run: &Run<'_>,
        runtime: &Runtime,
        (index, problem): (usize, &Problem),
    ) -> Result<Outcome, CliError> {
        let prompt = self.settings.prompt(run.served, problem)?;
        let job = self.settings.job((prompt, self.settings.seed_of(index)), (run.served, (run.target)(index)));
        run::generate(runtime, job, |_, _| Ok(())).await
    }
}
