//! A link to a subserver in another process: one connection, which this side dials, keeps and dials again. Owner of the
//! stream: a task on the arbiter of the subserver that sends. Invariant: nothing queued for one connection is ever sent
//! over another; when a connection ends and anything may have been lost with it, the subserver is told.

use super::identity::Identity;
use super::net::{self, Stream};
use super::wire::{Answer, BEAT, HELLO_BYTES_MAX, Hello, PROTOCOL, Parcel, WireError, decode, encode, read_frame};
use super::{Address, Link, LinkDown};
use crate::mailbox::Outlet;
use crate::messages::LinkEvent;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::peer::Envelope;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, BufWriter};
use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::{info, warn};

/// Frames that wait to be written, at most. More means that the peer does not read: the connection is given up.
pub const QUEUE_FRAMES_MAX: usize = 4096;

/// Bytes that wait to be written, at most.
pub const QUEUE_BYTES_MAX: usize = 64 << 20;

/// A process that does not take a connection, a greeting or a write within this time is taken for dead.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// An idle connection says this often that its sender is alive.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);

/// Frames written before the task looks around again.
const BATCH_FRAMES_MAX: usize = 64;

/// Pause before the second attempt to connect; doubled with every further one.
const BACK_OFF_MIN: Duration = Duration::from_millis(20);

/// Longest pause between two attempts.
const BACK_OFF_MAX: Duration = Duration::from_secs(1);

/// The sending half of the queue of one connection.
#[derive(Debug)]
struct Sending {
    frames: mpsc::Sender<Vec<u8>>,
    bytes: Arc<AtomicUsize>,
}

/// The receiving half.
#[derive(Debug)]
struct Waiting {
    frames: mpsc::Receiver<Vec<u8>>,
    bytes: Arc<AtomicUsize>,
}

impl Waiting {
    /// What waits now, first to last, into the stream; `first` was taken already.
    async fn write<W: AsyncWrite + Unpin>(&mut self, first: Vec<u8>, stream: &mut W) -> io::Result<()> {
        let mut next = Some(first);
        let mut room = BATCH_FRAMES_MAX;
        while let Some(frame) = next {
            self.bytes.fetch_sub(frame.len(), Ordering::Relaxed);
            stream.write_all(&frame).await?;
            room -= 1;
            next = if room > 0 { self.frames.try_recv().ok() } else { None };
        }
        stream.flush().await
    }
}

fn queue() -> (Sending, Waiting) {
    let (sender, receiver) = mpsc::channel(QUEUE_FRAMES_MAX);
    let bytes = Arc::new(AtomicUsize::new(0));
    (Sending { frames: sender, bytes: Arc::clone(&bytes) }, Waiting { frames: receiver, bytes })
}

/// The queue of the present connection or attempt. Without a sending half, sending fails at once; the waiting half is
/// here until the task takes it.
#[derive(Debug, Default)]
struct Queue {
    sending: Option<Sending>,
    waiting: Option<Waiting>,
}

impl Queue {
    /// Sends are queued from now on. Returns whether they failed before.
    fn open(&mut self) -> bool {
        let was_shut = self.sending.is_none();
        if was_shut {
            let (sending, waiting) = queue();
            (self.sending, self.waiting) = (Some(sending), Some(waiting));
        }
        was_shut
    }

