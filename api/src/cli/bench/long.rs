//! `tokenrouter bench long`: whether long answers stay as fast as short ones. Owner: the process. Invariant: beside every
//! run of the runtime a bare executor makes the same steps, with the same rows over the same growing contexts: what attention
//! costs is in both, so it is not in their ratio.

use super::bare::{Answered, Bare};
use super::drive::{Work, warm_up};
use super::rows::Row;
use super::shape::{Corpus, Sizes};
use super::stage::Stage;
use super::statistics::Mean;
use crate::cli::logs::{self, Talk};
use crate::cli::{CliError, Context};
use crate::launch::{self, Loaded};
use futures_util::future::try_join_all;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::{Duration, Instant};
use tokenrouter_actors::runtime::Runtime;
use tokenrouter_core::executor::PAGE_TOKENS;
use tokenrouter_core::ids::{ModelIdx, TokenId};
use tokenrouter_core::job::{Event, Failure, Job, Target};

/// Time for requests to free what they hold.
const ENDING: Duration = Duration::from_secs(30);

/// Options of `bench long`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model that answers, without routing; by default the launch file's first
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Lengths of answers; the last is compared with the first
    #[arg(long, value_name = "T,...", value_delimiter = ',', default_value = "2048,8192",
          value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Vec<u32>,
    /// Requests at once, each of them one answer
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// Tokens of each prompt
    #[arg(long, value_name = "P", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Rounds: each runs every length once through the runtime and once on the bare executor
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Other prompts and draws
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object instead of the tables
    #[arg(long)]
    pub json: bool,
}

/// What was found.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    workers: u32,
    prompt_tokens: u32,
    /// Keys and values of a token, as the model's shape says.
    kv_bytes_per_token: u64,
    lengths: Vec<Length>,
    /// None for a single length.
    last_over_first: Option<Compared>,
}

/// Answers of one length.
#[derive(Debug, Serialize)]
struct Length {
    tokens: u32,
    runtime_tokens_per_second: Mean,
    executor_tokens_per_second: Mean,
    /// The runtime's speed over the executor's, round by round.
    ratio: Mean,
    /// Whether both made the same answers in all rounds.
    same_answers: bool,
    /// By how much the process grew, for each token of prompts and answers; none where the system does not tell.
    resident_bytes_per_token: Option<Mean>,
}

/// The last length over the first, round by round.
#[derive(Debug, Serialize)]
struct Compared {
    runtime: Mean,
    executor: Mean,
    /// `runtime` over `executor`: what is left when attention's own cost is taken out.
    apart_from_attention: Mean,
    /// By how much the process grew for each token that the last length has more.
    resident_bytes_per_further_token: Option<Mean>,
}

