//! `tokenrouter bench step`: how long a model's steps take, by sequences and new tokens. Owner: the process. Invariant:
//! shapes take turns, round after round, so a slow spell of the machine falls on all of them; every step of a shape is the
//! same step, over the same context.

pub mod subject;

use super::roofline::{ModelReport, Rates, Roofline};
use crate::cli::{CliError, Context};
use serde::Serialize;
use std::fmt::Write;
use std::io::{self, Write as _};
use std::str::FromStr;
use subject::{Drawing, On, Room, Subject, Timing};
use tokenrouter_core::executor::Needs;
use tokenrouter_gpu::weights::ModelConfig;

/// Most sequences of a step, and most tokens of one.
const SEQUENCES_MAX: u32 = 4096;
const STEP_TOKENS_MAX: u32 = 65_536;
/// Tokens of a step that a launch file allows when it does not say: the context is filled in chunks of this size.
pub const CHUNK: u32 = 512;

/// Options of `bench step`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    on: On,
    /// Tokens that every sequence has behind it
    #[arg(long, value_name = "C", default_value_t = 128)]
    context: u32,
    /// Steps to measure: sequences and new tokens of each
    #[arg(long, value_name = "S:N,…", default_value = "1:1,2:1,4:1,8:1,16:1,1:4,4:4")]
    steps: String,
    /// What every row is asked beside its token, as a routing algorithm does: entropy, top:K, hidden
    #[arg(long, value_name = "SIGNAL,…", default_value = "")]
    signals: String,
    /// Steps of every shape
    #[arg(long, value_name = "R", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
}

impl Args {
    /// Whether stdout is for machines.
    pub fn wants_json(&self) -> bool {
        self.on.json
    }
}

/// Sequences and new tokens of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    sequences: u32,
    tokens: u32,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Shape, String> {
        let parts = text.trim().split_once(':');
        let numbers = parts.and_then(|(sequences, tokens)| Some((sequences.parse().ok()?, tokens.parse().ok()?)));
        match numbers {
            Some((sequences @ 1.., tokens @ 1..)) => Ok(Shape { sequences, tokens }),
            _ => Err(format!("{text:?} is no step; write sequences:tokens from 1 up, as in 1:1,8:1,1:4")),
        }
    }
}

impl Shape {
    fn all(self) -> u32 {
        self.sequences.saturating_mul(self.tokens)
    }

    fn name(self) -> String {
        format!("{}:{}", self.sequences, self.tokens)
    }
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    work: ModelReport,
    threads: usize,
    context: u32,
    signals: String,
    repeat: u32,
    load_s: f64,
    #[serde(serialize_with = "by_name")]
    steps: Vec<Measured>,
    #[serde(skip_serializing_if = "Option::is_none")]
    roofline: Option<Roofline>,
}

/// One shape.
#[derive(Debug, Serialize)]
struct Measured {
    #[serde(skip)]
    shape: Shape,
    #[serde(flatten)]
    timing: Timing,
    tokens_per_s: f64,
    #[serde(flatten)]
    rates: Rates,
}