    fn push(&mut self, frame: Vec<u8>) -> Result<(), &'static str> {
        let sending = self.sending.as_ref().ok_or("not connected")?;
        let bytes = frame.len();
        let held = sending.bytes.fetch_add(bytes, Ordering::Relaxed);
        if held + bytes > QUEUE_BYTES_MAX || sending.frames.try_send(frame).is_err() {
            // A gap must not be followed by anything: what is queued still goes, and then the connection ends.
            self.sending = None;
            return Err("it does not take what is sent");
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Lane {
    to: ModelIdx,
    address: Address,
    queue: Mutex<Queue>,
    up: AtomicBool,
    wake: Arc<Notify>,
}

impl Lane {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection is about to be made; what is sent from now on is queued for it.
    fn begin(&self) -> Waiting {
        let mut queue = self.queue();
        queue.open();
        if let Some(waiting) = queue.waiting.take() {
            return waiting;
        }
        let (sending, waiting) = self::queue();
        queue.sending = Some(sending);
        waiting
    }

    /// The connection has ended; sends fail from now on. Returns whether it ever was up, and whether frames that were
    /// queued meanwhile are lost.
    fn end(&self) -> (bool, bool) {
        let was_up = self.up.swap(false, Ordering::AcqRel);
        let queue = std::mem::take(&mut *self.queue());
        (was_up, queue.waiting.is_some_and(|waiting| !waiting.frames.is_empty()))
    }
}

/// The link; its connection lives as long as any clone of it.
#[derive(Clone, Debug)]
pub struct Socket(Arc<Lane>);

/// Whom a link connects.
#[derive(Debug)]
pub struct Ends {
    /// The subserver here.
    pub from: ModelIdx,
    /// The subserver there.
    pub to: ModelIdx,
    /// Where its process listens.
    pub address: Address,
    /// What this process takes the server for.
    pub server: Identity,
}

impl Socket {
    /// A link, and the task that keeps its connection, to be spawned on the arbiter of the sender. The task ends when
    /// the last clone of the link is gone and all it was given is written.
    pub fn new(ends: Ends, events: Outlet<LinkEvent>) -> (Self, impl Future<Output = ()> + 'static) {
        let wake = Arc::new(Notify::new());
        let lane = Arc::new(Lane {
            to: ends.to,
            address: ends.address.clone(),
            queue: Mutex::default(),
            up: AtomicBool::new(false),
            wake: Arc::clone(&wake),
        });
        lane.queue().open();
        let dialler = Dialler { lane: Arc::downgrade(&lane), wake, ends, events };
        (Socket(lane), dialler.run())
    }
}

impl Link for Socket {
    fn send(&self, envelope: Envelope) -> Result<(), LinkDown> {
        let Lane { to, address, .. } = &*self.0;
        let frame = encode(&Parcel { to: *to, envelope }).map_err(|error| LinkDown(error.to_string()))?;
        self.0.queue().push(frame).map_err(|why| LinkDown(format!("model {to} at {address}: {why}")))
    }

    fn is_up(&self) -> bool {
        self.0.up.load(Ordering::Acquire)
    }

    fn wake(&self) {
        if self.0.queue().open() {
            self.0.wake.notify_one();
        }
    }
}

/// Keeps the connection of a link.
struct Dialler {
    lane: Weak<Lane>,
    wake: Arc<Notify>,
    ends: Ends,
    events: Outlet<LinkEvent>,
}

impl Dialler {
    async fn run(self) {
        let mut pause = BACK_OFF_MIN;
        let mut said = String::new();
        while let Some(mut waiting) = self.lane.upgrade().map(|lane| lane.begin()) {
            let end = self.session(&mut waiting).await;
            let Some(lane) = self.lane.upgrade() else { return };
            let (was_up, lost) = lane.end();
            drop(lane);
            if was_up || lost || !waiting.frames.is_empty() {
                self.tell(LinkEvent::Unreached(self.ends.to)).await;
            }
            let reason =
                end.err().map_or_else(|| "it does not take what is sent".to_owned(), |error| error.to_string());
            if was_up || said != reason {
                let Ends { from, to, address, .. } = &self.ends;
                warn!(%from, %to, %address, reason, "no connection to a peer; trying again");
                said = reason;
            }
            pause = if was_up { BACK_OFF_MIN } else { BACK_OFF_MAX.min(pause * 2) };
            tokio::select! {
                () = sleep(pause) => {}
                () = self.wake.notified() => {}
            }
        }
    }

    async fn tell(&self, event: LinkEvent) {
        // A subserver that is gone drops its links, which ends this task.
        self.events.send(event).await.ok();
    }

    /// One connection from its beginning to its end. `Ok` = there is nothing more to send over it.
    async fn session(&self, waiting: &mut Waiting) -> Result<(), WireError> {
        let stream = patiently(self.greet()).await?;
        let Ends { from, to, address, .. } = &self.ends;
        if let Some(lane) = self.lane.upgrade() {
            lane.up.store(true, Ordering::Release);
        }
        info!(%from, %to, %address, "connected to a peer");
        self.tell(LinkEvent::Reached(*to)).await;
        let (mut read, write) = tokio::io::split(stream);
        let mut write = BufWriter::new(write);
        let mut beat = interval(BEAT_EVERY);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                frame = waiting.frames.recv() => match frame {
                    Some(frame) => patiently(async { Ok(waiting.write(frame, &mut write).await?) }).await?,
                    None => return Ok(()),
                },
                end = read.read_u8() => {
                    end?;
                    return Err(WireError::Refused("it answers where it must only listen".to_owned()));
                }
                _ = beat.tick() => {
                    patiently(async {
                        write.write_all(&BEAT).await?;
                        Ok(write.flush().await?)
                    })
                    .await?;
                }
            }
        }
    }

    async fn greet(&self) -> Result<Box<dyn Stream>, WireError> {
        let Ends { from, to, address, server } = &self.ends;
        let mut stream = net::connect(address).await?;
        let hello = Hello { protocol: PROTOCOL, from: *from, to: *to, server: server.clone() };
        stream.write_all(&encode(&hello)?).await?;
        stream.flush().await?;
        match decode(&read_frame(&mut stream, HELLO_BYTES_MAX).await?)? {
            Answer::Welcome => Ok(stream),
            Answer::Refused(reason) => Err(WireError::Refused(reason)),
        }
    }
}

/// Gives up on what makes no progress.
async fn patiently<T>(work: impl Future<Output = Result<T, WireError>>) -> Result<T, WireError> {
    match timeout(PATIENCE, work).await {
        Ok(outcome) => outcome,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("no progress within {PATIENCE:?}")).into()),
    }
}
