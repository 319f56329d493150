//! Server-sent events of one answer: opening chunks, deltas, one finish chunk a choice, usage, `[DONE]`. Owner: the
//! response body. Invariant: one JSON object an event; a failed choice never gets a finish reason; a stream never ends
//! without `[DONE]`. Dropping the body aborts the request, and so does leaving it unread.

use super::Limits;
use super::choices::{Choices, Happened};
use super::dialect::{Dialect, Head, Piece};
use super::errors::ApiError;
use super::types::generation::Streaming;
use super::types::response::{Ending, Tally};
use actix_web::HttpResponse;
use actix_web::http::header;
use actix_web::web::Bytes;
use futures_util::stream::{Stream, unfold};
use serde::Serialize;
use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;
use tokenrouter_core::job::Event;
use tokio::task::JoinHandle;
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

    /// What happened to a choice as it looks on the wire.
    pub fn event(&mut self, Happened { index, event, took }: Happened) -> Frames {
        let piece = match event {
            Event::Prompt(tokens) => {
                let part = self.dialect.prompt(index, &tokens);
                let text = part.map(|part| self.chunk(vec![part])).unwrap_or_default();
                return Frames { text, last: false };
            }
            Event::Delta { text, tokens } => {
                tokens.iter().for_each(|report| self.tally.token(index, report.model.index()));
                let worth_a_chunk = !text.is_empty()
                    || !tokens.is_empty() && (self.dialect.carries_tokens() || self.streaming.usage_always);
                if !worth_a_chunk {
                    return Frames { text: String::new(), last: false };
                }
                Piece { index, text, tokens, took, ending: Ending::default() }
            }
            Event::Finished { reason, usage, .. } => {
                self.tally.finish(index, usage);
                Piece { index, text: String::new(), tokens: Vec::new(), took, ending: Ending::from(&reason) }
            }
            Event::Failed(failure) => {
                tracing::error!(id = %self.head.id, index, %failure, "a streamed answer failed");
                let text = frame(&ApiError::from(&failure).body()) + DONE_FRAME;
                return Frames { text, last: true };
            }
        };
        let part = self.dialect.part(piece);
        Frames { text: part.map(|part| self.chunk(vec![part])).unwrap_or_default(), last: false }
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

/// A stream whose last bytes were taken at `since` and of which no more were asked for yet: the connection asks when it
/// has room again, so the client does not read.
struct Parked<D: Dialect> {
    stage: Stage<D>,
    since: Instant,
}

/// Where a stream is while the connection does not ask for more; empty while it does, and when it was given up.
type Desk<D> = Rc<Cell<Option<Parked<D>>>>;

/// The connection's side of a stream. Dropping it aborts the request.
struct Reading<D: Dialect> {
    desk: Desk<D>,
    unread_max: Duration,
    watch: JoinHandle<()>,
}

impl<D: Dialect + 'static> Reading<D> {
    fn new(sending: Sending<D>, unread_max: Duration) -> Self {
        let desk: Desk<D> = Rc::default();
        let watch = actix_rt::spawn(watch(Rc::clone(&desk), unread_max));
        let reading = Reading { desk, unread_max, watch };
        reading.park(Stage::Opening(sending));
        reading
    }

    fn park(&self, stage: Stage<D>) {
        self.desk.set(Some(Parked { stage, since: Instant::now() }));
    }
}

impl<D: Dialect> Drop for Reading<D> {
    fn drop(&mut self) {
        self.watch.abort();
        drop(self.desk.take());
    }
}

/// Gives up a stream that nobody has read for `unread_max`, with all that waits to be sent: its request is aborted.
async fn watch<D: Dialect>(desk: Desk<D>, unread_max: Duration) {
    let mut look = Instant::now() + unread_max;
    loop {
        sleep_until(look).await;
        look = match desk.take() {
            Some(parked) if parked.since.elapsed() >= unread_max => {
                tracing::warn!(?unread_max, "a client does not read its stream: the request is aborted");
                return;
            }
            Some(parked) => {
                let due = parked.since + unread_max;
                desk.set(Some(parked));
                due
            }
            // The connection waits for the next event.
            None => Instant::now() + unread_max,
        };
    }
}

/// The body of a streamed answer.
fn body<D: Dialect + 'static>(
    sending: Sending<D>,
    unread_max: Duration,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    unfold(Some(Reading::new(sending, unread_max)), |reading| async move {
        let reading = reading?;
        let stage = match reading.desk.take() {
            Some(parked) => parked.stage,
            None => {
                let error = ApiError::slow_client("the stream was not read", reading.unread_max);
                return Some((Ok(Bytes::from(frame(&error.body()) + DONE_FRAME)), None));
            }
        };
        let (text, next) = match stage {
            Stage::Opening(mut sending) => {
                let text = sending.writer.opening(sending.choices.prompt_tokens().len());
                if text.is_empty() { next_frames(sending).await } else { (text, Stage::Running(sending)) }
            }
            Stage::Running(sending) => next_frames(sending).await,
            Stage::Over => return None,
        };
        reading.park(next);
        Some((Ok(Bytes::from(text)), Some(reading)))
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
            Some(happened) => match sending.writer.event(happened) {
                Frames { text, last: true } => return (text, Stage::Over),
                Frames { text, .. } if text.is_empty() => {}
                Frames { text, .. } => return (text, Stage::Running(sending)),
            },
        }
    }
}

/// The response of a streamed answer; after `silence_max` without an event a comment is sent, and a stream that is not
/// read for as long as a client may take is given up.
pub fn response<D: Dialect + 'static>(choices: Choices, writer: Writer<D>, limits: Limits) -> HttpResponse {
    let sending = Sending { choices, writer, silence_max: limits.silence_max };
    HttpResponse::Ok()
        .content_type("text/event-stream; charset=utf-8")
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        .insert_header(("x-accel-buffering", "no"))
        .streaming(body(sending, limits.client))
}
