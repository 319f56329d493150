//! Log lines on stderr, for people or for machines. Owner: the process, once. Invariant: logs never mix with what a
//! command prints on stdout.

use super::options::LogFormat;
use super::{CliError, Context};
use tokenrouter_config::LaunchFile;
use tracing_subscriber::EnvFilter;

/// Whose words are logged where nobody says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Talk {
    /// A server: the launch file's `log_level`.
    Server,
    /// A command that a person looks at: warnings only.
    Command,
}

/// What the HTTP library says of its own start is left out, unless the user chooses a filter.
const QUIET: &str = "actix_server=warn";

/// Starts logging: the command line comes first, then RUST_LOG, then the launch file.
pub fn start(context: &Context, file: &LaunchFile, talk: Talk) -> Result<(), CliError> {
    let (filter, origin) = match (&context.common.log_level, &context.environment.log_filter, talk) {
        (Some(filter), _, _) => (filter.as_str(), "--log-level"),
        (None, Some(filter), _) => (filter.as_str(), "RUST_LOG"),
        (None, None, Talk::Server) => (file.server.log_level.as_str(), "server.log_level"),
        (None, None, Talk::Command) => ("warn", "the default"),
    };
    let chosen = match origin {
        "server.log_level" => format!("{QUIET},{filter}"),
        _ => filter.to_owned(),
    };
    let parsed = EnvFilter::try_new(chosen).map_err(|error| {
        let message = format!(
            "{origin} `{filter}` is no log filter ({error}); write a level such as info or info,tokenrouter=debug"
        );
        match origin {
            "server.log_level" => CliError::Launch(file.error_at("server.log_level", message).into()),
            _ => CliError::Usage(message),
        }
    })?;
    let json = match context.common.log_format {
        Some(format) => format == LogFormat::Json,
        None => file.server.log_format == tokenrouter_config::LogFormat::Json,
    };
    let builder = tracing_subscriber::fmt().with_env_filter(parsed).with_writer(std::io::stderr);
    // A second start in one process (tests) keeps the first.
    let _ = if json {
        builder.json().flatten_event(true).try_init()
    } else {
        builder
            .with_ansi(!context.environment.no_color && std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .try_init()
    };
    Ok(())
}
