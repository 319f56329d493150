//! The command line. Owner: the process. Invariant: settings that are wrong end in one line on stderr and exit code 2,
//! other failures in exit code 1; what a command prints for machines goes to stdout, everything else to stderr.

mod bench;
mod chat;
mod check;
mod completions;
mod convert_router;
mod counted;
mod drawing;
mod eval;
mod files;
mod generate;
mod interrupt;
mod label;
mod logs;
mod options;
mod paint;
mod plan;
mod profile;
mod run;
mod serve;
mod sweep;
mod synth_model;
mod train_router;
mod transcript;

use crate::launch::{Environment, LaunchError};
use crate::progress::Progress;
use clap::{CommandFactory, Parser, Subcommand};
use interrupt::Interrupts;
use options::Common;
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;
use tokenrouter_core::job::{Failure, Refusal};
use tokenrouter_core::routing::catalog::Catalog;

/// An OpenAI-compatible server in which several models write one answer, token by token.
#[derive(Debug, Parser)]
#[command(name = "tokenrouter", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the models over the OpenAI API
    Serve(serve::Args),
    /// Answer one prompt, coloured by the model that wrote each token
    Generate(generate::Args),
    /// Talk to the models
    Chat(chat::Args),
    /// Check a launch file without loading weights, and print it with every default filled in
    Check(check::Args),
    /// Measure accuracy and share of each model on a file of problems
    Eval(eval::Args),
    /// Measure accuracy over the share of the large model, for algorithms at several values of a parameter
    Sweep(sweep::Args),
    /// Label where a small model's tokens lead astray, as training data for train-router
    Label(label::Args),
    /// Train a head for r2r or citer on what label wrote; sweep then shows what it is worth
    TrainRouter(train_router::Args),
    /// Find the best thresholds of delayed batching with the throughput model
    Plan(plan::Args),
    /// Measure what plan needs to know of a launch file: latencies of steps, ways of requests
    Profile(profile::Args),
    /// Write a model of a published shape with random weights
    SynthModel(synth_model::Args),
    /// Measure how fast requests are answered
    Bench(bench::Args),
    /// Turn a published router checkpoint into a folder for `router.params.head`
    ConvertRouter(convert_router::Args),
    /// Print a script that lets a shell complete commands and options
    Completions(completions::Args),
}

/// The whole command line, for those who document it.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Exit code of a command that Ctrl-C ended, as shells have it: 128 and the number of the signal.
const INTERRUPTED: u8 = 130;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// Settings, files or models.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// An option of the command is wrong.
    #[error("{0}")]
    Usage(String),
    /// The runtime did not take the prompt.
    #[error("the prompt is refused: {0}")]
    Refused(#[from] Refusal),
    /// The answer broke off.
    #[error("the answer broke off: {0}")]
    Broken(#[from] Failure),
    /// What was asked for could not be done.
    #[error("{0}")]
    Failed(String),
    /// A signal ended the command; what it had to say is said.
    #[error("interrupted")]
    Interrupted,
    /// Reading or writing failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl CliError {
    fn exit_code(&self) -> ExitCode {
        match self {
            CliError::Launch(error) => ExitCode::from(error.exit_code()),
            CliError::Usage(_) => ExitCode::from(2),
            CliError::Interrupted => ExitCode::from(INTERRUPTED),
            // A reader that went away (`| head`) is no failure.
            CliError::Io(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }
}

/// What every command gets.
struct Context {
    common: Common,
    environment: Environment,
    progress: Progress,
    interrupts: Interrupts,
}

/// Runs a command line, program name included.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    run_with(arguments, Catalog::default())
}

/// As [`run`], in a program that adds routing algorithms of its own.
pub fn run_with(arguments: impl IntoIterator<Item = OsString>, catalog: Catalog) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too, on stdout with code 0. Nothing is left to do if printing fails.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let quiet = cli.common.quiet || cli.command.wants_json();
    let progress = if quiet { Progress::hidden() } else { Progress::on_terminal() };
    let environment = Environment { catalog, ..Environment::read() };
    let context = Context { common: cli.common, environment, progress, interrupts: Interrupts::default() };
    let watched = (context.interrupts.clone(), context.progress.clone(), !context.environment.no_color);
    match interrupt::guard(watched, move || cli.command.run(&context)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let code = error.exit_code();
            if code != ExitCode::SUCCESS && !matches!(error, CliError::Interrupted) {
                eprintln!("error: {error}");
            }
            code
        }
    }
}

impl Command {
    fn run(&self, context: &Context) -> Result<(), CliError> {
        match self {
            Command::Serve(args) => serve::run(context, args),
            Command::Generate(args) => generate::run(context, args),
            Command::Chat(args) => chat::run(context, args),
            Command::Check(args) => check::run(context, args),
            Command::Eval(args) => eval::run(context, args),
            Command::Sweep(args) => sweep::run(context, args),
            Command::Label(args) => label::run(context, args),
            Command::TrainRouter(args) => train_router::run(context, args),
            Command::Plan(args) => plan::run(context, args),
            Command::Profile(args) => profile::run(context, args),
            Command::SynthModel(args) => synth_model::run(context, args),
            Command::Bench(args) => bench::run(context, args),
            Command::ConvertRouter(args) => convert_router::run(context, args),
            Command::Completions(args) => completions::run(context, args),
        }
    }

    fn wants_json(&self) -> bool {
        match self {
            Command::Generate(args) => args.json,
            Command::Eval(args) => args.json,
            Command::Label(args) => args.json,
            Command::Plan(args) => args.json,
            Command::Profile(args) => args.json,
            Command::Bench(args) => args.wants_json(),
            Command::Sweep(args) => args.json,
            Command::TrainRouter(args) => args.json,
            Command::Check(args) => args.json,
            Command::ConvertRouter(args) => args.json,
            Command::SynthModel(args) => args.json,
            Command::Serve(_) | Command::Chat(_) | Command::Completions(_) => false,
        }
    }
}

#[cfg(test)]
mod tests;
