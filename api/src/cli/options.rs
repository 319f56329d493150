//! Options that several commands share. Owner: the command line. Invariant: an option that is given has an effect or is
//! refused.

use super::CliError;
use crate::http::Served;
use crate::http::types::generation::SamplingDefaults;
use crate::launch::Overrides;
use clap::{Args, ValueEnum};
use serde_json::Value as Json;
use std::io::IsTerminal;
use std::path::PathBuf;
use tokenrouter_core::sampling::SamplingParams;

/// Options of every command.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// Launch file; without it the embedded pair of demo models
    #[arg(long, short, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Routing parameter that comes before the launch file's, such as threshold=0.02 (several: a=1,b=2)
    #[arg(long, global = true, value_name = "NAME=VALUE")]
    pub params: Vec<String>,
    /// Form of the log lines on stderr
    #[arg(long, global = true, value_enum)]
    pub log_format: Option<LogFormat>,
    /// Level or filter of the log lines, such as debug or info,tokenrouter=trace; comes before RUST_LOG
    #[arg(long, global = true, value_name = "FILTER")]
    pub log_level: Option<String>,
    /// No progress bars and no closing lines
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

/// Form of the log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    Human,
    /// One JSON object a line
    Json,
}

impl Common {
    /// What comes before the launch file, all `--params` taken together.
    pub fn overrides(&self) -> Result<Overrides, CliError> {
        let params = self.params.iter().map(|text| params(text)).collect::<Result<Vec<_>, _>>()?;
        Ok(Overrides { params: params.into_iter().flatten().collect(), ..Overrides::default() })
    }

    /// Refuses routing parameters, for a command that routes nothing.
    pub fn without_params(&self, why: &str) -> Result<(), CliError> {
        match self.params.is_empty() {
            true => Ok(()),
            false => Err(CliError::Usage(format!("--params: {why}; leave it out"))),
        }
    }

    /// Refuses a launch file and its parameters, for a command that reads none; `why` says what it does instead.
    pub fn without_launch_file(&self, why: &str) -> Result<(), CliError> {
        if self.config.is_some() || !self.params.is_empty() {
            return Err(CliError::Usage(format!("{why}: --config and --params have no meaning here; leave them out")));
        }
        Ok(())
    }
}

/// Reads `a=1,b=text`: values are JSON where they can be, otherwise text.
pub fn params(text: &str) -> Result<Vec<(String, Json)>, CliError> {
    let pair = |part: &str| {
        let (name, value) = part.split_once('=').filter(|(name, _)| !name.trim().is_empty())?;
        let json = serde_json::from_str(value.trim()).unwrap_or_else(|_| Json::String(value.trim().to_owned()));
        Some((name.trim().to_owned(), json))
    };
    let wrong = || CliError::Usage(format!("--params {text}: write NAME=VALUE, as in threshold=0.02"));
    outer_parts(text).into_iter().map(|part| pair(part).ok_or_else(wrong)).collect()
}

/// The parts between commas that stand in no bracket.
fn outer_parts(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0);
    for (at, character) in text.char_indices() {
        match character {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// When colours are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl Color {
    /// Whether output to stdout is coloured.
    pub fn wanted(self, no_color: bool) -> bool {
        match self {
            Color::Auto => !no_color && std::io::stdout().is_terminal(),
            Color::Always => true,
            Color::Never => false,
        }
    }
}

/// How answers are generated.
#[derive(Clone, Debug, Args)]
pub struct Generation {
    /// Who answers: the routed name (the default) or one model's name
    #[arg(long, short, value_name = "NAME")]
    pub model: Option<String>,
    /// Tokens to generate at most
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// 0 = always the likeliest token; without it what the model's makers recommend
    #[arg(long, value_name = "T", value_parser = number::<0, 2>)]
    pub temperature: Option<f32>,
    /// Keep the smallest set of tokens whose probability reaches P
    #[arg(long, value_name = "P", value_parser = number::<0, 1>)]
    pub top_p: Option<f32>,
    /// Keep the K likeliest tokens; 0 = all
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Drop tokens less likely than P times the likeliest
    #[arg(long, value_name = "P", value_parser = number::<0, 1>)]
    pub min_p: Option<f32>,
    /// The same seed gives the same answer
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// End the answer at this text (can be given several times)
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
}

/// A number from LOW to HIGH.
fn number<const LOW: i32, const HIGH: i32>(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "not a number".to_owned())?;
    let range = LOW as f32..=HIGH as f32;
    if range.contains(&value) { Ok(value) } else { Err(format!("must be between {LOW} and {HIGH}")) }
}

impl Generation {
    /// Sampling parameters: what was given, then what the served model recommends.
    pub fn sampling(&self, recommended: SamplingDefaults) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(recommended.temperature),
            top_p: self.top_p.unwrap_or(recommended.top_p),
            top_k: self.top_k.unwrap_or(recommended.top_k),
            min_p: self.min_p.unwrap_or(recommended.min_p),
            repetition_penalty: recommended.repetition_penalty,
            seed: self.seed,
            ..SamplingParams::default()
        }
    }
}

/// The served name that was asked for, the first one when none was.
pub fn served<'a>(served: &'a [Served], name: Option<&str>) -> Result<&'a Served, CliError> {
    let names: Vec<&str> = served.iter().map(|served| served.id.as_str()).collect();
    let found = match name {
        None => served.first(),
        Some(name) => served.iter().find(|served| served.id == name),
    };
    found.ok_or_else(|| {
        let name = name.unwrap_or_default();
        let near = tokenrouter_config::nearest(name, names.iter().copied());
        let hint = near.map_or_else(String::new, |near| format!("did you mean `{near}`? "));
        CliError::Usage(format!("--model {name} is not served; {hint}valid: {}", names.join(", ")))
    })
}
