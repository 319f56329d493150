//! `tokenrouter sweep`: accuracy over the share of large tokens, for algorithms at several values of a parameter.
//! Owner: the process. Invariant: every row answers the same problems with the same prompts and settings; each comparison
//! holds both models alone, the oracle, and routing whole requests at random and by a prompt classifier.

mod classifier;
mod grid;
mod oracle;
mod query;
mod report;
mod svg;

use super::eval::measure::{Answers, Bench, Grader, Run, Settings};
use super::eval::{self, problems::Problem, report::Row};
use super::logs::{self, Talk};
use super::run::Outcome;
use super::{CliError, Context, files, options};
use crate::launch::{self, LaunchError, Loaded, Overrides};
use grid::{Series, Values, real};
use indicatif::ProgressBar;
use oracle::Oracle;
use query::Alone;
use report::Point;
use serde_json::{Number, Value as Json};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenrouter_config::LaunchFile;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::Target;
use tokenrouter_core::routing::{Algorithm, HeadSpec};

/// Models of a sweep: a small one and a large one.
const MODELS: usize = 2;
const SMALL: Target = Target::Only(ModelIdx(0));
const LARGE: Target = Target::Only(ModelIdx(1));

/// Options of `sweep`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    settings: Settings,
    /// Algorithm to run (several times); KEY=VALUE sets its other parameters. Without it r_stitch and bernoulli
    #[arg(long, value_name = "NAME[:KEY=VALUE,...]")]
    algorithm: Vec<String>,
    /// Parameter of the algorithm that changes; one for each --algorithm, in the same order
    #[arg(long, value_name = "NAME")]
    param: Vec<String>,
    /// Its values: 0.005,0.02,0.1 or LOW:HIGH:COUNT or LOW:HIGH:COUNT:log; one for each --algorithm
    #[arg(long, value_name = "VALUES", value_parser = grid::values, allow_hyphen_values = true)]
    values: Vec<Values>,
    /// Shares of whole requests that go to the large model, at random and by a prompt classifier, for comparison
    #[arg(long, value_name = "VALUES", value_parser = grid::values, default_value = "0.1,0.25,0.5,0.75")]
    query: Values,
    /// Folder for sweep.csv, sweep.json and sweep.svg, written again after every row; made if it is not there
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let file = launch::read(context.common.config.as_deref(), &Overrides::default(), &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    let series = wanted(context, args, &file)?;
    let problems = args.settings.problems(context)?;
    let grader = args.settings.grader(&problems)?;
    if let Some(folder) = &args.out {
        std::fs::create_dir_all(folder).map_err(|error| unwritable(folder, &error))?;
    }
    let plans = series.into_iter().map(|series| plan(context, &file, series)).collect::<Result<Vec<_>, _>>()?;
    let sets = load(context, &plans)?;
    let routed: usize = plans.iter().map(|plan| plan.variants.len()).sum();
    let bar = context.progress.count("sweep", ((3 + routed) * problems.len()) as u64);
    let sweep = Sweep { args, problems: &problems, grader: &grader, sets: &sets, bar: &bar };
    let points = sweep.points(&plans)?;
    bar.finish_and_clear();
    let names = sets[0].loaded.names();
    show(args, &points, &names)
}

/// The series asked for, or the usual ones.
fn wanted(context: &Context, args: &Args, file: &LaunchFile) -> Result<Vec<Series>, CliError> {
    let usage = |message: String| Err(CliError::Usage(message));
    if !context.common.params.is_empty() {
        return usage("--params has no meaning for sweep; write --algorithm NAME:KEY=VALUE".to_owned());
    }
    let models = file.router.models.len();
    if models != MODELS {
        return usage(format!("a sweep compares a small and a large model, but the launch file routes {models}"));
    }
    if let Some(share) = args.query.0.iter().find(|share| !(0.0..=1.0).contains(&real(share))) {
        return usage(format!("--query {share}: a share is within 0 and 1"));
    }
    let series = grid::series(&args.algorithm, &args.param, &args.values)?;
    if series.is_empty() { grid::usual() } else { Ok(series) }
}

