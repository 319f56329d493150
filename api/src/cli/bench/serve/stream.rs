//! What the events of a streamed answer say about tokens and time. Pure. Invariant: how many tokens there are is what the
//! server's `usage` says; chunks only say when. A chunk without text (the one with the role, the one with the end) is no
//! token.
//!
//! The time between two tokens is the time between the chunks that brought them, divided by how many the later one brought,
//! as the server's own histogram does. Where chunks carry counts (`continuous_usage_stats`) that is known; where they do
//! not, the tokens of an answer are taken to be spread evenly over its chunks.

use super::client::Trouble;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

/// Longest event that is read.
const EVENT_BYTES_MAX: usize = 64 << 20;

/// Takes server-sent events out of the bytes of a body.
#[derive(Debug, Default)]
pub struct Events {
    rest: Vec<u8>,
}

impl Events {
    /// The data of the events that end in these bytes; one event is one line here, as all OpenAI servers write it.
    pub fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8]) -> Result<(), Trouble>) -> Result<(), Trouble> {
        self.rest.extend_from_slice(bytes);
        let mut from = 0;
        while let Some(length) = self.rest[from..].iter().position(|byte| *byte == b'\n') {
            let line = self.rest[from..from + length].trim_ascii();
            from += length + 1;
            if let Some(data) = line.strip_prefix(b"data:") {
                each(data.trim_ascii())?;
            }
        }
        self.rest.drain(..from);
        if self.rest.len() > EVENT_BYTES_MAX {
            return Err(Trouble::new("no event stream", "an event without an end"));
        }
        Ok(())
    }
}

#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    delta: Option<Delta>,
    text: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Delta {
    content: Option<String>,
    #[serde(alias = "reasoning")]
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<IgnoredAny>>,
}

impl Choice {
    fn has_text(&self) -> bool {
        let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let in_delta = |delta: &Delta| {
            said(&delta.content)
                || said(&delta.reasoning_content)
                || delta.tool_calls.as_ref().is_some_and(|c| !c.is_empty())
        };
        said(&self.text) || self.delta.as_ref().is_some_and(in_delta)
    }
}

/// What a server says it counted.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    #[serde(default)]
    pub completion_tokens: u32,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
    #[serde(default)]
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
struct CompletionDetails {
    #[serde(default)]
    by_model: BTreeMap<String, u32>,
    #[serde(default)]
    hops: Option<u32>,
}

impl Usage {
    /// Tokens of the prompt that were there already.
    pub fn cached(&self) -> u32 {
        self.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens).unwrap_or(0)
    }

    /// Tokens by the model that made them, where the server routes.
    pub fn by_model(&self) -> BTreeMap<String, u32> {
        self.completion_tokens_details.as_ref().map(|details| details.by_model.clone()).unwrap_or_default()
    }

    /// Times control moved between models, where the server routes.
    pub fn hops(&self) -> Option<u32> {
        self.completion_tokens_details.as_ref().and_then(|details| details.hops)
    }
}

/// One answer; times are seconds since the request was sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The first token.
    pub ttft: f64,
    /// The last one, or the end if that came with it.
    pub e2el: f64,
    /// When tokens came, and how many; the sum of the numbers is that of `usage`.
    pub arrivals: Vec<(f64, f64)>,
    /// Times between tokens.
    pub gaps: Vec<f64>,
    /// What the server counted.
    pub usage: Usage,
}

impl Answer {
    /// Mean time of a token after the first; none if there is no other.
    pub fn tpot(&self) -> Option<f64> {
        let more = self.usage.completion_tokens.checked_sub(1).filter(|more| *more > 0)?;
        Some((self.e2el - self.ttft) / f64::from(more))
    }
}

/// Follows a stream.
#[derive(Debug, Default)]
pub struct Watch {
    /// Chunks with text: when, and the tokens up to there if they were told.
    chunks: Vec<(f64, Option<u32>)>,
    /// The last chunk with a choice: text or end.
    last: Option<f64>,
    usage: Option<Usage>,
    done: bool,
}

impl Watch {
    /// An event that came at this time.
    ///
    /// # Errors
    /// What is no chunk, and the server's own error events.
    pub fn event(&mut self, data: &[u8], at: f64) -> Result<(), Trouble> {
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk =
            serde_json::from_slice(data).map_err(|error| Trouble::new("no event stream", &error.to_string()))?;
        if let Some(error) = chunk.error {
            let said = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
            return Err(Trouble::new("error event", &said));
        }
        let told = chunk.usage.as_ref().filter(|_| !chunk.choices.is_empty()).map(|usage| usage.completion_tokens);
        let more = told.is_some_and(|told| told > self.told());
        if more || chunk.choices.iter().any(Choice::has_text) {
            self.chunks.push((at, told));
        }
        if !chunk.choices.is_empty() {
            self.last = Some(at);
        }
        self.usage = chunk.usage.or(self.usage.take());
        Ok(())
    }

