//! One row of a comparison: all problems answered one way by models in memory. Owner: the command. Invariant: rows differ
//! in nothing but their algorithm and their targets; a problem that fails counts as wrong.

use super::code::{self, Sandbox};
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
    /// Allow problems with tests: Python that a model wrote is run by python3 in processes of its own, within limits
    #[arg(long)]
    run_code: bool,
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

    /// What tells right answers to these problems from wrong ones.
    ///
    /// # Errors
    /// A problem has tests and --run-code is not given, or programs cannot be run here.
    pub fn grader(&self, problems: &[Problem]) -> Result<Grader, CliError> {
        let tested = problems.iter().position(|problem| problem.tests.is_some());
        let sandbox = match tested {
            None => None,
            Some(_) if self.run_code => Some(Sandbox::open()?),
            Some(index) => {
                return Err(CliError::Usage(format!(
                    "problem {} has tests, which run Python that a model wrote; allow it with --run-code",
                    index + 1
                )));
            }
        };
        Ok(Grader { check: self.check, sandbox })
    }

    /// The seed of the problem of this index: no two draw the same way, and no two have the same.
    pub fn seed_of(&self, index: usize) -> u64 {
        self.seed.wrapping_add(index as u64)
    }

    fn prompt(&self, served: &Served, problem: &Problem) -> Result<Prompt, CliError> {
        if self.raw {
            return Ok(run::raw_prompt(&problem.question));
        }
        run::chat_prompt(served, &[Message::new(Role::User, problem.question.as_str())])
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
            constraint: None,
            prompt_logprobs: None,
            entropy: false,
        }
    }
}

/// Tells right answers from wrong ones.
#[derive(Clone, Debug)]
pub struct Grader {
    check: Check,
    sandbox: Option<Sandbox>,
}

impl Grader {
    /// # Errors
    /// Why the program in the answer could not be run; a program that fails is a wrong answer.
    fn right(&self, problem: &Problem, text: &str) -> Result<bool, String> {
        match (&problem.tests, &self.sandbox) {
            (None, _) => Ok(self.check.matches(text, &problem.answer)),
            (Some(tests), Some(sandbox)) => {
                sandbox.passes(code::program(text), tests).map_err(|error| error.to_string())
            }
            (Some(_), None) => Err("there are tests, but --run-code is not given".to_owned()),
        }
    }
}

/// One row to be measured.
pub struct Run<'a> {
    /// What the row is called.
    pub title: &'a str,
    /// Whose chat template and sampling defaults are used.
    pub served: &'a Served,
    /// Who answers.
    pub target: Target,
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
    /// Which answers are right.
    pub grader: &'a Grader,
}

/// An answer that was graded, or why there is none.
pub type Graded = Result<(Outcome, bool), String>;

/// All problems answered one way.
pub struct Answers {
    /// One for each problem, in the order of the problems.
    pub each: Vec<Graded>,
    /// Wall-clock time of the answers, without that of grading.
    pub seconds: f64,
}

impl Answers {
    /// The row that they make.
    pub fn row(&self, title: &str, models: usize) -> Row {
        Row { seconds: self.seconds, ..Row::of(title.to_owned(), models, &self.each) }
    }
}

impl Bench<'_> {
    /// Answers all problems one way.
    ///
    /// # Errors
    /// The runtime does not start. A problem that fails is one of the answers instead.
    pub fn answers(&self, run: &Run<'_>, bar: &ProgressBar) -> Result<Answers, CliError> {
        bar.set_message(run.title.to_owned());
        let (outcomes, seconds) = actix_rt::System::new().block_on(self.answer_all(run, bar))?;
        let grade = |(problem, outcome): (&Problem, Result<Outcome, CliError>)| -> Graded {
            let outcome = outcome.map_err(|error| error.to_string())?;
            let right = self.grader.right(problem, &outcome.text)?;
            Ok((outcome, right))
        };
        Ok(Answers { each: self.problems.iter().zip(outcomes).map(grade).collect(), seconds })
    }

    /// Outcomes in the order of the problems, and the seconds they took.
    async fn answer_all(
        &self,
        run: &Run<'_>,
        bar: &ProgressBar,
    ) -> Result<(Vec<Result<Outcome, CliError>>, f64), CliError> {
        let runtime = self.loaded.start_with(run.algorithm.clone())?;
        let at_once = self.settings.concurrency.min(self.loaded.file.server.live_max) as usize;
        let started = Instant::now();
        let mut answers = stream::iter(self.problems.iter().enumerate())
            .map(|(index, problem)| {
                let runtime = &runtime;
                async move { (index, self.answer(run, runtime, (index, problem)).await) }
            })
            .buffer_unordered(at_once);
        let mut outcomes = Vec::with_capacity(self.problems.len());
        while let Some(outcome) = answers.next().await {
            outcomes.push(outcome);
            bar.inc(1);
        }
        drop(answers);
        let seconds = started.elapsed().as_secs_f64();
        runtime.drain(Duration::ZERO).await;
        outcomes.sort_by_key(|(index, _)| *index);
        Ok((outcomes.into_iter().map(|(_, outcome)| outcome).collect(), seconds))
    }

    async fn answer(
        &self,
        run: &Run<'_>,
        runtime: &Runtime,
        (index, problem): (usize, &Problem),
    ) -> Result<Outcome, CliError> {
        let prompt = self.settings.prompt(run.served, problem)?;
        let job = self.settings.job((prompt, self.settings.seed_of(index)), (run.served, run.target));
        run::generate(runtime, job, |_, _| Ok(())).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        settings: Settings,
    }

    fn grader(arguments: &[&str], problems: &[Problem]) -> Result<Grader, String> {
        let line = <Line as clap::Parser>::parse_from([&["test"], arguments].concat());
        line.settings.grader(problems).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_are_compared_and_programs_are_run() {
        let number = Problem { answer: "28".into(), ..Problem::default() };
        let code = Problem { tests: Some("assert f(2) == 4".into()), ..Problem::default() };
        let problems = [number, code];
        let grader = grader(&["--run-code", "--check", "last-number"], &problems).expect("python3 is installed");
        for (problem, text, expected) in [
            (0, "So 28.", true),
            (0, "So 29.", false),
            (1, "Here:\n```python\ndef f(x):\n    return x * x\n```\nIt squares 3.", true),
            (1, "def f(x):\n    return x * x", true),
            (1, "```python\ndef f(x):\n    return 3 * x\n```", false),
            (1, "I cannot.", false),
        ] {
            assert_eq!(grader.right(&problems[problem], text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn nothing_runs_unless_it_is_allowed() {
        let number = Problem { answer: "28".into(), ..Problem::default() };
        let code = Problem { tests: Some("assert f(2) == 4".into()), ..Problem::default() };
        let error = grader(&[], &[number.clone(), code.clone()]).expect_err("tests without --run-code");
        assert!(error.contains("problem 2") && error.contains("--run-code"), "{error}");
        let grader = grader(&[], std::slice::from_ref(&number)).expect("nothing to run");
        assert_eq!(grader.right(&number, "28\n#### 28"), Ok(true));
        assert!(grader.right(&code, "def f(x): return 4").is_err(), "never run by accident");
    }
}
