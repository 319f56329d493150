//! Judges: whether the small model's token leads somewhere else than the large model's. Owner: the command. Invariant: a
//! judge sees texts alone; what it cannot tell is unknown and never becomes a label.

use crate::cli::CliError;
use crate::cli::eval::problems::Check;
use clap::ValueEnum;
use serde_json::{Value as Json, json};
use std::time::Duration;
use tokenrouter_core::job::Failure;

/// Which judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// The final answer of the complete continuations: neutral if that of the small model's token is right as well.
    /// Where the large model's own answer is wrong, its positions that differ are left out
    Exact,
    /// The continuations to the end of the sentence, letter by letter
    Equal,
    /// A model behind an OpenAI-compatible endpoint is asked whether the sentences differ in meaning
    Endpoint,
}

impl Kind {
    /// Its name on the command line and in the manifest.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Exact => "exact",
            Kind::Equal => "equal",
            Kind::Endpoint => "endpoint",
        }
    }
}

/// How far continuations go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// To the end of the text.
    Text,
    /// To the end of the sentence.
    Sentence,
}

/// A position where the models differ.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// What was asked.
    pub question: &'a str,
    /// The right answer; empty where none is known.
    pub right: &'a str,
    /// The answer before this position.
    pub before: &'a str,
    /// The large model's continuation, its own token first.
    pub large: &'a str,
    /// The large model's continuation after the small model's token, that token first.
    pub small: &'a str,
}

/// What a judge says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The small model's token leads somewhere else: label 1.
    Divergent,
    /// It does not matter: label 0.
    Neutral,
    /// It cannot be told: no label.
    Unknown,
}

/// Judges positions where the models differ.
pub trait Judge {
    /// How far it wants the continuations.
    fn reach(&self) -> Reach;

    /// Its verdict.
    ///
    /// # Errors
    /// [`CliError::Broken`] when it cannot be asked.
    fn verdict(&self, case: Case<'_>) -> Result<Verdict, CliError>;
}

/// [`Kind::Exact`].
pub struct Exact(pub Check);

/// [`Kind::Equal`].
pub struct Equal;

/// [`Kind::Endpoint`].
pub struct Endpoint {
    agent: ureq::Agent,
    url: String,
    model: String,
}

impl Judge for Exact {
    fn reach(&self) -> Reach {
        Reach::Text
    }

    fn verdict(&self, case: Case<'_>) -> Result<Verdict, CliError> {
        let right = |continuation: &str| self.0.matches(&format!("{}{continuation}", case.before), case.right);
        Ok(match (right(case.large), right(case.small)) {
            (false, _) => Verdict::Unknown,
            (true, true) => Verdict::Neutral,
            (true, false) => Verdict::Divergent,
        })
    }
}

impl Judge for Equal {
    fn reach(&self) -> Reach {
        Reach::Sentence
    }

    fn verdict(&self, case: Case<'_>) -> Result<Verdict, CliError> {
        Ok(if case.large == case.small { Verdict::Neutral } else { Verdict::Divergent })
    }
}

impl Endpoint {
    /// A judge behind `url`, which ends in `/v1` or so; `/chat/completions` is put behind it.
    pub fn new(url: &str, model: String) -> Endpoint {
        let config = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(120))).build();
        let url = format!("{}/chat/completions", url.trim_end_matches('/'));
        Endpoint { agent: config.into(), url, model }
    }

    fn ask(&self, prompt: &str) -> Result<String, ureq::Error> {
        let body = json!({
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": 16,
        });
        let mut response =
            self.agent.post(&self.url).header("content-type", "application/json").send(body.to_string())?;
        response.body_mut().read_to_string()
    }
}

impl Judge for Endpoint {
    fn reach(&self) -> Reach {
        Reach::Sentence
    }

    /// An answer that starts with neither word is no verdict.
    fn verdict(&self, case: Case<'_>) -> Result<Verdict, CliError> {
        if case.large == case.small {
            return Ok(Verdict::Neutral);
        }
        let prompt = format!(
            "Question:\n{}\n\nAn answer begins:\n{}\n\nTwo ways to go on:\nA: {}\nB: {}\n\n\
             Do A and B differ in meaning, in a way that matters for the answer? Reply with one word: DIFFERENT or SAME.",
            case.question, case.before, case.large, case.small
        );
        let broken = |reason: String| {
            CliError::Broken(Failure::Internal(format!("judge {}: {reason}; finished shards are kept", self.url)))
        };
        let text = self.ask(&prompt).map_err(|error| broken(error.to_string()))?;
        let reply: Json = serde_json::from_str(&text).map_err(|error| broken(format!("no JSON: {error}")))?;
        let word = reply["choices"][0]["message"]["content"].as_str();
        let word = word.ok_or_else(|| broken("the reply has no choices[0].message.content".into()))?;
        let word = word.trim().to_uppercase();
        Ok(match (word.starts_with("DIFFERENT"), word.starts_with("SAME")) {
            (true, _) => Verdict::Divergent,
            (_, true) => Verdict::Neutral,
            _ => Verdict::Unknown,
        })
    }
}

