//! `tokenrouter eval`: accuracy, share of each model, hops and speed on a file of problems. Owner: the process.
//! Invariant: every row answers the same problems with the same settings; a problem that fails counts as wrong and is
//! reported.

mod code;
pub(super) mod measure;
pub(super) mod problems;
pub(super) mod report;

use super::logs::{self, Talk};
use super::options;
use super::run::load;
use super::{CliError, Context};
use crate::http::Served;
use crate::launch::{self, Overrides};
use measure::{Bench, Run, Settings};
use report::Row;
use std::io::{self, Write};
use std::sync::Arc;
use tokenrouter_core::job::Target;
use tokenrouter_core::routing::Algorithm;

/// Options of `eval`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    settings: Settings,
    /// Rows: the routed name or a model's name, several times; without it every model and the routed name.
    /// Each --params gives a routed row of its own
    #[arg(long, short, value_name = "NAME")]
    model: Vec<String>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let file = launch::read(context.common.config.as_deref(), &Overrides::default(), &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    let problems = args.settings.problems(context)?;
    let grader = args.settings.grader(&problems)?;
    let variants = variants(context, &file)?;
    let loaded = load(context, file)?;
    let served = launch::served(&loaded);
    let bench = Bench { loaded: &loaded, problems: &problems, settings: &args.settings, grader: &grader };
    let mut rows = Vec::new();
    for Planned { title, served, variant } in planned(args, &served, &variants)? {
        let bar = context.progress.count(&title, problems.len() as u64);
        let algorithm = variant.algorithm.clone();
        let run = Run { title: &title, served, target: served.target, algorithm };
        rows.push(bench.answers(&run, &bar)?.row(&title, loaded.members.len()));
        bar.finish_and_clear();
    }
    let names = loaded.names();
    let text = if args.json { format!("{}\n", report::json(&rows, &names)) } else { report::table(&rows, &names) };
    io::stdout().write_all(text.as_bytes())?;
    note_failures(&rows);
    Ok(())
}

/// Says on stderr which rows have problems that could not be answered, and why.
pub(super) fn note_failures<'a>(rows: impl IntoIterator<Item = &'a Row>) {
    for row in rows {
        if let Some(failure) = &row.failure {
            eprintln!("note: {}: {} problems failed, the first with: {failure}", row.title, row.failed);
        }
    }
}

/// The routing settings to compare: the launch file's, or one for each `--params`.
struct Variant {
    label: String,
    algorithm: Arc<dyn Algorithm>,
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
struct Planned<'a> {
    title: String,
    served: &'a Served,
    variant: &'a Variant,
}

fn planned<'a>(args: &Args, served: &'a [Served], variants: &'a [Variant]) -> Result<Vec<Planned<'a>>, CliError> {
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
            runs.extend(variants.iter().map(|variant| Planned { title: variant.label.clone(), served, variant }));
        } else {
            runs.push(Planned { title: format!("{} alone", served.id), served, variant: &variants[0] });
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod coder_tests;
