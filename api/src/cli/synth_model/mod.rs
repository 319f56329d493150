//! `tokenrouter synth-model`: a model of a real shape with random weights, for measuring speed. Owner: the process.
//! Invariant: what was written has been loaded and has made a step; what exists is not written over.

use super::files::{self, Passing};
use super::{CliError, Context};
use clap::ValueEnum;
use serde_json::json;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tokenrouter_core::executor::{Draw, Executor, Row, RowOutput, Step};
use tokenrouter_core::ids::RequestId;
use tokenrouter_core::job::Failure;
use tokenrouter_gpu::load::{self, KvMemory, LoadOptions};
use tokenrouter_gpu::weights::synth::{Shape, Synth};
use tokenrouter_kernels::quant::Format;

/// Options of `synth-model`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Architecture
    #[arg(long, value_enum, default_value = "qwen3")]
    arch: Arch,
    /// Shape, by the published model that has it
    #[arg(long, value_enum)]
    size: Size,
    /// Format of the matrices
    #[arg(long, value_enum, default_value = "q8_0")]
    quant: Quant,
    /// File that ends in .gguf, or a folder for a file named after the shape; nothing is written over
    #[arg(long, short, value_name = "PATH")]
    out: PathBuf,
    /// What the weights are drawn from
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one JSON object: path, bytes
    #[arg(long)]
    pub json: bool,
}

/// Architectures that are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Arch {
    /// Qwen3
    Qwen3,
}

/// Published shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Size {
    /// 0.6 billion parameters
    #[value(name = "0.6b")]
    B0_6,
    /// 1.7 billion parameters
    #[value(name = "1.7b")]
    B1_7,
    /// 4 billion parameters
    #[value(name = "4b")]
    B4,
}

/// Formats that are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Quant {
    /// 8.5 bits a weight
    #[value(name = "q8_0")]
    Q8_0,
    /// 4.5 bits a weight
    #[value(name = "q4_0")]
    Q4_0,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    context.common.without_launch_file("synth-model writes a model from its own options")?;
    let Arch::Qwen3 = args.arch;
    let shape = match args.size {
        Size::B0_6 => Shape::QWEN3_0_6B,
        Size::B1_7 => Shape::QWEN3_1_7B,
        Size::B4 => Shape::QWEN3_4B,
    };
    let format = match args.quant {
        Quant::Q8_0 => Format::Q8_0,
        Quant::Q4_0 => Format::Q4_0,
    };
    let path = place(args)?;
    let synth = Synth { shape, format, seed: args.seed };
    let wrong = |error: &dyn std::fmt::Display| CliError::Usage(format!("--out: {error}"));
    let bar = context.progress.bytes("write", synth.bytes().map_err(|error| wrong(&error))?);
    // A model is known by the end of its name.
    let part = Passing::new(files::beside(&path).with_extension("gguf"));
    synth.write(part.path(), &mut |bytes| bar.set_position(bytes)).map_err(|error| wrong(&error))?;
    bar.finish_and_clear();
    try_out(context, part.path())?;
    let bytes = std::fs::metadata(part.path())?.len();
    part.keep_as(&path).map_err(|error| wrong(&error))?;
    let path = path.display().to_string();
    let said = if args.json { json!({ "path": path, "bytes": bytes }).to_string() } else { path };
    Ok(writeln!(io::stdout(), "{said}")?)
}

/// The file to write; folders on the way are made.
fn place(args: &Args) -> Result<PathBuf, CliError> {
    let name = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
        value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    };
    let file = format!(
        "synth-{}-{}-{}-seed{}.gguf",
        name(&|| args.arch.to_possible_value()),
        name(&|| args.size.to_possible_value()),
        name(&|| args.quant.to_possible_value()),
        args.seed
    );
    let is_file = args.out.extension().is_some_and(|extension| extension == "gguf");
    let path = if is_file { args.out.clone() } else { args.out.join(file) };
    let usage = |reason: String| CliError::Usage(format!("--out {}: {reason}", args.out.display()));
    if path.exists() {
        return Err(usage(format!("{} exists; remove it or name another", path.display())));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(|error| usage(error.to_string()))?;
    Ok(path)
}

/// Loads the file and makes one step.
fn try_out(context: &Context, path: &Path) -> Result<(), CliError> {
    let broken = |reason: &dyn std::fmt::Display| {
        CliError::Broken(Failure::Internal(format!("{} was written but {reason}", path.display())))
    };
    let bar = context.progress.count("try", 1);
    let options = LoadOptions { kv: KvMemory::Pages(1), ..LoadOptions::default() };
    let model = load::load(path, &options, &mut |_| ()).map_err(|error| broken(&error))?;
    let mut runner = model.executor().map_err(|error| broken(&error))?;
    let draw = Draw::default();
    let row = Row {
        request: RequestId(0),
        start: 0,
        tokens: vec![65, 66, 67],
        pages: vec![0],
        draw: Some(draw),
        targets: None,
    };
    let output = runner.step(&Step { rows: vec![row] }).map_err(|error| broken(&error))?;
    bar.finish_and_clear();
    match output.rows.first() {
        Some(RowOutput::Drawn(_)) => Ok(()),
        Some(RowOutput::Failed(reason)) => Err(broken(reason)),
        _ => Err(broken(&"a step drew nothing")),
    }
}