    fn told(&self) -> u32 {
        self.chunks.last().and_then(|(_, told)| *told).unwrap_or(0)
    }

    /// Whether the end was announced.
    pub fn done(&self) -> bool {
        self.done
    }

    /// What the answer was.
    ///
    /// # Errors
    /// A stream that broke off, or one without `usage`.
    pub fn finish(mut self) -> Result<Answer, Trouble> {
        if !self.done {
            return Err(Trouble::new("broke off", "the stream ended before [DONE]"));
        }
        let usage = self.usage.take().ok_or_else(|| {
            Trouble::new("no usage", "the stream told no usage, though stream_options.include_usage asked for it")
        })?;
        let (tokens, last) = (usage.completion_tokens, self.last.unwrap_or(0.0));
        let counted = !self.chunks.is_empty() && self.chunks.iter().all(|(_, told)| told.is_some());
        // A token without text, such as the end of text, came with the end at the latest.
        if !counted && (self.chunks.len() as u32) < tokens && self.chunks.last().is_none_or(|(at, _)| *at < last) {
            self.chunks.push((last, None));
        }
        let e2el = self.chunks.last().map_or(last, |(at, _)| *at);
        let ttft = self.chunks.first().map_or(last, |(at, _)| *at);
        let (arrivals, gaps) = if counted { exact(&self.chunks, tokens) } else { even(&self.chunks, tokens) };
        Ok(Answer { ttft, e2el, arrivals, gaps, usage })
    }
}

/// Chunks that say how many tokens there were.
fn exact(chunks: &[(f64, Option<u32>)], tokens: u32) -> (Vec<(f64, f64)>, Vec<f64>) {
    let (mut arrivals, mut gaps) = (Vec::with_capacity(chunks.len()), Vec::with_capacity(tokens as usize));
    let mut before = (0.0, 0);
    for (index, (at, told)) in chunks.iter().enumerate() {
        let last = index + 1 == chunks.len();
        let told = if last { tokens } else { told.unwrap_or(before.1).min(tokens) };
        let count = told.saturating_sub(before.1);
        if count > 0 {
            arrivals.push((*at, f64::from(count)));
            if arrivals.len() > 1 {
                gaps.extend((0..count).map(|_| (at - before.0) / f64::from(count)));
            }
            before = (*at, told);
        }
    }
    (arrivals, gaps)
}

