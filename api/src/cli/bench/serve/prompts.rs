//! What is asked: prompts from a file, or made-up ones of a wanted length. Owner: the run, before anything is measured.
//! Invariant: the same seed and file give the same requests. The length of a made-up prompt is what the server counts: by
//! `/tokenize` where there is one, otherwise estimated from the `usage` of two requests.

use super::super::super::CliError;
use super::arrivals::Draws;
use super::client::{Client, Trouble};
use super::options::{Endpoint, Prompts, Settings};
use hyper::body::Bytes;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Most prompts that are prepared; then they come again.
const PROMPTS_MAX: u32 = 4096;
/// Prompts where the number of requests is not known.
const PROMPTS_TIMED: u32 = 1024;
/// Attempts at a prompt of exactly the wanted length.
const ATTEMPTS: u32 = 48;
/// Attempts at one text before another one is tried.
const RETRY: u32 = 8;
/// Characters of a token where nothing is known yet.
const CHARACTERS: f64 = 4.0;
/// Words of the two requests that lengths are estimated from.
const PROBES: [usize; 2] = [16, 144];
/// Plain words, so that made-up prompts look like text to a tokenizer.
const WORDS: [&str; 64] = [
    "apple", "river", "window", "seven", "market", "yellow", "garden", "number", "letter", "summer", "bridge",
    "second", "forest", "copper", "winter", "people", "castle", "minute", "orange", "travel", "silver", "answer",
    "music", "paper", "stone", "green", "house", "water", "light", "table", "train", "north", "the", "a", "of", "and",
    "to", "in", "is", "was", "for", "with", "on", "as", "at", "by", "from", "that", "this", "are", "how", "many",
    "what", "when", "has", "each", "more", "than", "some", "give", "take", "find", "keep", "make",
];

/// One thing to ask.
#[derive(Clone, Debug, PartialEq)]
enum Ask {
    Text(String),
    Messages(Value),
}

/// What is asked of one server.
pub struct Asked<'a> {
    /// The server.
    pub client: &'a Client,
    /// The model.
    pub model: &'a str,
    /// How.
    pub settings: &'a Settings,
}

/// The prompts of a run, for every server the same.
pub struct Questions(Vec<(Ask, u32)>);

impl Questions {
    /// Reads or makes the prompts; made-up ones have the wanted length at this server.
    ///
    /// # Errors
    /// A file with lines that are no prompts, a server that does not answer, a length that cannot be.
    pub async fn prepare(asked: &Asked<'_>, prompts: &Prompts) -> Result<Questions, CliError> {
        let mut draws = Draws::new(prompts.seed);
        let asks = match &prompts.prompts {
            Some(path) => read(path, asked.settings.endpoint)?,
            None => made(asked, prompts, &mut draws).await?,
        };
        let mut draws = Draws::new(!prompts.seed);
        let with_length = |ask| (ask, prompts.output_tokens.pick(draws.bits()));
        Ok(Questions(asks.into_iter().map(with_length).collect()))
    }

    /// The bodies of the requests.
    pub fn bodies(&self, asked: &Asked<'_>) -> Vec<Bytes> {
        self.0.iter().map(|(ask, tokens)| Bytes::from(body(asked, ask, *tokens).to_string())).collect()
    }
}

fn body(Asked { model, settings, .. }: &Asked<'_>, ask: &Ask, tokens: u32) -> Value {
    let mut fields = Map::new();
    fields.insert("model".to_owned(), json!(model));
    let (name, value) = question(settings.endpoint, ask);
    fields.insert(name.to_owned(), value);
    let limit = match settings.endpoint {
        Endpoint::Chat => "max_completion_tokens",
        Endpoint::Completions => "max_tokens",
    };
    fields.insert(limit.to_owned(), json!(tokens));
    fields.insert("stream".to_owned(), json!(true));
    let mut options = json!({ "include_usage": true });
    if settings.count_chunks {
        options["continuous_usage_stats"] = json!(true);
    }
    fields.insert("stream_options".to_owned(), options);
    if settings.ignore_eos {
        fields.insert("ignore_eos".to_owned(), json!(true));
    }
    fields.extend(settings.extra.clone());
    Value::Object(fields)
}

