//! `tokenrouter check`: is a launch file right? Owner: the process. Invariant: no weight is loaded and nothing is
//! downloaded; what could not be checked is said.

use super::logs::{self, Talk};
use super::{CliError, Context};
use crate::launch::{self, Downloads, LaunchError, Plan};
use std::io::{self, Write};
use tokenrouter_config::Bytes;

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the JSON Schema of launch files, for editors, and check nothing
    #[arg(long, conflicts_with = "config")]
    schema: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    if args.schema {
        writeln!(io::stdout(), "{:#}", tokenrouter_config::schema::json())?;
        return Ok(());
    }
    let file = launch::read(context.common.config.as_deref(), &context.common.overrides()?, &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    launch::keys(&file, &context.environment)?;
    launch::Certificate::read(&file)?;
    launch::algorithm(&file, context.environment.catalog).map_err(LaunchError::from)?;
    let paths = launch::resolve(&file, Downloads::CachedOnly, (&context.environment, &context.progress))?;
    let missing: Vec<String> = file
        .models
        .iter()
        .zip(&paths)
        .filter(|(_, path)| path.is_none())
        .map(|(model, _)| model.name.clone())
        .collect();
    let text = if missing.is_empty() {
        let plan = Plan::new(file, paths.into_iter().flatten().collect(), context.environment.catalog)?;
        format!("{}{}", plan.file.to_toml(), facts(&plan))
    } else {
        file.to_toml()
    };
    io::stdout().write_all(text.as_bytes())?;
    if !missing.is_empty() {
        eprintln!("note: not downloaded yet: {}; model files are checked when they are served", missing.join(", "));
    }
    Ok(())
}

/// What the model files say, as comments below the launch file.
fn facts(plan: &Plan) -> String {
    let mut text = String::new();
    for model in &plan.models {
        let limits = model.limits;
        let config = &model.inspection.config;
        text.push_str(&format!(
            "\n# {}: {}, {} layers of {}, weights {}, context {} tokens, KV memory for {} tokens, {} tokens in the vocabulary",
            model.name,
            config.architecture,
            config.layers,
            config.hidden,
            Bytes(model.inspection.weight_bytes),
            limits.context_len,
            u64::from(limits.pages) * tokenrouter_core::executor::PAGE_TOKENS as u64,
            model.inspection.tokens.len,
        ));
    }
    text + "\n"
}
