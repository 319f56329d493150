//! `tokenrouter plan`: thresholds of delayed batching from the throughput model. Owner: the process. Invariant: every
//! number is printed with how it was found and what is known about better ones.

mod report;
mod system;

use super::{CliError, Context};
use std::io::{self, Write};
use std::path::PathBuf;
use tokenrouter_core::theory::search::{Budget, Plan, plan};
use tokenrouter_core::theory::system::System;

/// Options of `plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// JSON file with N, latency_ticks, P and C of a system
    #[arg(long, value_name = "FILE")]
    system: PathBuf,
    /// Plan for this many live requests instead of the file's N
    #[arg(long, value_name = "N", conflicts_with = "up_to", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Plan for every number of live requests from 1 to this one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    up_to: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let source = system::read(&args.system)?;
    let plans = match args.up_to {
        None => vec![plan(&source.system(args.requests)?, Budget::default())],
        Some(last) => {
            let bar = context.progress.count("planning", u64::from(last));
            let systems: Vec<System> = (1..=last).map(|n| source.system(Some(n))).collect::<Result<_, _>>()?;
            systems.iter().map(|system| plan(system, Budget::default())).inspect(|_| bar.inc(1)).collect::<Vec<Plan>>()
        }
    };
    let text = match (args.json, plans.as_slice()) {
        (true, [one]) if args.up_to.is_none() => report::json(one),
        (true, many) => report::json(&many),
        (false, [one]) if args.up_to.is_none() => report::one(one),
        (false, many) => report::many(many),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(())
}
