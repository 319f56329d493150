//! `tokenrouter completions`: scripts for shells. Owner: the process. Invariant: what is completed is what the command line
//! takes: both come from one definition.

use super::{Cli, CliError, Context};
use clap::CommandFactory;
use clap_complete::{Shell, generate};
use std::io::{self, Write};

/// Options of `completions`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell that reads the script
    #[arg(value_enum)]
    shell: Shell,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    context.common.without_launch_file("completions prints a script")?;
    let mut script = Vec::new();
    generate(args.shell, &mut Cli::command(), "tokenrouter", &mut script);
    Ok(io::stdout().write_all(&script)?)
}
