//! `tokenrouter train-router`: a head for a pair of models, from the shards of `label`. Owner: the process. Invariant:
//! what is reported was measured on problems that no gradient came from, and a head is written only when its threshold
//! keeps the recall that was asked for.

mod choice;
mod data;
mod fit;
mod network;
mod save;

use super::label::shards::Settings;
use super::logs::{self, Talk};
use super::{CliError, Context};
use crate::launch::{self, Downloads, Overrides};
use choice::Choice;
use clap::ValueEnum;
use data::{Batches, Data, Embeddings, Split};
use fit::{Fit, Plan};
use save::Place;
use serde_json::json;
use std::io::{self, Write};
use std::path::PathBuf;
use tokenrouter_gpu::heads::{Class, FORMAT, Family, HeadConfig, Inputs, R2R_CLASSES};
use tokenrouter_gpu::weights::{self, ModelFiles};
use tokenrouter_kernels::quant::dequantize_row;

/// Options of `train-router`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folders that `label` wrote, all of one pair of models
    #[arg(required = true, value_name = "SHARDS")]
    shards: Vec<PathBuf>,
    /// The algorithm that the head is for
    #[arg(long, value_enum)]
    family: Kind,
    /// Folder for head.json and head.safetensors, as `router.params.head` names it
    #[arg(long, short, value_name = "DIR")]
    out: PathBuf,
    /// Replace the head that is in the folder
    #[arg(long)]
    force: bool,
    /// The small model in the launch file; without it the one that the shards name
    #[arg(long, value_name = "NAME")]
    small: Option<String>,
    #[command(flatten)]
    shape: Shape,
    #[command(flatten)]
    plan: Plan,
    /// Share of the problems that is kept for early stopping, threshold and report
    #[arg(long, value_name = "SHARE", default_value_t = 0.2)]
    validation: f64,
    /// Share of the divergent tokens that the threshold must catch; of those that do, the one that routes least is taken
    #[arg(long, value_name = "SHARE", default_value_t = 0.95)]
    recall: f64,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Sizes of the network.
#[derive(Debug, clap::Args)]
struct Shape {
    /// Widths of the layers; without it H,H for r2r and 2H,H for citer, H being the width of a hidden row
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    layers: Option<Vec<usize>>,
    /// How many times wider an R2R block is inside [default: 2]
    #[arg(long, value_name = "N")]
    expansion: Option<usize>,
    /// What an R2R network reads; without it all three
    #[arg(long, value_enum, value_name = "PART,...", value_delimiter = ',')]
    reads: Option<Vec<Part>>,
    /// Highest logits that an R2R network reads; without it as many as the shards hold
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// R2R: put hidden row and embedding through layer norms and the logits through a softmax
    #[arg(long)]
    normalize_input: bool,
}

/// The families that can be trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// R2R's network: hidden row, candidate and highest logits; its score is the probability of divergence
    R2r,
    /// CITER's MLP over the hidden row; its score is the probability that the candidate is fine
    Citer,
}

/// A part of what an R2R network reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The hidden row after the final norm
    Hidden,
    /// The embedding of the candidate
    Token,
    /// The highest logits
    Logits,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    context.common.without_params("nothing is routed while a router is trained")?;
    for (option, share) in [("--validation", args.validation), ("--recall", args.recall)] {
        if !(share > 0.0 && share <= 1.0) {
            return Err(CliError::Usage(format!("{option} is {share}; it must be a share above 0 and up to 1")));
        }
    }
    args.plan.check()?;
    let place = Place::free(&args.out, args.force)?;
    let data = Data::read(&args.shards)?;
    let small = small(context, args, &data.settings)?;
    let mut config = args.shape.config(args.family, &data.settings)?;
    let embeddings =
        if config.class.inputs().token { embeddings(&small, &data.candidate)? } else { Embeddings::default() };
    let split = data.split(args.validation, args.plan.seed)?;
    let bar = context.progress.count("train", u64::from(args.plan.epochs));
    let batches = Batches { data: &data, config: &config, embeddings: &embeddings };
    let fit = fit::fit(&config, &batches, (&split, &args.plan), &bar)?;
    bar.finish_and_clear();
    let choice = choice::choose(config.family, &fit.scored, args.recall).ok_or_else(|| {
        let recall = args.recall;
        CliError::Usage(format!(
            "no threshold from 0.01 to 0.99 has a recall of {recall} on validation; lower --recall, or raise --recall-factor"
        ))
    })?;
    config.threshold = Some(choice.threshold);
    place.write(&config, &fit.tensors)?;
    let report = Report { config: &config, data: &data, split: &split, fit: &fit, choice };
    let text = if args.json { format!("{}\n", report.json()) } else { report.text() };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

