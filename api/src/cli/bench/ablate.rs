//! `tokenrouter bench ablate`: the server with one thing taken away at a time, under a closed loop of workers. Owner: the
//! process. Invariant: rounds are interleaved: each measures every row once, in an order that moves on, so that what the
//! machine does meanwhile falls on all rows alike.

use super::drive::{Seen, Work, drive};
use super::picture;
use super::report::{self, Cell, Report};
use super::rows::{self, Row};
use super::shape::{Corpus, Shape, Sizes};
use super::simulated::Simulated;
use super::stage::Stage;
use crate::cli::logs::{self, Talk};
use crate::cli::{CliError, Context, files};
use crate::launch::{self, LaunchError, Overrides};
use indicatif::ProgressBar;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time for requests that were left unfinished to free what they hold.
const ENDING: Duration = Duration::from_secs(30);

/// Options of `bench ablate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Lengths of prompts and answers
    #[arg(long, value_enum, default_value_t = Shape::LowEffort)]
    shape: Shape,
    /// Factor of all lengths, for slow machines
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = scale)]
    scale: f64,
    /// JSON lines with `question`: prompts as a user would ask them, at the lengths that they have, instead of texts cut to
    /// the length of the shape
    #[arg(long, value_name = "FILE", conflicts_with = "simulated")]
    prompts: Option<PathBuf>,
    /// Requests live at once: one column for each
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,4,8,16",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: Vec<u32>,
    /// Rounds: each measures every row once
    #[arg(long, value_name = "R", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Conversations (single requests but for agentic) of each worker in a round
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    conversations: u32,
    /// Rows to measure, by default all but prefill-ahead; the ratios are to the first
    #[arg(long, value_enum, value_name = "ROW,...", value_delimiter = ',')]
    rows: Vec<Row>,
    /// Routing algorithm instead of the launch file's; --params are its parameters
    #[arg(long, value_name = "NAME", conflicts_with = "simulated")]
    algorithm: Option<String>,
    /// No weights: two models that take 6.0 and 27.9 ms a step, bernoulli routing with p = 0.35 unless --params p= says
    /// otherwise
    #[arg(long)]
    simulated: bool,
    /// Other prompts and draws
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Folder for ablation.json, ablation.md and ablation.svg, written again after every round; made if it is not there
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object instead of the tables
    #[arg(long)]
    pub json: bool,
}

fn scale(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(scale) if 0.0 < scale && scale <= 16.0 => Ok(scale),
        _ => Err("a number above 0 and at most 16".to_owned()),
    }
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let mut sizes = args.shape.sizes(args.scale);
    if let (Some(path), true) = (&args.prompts, sizes.turns > 1) {
        let message = format!(
            "--prompts {}: each question is a conversation of one turn; choose another --shape",
            path.display()
        );
        return Err(CliError::Usage(message));
    }
    let mut stage = stage(context, args, sizes)?;
    if args.rows.contains(&Row::NoGraphs) && !stage.has_graphs() {
        let message = "--rows no-graphs: no model plays graphs; give one device = \"cuda:0\", or leave the row out";
        return Err(CliError::Usage(message.to_owned()));
    }
    let corpus = match &args.prompts {
        Some(path) => stage.questions(path)?,
        None => stage.corpus(context)?,
    };
    sizes.prompt = corpus.longest().unwrap_or(sizes.prompt);
    stage.fits(sizes.longest())?;
    if let Some(folder) = &args.out {
        std::fs::create_dir_all(folder).map_err(|error| unwritable(folder, &error))?;
    }
    let rows = if args.rows.is_empty() { Row::ALL.to_vec() } else { args.rows.clone() };
    let steps = args.repeat as usize * args.workers.len() * rows.len();
    let bar = context.progress.count("ablate", steps as u64);
    let cells = args.workers.iter().flat_map(|&n| rows.iter().map(move |&row| (row, n)));
    let cells = cells.map(|(row, n)| Cell::new(row, n, stage.predicted(row, n))).collect();
    let mut report = report(args, &stage, (sizes, cells));
    for round in 0..args.repeat {
        measure(&mut stage, (args, &corpus, round), (&mut report, &bar))?;
        write(args, &report)?;
    }
    bar.finish_and_clear();
    let text = if args.json { format!("{}\n", report.json()) } else { report::markdown(&report) };
    io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

