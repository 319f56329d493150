//! Server-sent events of one answer: opening chunks, deltas, one finish chunk a choice, usage, `[DONE]`. Owner: the
//! response body. Invariant: one JSON object an event; a failed choice never gets a finish reason; a stream never ends
//! without `[DONE]`. Dropping the body aborts the request.

use super::choices::Choices;
use super::dialect::{Dialect, Head, Piece};
use super::errors::ApiError;
use super::types::generation::Streaming;
use super::types::response::{Ending, Tally};
use actix_web::HttpResponse;
use actix_web::http::header;
use actix_web::web::Bytes;
use futures_util::stream::{Stream, unfold};
use serde::Serialize;
use std::convert::Infallible;
use std::time::Duration;
use tokenrouter_core::job::Event;
use tokio::time::{Instant, sleep_until};

const KEEP_ALIVE_FRAME: &str = ": keep-alive\n\n";
const DONE_FRAME: &str = "data: [DONE]\n\n";

/// One event: `data: ` and one line of JSON.
fn frame(value: &impl Serialize) -> String {
    match serde_json::to_string(value) {
        Ok(json) => format!("data: {json}\n\n"),
        Err(error) => {
            tracing::error!(%error, "an event could not be written");
            format!("data: {}\n\n", ApiError::internal("an event could not be written").body())
        }
    }
}

/// Turns the events of all choices into frames. Pure: no clock, no socket.
pub struct Writer<D: Dialect> {
    head: Head,
    dialect: D,
    streaming: Streaming,
    tally: Tally,
}

/// Frames to send, and whether more can follow.
pub struct Frames {
    /// The bytes of zero or more whole events.
    pub text: String,
    /// The stream is over.
    pub last: bool,
}

impl<D: Dialect> Writer<D> {
    /// A writer for an answer whose choices are counted by `tally`.
    pub fn new(head: Head, dialect: D, streaming: Streaming, tally: Tally) -> Self {
        Writer { head, dialect, streaming, tally }
    }

    /// The first chunk of each of `choices` choices.
    pub fn opening(&mut self, choices: usize) -> String {
        let parts: Vec<D::Part> = (0..choices).filter_map(|index| self.dialect.opening(index)).collect();
        parts.into_iter().map(|part| self.chunk(vec![part])).collect()
    }

    /// What an event of a choice looks like on the wire.
    pub fn event(&mut self, index: usize, event: Event) -> Frames {
        let piece = match event {
            Event::Delta { text, tokens } => {
                tokens.iter().for_each(|report| self.tally.token(index, report.model.index()));
                let worth_a_chunk = !text.is_empty()
                    || !tokens.is_empty() && (self.dialect.carries_tokens() || self.streaming.usage_always);
            Event::Prompt(tokens) => {
                let part = self.dialect.prompt(index, &tokens);
                let text = part.map(|part| self.chunk(vec![part])).unwrap_or_default();
                return Frames { text, last: false };
            }
                if !worth_a_chunk {
                    return Frames { text: String::new(), last: false };
                }
                Piece { index, text, tokens, ending: Ending::default() }
            }
            Event::Finished { reason, usage } => {
                self.tally.finish(index, usage);
                Piece { index, text: String::new(), tokens: Vec::new(), ending: Ending::from(&reason) }
            }
            Event::Failed(failure) => {
                tracing::error!(id = %self.head.id, index, %failure, "a streamed answer failed");
                let text = frame(&ApiError::from(&failure).body()) + DONE_FRAME;
                return Frames { text, last: true };
            }
        };
        let part = self.dialect.part(piece);
        Frames { text: self.chunk(vec![part]), last: false }
    }

    /// The end of a stream whose choices have all finished.
    pub fn closing(&mut self) -> String {
        let mut text = String::new();
        if self.streaming.usage_last {
            let mut chunk = self.head.envelope::<D::Part>(D::CHUNK, Vec::new());
            chunk.usage = Some(Some(self.tally.report()));
            text.push_str(&frame(&chunk));
        }
        text + DONE_FRAME
    }

    fn chunk(&self, parts: Vec<D::Part>) -> String {
        let mut chunk = self.head.envelope(D::CHUNK, parts);
        chunk.usage = match self.streaming {
            Streaming { usage_always: true, .. } => Some(Some(self.tally.report())),
            Streaming { usage_last: true, .. } => Some(None),
            _ => None,
        };
        frame(&chunk)
    }
}

/// A stream on its way to one client.
struct Sending<D: Dialect> {
    choices: Choices,
    writer: Writer<D>,
    /// Longest silence; then a comment is sent, which proxies and dead connections notice and clients ignore.
    silence_max: Duration,
}

/// Where a stream stands.
enum Stage<D: Dialect> {
    Opening(Sending<D>),
    Running(Sending<D>),
    Over,
}

/// The body of a streamed answer.
fn body<D: Dialect + 'static>(sending: Sending<D>) -> impl Stream<Item = Result<Bytes, Infallible>> {
    unfold(Stage::Opening(sending), |stage| async {
        let (text, next) = match stage {
            Stage::Opening(mut sending) => {
                let text = sending.writer.opening(sending.choices.prompt_tokens().len());
                if text.is_empty() { next_frames(sending).await } else { (text, Stage::Running(sending)) }
            }
            Stage::Running(sending) => next_frames(sending).await,
            Stage::Over => return None,
        };
        Some((Ok(Bytes::from(text)), next))
    })
}

/// Waits for the next bytes to send; too long a silence gives a comment.
async fn next_frames<D: Dialect>(mut sending: Sending<D>) -> (String, Stage<D>) {
    let silence_ends = Instant::now() + sending.silence_max;
    loop {
        let event = tokio::select! {
            event = sending.choices.next() => event,
            () = sleep_until(silence_ends) => return (KEEP_ALIVE_FRAME.to_owned(), Stage::Running(sending)),
        };
        match event {
            None => return (sending.writer.closing(), Stage::Over),
            Some((index, event)) => match sending.writer.event(index, event) {
                Frames { text, last: true } => return (text, Stage::Over),
                Frames { text, .. } if text.is_empty() => {}
                Frames { text, .. } => return (text, Stage::Running(sending)),
            },
        }
    }
}

/// The response of a streamed answer; after `silence_max` without an event a comment is sent.
pub fn response<D: Dialect + 'static>(choices: Choices, writer: Writer<D>, silence_max: Duration) -> HttpResponse {
    HttpResponse::Ok()
        .content_type("text/event-stream; charset=utf-8")
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        .insert_header(("x-accel-buffering", "no"))
        .streaming(body(Sending { choices, writer, silence_max }))
}
