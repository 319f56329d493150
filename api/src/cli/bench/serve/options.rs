//! Options of `bench serve` and what they mean. Owner: the command line. Invariant: an option that is given has an effect or
//! is refused.

use super::super::super::{CliError, Context};
use clap::ValueEnum;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Requests where neither a number nor a time is given.
const REQUESTS: u32 = 100;
/// Requests at once where no rate is given.
const CONCURRENCY: u32 = 8;

/// Options of `bench serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address of the server, as in http://127.0.0.1:8080; without a path /v1 is meant
    #[arg(long, value_name = "URL")]
    pub url: String,
    /// Measure a second server too, in turns: a block of requests here, one there, one there, one here, and so on
    #[arg(long, value_name = "URL2")]
    pub compare: Option<String>,
    /// Model to ask for; without it the first one of /v1/models
    #[arg(long, short, value_name = "NAME")]
    pub model: Option<String>,
    /// Model to ask the second server for
    #[arg(long, value_name = "NAME", requires = "compare")]
    pub compare_model: Option<String>,
    /// Blocks of requests for each of two servers
    #[arg(long, value_name = "K", default_value_t = 10, requires = "compare", value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub blocks: u32,
    /// What is asked: conversations or plain text
    #[arg(long, value_enum, default_value_t)]
    pub endpoint: Endpoint,
    /// Key for the server (both, if there are two); comes before OPENAI_API_KEY
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Trust the certificates of this file (PEM) as well
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    #[command(flatten)]
    pub load: Load,
    #[command(flatten)]
    pub prompts: Prompts,
    /// A request meets the goal when it stays below these times in ms: ttft:MS, tpot:MS, e2el:MS
    #[arg(long, value_name = "NAME:MS", num_args = 1..)]
    pub goodput: Vec<Goal>,
    /// Percentiles to print
    #[arg(long, value_name = "P,...", value_delimiter = ',', default_value = "99", value_parser = percentile)]
    pub percentiles: Vec<f64>,
    /// Write everything that was measured to this file as JSON; - prints it instead of the text
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with the figures and their curves; it needs nothing from outside
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// When requests are sent.
#[derive(Debug, clap::Args)]
pub struct Load {
    /// Requests at once: the next one is sent when one ends. With --rate no more than these run at once [default: 8, with --rate any number]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    concurrency: Option<u32>,
    /// Requests a second, sent whether others have ended or not
    #[arg(long, value_name = "R", value_parser = above_zero)]
    rate: Option<f64>,
    /// How evenly --rate sends: 1 = at random (Poisson), less = in bursts, more = evenly (gamma distribution of this shape)
    #[arg(long, value_name = "B", default_value_t = 1.0, requires = "rate", value_parser = above_zero)]
    burstiness: f64,
    /// Requests to send [default: 100, with --seconds any number]
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Send no new request after this time
    #[arg(long, value_name = "S", value_parser = above_zero)]
    seconds: Option<f64>,
    /// Requests before the measured ones; they must be answered
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub warmup: u32,
    /// A request that takes longer failed
    #[arg(long, value_name = "S", default_value_t = 600.0, value_parser = above_zero)]
    timeout: f64,
}

/// What is asked.
#[derive(Debug, clap::Args)]
pub struct Prompts {
    /// Ask these instead of made-up prompts, in their order and from the start again: one JSON object a line with `prompt`, `question` or `messages`
    #[arg(long, value_name = "FILE", conflicts_with = "input_tokens")]
    pub prompts: Option<PathBuf>,
    /// Tokens of a made-up prompt as the server counts them, chat template included: N or LOW-HIGH
    #[arg(long, value_name = "N", default_value = "100")]
    pub input_tokens: Span,
    /// Tokens of an answer at most, with --ignore-eos exactly: N or LOW-HIGH
    #[arg(long, value_name = "N", default_value = "100")]
    pub output_tokens: Span,
    /// Ask for tokens beyond the end of text (a field that vLLM, SGLang and TokenRouter know)
    #[arg(long)]
    pub ignore_eos: bool,
    /// Ask for the number of tokens on every chunk, which vLLM, SGLang and TokenRouter can tell: exact times of tokens where
    /// chunks hold several
    #[arg(long)]
    pub count_chunks: bool,
    /// Fields for every request, as in {"temperature": 0}
    #[arg(long, value_name = "JSON", value_parser = object)]
    pub extra: Option<Extra>,
    /// What prompts, lengths and times are drawn from
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Fields for every request.
#[derive(Clone, Debug)]
pub struct Extra(pub Map<String, Value>);

/// What is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// /v1/chat/completions
    #[default]
    Chat,
    /// /v1/completions
    Completions,
}

/// A number of tokens: one, or anything between two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    low: u32,
    high: u32,
}

impl Span {
    /// The number for this random draw.
    pub fn pick(self, bits: u64) -> u32 {
        self.low + (bits % u64::from(self.high - self.low + 1)) as u32
    }
}

impl std::fmt::Display for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.low == self.high { write!(f, "{}", self.low) } else { write!(f, "{}-{}", self.low, self.high) }
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|number| *number > 0);
        match (number(low), number(high)) {
            (Some(low), Some(high)) if low <= high && high <= 10_000_000 => Ok(Span { low, high }),
            _ => Err("write a number of tokens such as 100, or two such as 50-200".to_owned()),
        }
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timed {
    /// Time to the first token.
    Ttft,
    /// Mean time of a token after the first.
    Tpot,
    /// Time to the end.
    E2el,
}