/// A series whose algorithms are built; no weight is read yet.
struct Plan {
    series: Series,
    /// The launch file that loads the models as the algorithm needs them.
    file: LaunchFile,
    /// The algorithm at each value.
    variants: Vec<Arc<dyn Algorithm>>,
    /// The learned head that each model needs.
    heads: Vec<Option<HeadSpec>>,
}

fn plan(context: &Context, file: &LaunchFile, series: Series) -> Result<Plan, CliError> {
    let mut base = file.clone();
    if base.router.algorithm != series.algorithm {
        base.router.algorithm.clone_from(&series.algorithm);
        base.router.params.clear();
    }
    base.router.params.extend(series.fixed.iter().cloned());
    let at = |value: &Number| {
        let mut file = base.clone();
        file.router.params.insert(series.param.clone(), Json::Number(value.clone()));
        file
    };
    let build = |value: &Number| {
        launch::algorithm(&at(value), context.environment.catalog).map_err(|error| {
            let Series { algorithm, param, .. } = &series;
            CliError::Usage(format!("--algorithm {algorithm} with {param} = {value}: {}", error.message))
        })
    };
    let variants = series.values.iter().map(build).collect::<Result<Vec<_>, _>>()?;
    let models = 0..file.router.models.len() as u8;
    let heads = models.map(|model| variants.first().and_then(|first| first.head(ModelIdx(model)))).collect();
    let file = series.values.first().map_or_else(|| base.clone(), at);
    Ok(Plan { series, file, variants, heads })
}

/// Models in memory with the learned heads they carry.
struct Set {
    heads: Vec<Option<HeadSpec>>,
    loaded: Loaded,
}

impl Set {
    fn serves(&self, heads: &[Option<HeadSpec>]) -> bool {
        self.heads.iter().zip(heads).all(|(have, need)| need.is_none() || have == need)
    }
}

/// Loads the models once, and once more only for algorithms that need other heads.
fn load(context: &Context, plans: &[Plan]) -> Result<Vec<Set>, CliError> {
    let mut sets: Vec<Set> = Vec::new();
    for plan in plans {
        if !sets.iter().any(|set| set.serves(&plan.heads)) {
            let loaded = super::run::load(context, plan.file.clone())?;
            sets.push(Set { heads: plan.heads.clone(), loaded });
        }
    }
    Ok(sets)
}

/// Everything that the rows share.
struct Sweep<'a> {
    args: &'a Args,
    problems: &'a [Problem],
    grader: &'a Grader,
    sets: &'a [Set],
    bar: &'a ProgressBar,
}

/// One row.
struct Wanted<'a> {
    series: &'a str,
    setting: Option<(&'a str, &'a Number)>,
}

impl Wanted<'_> {
    fn title(&self) -> String {
        match self.setting {
            Some((param, value)) => format!("{} {param}={value}", self.series),
            None => self.series.to_owned(),
        }
    }

    fn point(&self, row: Row) -> Point {
        let setting = self.setting.map(|(param, value)| (param.to_owned(), value.clone()));
        Point { series: self.series.to_owned(), setting, row }
    }
}

