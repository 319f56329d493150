//! `tokenrouter eval`: accuracy, share of each model, hops and speed on a file of problems. Owner: the process.
//! Invariant: every row answers the same problems with the same settings; a problem that fails counts as wrong and is
//! reported.

mod problems;
mod report;

use super::logs::{self, Talk};
use super::options::{self, Generation};
use super::run::{self, Outcome};
use super::{CliError, Context};
use crate::http::Served;
use crate::http::types::chat::{Message, Role};
use crate::launch::{self, Loaded, Overrides};
use futures_util::StreamExt;
use futures_util::stream;
use problems::{Check, Problem};
use report::Row;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_core::job::{Job, StopRules, Target};

/// Options of `eval`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Problems, one JSON object a line with `question` and `answer`; without it those of the embedded pair
    problems: Option<PathBuf>,
    /// Rows: the routed name or a model's name, several times; without it every model and the routed name.
    /// Each --params gives a routed row of its own
    #[arg(long, short, value_name = "NAME")]
    model: Vec<String>,
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
    /// The same seed gives the same answers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// What counts as the answer
    #[arg(long, value_enum, default_value_t)]
    check: Check,
    /// Give the question as plain text, without the chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let file = launch::read(context.common.config.as_deref(), &Overrides::default(), &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    let problems = problems::read(&problems_path(context, args)?, args.limit)?;
    let variants = variants(context, &file)?;
    let loaded = run::load(context, file)?;
    let served = launch::served(&loaded);
    let runs = runs(args, &served, &variants)?;
    let mut rows = Vec::new();
    for run in &runs {
        let bar = context.progress.count(&run.title, problems.len() as u64);
        let row = actix_rt::System::new()
            .block_on(evaluate(&Evaluation { loaded: &loaded, problems: &problems, args, run }, &bar))?;
        bar.finish_and_clear();
        rows.push(row);
    }
    let names = loaded.names();
    let text = if args.json { format!("{}\n", report::json(&rows, &names)) } else { report::table(&rows, &names) };
    io::stdout().write_all(text.as_bytes())?;
    for row in &rows {
        if let Some(failure) = &row.failure {
            eprintln!("note: {}: {} problems failed, the first with: {failure}", row.title, row.failed);
        }
    }
    Ok(())
}

fn problems_path(context: &Context, args: &Args) -> Result<PathBuf, CliError> {
    match (&args.problems, &context.common.config) {
        (Some(path), _) => Ok(path.clone()),
        (None, None) => Ok(launch::embedded::lay_out(&context.environment.cache)?.join(launch::embedded::PROBLEMS)),
        (None, Some(_)) => Err(CliError::Usage("name a file of problems: with --config there is no default".into())),
    }
}

/// The routing settings to compare: the launch file's, or one for each `--params`.
struct Variant {
    label: String,
    algorithm: std::sync::Arc<dyn tokenrouter_core::routing::Algorithm>,
}

fn variants(context: &Context, file: &tokenrouter_config::LaunchFile) -> Result<Vec<Variant>, CliError> {
    let given: Vec<&str> = if context.common.params.is_empty() {
        vec![""]
    } else {
        context.common.params.iter().map(String::as_str).collect()
    };
    let variant = |text: &str| {
        let params = if text.is_empty() { Vec::new() } else { options::params(text)? };
        let file = launch::with_params(file.clone(), &params, context.environment.catalog)?;
        let params: Vec<String> = file.router.params.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let label = format!("{} {}", file.router.algorithm, params.join(","));
        let algorithm = launch::algorithm(&file, context.environment.catalog).map_err(launch::LaunchError::from)?;
        Ok(Variant { label: label.trim().to_owned(), algorithm })
    };
    given.into_iter().map(variant).collect()
}

/// One row to be measured.
struct Run<'a> {
    title: String,
    served: &'a Served,
    variant: &'a Variant,
}

fn runs<'a>(args: &Args, served: &'a [Served], variants: &'a [Variant]) -> Result<Vec<Run<'a>>, CliError> {
    let mut wanted: Vec<&Served> = Vec::new();
    for name in &args.model {
        wanted.push(options::served(served, Some(name))?);
    }
    if wanted.is_empty() {
        // The routed name comes last in the table, below what it is compared with.
        wanted.extend(served.iter().skip(1).chain(served.first()));
    }
    let mut runs = Vec::new();
    for served in wanted {
        if served.target == Target::Routed {
            runs.extend(variants.iter().map(|variant| Run { title: variant.label.clone(), served, variant }));
        } else {
            runs.push(Run { title: format!("{} alone", served.id), served, variant: &variants[0] });
        }
    }
    Ok(runs)
}

struct Evaluation<'a> {
    loaded: &'a Loaded,
    problems: &'a [Problem],
    args: &'a Args,
    run: &'a Run<'a>,
}

async fn evaluate(evaluation: &Evaluation<'_>, bar: &indicatif::ProgressBar) -> Result<Row, CliError> {
    let Evaluation { loaded, problems, args, run } = evaluation;
    let runtime = loaded.start_with(run.variant.algorithm.clone())?;
    let at_once = args.concurrency.min(loaded.file.server.live_max) as usize;
    let started = Instant::now();
    let mut answers = stream::iter(*problems)
        .map(|problem| {
            let runtime = &runtime;
            async move { (problem, answer(evaluation, runtime, problem).await) }
        })
        .buffer_unordered(at_once);
    let mut row = Row::new(run.title.clone(), loaded.members.len());
    while let Some((problem, answer)) = answers.next().await {
        match answer {
            Ok(outcome) => row.add(&outcome, args.check.matches(&outcome.text, &problem.answer)),
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

async fn answer(evaluation: &Evaluation<'_>, runtime: &Runtime, problem: &Problem) -> Result<Outcome, CliError> {
    let Evaluation { args, run, .. } = evaluation;
    let prompt = if args.raw {
        run::raw_prompt(&problem.question)
    } else {
        run::chat_prompt(run.served, &[Message { role: Role::User, content: problem.question.clone() }])?
    };
    let generation = Generation {
        model: None,
        max_tokens: Some(args.max_tokens),
        temperature: Some(args.temperature),
        top_p: None,
        top_k: None,
        min_p: None,
        seed: args.seed,
        stop: Vec::new(),
    };
    let job = Job {
        prompt,
        target: run.served.target,
        routing: None,
        sampling: generation.sampling(run.served.defaults),
        stop: StopRules { max_tokens: Some(args.max_tokens), ..StopRules::default() },
        logprobs: None,
        entropy: false,
    };
    run::generate(runtime, job, |_, _| Ok(())).await
}