/// The models, ready for every row.
fn stage(context: &Context, args: &Args, sizes: Sizes) -> Result<Stage, CliError> {
    let most = args.workers.iter().copied().max().unwrap_or(1);
    let overrides = context.common.overrides()?;
    if args.simulated {
        if context.common.config.is_some() {
            return Err(CliError::Usage("--simulated has no use for --config; leave one of them out".to_owned()));
        }
        return Ok(Stage::Simulated(Simulated::new(&overrides.params, most, sizes.longest())?));
    }
    let mut file = launch::read(context.common.config.as_deref(), &Overrides::default(), &context.environment)?;
    if let Some(algorithm) = &args.algorithm
        && file.router.algorithm != *algorithm
    {
        file.router.algorithm.clone_from(algorithm);
        file.router.params.clear();
    }
    let file = launch::with_params(file, &overrides.params, context.environment.catalog)?;
    logs::start(context, &file, Talk::Command)?;
    Stage::load(context, file, most)
}

fn report(args: &Args, stage: &Stage, (sizes, cells): (Sizes, Vec<Cell>)) -> Report {
    let most = args.workers.iter().copied().max().unwrap_or(1);
    let holds = stage.holds(sizes.longest());
    let short = (holds < most).then(|| {
        format!(
            "KV memory holds {holds} requests of {} tokens; with more workers some wait for memory",
            sizes.longest()
        )
    });
    Report {
        shape: clap::ValueEnum::to_possible_value(&args.shape).map_or_else(String::new, |v| v.get_name().to_owned()),
        sizes,
        scale: args.scale,
        prompts: args.prompts.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()),
        conversations: args.conversations,
        models: stage.names(),
        routing: stage.routing(),
        policy: stage.policy(&args.workers),
        note: short,
        cells,
    }
}

/// One round: every row once for every number of workers.
fn measure(
    stage: &mut Stage,
    (args, corpus, round): (&Args, &Corpus, u32),
    (report, bar): (&mut Report, &ProgressBar),
) -> Result<(), CliError> {
    let rows = if args.rows.is_empty() { Row::ALL.to_vec() } else { args.rows.clone() };
    let (models, algorithm) = (report.models.len(), stage.algorithm());
    for (column, &workers) in args.workers.iter().enumerate() {
        for row in rows::rotated(&rows, round as usize + column) {
            bar.set_message(format!("N = {workers}, {}", row.title()));
            let work = Work {
                sizes: report.sizes,
                corpus,
                target: row.target(models),
                algorithm: &*algorithm,
                workers,
                conversations: args.conversations,
                seed: args.seed.wrapping_add(u64::from(round)),
            };
            let seen = play(stage, row, (work, models))?;
            if let Some(cell) = report.cells.iter_mut().find(|cell| cell.row == row && cell.workers == workers) {
                cell.add(seen);
            }
            bar.inc(1);
        }
    }
    Ok(())
}

/// A runtime of its own for one row of one round.
fn play(stage: &mut Stage, row: Row, (work, models): (Work<'_>, usize)) -> Result<Seen, CliError> {
    actix_rt::System::new().block_on(async {
        let runtime = stage.start(row)?;
        let seen = drive(&runtime, work, models).await;
        runtime.drain(ENDING).await;
        seen
    })
}

fn write(args: &Args, report: &Report) -> Result<(), CliError> {
    let Some(folder) = &args.out else { return Ok(()) };
    let json = format!("{}\n", report.json());
    for (kind, text) in [("json", json), ("md", report::markdown(report)), ("svg", picture::picture(report))] {
        let path = folder.join(format!("ablation.{kind}"));
        files::whole(&path, text.as_bytes()).map_err(|error| unwritable(&path, &error))?;
    }
    Ok(())
}

fn unwritable(path: &Path, error: &io::Error) -> CliError {
    let message = format!("{}: cannot be written: {error}; name another folder with --out", path.display());
    CliError::Launch(LaunchError::Option(message))
}
