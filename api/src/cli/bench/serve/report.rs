//! What a run writes as JSON. Pure. Invariant: the document is the one that `docs/bench-serve.schema.json` describes (a test
//! compares them).

use super::compare::{Ratio, ratios};
use super::options::{Args, Settings};
use super::stream::Answer;
use super::summary::{Measured, Summary};
use schemars::JsonSchema;
use serde::Serialize;

/// A run of `tokenrouter bench serve`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Report {
    /// Version of the program.
    pub version: String,
    /// What was done.
    pub settings: Settings,
    /// The run was ended by a signal before it was complete.
    pub stopped: bool,
    /// One server, or the two that were compared.
    pub servers: Vec<Server>,
    /// The second server over the first; none if there was one.
    pub ratios: Option<Vec<Ratio>>,
}

/// What was measured of one server.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Server {
    /// Its address as it was given.
    pub url: String,
    /// The model that was asked.
    pub model: String,
    /// The figures.
    pub summary: Summary,
    /// Every request, in the order of sending.
    pub requests: Vec<Request>,
}

impl Server {
    /// Who it is, for people.
    pub fn title(&self) -> String {
        format!("{} at {}", self.model, self.url)
    }
}

/// One request.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Request {
    /// When it was sent: seconds on a clock that runs only while this server is asked.
    pub start_s: f64,
    /// Why it failed; none if it was answered or cut.
    pub error: Option<String>,
    /// Time to the first token.
    pub ttft_ms: Option<f64>,
    /// Mean time of a token after the first.
    pub tpot_ms: Option<f64>,
    /// Time to the end.
    pub e2el_ms: Option<f64>,
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u32>,
    /// Tokens of the answer.
    pub completion_tokens: Option<u32>,
}

/// One side of a run.
pub struct Side {
    /// Address as it was given.
    pub url: String,
    /// Model that was asked.
    pub model: String,
    /// What was measured.
    pub measured: Measured,
}

impl Report {
    /// The report of these sides.
    pub fn new(args: &Args, settings: &Settings, (sides, stopped): (&[Side], bool)) -> Report {
        let server = |side: &Side| Server {
            url: side.url.clone(),
            model: side.model.clone(),
            summary: side.measured.summary(&args.goodput, &args.percentiles),
            requests: requests(&side.measured),
        };
        let compared = match sides {
            [first, second] => Some(ratios(&first.measured, &second.measured)),
            _ => None,
        };
        Report {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            settings: settings.clone(),
            stopped,
            servers: sides.iter().map(server).collect(),
            ratios: compared,
        }
    }
}

fn requests(measured: &Measured) -> Vec<Request> {
    let request = |(start_s, sent): (f64, &super::drive::Sent)| {
        let answer = sent.outcome.as_ref().and_then(|outcome| outcome.as_ref().ok());
        let ms = |time: fn(&Answer) -> Option<f64>| answer.and_then(time).map(|seconds| 1e3 * seconds);
        Request {
            start_s,
            error: sent.outcome.as_ref().and_then(|outcome| outcome.as_ref().err()).map(ToString::to_string),
            ttft_ms: ms(|answer| Some(answer.ttft)),
            tpot_ms: ms(Answer::tpot),
            e2el_ms: ms(|answer| Some(answer.e2el)),
            prompt_tokens: answer.map(|answer| answer.usage.prompt_tokens),
            completion_tokens: answer.map(|answer| answer.usage.completion_tokens),
        }
    };
    measured.sent().map(request).collect()
}

#[cfg(test)]
mod tests {
    use super::super::summary::tests::example;
    use super::*;

    #[test]
    fn every_request_is_told() {
        let told = requests(&example());
        assert_eq!(told.len(), 6);
        assert_eq!(told.iter().filter(|request| request.error.as_deref() == Some("HTTP 503: no room")).count(), 2);
        assert_eq!((told[3].start_s, told[3].completion_tokens, told[5].ttft_ms), (3.0, Some(2), None));
    }

    /// What this test prints is what the file should hold.
    #[test]
    fn the_documented_schema_is_that_of_the_document() {
        let schema = serde_json::to_string_pretty(&schemars::schema_for!(Report)).expect("JSON") + "\n";
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/bench-serve.schema.json");
        let documented = std::fs::read_to_string(path).unwrap_or_default();
        assert!(documented == schema, "docs/bench-serve.schema.json should be:\n{schema}");
    }
}
