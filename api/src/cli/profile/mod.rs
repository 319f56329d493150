//! `tokenrouter profile`: what `plan` and the policies `optimal` and `adaptive` need to know of a launch file. Owner: the
//! process. Invariant: everything is measured on the executors and the router that would serve; nothing is assumed but the
//! ways of a model that no prompt led to, and the table says so.

mod steps;
mod table;

use super::counted::{Counted, Seen};
use super::files;
use super::logs::{self, Talk};
use super::options::Generation;
use super::run::{self, load};
use super::{CliError, Context};
use crate::http::types::chat::{Message, Role};
use crate::launch::{self, Loaded};
use futures_util::{StreamExt, stream};
use serde::Deserialize;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use steps::{Effort, Shapes};
use tokenrouter_config::Policy;
use tokenrouter_core::job::{Job, Prompt, StopRules};
use tokenrouter_core::sampling::SamplingParams;
use tokenrouter_core::theory::profile::{ModelProfile, Profile, VERSION};

/// Options of `profile`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Prompts that the router is watched on: one JSON object a line with `question`
    prompts: PathBuf,
    /// File to write
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
    /// Requests at once while the router is watched
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    concurrency: u32,
    /// Take only the first prompts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    /// Tokens of an answer at most
    #[arg(long, short = 'n', value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// 0 = always the likeliest token; without it what the model's makers recommend
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Go on after end-of-text, up to --max-tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Give the question as plain text, without the chat template
    #[arg(long)]
    raw: bool,
    /// Largest batch to measure; without it what the launch file allows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    rows: Option<u32>,
    /// Tokens before each measured step; without it the mean that was seen
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Steps of every shape
    #[arg(long, value_name = "R", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Print the profile as JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let questions = questions(&args.prompts, args.limit)?;
    let overrides = context.common.overrides()?;
    let mut file = launch::read(context.common.config.as_deref(), &overrides, &context.environment)?;
    // The profile that the policy would need is what is being made.
    (file.batching.policy, file.batching.profile) = (Policy::Eager, None);
    logs::start(context, &file, Talk::Command)?;
    let loaded = load(context, file)?;
    let jobs = jobs(&loaded, args, &questions)?;
    let sampling = jobs.first().map(|job| job.sampling.clone()).unwrap_or_default();
    let seen = watch(context, (&loaded, args.concurrency), jobs)?;
    let profile = measure(context, (args, &loaded), (seen, &sampling))?;
    profile.check().map_err(CliError::Usage)?;
    let json = serde_json::to_string_pretty(&profile).map_err(io::Error::other)? + "\n";
    files::write(&args.out, json.as_bytes(), "--out")?;
    let text = if args.json { json } else { table::text(&profile) };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

/// The questions of a file of JSON lines.
fn questions(path: &Path, limit: Option<u32>) -> Result<Vec<String>, CliError> {
    #[derive(Deserialize)]
    struct Line {
        question: String,
    }
    let usage = |reason: String| CliError::Usage(format!("{}{reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!(": {error}")))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(number, line): (usize, &str)| match serde_json::from_str::<Line>(line) {
        Ok(line) => Ok(line.question),
        Err(error) => Err(usage(format!(":{}: {error}; each line is {{\"question\": \"…\"}}", number + 1))),
    };
    let limit = limit.map_or(usize::MAX, |limit| limit as usize);
    let questions: Vec<String> = lines.take(limit).map(read).collect::<Result<_, _>>()?;
    if questions.is_empty() { Err(usage(": holds no prompt".into())) } else { Ok(questions) }
}

/// A job for every question, to the routed name.
fn jobs(loaded: &Loaded, args: &Args, questions: &[String]) -> Result<Vec<Job>, CliError> {
    let served = launch::served(loaded);
    let served = served.first().ok_or_else(|| CliError::Usage("nothing is served".into()))?;
    let prompt = |question: &String| -> Result<Prompt, CliError> {
        if args.raw {
            return Ok(run::raw_prompt(question));
        }
        run::chat_prompt(served, &[Message::new(Role::User, question.as_str())])
    };
    let job = |(index, question): (usize, &String)| {
        let generation = Generation {
            model: None,
            max_tokens: Some(args.max_tokens),
            temperature: args.temperature,
            top_p: None,
            top_k: None,
            min_p: None,
            seed: index as u64,
            stop: Vec::new(),
        };
        Ok(Job {
            prompt: prompt(question)?,
            target: served.target,
            routing: None,
            sampling: generation.sampling(served.defaults),
            stop: StopRules { max_tokens: Some(args.max_tokens), ignore_eos: args.ignore_eos, ..StopRules::default() },
            logprobs: None,
            constraint: None,
            prompt_logprobs: None,
            entropy: false,
        })
    };
    questions.iter().enumerate().map(job).collect()
}

/// Runs all jobs through the router and counts its decisions.
fn watch(context: &Context, (loaded, concurrency): (&Loaded, u32), jobs: Vec<Job>) -> Result<Vec<Seen>, CliError> {
    let counted = Arc::new(Counted::new(loaded.algorithm.clone(), loaded.members.len()));
    let bar = context.progress.count("watch the router", jobs.len() as u64);
    actix_rt::System::new().block_on(async {
        let runtime = loaded.start_with(counted.clone())?;
        let answers = stream::iter(jobs.into_iter().map(|job| run::generate(&runtime, job, |_, _| Ok(()))));
        let mut answers = answers.buffer_unordered(concurrency.min(loaded.file.server.live_max) as usize);
        while let Some(answer) = answers.next().await {
            answer?;
            bar.inc(1);
        }
        drop(answers);
        runtime.drain(Duration::from_secs(1)).await;
        Ok::<(), CliError>(())
    })?;
    bar.finish_and_clear();
    Ok(counted.seen(&loaded.names()))
}

/// Measures the steps of all models.
fn measure(
    context: &Context,
    (args, loaded): (&Args, &Loaded),
    (seen, sampling): (Vec<Seen>, &SamplingParams),
) -> Result<Profile, CliError> {
    let several = loaded.members.len() > 1;
    let plan: Vec<(Effort, Shapes)> = loaded
        .members
        .iter()
        .zip(&seen)
        .map(|(member, seen)| {
            let limits = member.model.limits();
            let rows_max = args.rows.unwrap_or(limits.rows_max.min(loaded.file.server.live_max));
            let context = args.context.unwrap_or(seen.context).max(1);
            let effort = Effort { rows_max, context, repeat: args.repeat };
            (effort, steps::shapes(&limits, effort, seen.lengths.1))
        })
        .collect();
    let shapes: usize = plan.iter().map(|(_, shapes)| shapes.len()).sum();
    let total = shapes as u64 * u64::from(args.repeat) * if several { 2 } else { 1 };
    let bar = context.progress.count("time steps", total);
    let mut models = Vec::new();
    let typical: Vec<u32> = seen.iter().map(|seen| seen.lengths.0).collect();
    for (index, ((effort, shapes), seen)) in plan.iter().zip(seen).enumerate() {
        let how = (*effort, sampling, &bar, typical.as_slice());
        let [alone, beside] = steps::points(loaded, (index, shapes), how)?;
        models.push(ModelProfile {
            name: loaded.members[index].name.clone(),
            rows_max: loaded.members[index].model.limits().rows_max,
            alone,
            beside,
            ways: seen.ways,
            observations: seen.observations,
        });
    }
    bar.finish_and_clear();
    Ok(Profile { version: VERSION, models })
}
