//! The choices of one HTTP request while they are generated. Owner: the handler, then the response body. Invariant: every
//! choice yields exactly one `Finished` or `Failed`; dropping the value aborts all of them.

use super::engine::Engine;
use super::meter::{RequestMeter, Watch};
use futures_util::stream::{SelectAll, Stream, StreamExt};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokenrouter_actors::runtime::Reply;
use tokenrouter_core::job::{Event, Failure, FinishReason, Job, Refusal, TokenReport, Usage};
use tokio::sync::mpsc::Receiver;

/// Running choices, merged into one stream of what happens to them.
pub struct Choices {
    streams: SelectAll<Choice>,
    first: Option<Happened>,
    prompt_tokens: Vec<u32>,
}

/// Something happened to a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Happened {
    /// Which choice.
    pub index: usize,
    /// What.
    pub event: Event,
    /// Of each of the event's tokens; see [`Watch::event`].
    pub took: Duration,
}

/// A choice that ended well.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The tokens of its prompt, if their log-probabilities were wanted.
    pub prompt: Vec<TokenReport>,
    /// Its text.
    pub text: String,
    /// The tokens behind it.
    pub tokens: Vec<TokenReport>,
    /// How long each of them took.
    pub took: Vec<Duration>,
    /// Why it ended.
    pub reason: FinishReason,
    /// What it consumed and made.
    pub usage: Usage,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// A job was not accepted.
    Refused(Refusal),
    /// A job failed later.
    Failed(Failure),
}

impl Choices {
    /// Submits all jobs at once and waits for the first sign of life, so that whatever goes wrong before the first token
    /// can still become an HTTP status.
    ///
    /// # Errors
    /// The first refusal or failure; the other jobs are aborted.
    pub async fn start(engine: &dyn Engine, jobs: Vec<Job>, meter: &RequestMeter) -> Result<Self, Unanswered> {
        let watches: Vec<Watch> = (0..jobs.len()).map(|index| meter.watch(index)).collect();
        let accepted = engine.submit_all(jobs).await;
        let mut streams = SelectAll::new();
        let mut prompt_tokens = Vec::new();
        let mut refused = None;
        for (index, (reply, mut watch)) in accepted.into_iter().zip(watches).enumerate() {
            match reply {
                Ok(Reply { prompt_tokens: tokens, events, .. }) => {
                    prompt_tokens.push(tokens);
                    watch.accepted(tokens);
                    streams.push(Choice { index, events, watch, ended: false });
                }
                Err(refusal) => {
                    watch.refused(&refusal);
                    refused.get_or_insert(refusal);
                }
            }
        }
        if let Some(refusal) = refused {
            return Err(Unanswered::Refused(refusal));
        }
        let mut choices = Choices { streams, first: None, prompt_tokens };
        choices.first = choices.streams.next().await;
        match choices.first.take() {
            Some(Happened { event: Event::Failed(failure), .. }) => Err(Unanswered::Failed(failure)),
            first => Ok(Choices { first, ..choices }),
        }
    }

    /// Tokens of the prompt of each choice.
    pub fn prompt_tokens(&self) -> &[u32] {
        &self.prompt_tokens
    }

    /// What happens next; `None` when all choices have ended.
    pub async fn next(&mut self) -> Option<Happened> {
        match self.first.take() {
            Some(first) => Some(first),
            None => self.streams.next().await,
        }
    }

    /// Reads all choices to their end.
    ///
    /// # Errors
    /// The first failure; the other choices are aborted.
    pub async fn collect(mut self) -> Result<Vec<Outcome>, Failure> {
        let mut running: Vec<Running> = vec![Running::default(); self.prompt_tokens.len()];
        let mut outcomes: Vec<Option<Outcome>> = vec![None; running.len()];
        while let Some(Happened { index, event, took }) = self.next().await {
            match event {
                Event::Prompt(tokens) => running[index].prompt = tokens,
                Event::Delta { text, tokens } => {
                    let choice = &mut running[index];
                    choice.text.push_str(&text);
                    choice.took.extend(tokens.iter().map(|_| took));
                    choice.tokens.extend(tokens);
                }
                Event::Finished { reason, usage, .. } => {
                    let Running { prompt, text, tokens, took } = std::mem::take(&mut running[index]);
                    outcomes[index] = Some(Outcome { prompt, text, tokens, took, reason, usage });
                }
                Event::Failed(failure) => return Err(failure),
            }
        }
        let lost = || Failure::Internal("a choice ended without a result".to_owned());
        outcomes.into_iter().map(|outcome| outcome.ok_or_else(lost)).collect()
    }
}

/// What there is of a choice before its end.
#[derive(Clone, Default)]
struct Running {
    prompt: Vec<TokenReport>,
    text: String,
    tokens: Vec<TokenReport>,
    took: Vec<Duration>,
}

/// One choice as a stream of its events.
struct Choice {
    index: usize,
    events: Receiver<Event>,
    watch: Watch,
    ended: bool,
}

impl Stream for Choice {
    type Item = Happened;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = match self.events.poll_recv(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(event)) => event,
            // The engine promises an ending; if it breaks the promise the client still gets one.
            Poll::Ready(None) => Event::Failed(Failure::Internal("the engine dropped the request".to_owned())),
        };
        self.ended = matches!(event, Event::Finished { .. } | Event::Failed(_));
        let took = self.watch.event(&event);
        Poll::Ready(Some(Happened { index: self.index, event, took }))
    }
}
