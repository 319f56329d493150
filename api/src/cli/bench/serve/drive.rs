//! One block of requests to one server: closed loop or open loop. Owner: the run. Invariant: every request that was sent
//! is in the block with what became of it; after a stop nothing is sent, and what runs is cut.

use super::client::{Client, Trouble};
use super::stream::Answer;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use hyper::body::Bytes;
use indicatif::ProgressBar;
use std::cell::Cell;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

/// A request to a server that is not there ends after this time; a closed loop would ask thousands of times a second.
const ABSENCE: Duration = Duration::from_millis(100);

/// Signals that end a run early.
pub struct Stop {
    interrupt: Signal,
    terminate: Signal,
    /// One has come.
    pub came: bool,
}

impl Stop {
    /// Listens from now on.
    ///
    /// # Errors
    /// When the system lets nobody listen.
    pub fn listen() -> std::io::Result<Stop> {
        let (interrupt, terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        Ok(Stop { interrupt, terminate, came: false })
    }

    /// Ends when one comes.
    pub async fn asked(&mut self) {
        if !self.came {
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.terminate.recv() => {}
            }
            self.came = true;
        }
    }
}

/// What a block sends.
pub struct Work<'a> {
    /// Who is asked.
    pub client: &'a Client,
    /// Where.
    pub path: &'a str,
    /// Bodies, taken in turn from `first` on.
    pub bodies: &'a [Bytes],
    /// Index of the first body.
    pub first: usize,
}

/// When a block sends.
pub struct Pace {
    /// Most requests at once.
    pub at_once: usize,
    /// Most requests.
    pub requests: usize,
    /// Nothing is sent after this time.
    pub until: Option<Duration>,
    /// Seconds from the start at which each request is sent; none: as soon as there is room.
    pub times: Option<Vec<f64>>,
}

/// What became of a request that was sent.
#[derive(Clone, Debug)]
pub struct Sent {
    /// When, in seconds from the start of the block.
    pub at: f64,
    /// The answer, or why there is none; nothing if it was cut by a stop.
    pub outcome: Option<Result<Answer, Trouble>>,
}

/// What a block measured.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// Every request, in the order of sending.
    pub sent: Vec<Sent>,
    /// From its start to the end of its last request.
    pub seconds: f64,
    /// Most requests that ran at once.
    pub peak: usize,
    /// Seconds by which the request that was sent latest after its time was late: this program, or the limit of requests
    /// at once, could not keep up.
    pub late: f64,
}

/// Sends a block and waits for its answers, or until it is to stop.
pub async fn block(work: &Work<'_>, pace: &Pace, (stop, bar): (&mut Stop, &ProgressBar)) -> Block {
    let started = Instant::now();
    let mut block = Block::default();
    let mut running = FuturesUnordered::new();
    let late = Cell::new(0.0f64);
    loop {
        let next = block.sent.len();
        let due = due(pace, next, started);
        let room = running.len() < pace.at_once;
        if let Some(due) = due.filter(|due| room && *due <= Instant::now()) {
            let at = started.elapsed().as_secs_f64();
            late.set(late.get().max(Instant::now().duration_since(due).as_secs_f64()));
            block.sent.push(Sent { at, outcome: None });
            let body = work.bodies[(work.first + next) % work.bodies.len()].clone();
            running.push(async move {
                let outcome = work.client.stream(work.path, body).await;
                if outcome.as_ref().is_err_and(Trouble::is_absence) {
                    tokio::time::sleep(ABSENCE).await;
                }
                (next, outcome)
            });
            block.peak = block.peak.max(running.len());
            continue;
        }
        if running.is_empty() && due.is_none() {
            break;
        }
        // Without room the next one waits for an end; without a next one there are only ends to wait for.
        let wake = due.filter(|_| room).unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::select! {
            biased;
            () = stop.asked() => break,
            Some((index, outcome)) = running.next(), if !running.is_empty() => {
                block.sent[index].outcome = Some(outcome);
                bar.inc(1);
            }
            () = tokio::time::sleep_until(wake) => {}
        }
    }
    drop(running);
    block.seconds = started.elapsed().as_secs_f64();
    block.late = if pace.times.is_some() { late.get() } else { 0.0 };
    block
}

/// When request `next` is to be sent; none if it is not.
fn due(pace: &Pace, next: usize, started: Instant) -> Option<Instant> {
    if next >= pace.requests {
        return None;
    }
    let due = match &pace.times {
        None => started,
        Some(times) => started + Duration::from_secs_f64(*times.get(next)?),
    };
    let over = pace.until.is_some_and(|until| due.max(Instant::now()) >= started + until);
    (!over).then_some(due)
}