/// Bytes up to the end of the first sentence: behind a line break, or behind `.`, `!`, `?` where white space follows.
/// `None` while it may still go on.
pub fn sentence_end(text: &str) -> Option<usize> {
    let mut mark = None;
    for (at, character) in text.char_indices() {
        match character {
            '\n' => return Some(mark.unwrap_or(at + 1)),
            _ if character.is_whitespace() && mark == Some(at) => return mark,
            '.' | '!' | '?' => mark = Some(at + 1),
            _ => mark = None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;

    fn case<'a>(large: &'a str, small: &'a str) -> Case<'a> {
        Case { question: "1 + 1?", right: "2", before: "1 + 1 = ", large, small }
    }

    #[test]
    fn sentences_end_at_marks_before_white_space() {
        for (text, end) in [
            ("It is 3.5 m. Then", Some(12)),
            ("It is 3.5 m.", None),
            ("one\ntwo", Some(4)),
            ("one.\ntwo", Some(4)),
            ("Is it? Yes", Some(6)),
            ("e.g.x", None),
            ("", None),
        ] {
            assert_eq!(sentence_end(text), end, "{text}");
        }
    }

    #[test]
    fn exact_compares_final_answers_and_equal_compares_text() {
        let exact = |large, small| Exact(Check::Marked).verdict(case(large, small)).expect("a verdict");
        assert_eq!(exact("2\n#### 2", "2, so\n#### 2.0"), Verdict::Neutral);
        assert_eq!(exact("2\n#### 2", "3\n#### 3"), Verdict::Divergent);
        assert_eq!(exact("2\n#### 2", "2"), Verdict::Divergent);
        assert_eq!(exact("3\n#### 3", "2\n#### 2"), Verdict::Unknown);
        let equal = |large, small| Equal.verdict(case(large, small)).expect("a verdict");
        assert_eq!((equal("a.", "a."), equal("a.", "b.")), (Verdict::Neutral, Verdict::Divergent));
    }

    /// One request on a socket of its own, answered with `content`; gives the request's body.
    fn judged(content: &str) -> (Result<Verdict, CliError>, Json) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/v1/", listener.local_addr().expect("an address"));
        let body = json!({"choices": [{"message": {"content": content}}]}).to_string();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a connection");
            let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
            let (mut line, mut len) = (String::new(), 0);
            while reader.read_line(&mut line).expect("a line") > 2 {
                if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                    len = value.trim().parse().expect("a length");
                }
                assert!(!line.starts_with("POST") || line.starts_with("POST /v1/chat/completions "), "{line}");
                line.clear();
            }
            let mut request = vec![0; len];
            reader.read_exact(&mut request).expect("the body");
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            (&stream).write_all(format!("{head}{body}").as_bytes()).expect("answered");
            serde_json::from_slice(&request).expect("JSON")
        });
        let verdict = Endpoint::new(&url, "judge".into()).verdict(case("2 roses.", "3 roses."));
        (verdict, server.join().expect("the server ends"))
    }

    #[test]
    fn an_endpoint_is_asked_and_its_word_counts() {
        for (content, expected) in
            [("DIFFERENT", Verdict::Divergent), (" same.", Verdict::Neutral), ("maybe", Verdict::Unknown)]
        {
            let (verdict, asked) = judged(content);
            assert_eq!(verdict.expect("a verdict"), expected, "{content}");
            let prompt = asked["messages"][0]["content"].as_str().expect("a prompt");
            assert!(asked["model"] == "judge" && prompt.contains("A: 2 roses.") && prompt.contains("B: 3 roses."));
        }
        let equal = Endpoint::new("http://127.0.0.1:9/v1", "judge".into()).verdict(case("a", "a"));
        assert_eq!(equal.expect("nobody is asked"), Verdict::Neutral);
    }
}