/// One length in one round.
struct Run {
    runtime: Answered,
    executor: Answered,
    /// Bytes by which the process grew while the runtime answered.
    grown: Option<f64>,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let file = launch::read(context.common.config.as_deref(), &context.common.overrides()?, &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    let mut stage = Stage::load(context, file, args.workers)?;
    let model = model(args, &stage.names())?;
    fits(args, loaded(&stage)?, model)?;
    let corpus = stage.corpus(context)?;
    let bar = context.progress.count("long answers", u64::from(args.repeat) * args.tokens.len() as u64);
    let mut runs: Vec<Vec<Run>> = args.tokens.iter().map(|_| Vec::new()).collect();
    for round in 0..args.repeat {
        for (runs, &tokens) in runs.iter_mut().zip(&args.tokens) {
            bar.set_message(format!("{tokens} tokens"));
            runs.push(play(&mut stage, (args, model), (&corpus, tokens, round))?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let member = &loaded(&stage)?.members[model.index()];
    let (name, bytes) = (member.name.clone(), member.model.info().kv_bytes_per_token);
    let report = report(args, (name, bytes), &runs);
    let text =
        if args.json { serde_json::to_string(&report).map_err(io::Error::other)? + "\n" } else { markdown(&report) };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

fn loaded(stage: &Stage) -> Result<&Loaded, CliError> {
    match stage {
        Stage::Weights(loaded, _) => Ok(loaded),
        Stage::Simulated(_) => Err(CliError::Usage("long answers need models with weights".to_owned())),
    }
}

fn model(args: &Args, names: &[String]) -> Result<ModelIdx, CliError> {
    let Some(name) = &args.model else { return Ok(ModelIdx(0)) };
    let index = names.iter().position(|known| known == name).ok_or_else(|| {
        CliError::Usage(format!("--model {name}: no such model; the launch file has {}", names.join(", ")))
    })?;
    Ok(ModelIdx(index as u8))
}

/// All requests must be live from beginning to end.
fn fits(args: &Args, loaded: &Loaded, model: ModelIdx) -> Result<(), CliError> {
    let member = &loaded.members[model.index()];
    let (limits, name) = (member.model.limits(), &member.name);
    let most = args.tokens.iter().copied().max().unwrap_or(1);
    let longest = u64::from(args.prompt) + u64::from(most);
    if longest > u64::from(limits.context_len) {
        let room = limits.context_len.saturating_sub(args.prompt);
        return Err(CliError::Usage(format!(
            "--tokens {most}: model {name} holds {} tokens with the prompt's {}; ask for at most {room}",
            limits.context_len, args.prompt
        )));
    }
    let held = u64::from(limits.pages) / longest.div_ceil(PAGE_TOKENS as u64);
    let held = held.min(u64::from(limits.rows_max));
    if u64::from(args.workers) > held {
        return Err(CliError::Usage(format!(
            "--workers {}: model {name} holds {held} requests of {longest} tokens; lower --workers or --tokens, or raise \
             kv_memory and rows_max in the launch file",
            args.workers
        )));
    }
    Ok(())
}

/// One length through the runtime and on the bare executor; who is first changes from round to round.
fn play(
    stage: &mut Stage,
    (args, model): (&Args, ModelIdx),
    (corpus, tokens, round): (&Corpus, u32, u32),
) -> Result<Run, CliError> {
    let algorithm = stage.algorithm();
    let work = Work {
        sizes: Sizes { turns: 1, prompt: args.prompt, output: tokens },
        corpus,
        target: Target::Only(model),
        algorithm: &*algorithm,
        workers: args.workers,
        conversations: 1,
        seed: args.seed.wrapping_add(u64::from(round)),
    };
    let jobs = work.opening();
    let bare = |stage: &Stage| {
        let mut bare = Bare::new(loaded(stage)?, model)?;
        bare.answer(&[work.warming(model)])?;
        bare.answer(&jobs)
    };
    if round % 2 == 1 {
        let executor = bare(stage)?;
        let (runtime, grown) = through(stage, work, &jobs)?;
        return Ok(Run { runtime, executor, grown });
    }
    let (runtime, grown) = through(stage, work, &jobs)?;
    Ok(Run { runtime, executor: bare(stage)?, grown })
}

/// The jobs through a runtime of their own, and by how many bytes the process grew.
fn through(stage: &mut Stage, work: Work<'_>, jobs: &[Job]) -> Result<(Answered, Option<f64>), CliError> {
    let models = stage.names().len();
    actix_rt::System::new().block_on(async {
        let runtime = stage.start(Row::Eager)?;
        warm_up(&runtime, work, models).await?;
        let before = resident();
        let started = Instant::now();
        let tokens = try_join_all(jobs.iter().map(|job| answer(&runtime, job.clone()))).await;
        let seconds = started.elapsed().as_secs_f64();
        let grown = resident().zip(before).map(|(after, before)| after - before);
        runtime.drain(ENDING).await;
        Ok((Answered { seconds, tokens: tokens? }, grown))
    })
}

async fn answer(runtime: &Runtime, job: Job) -> Result<Vec<TokenId>, CliError> {
    let mut said = Vec::new();
    let mut events = runtime.submit(job).await?.events;
    while let Some(event) = events.recv().await {
        match event {
            Event::Prompt(_) => {}
            Event::Delta { tokens, .. } => said.extend(tokens.iter().map(|token| token.id)),
            Event::Finished { .. } => return Ok(said),
            Event::Failed(failure) => return Err(failure.into()),
        }
    }
    Err(Failure::Internal("the answer ended without a reason".into()).into())
}

/// Bytes of memory that the process has at this moment.
fn resident() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}

fn report(args: &Args, (model, kv_bytes_per_token): (String, u64), runs: &[Vec<Run>]) -> Report {
    let lengths = args.tokens.iter().zip(runs).map(|(&tokens, runs)| length(args, tokens, runs)).collect();
    let last_over_first = match runs {
        [first, .., last] => Some(compared(args, first, last)),
        _ => None,
    };
    Report { model, workers: args.workers, prompt_tokens: args.prompt, kv_bytes_per_token, lengths, last_over_first }
}

fn length(args: &Args, tokens: u32, runs: &[Run]) -> Length {
    let mean = |value: fn(&Run) -> f64| Mean::of(runs.iter().map(value).collect());
    let all = f64::from(args.workers) * f64::from(args.prompt + tokens);
    let grown: Option<Vec<f64>> = runs.iter().map(|run| run.grown.map(|bytes| bytes / all)).collect();
    Length {
        tokens,
        runtime_tokens_per_second: mean(|run| run.runtime.tokens_per_second()),
        executor_tokens_per_second: mean(|run| run.executor.tokens_per_second()),
        ratio: mean(|run| run.runtime.tokens_per_second() / run.executor.tokens_per_second()),
        same_answers: runs.iter().all(|run| run.runtime.tokens == run.executor.tokens),
        resident_bytes_per_token: grown.map(Mean::of),
    }
}

fn compared(args: &Args, first: &[Run], last: &[Run]) -> Compared {
    let ratios = |speed: fn(&Run) -> f64| -> Vec<f64> {
        first.iter().zip(last).map(|(first, last)| speed(last) / speed(first)).collect()
    };
    let more = match (args.tokens.first(), args.tokens.last()) {
        (Some(&first), Some(&last)) => f64::from(args.workers) * (f64::from(last) - f64::from(first)),
        _ => 0.0,
    };
    let further = |(first, last): (&Run, &Run)| Some((last.grown? - first.grown?) / more);
    let further: Option<Vec<f64>> = first.iter().zip(last).map(further).collect();
    Compared {
        runtime: Mean::of(ratios(|run| run.runtime.tokens_per_second())),
        executor: Mean::of(ratios(|run| run.executor.tokens_per_second())),
        apart_from_attention: Mean::of(ratios(|run| {
            run.runtime.tokens_per_second() / run.executor.tokens_per_second()
        })),
        resident_bytes_per_further_token: further.filter(|_| more != 0.0).map(Mean::of),
    }
}

/// The tables.
fn markdown(report: &Report) -> String {
    let mut out = String::new();
    let rounds = report.lengths.first().map_or(0, |length| length.ratio.rounds.len());
    let _ = writeln!(
        out,
        "{}; requests at once: {}; tokens in: {}; rounds: {rounds}; keys and values: {} bytes a token.\n",
        report.model, report.workers, report.prompt_tokens, report.kv_bytes_per_token
    );
    let _ = writeln!(
        out,
        "| tokens out | runtime, tokens/s | bare executor | ratio | memory, bytes a token | same answers |"
    );
    let _ = writeln!(out, "| ---: | ---: | ---: | ---: | ---: | --- |");
    for length in &report.lengths {
        let memory = length.resident_bytes_per_token.as_ref().map_or("-".to_owned(), |mean| mean.shown(0));
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {memory} | {} |",
            length.tokens,
            length.runtime_tokens_per_second.shown(1),
            length.executor_tokens_per_second.shown(1),
            length.ratio.shown(3),
            if length.same_answers { "yes" } else { "no" }
        );
    }
    if let (Some(compared), [first, .., last]) = (&report.last_over_first, &report.lengths[..]) {
        let _ = writeln!(
            out,
            "\nSpeed at {} tokens over that at {}: {}, of the bare executor {}; apart from attention {}.",
            last.tokens,
            first.tokens,
            compared.runtime.shown(3),
            compared.executor.shown(3),
            compared.apart_from_attention.shown(3)
        );
        if let Some(bytes) = &compared.resident_bytes_per_further_token {
            let _ = writeln!(out, "Memory: {} bytes for each further token.", bytes.shown(0));
        }
    }
    out
}
