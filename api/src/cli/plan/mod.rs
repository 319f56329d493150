//! `tokenrouter plan`: thresholds of delayed batching from the throughput model, for a system or for a launch file that
//! was measured. Owner: the process. Invariant: every number is printed with how it was found and what is known about
//! better ones.

mod measure;
mod outlook;
mod report;
mod system;

use super::logs::{self, Talk};
use super::run::load;
use super::{CliError, Context};
use crate::launch;
use measure::{Trial, measure};
use outlook::{Check, Checked};
use serde_json::json;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tokenrouter_config::LaunchFile;
use tokenrouter_core::job::Failure;
use tokenrouter_core::theory::measured::{Measured, Outlook};
use tokenrouter_core::theory::profile::Profile;
use tokenrouter_core::theory::search::{Budget, Plan, plan};
use tokenrouter_core::theory::system::System;

/// Numbers of live requests that a launch file is planned for where nothing else is said.
const UP_TO: u32 = 8;

/// Options of `plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// JSON file with N, latency_ticks, P and C of a system
    #[arg(long, value_name = "FILE", required_unless_present = "profile")]
    system: Option<PathBuf>,
    /// What `profile` measured of the launch file (--config)
    #[arg(long, value_name = "FILE", conflicts_with = "system")]
    profile: Option<PathBuf>,
    /// Plan for this many live requests
    #[arg(long, value_name = "N", conflicts_with = "up_to", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Plan for every number of live requests from 1 to this one; with --profile up to 8 where nothing is said
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    up_to: Option<u32>,
    /// With --profile and --requests: run that many requests of TOKENS tokens each under the best thresholds and eagerly,
    /// and compare with the prediction
    #[arg(long, value_name = "TOKENS", requires = "profile", requires = "requests", value_parser = clap::value_parser!(u32).range(1..))]
    measure: Option<u32>,
    /// Runs of each with --measure
    #[arg(long, value_name = "R", default_value_t = 3, requires = "measure", value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let text = match (&args.system, &args.profile) {
        (Some(path), _) => of_system(context, (args, path))?,
        (None, Some(path)) => of_profile(context, (args, path))?,
        (None, None) => return Err(CliError::Usage("give --system or --profile".into())),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn of_system(context: &Context, (args, path): (&Args, &Path)) -> Result<String, CliError> {
    let source = system::read(path)?;
    let plans = match args.up_to {
        None => vec![plan(&source.system(args.requests)?, Budget::default())],
        Some(last) => {
            let bar = context.progress.count("planning", u64::from(last));
            let systems: Vec<System> = (1..=last).map(|n| source.system(Some(n))).collect::<Result<_, _>>()?;
            systems.iter().map(|system| plan(system, Budget::default())).inspect(|_| bar.inc(1)).collect::<Vec<Plan>>()
        }
    };
    Ok(match (args.json, plans.as_slice()) {
        (true, [one]) if args.up_to.is_none() => report::json(one),
        (true, many) => report::json(&many),
        (false, [one]) if args.up_to.is_none() => report::one(one),
        (false, many) => report::many(many),
    })
}

fn of_profile(context: &Context, (args, path): (&Args, &Path)) -> Result<String, CliError> {
    let profile = Profile::read(path).map_err(CliError::Usage)?;
    let overrides = context.common.overrides()?;
    let file = launch::read(context.common.config.as_deref(), &overrides, &context.environment)?;
    let names = file.router.models.clone();
    let usage = |problem: String| CliError::Usage(format!("profile {}: {problem}", path.display()));
    let wanted: Vec<u32> = match args.requests {
        Some(requests) => vec![requests],
        None => (1..=args.up_to.unwrap_or(UP_TO)).collect(),
    };
    let known = profile.measured(&names).map_err(usage)?;
    let bar = context.progress.count("planning", wanted.len() as u64);
    let plans = wanted.iter().map(|&n| known.plan(n, Budget::default())).inspect(|_| bar.inc(1));
    let outlooks: Vec<Outlook> = plans.collect::<Result<_, _>>().map_err(usage)?;
    bar.finish_and_clear();
    let most = wanted.iter().copied().max().unwrap_or(1);
    let bound = (known.longest(most), file.batching.max_wait_ms);
    let checks = match (args.measure, outlooks.as_slice()) {
        (Some(tokens), [one]) => check(context, (args, file), (&known, one, tokens))?,
        _ => Vec::new(),
    };
    if args.json {
        return Ok(report::json(&json!({ "models": names, "plans": outlooks, "checks": checks })));
    }
    let mut text = match outlooks.as_slice() {
        [one] if args.requests.is_some() => outlook::one(&names, one),
        many => outlook::many(&names, many),
    };
    text += &outlook::notes(&outlooks, bound);
    if !checks.is_empty() {
        text += &outlook::checks(&names, &checks);
    }
    Ok(text)
}

/// Runs what was predicted: the best thresholds and eager starts in turn.
fn check(
    context: &Context,
    (args, file): (&Args, LaunchFile),
    (known, outlook, tokens): (&Measured, &Outlook, u32),
) -> Result<Vec<Check>, CliError> {
    let mut file = file;
    // Thresholds are set for each run.
    (file.batching.policy, file.batching.profile) = (tokenrouter_config::Policy::Eager, None);
    logs::start(context, &file, Talk::Command)?;
    let mut loaded = load(context, file)?;
    let names = loaded.names();
    let mut checks = vec![Check::new(outlook.eager.clone())];
    if outlook.best.thresholds != outlook.eager.thresholds {
        checks.push(Check::new(outlook.best.clone()));
    }
    let bar = context.progress.count("measuring", u64::from(args.repeat) * checks.len() as u64);
    for round in 0..args.repeat {
        for check in &mut checks {
            let thresholds = check.predicted.thresholds.as_slice();
            let trial = Trial { requests: outlook.requests, thresholds, tokens, seed: u64::from(round) };
            let run = measure(&mut loaded, trial)?;
            let broken = |problem| CliError::Broken(Failure::Internal(problem));
            check.runs.push(Checked::new(&run, &names, (known, trial)).map_err(broken)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(checks)
}