impl Shape {
    /// The description of a head of these sizes for the model of the shards.
    fn config(&self, kind: Kind, settings: &Settings) -> Result<HeadConfig, CliError> {
        let usage = |reason: String| CliError::Usage(reason);
        let hidden = settings.hidden_size;
        if kind == Kind::Citer {
            let given = [
                ("--expansion", self.expansion.is_some()),
                ("--reads", self.reads.is_some()),
                ("--top-k", self.top_k.is_some()),
                ("--normalize-input", self.normalize_input),
            ];
            if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
                return Err(usage(format!(
                    "{option} goes with --family r2r; a citer network reads the hidden row alone"
                )));
            }
        }
        let (family, class, layers, expansion) = match kind {
            Kind::Citer => (Family::Citer, Class::Mlp, vec![2 * hidden, hidden], 0),
            Kind::R2r => (Family::R2r, self.class()?, vec![hidden; 2], self.expansion.unwrap_or(2)),
        };
        let Inputs { hidden: reads_hidden, token, logits } = class.inputs();
        let kept = settings.top_k;
        let top_k = self.top_k.unwrap_or(kept);
        if top_k > kept {
            return Err(usage(format!(
                "--top-k is {top_k}, but the shards hold the {kept} highest logits; label with more"
            )));
        }
        let config = HeadConfig {
            format: FORMAT,
            family,
            class,
            hidden_size: if reads_hidden { hidden } else { 0 },
            embedding_size: if token { hidden } else { 0 },
            logits_size: if logits { top_k } else { 0 },
            layers: self.layers.clone().unwrap_or(layers),
            expansion,
            normalize_input: self.normalize_input,
            threshold: None,
            model: Some(settings.small.clone()),
        };
        config.check().map_err(|reason| usage(format!("the network: {reason}")))?;
        Ok(config)
    }

    /// The network that reads what is asked for.
    fn class(&self) -> Result<Class, CliError> {
        let Some(parts) = &self.reads else { return Ok(Class::HiddenStatesTokenLMHeadLogitsClassifier) };
        let has = |part| parts.contains(&part);
        let wanted = Inputs { hidden: has(Part::Hidden), token: has(Part::Token), logits: has(Part::Logits) };
        let found = R2R_CLASSES.into_iter().find(|class| class.inputs() == wanted);
        found.ok_or_else(|| {
            CliError::Usage(
                "--reads: there are networks for hidden,token,logits and hidden,token and hidden,logits and hidden and logits"
                    .into(),
            )
        })
    }
}

