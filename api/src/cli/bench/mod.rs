//! `tokenrouter bench`: how fast, in this process without HTTP, or of any server over HTTP. Owner: the process. Invariant: what is compared differs in
//! nothing but what its name says.

mod ablate;
mod bare;
mod drive;
mod long;
mod picture;
mod prefill;
mod report;
mod roofline;
mod rows;
mod serve;
mod shape;
mod simulated;
mod stage;
mod statistics;
mod step;

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
    /// Answer at length, through the runtime and on the bare executor: what long answers cost apart from attention
    Long(long::Args),
    /// Time single steps of a model: sequences by new tokens
    Step(step::Args),
    /// Time how fast a model takes in a prompt
    Prefill(prefill::Args),
    /// Load any OpenAI endpoint and measure throughput and latency; prints what `vllm bench serve` prints
    Serve(Box<serve::Args>),
}

impl Args {
    /// Whether stdout is for machines.
    pub fn wants_json(&self) -> bool {
        match &self.what {
            What::Ablate(args) => args.json,
            What::Long(args) => args.json,
            What::Step(args) => args.wants_json(),
            What::Prefill(args) => args.wants_json(),
            What::Serve(args) => args.wants_json(),
        }
    }
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    match &args.what {
        What::Ablate(args) => ablate::run(context, args),
        What::Long(args) => long::run(context, args),
        What::Step(args) => step::run(context, args),
        What::Prefill(args) => prefill::run(context, args),
        What::Serve(args) => serve::run(context, args),
    }
}
