//! `tokenrouter check`: is a launch file right? Owner: the process. Invariant: no weight is loaded and nothing is
//! downloaded; what could not be checked is said.

use super::logs::{self, Talk};
use super::{CliError, Context};
use crate::launch::{self, Downloads, LaunchError, Plan, PlannedModel};
use serde_json::{Value, json};
use std::io::{self, Write};
use tokenrouter_config::Bytes;

/// Options of `check`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the JSON Schema of launch files, for editors, and check nothing
    #[arg(long, conflicts_with = "config")]
    schema: bool,
    /// Print one JSON object: launch_file (as TOML), models, missing
    #[arg(long, conflicts_with = "schema")]
    pub json: bool,
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
    let (toml, plan) = if missing.is_empty() {
        let plan = Plan::new(file, paths.into_iter().flatten().collect(), &context.environment)?;
        (plan.file.to_toml(), Some(plan))
    } else {
        (file.to_toml(), None)
    };
    if args.json {
        let models: Vec<Value> = plan.iter().flat_map(models).collect();
        writeln!(io::stdout(), "{}", json!({ "launch_file": toml, "models": models, "missing": missing }))?;
        return Ok(());
    }
    let facts = plan.as_ref().map(facts).unwrap_or_default();
    io::stdout().write_all(format!("{toml}{facts}").as_bytes())?;
    if !missing.is_empty() && !context.common.quiet {
        eprintln!("note: not downloaded yet: {}; model files are checked when they are served", missing.join(", "));
    }
    Ok(())
}

/// What the model files say.
fn models(plan: &Plan) -> Vec<Value> {
    let model = |model: &PlannedModel| {
        let (limits, config) = (model.limits, &model.inspection.config);
        json!({
            "name": model.name,
            "architecture": config.architecture.to_string(),
            "layers": config.layers,
            "hidden": config.hidden,
            "weight_bytes": model.inspection.weight_bytes,
            "context_length": limits.context_len,
            "kv_tokens": u64::from(limits.pages) * tokenrouter_core::executor::PAGE_TOKENS as u64,
            "vocabulary": model.inspection.tokens.len,
        })
    };
    plan.models.iter().map(model).collect()
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
