//! `tokenrouter bench prefill`: how fast a prompt is taken in that nothing is known of. Owner: the process. Invariant: the
//! prompt comes in chunks as a server feeds it, and its last token draws; the clock adds up the steps alone.

use super::roofline::{ModelReport, Rates, Roofline};
use super::step::subject::{Drawing, On, Room, Timing, chunks};
use super::step::{CHUNK, sample};
use crate::cli::{CliError, Context};
use serde::Serialize;
use std::io::{self, Write};
use tokenrouter_core::executor::Needs;
use tokenrouter_gpu::work::{StepWork, Work};

/// Options of `bench prefill`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    on: On,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Tokens of a step, as `step_tokens_max` of a launch file
    #[arg(long, value_name = "N", default_value_t = CHUNK, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    chunk: u32,
    /// Times the prompt is taken in
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
}

impl Args {
    /// Whether stdout is for machines.
    pub fn wants_json(&self) -> bool {
        self.on.json
    }
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    work: ModelReport,
    threads: usize,
    tokens: u32,
    chunk: u32,
    repeat: u32,
    load_s: f64,
    #[serde(flatten)]
    timing: Timing,
    prefill_tokens_per_s: f64,
    #[serde(flatten)]
    rates: Rates,
    #[serde(skip_serializing_if = "Option::is_none")]
    roofline: Option<Roofline>,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let files = args.on.open(context)?;
    let (tokens, chunk) = (args.tokens, args.chunk);
    if tokens as usize > files.config.context {
        let len = files.config.context;
        let text = format!("--tokens {tokens}: this model was made for {len} tokens; give at most as many");
        return Err(CliError::Usage(text));
    }
    let room = Room { sequences: 1, tokens, step_tokens: chunk };
    let mut subject = args.on.load(context, (&files, room))?;
    let mut roofline = args.on.roofline.then(|| Roofline::new(subject.threads));
    sample(&mut roofline)?;
    let bar = context.progress.count("prefill", u64::from(args.repeat));
    let mut seconds = Vec::new();
    for round in 0..=args.repeat {
        let took = subject.prefill((0, tokens), Drawing::Greedy(Needs::default()))?;
        if round > 0 {
            seconds.push(took);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    sample(&mut roofline)?;
    let timing = Timing::of(seconds);
    let report = Report {
        model: args.on.model(),
        work: ModelReport::of(&subject.info, &subject.work),
        threads: subject.threads,
        tokens,
        chunk,
        repeat: args.repeat,
        load_s: subject.load_s,
        timing,
        prefill_tokens_per_s: timing.tokens_per_s(tokens),
        rates: Rates::of(work(&subject.work, tokens, chunk), timing.median_ms, roofline.as_ref()),
        roofline,
    };
    let text =
        if args.on.json { serde_json::to_string(&report).map_err(io::Error::other)? + "\n" } else { report.text() };
    Ok(io::stdout().write_all(text.as_bytes())?)
}

/// All chunks together.
fn work(work: &Work, tokens: u32, chunk: u32) -> StepWork {
    let step = |(start, len): (u32, u32)| work.step((1, len, start), u32::from(start + len == tokens));
    chunks(tokens, chunk).map(step).fold(StepWork::default(), std::ops::Add::add)
}

impl Report {
    fn text(&self) -> String {
        let Timing { median_ms, min_ms, p90_ms } = self.timing;
        let heads = Rates::heads(self.roofline.is_some());
        let mut out = self.work.text();
        out += &format!(
            "{} thread(s), a prompt of {} tokens in steps of at most {}, {} times, loaded in {:.2} s\n\n",
            self.threads, self.tokens, self.chunk, self.repeat, self.load_s
        );
        out += &format!("{:>10} {:>10} {:>10} {:>10}  {heads}\n", "median ms", "min ms", "p90 ms", "tokens/s");
        out += &format!(
            "{median_ms:>10.2} {min_ms:>10.2} {p90_ms:>10.2} {:>10.1}  {}\n",
            self.prefill_tokens_per_s,
            self.rates.cells()
        );
        out += &self.roofline.as_ref().map_or_else(String::new, Roofline::text);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_gpu::work::Products;

    #[test]
    fn chunks_read_the_weights_again_and_the_last_one_draws() {
        let layers = Products { bytes: 100, int8_macs: 10, ..Products::default() };
        let head = Products { bytes: 7, int8_macs: 3, ..Products::default() };
        let model = Work { layers, head, attention_macs: 1, kv_bytes: 2 };
        let whole = work(&model, 12, 512);
        let cut = work(&model, 12, 5);
        assert_eq!(whole, model.step((1, 12, 0), 1));
        assert_eq!((cut.weight_bytes, cut.int8_macs), (3 * 100 + 7, 12 * 10 + 3));
        assert_eq!(cut.float_macs, whole.float_macs, "every token sees the same tokens");
    }
}