impl Sweep<'_> {
    /// Both models alone, the oracle, whole requests at random and by a classifier, then every algorithm. The files are
    /// written after each: a sweep of real models takes long, and what it has found stays if it is ended.
    fn points(&self, plans: &[Plan]) -> Result<Vec<Point>, CliError> {
        let loaded = &self.sets[0].loaded;
        let names = loaded.names();
        let mut points = Vec::new();
        let mut alone = |name: &str, target: Target| {
            let series = format!("{name} alone");
            let wanted = Wanted { series: &series, setting: None };
            let answers = self.answers(loaded, &wanted, (target, &loaded.algorithm))?;
            points.push(wanted.point(answers.row(&wanted.title(), MODELS)));
            Ok::<_, CliError>(answers)
        };
        let alone = Alone { small: alone(&names[0], SMALL)?, large: alone(&names[1], LARGE)? };
        let oracle: Arc<dyn Algorithm> = Arc::new(Oracle(Arc::new(self.tokens(&alone.large))));
        points.push(self.measure(loaded, &Wanted { series: "oracle", setting: None }, &oracle)?);
        points.extend(self.whole_requests(&alone));
        self.write(&points)?;
        for Plan { series, variants, heads, .. } in plans {
            let own = self.sets.iter().find(|set| set.serves(heads)).map_or(loaded, |set| &set.loaded);
            for (value, algorithm) in series.values.iter().zip(variants) {
                let setting = Some((series.param.as_str(), value));
                points.push(self.measure(own, &Wanted { series: &series.name, setting }, algorithm)?);
                self.write(&points)?;
            }
        }
        Ok(points)
    }

    /// Whole requests to one model, for each share.
    fn whole_requests(&self, alone: &Alone) -> Vec<Point> {
        let settings = &self.args.settings;
        let ranked = alone.ranked(self.problems, settings.seed_of(0));
        let row = |series, share, to_large: &dyn Fn(usize) -> bool| {
            let wanted = Wanted { series, setting: Some(("share", share)) };
            wanted.point(alone.row(&wanted.title(), MODELS, to_large))
        };
        let shares = &self.args.query.0;
        let at_random = shares
            .iter()
            .map(|share| row("query at random", share, &|index| query::by_lot(settings.seed_of(index), real(share))));
        let classified = shares.iter().map(|share| {
            let large = query::first(&ranked, real(share));
            row("query by classifier", share, &|index| large[index])
        });
        at_random.chain(classified).collect()
    }

    /// The tokens of the answers, by the seeds of the problems.
    fn tokens(&self, answers: &Answers) -> oracle::Answers {
        let ids = |outcome: &Outcome| outcome.tokens.iter().map(|token| token.id).collect();
        let given = answers.each.iter().enumerate();
        given
            .filter_map(|(index, answer)| Some((self.args.settings.seed_of(index), ids(&answer.as_ref().ok()?.0))))
            .collect()
    }

    fn write(&self, points: &[Point]) -> Result<(), CliError> {
        let Some(folder) = &self.args.out else { return Ok(()) };
        let names = self.sets[0].loaded.names();
        let large = names.get(report::LARGE).map_or("large", String::as_str);
        let object = object(points, &names);
        for (kind, text) in [("csv", report::csv(points)), ("json", object), ("svg", svg::picture(points, large))] {
            let path = folder.join(format!("sweep.{kind}"));
            files::whole(&path, text.as_bytes()).map_err(|error| unwritable(&path, &error))?;
        }
        Ok(())
    }

    fn measure(&self, loaded: &Loaded, wanted: &Wanted<'_>, with: &Arc<dyn Algorithm>) -> Result<Point, CliError> {
        let answers = self.answers(loaded, wanted, (Target::Routed, with))?;
        Ok(wanted.point(answers.row(&wanted.title(), MODELS)))
    }

    fn answers(
        &self,
        loaded: &Loaded,
        wanted: &Wanted<'_>,
        (target, algorithm): (Target, &Arc<dyn Algorithm>),
    ) -> Result<Answers, CliError> {
        let Sweep { args, problems, grader, .. } = *self;
        let served = launch::served(loaded);
        let (title, served) = (wanted.title(), options::served(&served, None)?);
        let bench = Bench { loaded, problems, settings: &args.settings, grader };
        bench.answers(&Run { title: &title, served, target, algorithm: algorithm.clone() }, self.bar)
    }
}

/// Prints the table or the object.
fn show(args: &Args, points: &[Point], names: &[String]) -> Result<(), CliError> {
    let rows = report::rows(points);
    let text = if args.json { object(points, names) } else { eval::report::table(&rows, names) };
    io::stdout().write_all(text.as_bytes())?;
    eval::note_failures(&rows);
    Ok(())
}

fn object(points: &[Point], names: &[String]) -> String {
    format!("{}\n", report::json(points, names))
}

fn unwritable(path: &Path, error: &io::Error) -> CliError {
    let message = format!("{}: cannot be written: {error}; name another folder with --out", path.display());
    CliError::Launch(LaunchError::Option(message))
}