/// A time that a request should stay below.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// What is timed.
    pub timed: Timed,
    /// The limit, in ms.
    pub limit_ms: f64,
}

impl FromStr for Goal {
    type Err = String;

    fn from_str(text: &str) -> Result<Goal, String> {
        let wrong = || "write ttft:MS, tpot:MS or e2el:MS, as in ttft:200".to_owned();
        let (name, limit) = text.split_once(':').ok_or_else(wrong)?;
        let timed = match name {
            "ttft" => Timed::Ttft,
            "tpot" => Timed::Tpot,
            "e2el" => Timed::E2el,
            _ => return Err(wrong()),
        };
        Ok(Goal { timed, limit_ms: above_zero(limit).map_err(|_| wrong())? })
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if value > 0.0 && value.is_finite() { Ok(value) } else { Err("must be above 0".to_owned()) }
}

fn percentile(text: &str) -> Result<f64, String> {
    let value: f64 = text.trim().parse().map_err(|_| "not a number".to_owned())?;
    if value > 0.0 && value < 100.0 { Ok(value) } else { Err("must be above 0 and below 100".to_owned()) }
}

fn object(text: &str) -> Result<Extra, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Ok(Extra(fields)),
        Ok(_) => Err("must be a JSON object, as in {\"temperature\": 0}".to_owned()),
        Err(error) => Err(format!("is no JSON: {error}")),
    }
}

/// When requests are sent, all of it decided. It is printed and written as it is.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Settings {
    /// What was asked.
    pub endpoint: Endpoint,
    /// Most requests at once; none: any number.
    pub max_concurrency: Option<u32>,
    /// Requests a second; none: the next one when one ends.
    pub request_rate: Option<f64>,
    /// Shape of the gamma distribution of the gaps; 1 = Poisson.
    pub burstiness: Option<f64>,
    /// Requests for each server; none: as many as the time allows.
    pub requests: Option<u32>,
    /// Seconds after which no new request was sent.
    pub seconds: Option<f64>,
    /// Requests before the measured ones.
    pub warmup: u32,
    /// Seconds after which a request failed.
    pub timeout: f64,
    /// File of the prompts; none: made up.
    pub prompts: Option<String>,
    /// Tokens of a made-up prompt.
    pub input_tokens: Option<String>,
    /// Tokens of an answer at most.
    pub output_tokens: String,
    /// Answers went on beyond the end of text.
    pub ignore_eos: bool,
    /// Tokens were counted on every chunk.
    pub count_chunks: bool,
    /// Further fields of every request.
    pub extra: Map<String, Value>,
    /// What prompts, lengths and times were drawn from.
    pub seed: u64,
}

impl Args {
    /// What is to be done.
    ///
    /// # Errors
    /// Options of other commands, which mean nothing here.
    pub fn settings(&self, context: &Context) -> Result<Settings, CliError> {
        context.common.without_launch_file("bench serve measures a server that runs and has its own")?;
        let (load, prompts) = (&self.load, &self.prompts);
        Ok(Settings {
            endpoint: self.endpoint,
            max_concurrency: load.concurrency.or(load.rate.is_none().then_some(CONCURRENCY)),
            request_rate: load.rate,
            burstiness: load.rate.map(|_| load.burstiness),
            requests: load.requests.or(load.seconds.is_none().then_some(REQUESTS)),
            seconds: load.seconds,
            warmup: load.warmup,
            timeout: load.timeout,
            prompts: prompts.prompts.as_ref().map(|path| path.display().to_string()),
            input_tokens: prompts.prompts.is_none().then(|| prompts.input_tokens.to_string()),
            output_tokens: prompts.output_tokens.to_string(),
            ignore_eos: prompts.ignore_eos,
            count_chunks: prompts.count_chunks,
            extra: prompts.extra.clone().map(|extra| extra.0).unwrap_or_default(),
            seed: prompts.seed,
        })
    }

    /// Whether stdout is for machines.
    pub fn wants_json(&self) -> bool {
        self.json.as_ref().is_some_and(|path| path.as_os_str() == "-")
    }
}

impl Settings {
    /// How long a request may take.
    pub fn patience(&self) -> Duration {
        Duration::from_secs_f64(self.timeout.min(1e9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_goals_are_read() {
        let span: Span = "50-52".parse().expect("two numbers");
        assert_eq!((0..4).map(|bits| span.pick(bits)).collect::<Vec<_>>(), [50, 51, 52, 50]);
        assert_eq!("7".parse::<Span>().map(|span| span.to_string()), Ok("7".to_owned()));
        for wrong in ["0", "9-3", "x", "-4", "1-"] {
            assert!(wrong.parse::<Span>().is_err(), "{wrong}");
        }
        assert_eq!("tpot:7.5".parse(), Ok(Goal { timed: Timed::Tpot, limit_ms: 7.5 }));
        for wrong in ["itl:3", "ttft", "ttft:-1"] {
            assert!(wrong.parse::<Goal>().is_err(), "{wrong}");
        }
        assert!(percentile("99.9").is_ok() && percentile("100").is_err());
        assert!(object("[1]").is_err() && object("{\"a\": 1}").is_ok());
    }
}
