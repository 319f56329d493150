//! `tokenrouter convert-router`: a published router checkpoint becomes a folder that a launch file can name. Owner: the
//! process. Invariant: nothing in the checkpoint is executed, and nothing is written unless all of it is understood.

use super::{CliError, Context};
use serde_json::json;
use std::io::{self, Write};
use std::path::PathBuf;
use tokenrouter_gpu::heads::{self, Conversion, HeadConfig};

/// Options of `convert-router`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint of an R2R router (.pt) or a CITER router (.pth), as torch.save wrote it
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// Folder for head.json and head.safetensors; made if it does not exist
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Width of the small model's hidden rows, to be compared with the checkpoint's
    #[arg(long, value_name = "N")]
    hidden_size: Option<usize>,
    /// Print one JSON object: head, weights, notes
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    context.common.without_launch_file("convert-router reads a checkpoint")?;
    let conversion = heads::convert(&args.input, &args.output, args.hidden_size)
        .map_err(|error| CliError::Usage(error.to_string()))?;
    let Conversion { config, parameters, notes } = &conversion;
    if args.json {
        writeln!(io::stdout(), "{}", json!({ "head": config, "weights": parameters, "notes": notes }))?;
        return Ok(());
    }
    io::stdout().write_all(found(&conversion).as_bytes())?;
    for note in notes.iter().filter(|_| !context.common.quiet) {
        eprintln!("note: {note}");
    }
    Ok(())
}

/// What the checkpoint is, a line a fact.
fn found(Conversion { config, parameters, .. }: &Conversion) -> String {
    let HeadConfig { family, class, hidden_size, embedding_size, logits_size, layers, normalize_input, .. } = config;
    let inputs = class.inputs();
    let mut reads = Vec::new();
    if inputs.hidden {
        reads.push(format!("hidden row of {hidden_size}"));
    }
    if inputs.token {
        reads.push(format!("embedding of {embedding_size} of the candidate"));
    }
    if inputs.logits {
        reads.push(format!("{logits_size} highest logits"));
    }
    let mut text = format!("algorithm: {}\nnetwork: {}\n", family.name(), class.name());
    text += &format!("reads: {}{}\n", reads.join(", "), if *normalize_input { ", normalised" } else { "" });
    text += &format!("layers: {layers:?}\nweights: {parameters}\n");
    let threshold = config.threshold.map_or_else(|| "none".to_owned(), |threshold| threshold.to_string());
    text += &format!("threshold: {threshold}\n");
    if let Some(model) = &config.model {
        text += &format!("trained for: {model}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_published_layout_is_described() {
        let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/heads/r2r-default.pt");
        let folder = std::env::temp_dir().join(format!("tokenrouter-convert-{}", std::process::id()));
        let conversion = heads::convert(&checkpoint, &folder, None).expect("a good checkpoint");
        std::fs::remove_dir_all(&folder).expect("the folder was written");
        let text = found(&conversion);
        for line in [
            "algorithm: r2r",
            "network: HiddenStatesTokenLMHeadLogitsClassifier",
            "reads: hidden row of 32, embedding of 32 of the candidate, 20 highest logits",
            "layers: [24, 24, 24]",
            "threshold: 0.40596",
            "trained for: random/small",
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
    }
}
