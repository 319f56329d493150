//! `tokenrouter generate`: one answer, coloured by model, or one JSON object. Owner: the process.

use super::logs::{self, Talk};
use super::options::{self, Color, Generation};
use super::paint::{Painter, painted};
use super::run::{self, Outcome};
use super::transcript::{Run, Transcript};
use super::{CliError, Context, files};
use crate::http::types::chat::{Message, Role};
use crate::launch::{self, Loaded};
use serde_json::{Value as Json, json};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::time::Instant;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::{Job, Prompt, StopRules};

/// Options of `generate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The prompt; - reads it from stdin
    prompt: String,
    #[command(flatten)]
    generation: Generation,
    /// Instructions that come before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON object: text, token_ids, token_models, entropies, hops, usage, timings
    #[arg(long)]
    pub json: bool,
    /// Colour the text by model
    #[arg(long, value_enum, default_value_t, value_name = "WHEN")]
    color: Color,
    /// Write the answer as a picture, coloured by model, for pages that show no terminals
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Runs the command.
pub fn run(context: &Context, args: &Args) -> Result<(), CliError> {
    let file = launch::read(context.common.config.as_deref(), &context.common.overrides()?, &context.environment)?;
    logs::start(context, &file, Talk::Command)?;
    let text = match args.prompt.as_str() {
        "-" => {
            let mut text = String::new();
            io::stdin().read_to_string(&mut text)?;
            text
        }
        text => text.to_owned(),
    };
    let started = Instant::now();
    let loaded = run::load(context, file)?;
    let load_seconds = started.elapsed().as_secs_f64();
    let served = launch::served(&loaded);
    let served = options::served(&served, args.generation.model.as_deref())?;
    let job = Job {
        prompt: prompt(args, served, text.clone())?,
        target: served.target,
        routing: None,
        sampling: args.generation.sampling(served.defaults),
        stop: StopRules {
            max_tokens: args.generation.max_tokens,
            stop: args.generation.stop.clone(),
            ..StopRules::default()
        },
        logprobs: None,
        constraint: None,
        prompt_logprobs: None,
        entropy: args.json,
    };
    let color = !args.json && args.color.wanted(context.environment.no_color);
    let codec = loaded.codec();
    let mut painter = Painter::new(color);
    let outcome = actix_rt::System::new().block_on(async {
        let runtime = loaded.start()?;
        let show = |text: &str, tokens: &[_]| {
            if args.json {
                return Ok(());
            }
            let mut out = io::stdout().lock();
            out.write_all(painter.paint(text, tokens, codec.as_ref()).as_bytes())?;
            out.flush()
        };
        let outcome = run::generate(&runtime, job, show).await;
        runtime.drain(std::time::Duration::ZERO).await;
        outcome
    })?;
    if let Some(file) = &args.svg {
        files::write(file, picture((args, &text), &outcome, &loaded).as_bytes(), "--svg")?;
    }
    if args.json {
        let mut object = describe(&outcome, &loaded.names());
        object["model"] = json!(served.id);
        object["timings"]["load_s"] = json!(load_seconds);
        writeln!(io::stdout(), "{object}")?;
    } else {
        writeln!(io::stdout())?;
        if !context.common.quiet {
            eprintln!("\n{}", summary(&outcome, &loaded, color));
        }
    }
    Ok(())
}

fn prompt(args: &Args, served: &crate::http::Served, text: String) -> Result<Prompt, CliError> {
    if args.raw {
        return Ok(run::raw_prompt(&text));
    }
    let system = args.system.iter().map(|content| Message::new(Role::System, content.as_str()));
    let messages: Vec<Message> = system.chain([Message::new(Role::User, text)]).collect();
    run::chat_prompt(served, &messages)
}

/// The JSON object of an answer.
fn describe(outcome: &Outcome, names: &[String]) -> Json {
    let name = |model: ModelIdx| names.get(model.index()).map_or("", String::as_str);
    let usage = &outcome.usage;
    let by_model: serde_json::Map<String, Json> =
        names.iter().cloned().zip(usage.by_model.iter().map(|count| json!(count))).collect();
    let steady = (outcome.total - outcome.first_token).as_secs_f64();
    json!({
        "model": "",
        "text": outcome.text,
        "token_ids": outcome.tokens.iter().map(|token| token.id).collect::<Vec<_>>(),
        "token_models": outcome.tokens.iter().map(|token| name(token.model)).collect::<Vec<_>>(),
        "entropies": outcome.tokens.iter().map(|token| token.entropy).collect::<Vec<_>>(),
        "hops": usage.hops,
        "finish_reason": outcome.reason.wire(),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "by_model": by_model,
        },
        "timings": {
            "load_s": 0.0,
            "first_token_s": outcome.first_token.as_secs_f64(),
            "total_s": outcome.total.as_secs_f64(),
            "tokens_per_s": outcome.tokens_per_second(),
            "decode_tokens_per_s": f64::from(usage.completion_tokens.saturating_sub(1)) / steady.max(1e-9),
        },
    })
}

/// The models, by index, with what each wrote.
fn writers(outcome: &Outcome, loaded: &Loaded) -> impl Iterator<Item = (ModelIdx, String, u32)> {
    let counted = loaded.names().into_iter().zip(outcome.usage.by_model.clone()).enumerate();
    counted.map(|(index, (name, count))| (ModelIdx(index as u8), name, count))
}

/// The answer as it looks on a terminal; without times, so that the same answer is the same picture.
fn picture((args, asked): (&Args, &str), outcome: &Outcome, loaded: &Loaded) -> String {
    let codec = loaded.codec();
    let runs = Painter::new(true).runs(&outcome.text, &outcome.tokens, codec.as_ref());
    let total = outcome.usage.completion_tokens.max(1);
    let part = |(model, name, count): (ModelIdx, String, u32)| -> Run {
        (model, format!("{name} {count} ({:.0} %)", 100.0 * f64::from(count) / f64::from(total)))
    };
    let parts: Vec<Run> = writers(outcome, loaded).map(part).collect();
    let typed = if args.raw { "tokenrouter generate --raw" } else { "tokenrouter generate" };
    Transcript {
        asked: &format!("{typed} \"{asked}\""),
        runs: &runs,
        parts: &parts,
        rest: &format!("{} hops", outcome.usage.hops),
    }
    .svg()
}

/// Who wrote how much, how often it moved, how fast it was: one line.
pub fn summary(outcome: &Outcome, loaded: &Loaded, color: bool) -> String {
    let total = outcome.usage.completion_tokens.max(1);
    let share = |count: u32| format!("{count} ({:.0} %)", 100.0 * f64::from(count) / f64::from(total));
    let shares = writers(outcome, loaded);
    let shares: Vec<String> =
        shares.map(|(model, name, count)| format!("{} {}", painted(&name, model, color), share(count))).collect();
    format!(
        "{} · {} hops · {} prompt tokens · first token {:.0} ms · {:.0} tokens/s",
        shares.join(" · "),
        outcome.usage.hops,
        outcome.usage.prompt_tokens,
        1e3 * outcome.first_token.as_secs_f64(),
        outcome.tokens_per_second(),
    )
}