/// Chunks that do not say it: each stands for as many as any other.
fn even(chunks: &[(f64, Option<u32>)], tokens: u32) -> (Vec<(f64, f64)>, Vec<f64>) {
    let each = f64::from(tokens) / chunks.len().max(1) as f64;
    let arrivals = chunks.iter().map(|(at, _)| (*at, each)).collect();
    let intervals = chunks.len().saturating_sub(1);
    if tokens < 2 || intervals == 0 {
        return (arrivals, Vec::new());
    }
    let per_interval = f64::from(tokens - 1) / intervals as f64;
    let gaps = chunks.windows(2).map(|two| (two[1].0 - two[0].0) / per_interval).collect();
    (arrivals, gaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(text: &str) -> String {
        format!(r#"{{"choices":[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":null}}],"usage":null}}"#)
    }

    const ROLE: &str = r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
    const END: &str = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;

    fn usage(tokens: u32) -> String {
        format!(r#"{{"choices":[],"usage":{{"prompt_tokens":7,"completion_tokens":{tokens},"total_tokens":9}}}}"#)
    }

    fn watched(events: &[(&str, f64)]) -> Result<Answer, Trouble> {
        let mut watch = Watch::default();
        for (data, at) in events {
            watch.event(data.as_bytes(), *at)?;
        }
        watch.event(b"[DONE]", 99.0)?;
        watch.finish()
    }

    #[test]
    fn the_role_chunk_is_no_token_and_usage_counts() {
        let (a, b, end) = (chunk("a"), chunk("b"), usage(2));
        let answer = watched(&[(ROLE, 1.0), (&a, 3.0), (&b, 4.0), (END, 8.0), (&end, 9.0)]).expect("an answer");
        assert_eq!((answer.ttft, answer.e2el, answer.gaps.as_slice()), (3.0, 4.0, &[1.0][..]));
        assert_eq!((answer.arrivals.as_slice(), answer.tpot()), (&[(3.0, 1.0), (4.0, 1.0)][..], Some(1.0)));
    }

    #[test]
    fn a_token_without_text_came_with_the_end() {
        let (a, b, end) = (chunk("a"), chunk("b"), usage(3));
        let answer = watched(&[(ROLE, 0.0), (&a, 2.0), (&b, 3.0), (END, 5.0), (&end, 9.0)]).expect("an answer");
        assert_eq!((answer.e2el, answer.gaps.as_slice(), answer.tpot()), (5.0, &[1.0, 2.0][..], Some(1.5)));
        // Nothing but the end of text: the answer is empty, and its one token came with the end.
        let (none, end) = (chunk(""), usage(1));
        let answer = watched(&[(ROLE, 0.0), (&none, 1.0), (END, 2.0), (&end, 3.0)]).expect("an answer");
        assert_eq!((answer.ttft, answer.e2el, answer.gaps.len(), answer.tpot()), (2.0, 2.0, 0, None));
    }

    #[test]
    fn chunks_of_several_tokens_are_divided() {
        let (a, b, end) = (chunk("a"), chunk("bcd"), usage(5));
        let answer = watched(&[(ROLE, 0.0), (&a, 1.0), (&b, 3.0), (&b, 5.0), (&end, 9.0)]).expect("an answer");
        assert_eq!((answer.gaps.as_slice(), answer.tpot()), (&[1.0, 1.0][..], Some(1.0)));
        assert!((answer.arrivals.iter().map(|(_, tokens)| tokens).sum::<f64>() - 5.0).abs() < 1e-9);
        // With counts: one token, then three, then the end of text in the chunk that ends.
        let told = |text: &str, count: u32| {
            chunk(text)
                .replace("\"usage\":null", &format!("\"usage\":{{\"prompt_tokens\":7,\"completion_tokens\":{count}}}"))
        };
        let (a, b, c) = (told("a", 1), told("bcd", 4), told("", 5));
        let answer = watched(&[(&told("", 0), 0.5), (&a, 1.0), (&b, 4.0), (&c, 6.0), (&end, 9.0)]).expect("an answer");
        assert_eq!((answer.ttft, answer.e2el, answer.gaps.as_slice()), (1.0, 6.0, &[1.0, 1.0, 1.0, 2.0][..]));
        assert_eq!(answer.arrivals, [(1.0, 1.0), (4.0, 3.0), (6.0, 1.0)]);
    }

    #[test]
    fn streams_that_say_too_little_are_failures() {
        let a = chunk("a");
        let reason = |events: &[(&str, f64)]| watched(events).expect_err("a failure").reason;
        assert_eq!(reason(&[(&a, 1.0), (END, 2.0)]), "no usage");
        assert_eq!(reason(&[(&a, 1.0), (r#"{"error":{"message":"out of luck"}}"#, 2.0)]), "error event");
        assert_eq!(reason(&[("<html>", 1.0)]), "no event stream");
        let mut cut = Watch::default();
        cut.event(a.as_bytes(), 1.0).expect("a chunk");
        assert_eq!(cut.finish().expect_err("no end").reason, "broke off");
    }

    #[test]
    fn routed_usage_is_read() {
        let text = r#"{"prompt_tokens":5,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4},
            "completion_tokens_details":{"by_model":{"small":2,"large":1},"hops":2}}"#;
        let usage: Usage = serde_json::from_str(text).expect("usage");
        assert_eq!((usage.cached(), usage.hops(), usage.by_model()["small"]), (4, Some(2), 2));
        let plain: Usage = serde_json::from_str(r#"{"prompt_tokens":5,"completion_tokens":3}"#).expect("usage");
        assert_eq!((plain.cached(), plain.hops(), plain.by_model().len()), (0, None, 0));
    }

    #[test]
    fn events_are_found_however_the_bytes_are_cut() {
        let text = ": hello\n\ndata: one\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n";
        for size in 1..text.len() {
            let (mut events, mut found) = (Events::default(), Vec::new());
            for part in text.as_bytes().chunks(size) {
                let keep = |data: &[u8]| {
                    found.push(String::from_utf8_lossy(data).into_owned());
                    Ok(())
                };
                events.feed(part, keep).expect("short events");
            }
            assert_eq!(found, ["one", "two", "[DONE]"], "{size}");
        }
    }
}