fn question(endpoint: Endpoint, ask: &Ask) -> (&'static str, Value) {
    match (endpoint, ask) {
        (Endpoint::Chat, Ask::Text(text)) => ("messages", json!([{ "role": "user", "content": text }])),
        (Endpoint::Chat, Ask::Messages(messages)) => ("messages", messages.clone()),
        (Endpoint::Completions, Ask::Text(text)) => ("prompt", json!(text)),
        // Refused when the file is read.
        (Endpoint::Completions, Ask::Messages(messages)) => ("prompt", json!(messages.to_string())),
    }
}

fn read(path: &Path, endpoint: Endpoint) -> Result<Vec<Ask>, CliError> {
    let usage = |reason: String| CliError::Usage(format!("--prompts {}{reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| usage(format!(": {error}")))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let ask = |(number, line): (usize, &str)| {
        let wrong = |reason: &str| {
            usage(format!(":{}: {reason}; each line is {{\"prompt\": \"…\"}} or {{\"messages\": […]}}", number + 1))
        };
        let mut line: Value = serde_json::from_str(line).map_err(|error| wrong(&error.to_string()))?;
        let found = ["prompt", "question"].iter().find_map(|name| line[*name].as_str());
        match (found, line["messages"].is_array()) {
            (Some(text), false) => Ok(Ask::Text(text.to_owned())),
            (None, true) if endpoint == Endpoint::Chat => Ok(Ask::Messages(line["messages"].take())),
            (None, true) => Err(wrong("`messages` goes with --endpoint chat")),
            _ => Err(wrong("has neither a `prompt` that is a text nor `messages`")),
        }
    };
    let asks: Vec<Ask> = lines.map(ask).collect::<Result<_, _>>()?;
    if asks.is_empty() { Err(usage(": holds no prompt".to_owned())) } else { Ok(asks) }
}

async fn made(asked: &Asked<'_>, prompts: &Prompts, draws: &mut Draws) -> Result<Vec<Ask>, CliError> {
    let mut ruler = Ruler::find(asked).await.map_err(|trouble| {
        let message = format!("{} does not say how long a prompt is: {trouble}", asked.client.address.beside(""));
        CliError::Failed(message)
    })?;
    let number = asked.settings.requests.unwrap_or(PROMPTS_TIMED).min(PROMPTS_MAX);
    let mut asks = Vec::with_capacity(number as usize);
    for _ in 0..number {
        let wanted = prompts.input_tokens.pick(draws.bits());
        asks.push(Ask::Text(ruler.text(asked, wanted, draws).await?));
    }
    Ok(asks)
}

/// How the length of a prompt is found.
enum Ruler {
    /// The server counts.
    Tokenize { characters: f64 },
    /// Tokens of an empty prompt and of a word.
    Usage { empty: f64, word: f64 },
}

impl Ruler {
    async fn find(asked: &Asked<'_>) -> Result<Ruler, Trouble> {
        if count(asked, "a").await.is_ok() {
            return Ok(Ruler::Tokenize { characters: CHARACTERS });
        }
        let mut draws = Draws::new(0);
        let mut tokens = [0.0; 2];
        for (tokens, words) in tokens.iter_mut().zip(PROBES) {
            let ask = Ask::Text(some_words(&mut draws, words));
            let answer = asked.client.stream(&path(asked), Bytes::from(body(asked, &ask, 1).to_string())).await?;
            *tokens = f64::from(answer.usage.prompt_tokens);
        }
        let word = ((tokens[1] - tokens[0]) / (PROBES[1] - PROBES[0]) as f64).max(0.1);
        Ok(Ruler::Usage { empty: tokens[0] - word * PROBES[0] as f64, word })
    }

    async fn text(&mut self, asked: &Asked<'_>, wanted: u32, draws: &mut Draws) -> Result<String, CliError> {
        match self {
            Ruler::Usage { empty, word } => {
                let words = ((f64::from(wanted) - *empty) / *word).round();
                if words < 1.0 {
                    return Err(too_short(wanted, *empty as u32));
                }
                Ok(some_words(draws, words as usize))
            }
            Ruler::Tokenize { characters } => fitted(asked, (wanted, characters), draws).await,
        }
    }
}

/// A text of exactly this many tokens where there is one, otherwise of nearly as many.
async fn fitted(
    asked: &Asked<'_>,
    (wanted, characters): (u32, &mut f64),
    draws: &mut Draws,
) -> Result<String, CliError> {
    let mut text = String::new();
    let mut length = (f64::from(wanted) * *characters).max(1.0) as usize;
    let mut best: Option<(u32, String)> = None;
    for attempt in 1..=ATTEMPTS {
        if attempt.is_multiple_of(RETRY) {
            // This text has no end of the wanted length; another one has.
            text.clear();
        }
        while text.len() < length {
            text.push_str(&some_words(draws, 16));
            text.push(' ');
        }
        let part = &text[..length];
        let tokens = count(asked, part).await.map_err(|trouble| CliError::Failed(format!("/tokenize: {trouble}")))?;
        let off = tokens.abs_diff(wanted);
        if best.as_ref().is_none_or(|(least, _)| off < *least) {
            best = Some((off, part.to_owned()));
        }
        if off == 0 || (length == 1 && tokens > wanted) {
            break;
        }
        let step = ((f64::from(off) * *characters * 0.9) as usize).max(1);
        length = if tokens < wanted { length + step } else { length.saturating_sub(step).max(1) };
        *characters = (*characters * 0.9 + 0.1 * part.len() as f64 / f64::from(tokens.max(1))).clamp(0.25, 16.0);
    }
    match best {
        Some((off, text)) if off <= 2 + wanted / 20 => Ok(text),
        Some((off, _)) => Err(too_short(wanted, wanted + off)),
        None => Err(too_short(wanted, 1)),
    }
}

fn too_short(wanted: u32, least: u32) -> CliError {
    CliError::Usage(format!("--input-tokens {wanted}: no prompt has so few tokens here; ask for more than {least}"))
}

fn some_words(draws: &mut Draws, number: usize) -> String {
    let words: Vec<&str> = (0..number).map(|_| WORDS[(draws.bits() % WORDS.len() as u64) as usize]).collect();
    words.join(" ")
}

/// The path that is measured.
pub fn path(asked: &Asked<'_>) -> String {
    asked.client.address.api(match asked.settings.endpoint {
        Endpoint::Chat => "/chat/completions",
        Endpoint::Completions => "/completions",
    })
}

/// Tokens of a prompt as the server counts them.
async fn count(asked: &Asked<'_>, text: &str) -> Result<u32, Trouble> {
    let (name, value) = question(asked.settings.endpoint, &Ask::Text(text.to_owned()));
    let body = json!({ "model": asked.model, name: value });
    let (status, found) = asked.client.whole(&asked.client.address.beside("/tokenize"), Some(&body)).await?;
    let count = found["count"].as_u64().and_then(|count| u32::try_from(count).ok()).filter(|_| status == 200);
    count.ok_or_else(|| Trouble::new(&format!("HTTP {status}"), "no `count`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, text: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("tokenrouter-prompts-{}-{name}", std::process::id()));
        std::fs::write(&path, text).expect("written");
        path
    }

    #[test]
    fn lines_of_a_file_are_prompts() {
        let path = file(
            "good",
            "{\"prompt\": \"a\"}\n\n{\"question\": \"b\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"c\"}]}\n",
        );
        let asks = read(&path, Endpoint::Chat).expect("three prompts");
        assert_eq!(asks[..2], [Ask::Text("a".into()), Ask::Text("b".into())]);
        assert!(matches!(&asks[2], Ask::Messages(messages) if messages[0]["content"] == "c"));
        let error = read(&path, Endpoint::Completions).expect_err("messages are no text").to_string();
        assert!(error.contains(":4:") && error.contains("--endpoint chat"), "{error}");
        for (text, part) in [("{\"prompt\": 3}", ":1:"), ("x", ":1:"), ("\n", "holds no prompt")] {
            let error = read(&file("wrong", text), Endpoint::Chat).expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
        std::fs::remove_file(path).expect("removed");
        std::fs::remove_file(file("wrong", "")).expect("removed");
    }
}