/// Opens the small model and compares it with the one of the shards.
fn small(context: &Context, args: &Args, settings: &Settings) -> Result<ModelFiles, CliError> {
    let mut file = launch::read(context.common.config.as_deref(), &Overrides::default(), &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    let name = args.small.as_ref().unwrap_or(&settings.small);
    let known: Vec<String> = file.models.iter().map(|model| model.name.clone()).collect();
    file.models.retain(|model| model.name == *name);
    let paths = launch::resolve(&file, Downloads::Allowed, (&context.environment, &context.progress))?;
    let Some(path) = paths.into_iter().flatten().next() else {
        return Err(CliError::Usage(format!(
            "{}: the launch file has no model {name}, it has {}; name the small model with --small, or its launch file with --config",
            args.shards[0].display(),
            known.join(", ")
        )));
    };
    let usage = |reason: String| CliError::Usage(format!("model {name}: {reason}"));
    let files = weights::open(&path).map_err(|error| usage(error.to_string()))?;
    let parameters = files.config.tensors().iter().map(|(_, [rows, cols])| *rows as u64 * *cols as u64).sum::<u64>();
    let pairs = [
        ("hidden_size", settings.hidden_size as u64, files.config.hidden as u64),
        ("small_parameters", settings.small_parameters, parameters),
    ];
    match pairs.into_iter().find(|(_, shards, model)| shards != model) {
        Some((field, shards, model)) => Err(usage(format!(
            "{field} is {model}, the shards are of a model with {shards}; label with this model, or name the other one with --small or --config"
        ))),
        None => Ok(files),
    }
}

/// Rows of the model's token embedding for all candidates.
fn embeddings(files: &ModelFiles, candidates: &[u32]) -> Result<Embeddings, CliError> {
    let usage = |reason: String| CliError::Usage(format!("{}: {reason}", files.weights.origin().display()));
    let table = files.weights.tensor("embed.weight").map_err(|error| usage(error.to_string()))?;
    let mut tokens = candidates.to_vec();
    tokens.sort_unstable();
    tokens.dedup();
    let width = table.cols();
    let mut values = vec![0.0; tokens.len() * width];
    let row_bytes = table.format.row_bytes(width).map_err(|error| usage(error.to_string()))?;
    let rows: Vec<&[u8]> = table.bytes.as_slice().chunks(row_bytes.max(1)).collect();
    for (&token, value) in tokens.iter().zip(values.chunks_mut(width.max(1))) {
        let row = rows.get(token as usize).ok_or_else(|| {
            usage(format!("has {} tokens, the shards have `candidate` {token}; label with this model", table.rows()))
        })?;
        dequantize_row(table.format, row, value).map_err(|error| usage(error.to_string()))?;
    }
    Ok(Embeddings { tokens, values, width })
}

/// What was trained and measured.
struct Report<'a> {
    config: &'a HeadConfig,
    data: &'a Data,
    split: &'a Split,
    fit: &'a Fit,
    choice: Choice,
}

impl Report<'_> {
    fn weights(&self) -> usize {
        self.config.tensors().iter().map(|(_, [rows, cols])| rows * cols).sum()
    }

    fn auroc(&self) -> f64 {
        choice::auroc(self.config.family, &self.fit.scored)
    }

    fn text(&self) -> String {
        let Report { config, split, fit, choice, .. } = self;
        let rows = |rows: &[usize]| {
            let divergent = self.data.divergent_of(rows);
            let share = 100.0 * divergent as f64 / rows.len() as f64;
            format!("{} positions, {divergent} divergent ({share:.2} %)", rows.len())
        };
        format!(
            "algorithm: {}\nnetwork: {}, layers {:?}, {} weights\ntraining: {}\nvalidation: {}\npasses: {}, the best one {} with loss {:.5}\n\
             AUROC: {:.5}\nthreshold: {}\nrecall: {:.2} %\nrouted: {:.2} %\n",
            config.family.name(),
            config.class.name(),
            config.layers,
            self.weights(),
            rows(&split.training),
            rows(&split.validation),
            fit.epochs,
            fit.best,
            fit.loss,
            self.auroc(),
            choice.threshold,
            100.0 * choice.recall,
            100.0 * choice.routed
        )
    }

    fn json(&self) -> serde_json::Value {
        let Report { config, split, fit, choice, .. } = self;
        let rows = |rows: &[usize]| json!({ "rows": rows.len(), "divergent": self.data.divergent_of(rows) });
        let curve: Vec<_> = choice::grid()
            .map(|threshold| choice::at(config.family, &fit.scored, threshold))
            .map(|at| json!({ "threshold": at.threshold, "recall": at.recall, "routed": at.routed }))
            .collect();
        json!({
            "head": config,
            "weights": self.weights(),
            "training": rows(&split.training),
            "validation": rows(&split.validation),
            "epochs": fit.epochs,
            "best_epoch": fit.best,
            "loss": fit.loss,
            "auroc": self.auroc(),
            "threshold": choice.threshold,
            "recall": choice.recall,
            "routed": choice.routed,
            "curve": curve,
        })
    }
}

#[cfg(test)]
mod tests;
