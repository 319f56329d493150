//! `tokenrouter bench`: how fast, in this process, without HTTP. Owner: the process. Invariant: what is compared differs in
//! nothing but what its name says.

mod ablate;
mod drive;
mod picture;
mod report;
mod rows;
mod shape;
mod simulated;
mod stage;
mod statistics;

use super::{CliError, Context};

/// Options of `bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Take one thing away at a time: delayed batching, asynchronous models, kept KV, routing
    Ablate(ablate::Args),
}

impl Args {
    /// Whether stdout is for machines.
    pub fn wants_json(&self) -> bool {
        match &self.what {
            What::Ablate(args) => args.json,
        }
    }
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    match &args.what {
        What::Ablate(args) => ablate::run(context, args),
    }
}