/// An object with the shape as key, in the order of the command.
fn by_name<S: serde::Serializer>(steps: &[Measured], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(steps.iter().map(|step| (step.shape.name(), step)))
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let shapes = shapes(&args.steps)?;
    let needs = needs(&args.signals)?;
    let files = args.on.open(context)?;
    let room = room(&shapes, args.context, &files.config)?;
    let mut subject = args.on.load(context, (&files, room))?;
    let mut roofline = args.on.roofline.then(|| Roofline::new(subject.threads));
    sample(&mut roofline)?;
    let seconds = measure(context, &mut subject, (&shapes, args, needs))?;
    sample(&mut roofline)?;
    let measured = |(&shape, seconds): (&Shape, Vec<f64>)| {
        let timing = Timing::of(seconds);
        let work = subject.work.step((shape.sequences, shape.tokens, args.context), shape.sequences);
        let rates = Rates::of(work, timing.median_ms, roofline.as_ref());
        Measured { shape, timing, tokens_per_s: timing.tokens_per_s(shape.all()), rates }
    };
    let report = Report {
        steps: shapes.iter().zip(seconds).map(measured).collect(),
        model: args.on.model(),
        work: ModelReport::of(&subject.info, &subject.work),
        threads: subject.threads,
        context: args.context,
        signals: args.signals.clone(),
        repeat: args.repeat,
        load_s: subject.load_s,
        roofline,
    };
    let text =
        if args.on.json { serde_json::to_string(&report).map_err(io::Error::other)? + "\n" } else { report.text() };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

/// Takes some samples, if ceilings are wanted.
pub fn sample(roofline: &mut Option<Roofline>) -> Result<(), CliError> {
    match roofline {
        Some(roofline) => roofline.sample().map_err(|error| CliError::Usage(format!("--roofline: {error}"))),
        None => Ok(()),
    }
}

/// The steps of the option; equal ones once.
fn shapes(text: &str) -> Result<Vec<Shape>, CliError> {
    let mut shapes: Vec<Shape> = Vec::new();
    for part in text.split(',') {
        let shape: Shape = part.parse().map_err(|reason| CliError::Usage(format!("--steps {text}: {reason}")))?;
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    Ok(shapes)
}

/// The signals of the option.
fn needs(text: &str) -> Result<Needs, CliError> {
    let mut needs = Needs::default();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let top = part.strip_prefix("top:").and_then(|count| count.parse().ok());
        match (part, top) {
            ("entropy", _) => needs.entropy = true,
            ("hidden", _) => needs.hidden = true,
            (_, Some(count @ 1..)) => needs.top_k = count,
            _ => {
                let text = format!("--signals {text}: {part:?} is no signal; write entropy, top:20 or hidden");
                return Err(CliError::Usage(text));
            }
        }
    }
    Ok(needs)
}

/// What the largest of these steps need.
fn room(shapes: &[Shape], context: u32, config: &ModelConfig) -> Result<Room, CliError> {
    let usage = |text: String| Err(CliError::Usage(text));
    let largest = |size: fn(&Shape) -> u32| shapes.iter().map(size).max().unwrap_or(1);
    let (sequences, tokens) = (largest(|shape| shape.sequences), largest(|shape| shape.tokens));
    if let Some(shape) = shapes.iter().find(|shape| shape.sequences > SEQUENCES_MAX || shape.all() > STEP_TOKENS_MAX) {
        let name = shape.name();
        return usage(format!(
            "--steps {name}: a step has at most {SEQUENCES_MAX} sequences and {STEP_TOKENS_MAX} tokens in all; ask for less"
        ));
    }
    let len = u32::try_from(config.context).unwrap_or(u32::MAX);
    match context.checked_add(tokens) {
        Some(needed) if needed <= len => {
            let step_tokens = largest(|shape| shape.all()).max(CHUNK).max(sequences);
            Ok(Room { sequences, tokens: needed, step_tokens })
        }
        _ if tokens > len => {
            usage(format!("--steps: {tokens} tokens are more than the {len} this model was made for; ask for less"))
        }
        _ => usage(format!(
            "--context {context}: with {tokens} new tokens this is more than the {len} this model was made for; give at most {}",
            len - tokens
        )),
    }
}

/// Seconds of every shape, one for each round; the first round warms up.
fn measure(
    context: &Context,
    subject: &mut Subject,
    (shapes, args, needs): (&[Shape], &Args, Needs),
) -> Result<Vec<Vec<f64>>, CliError> {
    let sequences = shapes.iter().map(|shape| shape.sequences).max().unwrap_or(0);
    let bar = context.progress.count("fill", u64::from(sequences));
    for sequence in 0..sequences {
        subject.prefill((sequence, args.context), Drawing::None)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let bar = context.progress.count("step", u64::from(args.repeat));
    let mut seconds = vec![Vec::new(); shapes.len()];
    for round in 0..=args.repeat {
        for (shape, seconds) in shapes.iter().zip(&mut seconds) {
            let took = subject.step((shape.sequences, args.context, shape.tokens), Drawing::Greedy(needs))?;
            if round > 0 {
                seconds.push(took);
            }
        }
        bar.inc(u64::from(round > 0));
    }
    bar.finish_and_clear();
    Ok(seconds)
}

impl Report {
    fn text(&self) -> String {
        let mut out = self.work.text();
        let (threads, context, repeat) = (self.threads, self.context, self.repeat);
        let _ = writeln!(
            out,
            "{threads} thread(s), {context} tokens of context, {repeat} steps of each shape, loaded in {:.2} s\n",
            self.load_s
        );
        let _ = writeln!(
            out,
            "{:>8} {:>10} {:>10} {:>10} {:>10}  {}",
            "step",
            "median ms",
            "min ms",
            "p90 ms",
            "tokens/s",
            Rates::heads(self.roofline.is_some())
        );
        for step in &self.steps {
            let Timing { median_ms, min_ms, p90_ms } = step.timing;
            let (name, rate, rates) = (step.shape.name(), step.tokens_per_s, step.rates.cells());
            let _ = writeln!(out, "{name:>8} {median_ms:>10.3} {min_ms:>10.3} {p90_ms:>10.3} {rate:>10.1}  {rates}");
        }
        if let Some(roofline) = &self.roofline {
            out.push_str(&roofline.text());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_read_by_name() {
        let all = Needs { entropy: true, top_k: 20, hidden: true, score: false };
        assert_eq!(needs("entropy, top:20,hidden").expect("three"), all);
        assert_eq!(needs("").expect("none"), Needs::default());
        for wrong in ["top", "top:0", "top:70000", "entropy:1", "logits"] {
            let error = needs(wrong).expect_err(wrong).to_string();
            assert!(error.starts_with("--signals ") && error.contains("top:20"), "{error}");
        }
    }

    #[test]
    fn steps_are_read_in_order_and_once() {
        let shape = |sequences, tokens| Shape { sequences, tokens };
        assert_eq!(shapes("8:1, 1:4,8:1").expect("three"), [shape(8, 1), shape(1, 4)]);
        for wrong in ["", "4", "0:1", "1:0", "1:1,", "a:1", "1:-1", "1:1:1", "5000000000:1"] {
            let error = shapes(wrong).expect_err(wrong).to_string();
            assert!(error.starts_with("--steps ") && error.contains("as in 1:1"), "{error}");
        }
    }
}
