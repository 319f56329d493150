//! How long a process bears with a peer that hangs, on a virtual clock over real sockets.

use actix::prelude::*;
use std::path::PathBuf;
use std::time::Duration;
use tokenrouter_actors::link::gate::SILENCE_MAX;
use tokenrouter_actors::link::identity::Identity;
use tokenrouter_actors::link::socket::{Ends, PATIENCE, QUEUE_BYTES_MAX, QUEUE_FRAMES_MAX, Socket};
use tokenrouter_actors::link::wire::{Answer, BEAT, Hello, PROTOCOL, decode, decode_hello, encode, read_frame};
use tokenrouter_actors::link::{Address, Link};
use tokenrouter_actors::mailbox::{Mailbox, Meter, Metered};
use tokenrouter_actors::messages::LinkEvent;
use tokenrouter_actors::runtime::{Placement, RuntimeSpec, start};
use tokenrouter_core::ids::{ModelIdx, RequestId};
use tokenrouter_core::job::Failure;
use tokenrouter_core::live::Stamp;
use tokenrouter_core::peer::{Envelope, PeerFrame};
use tokenrouter_tests::processes::Town;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

const FROM: ModelIdx = ModelIdx(0);
const TO: ModelIdx = ModelIdx(1);

fn on_virtual_time<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let system = actix_rt::System::with_tokio_rt(|| {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(true).build().expect("a runtime")
    });
    system.block_on(async { test().await });
}

fn socket(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("tr-{}-{name}", std::process::id()))
}

fn spec(gate: &std::path::Path) -> RuntimeSpec {
    let town = Town::restless(&[0, 1], Duration::ZERO);
    let addresses = [Address::Unix("nobody-is-here".into()), Address::Unix(gate.to_owned())];
    RuntimeSpec { placement: Placement::Here, ..town.spec(1, &addresses) }
}

fn identity(spec: &RuntimeSpec) -> Identity {
    Identity::new(&spec.models, spec.codec.vocab_size(), &*spec.algorithm, &spec.batching)
}

/// Tells what the link says.
struct Ear(mpsc::Sender<LinkEvent>);

impl Actor for Ear {
    type Context = Context<Self>;
}

impl Handler<Metered<LinkEvent>> for Ear {
    type Result = ();

    fn handle(&mut self, event: Metered<LinkEvent>, _: &mut Self::Context) {
        self.0.try_send(event.open()).expect("the test listens");
    }
}

async fn greet(gate: &std::path::Path, server: &Identity) -> UnixStream {
    let mut stream = UnixStream::connect(gate).await.expect("the gate is open");
    let hello = Hello { protocol: PROTOCOL, from: FROM, to: TO, server: server.clone() };
    stream.write_all(&encode(&hello).expect("it is short")).await.expect("it is read");
    let answer = read_frame(&mut stream, 1 << 16).await.expect("an answer");
    assert_eq!(decode::<Answer>(&answer).expect("an answer"), Answer::Welcome);
    stream
}

/// Time until the gate ends a connection.
async fn end_of(stream: &mut UnixStream) -> Duration {
    let begin = Instant::now();
    let read = stream.read(&mut [0]).await;
    assert!(read.is_ok_and(|bytes| bytes == 0), "it only ends");
    begin.elapsed()
}

#[test]
fn a_silent_peer_is_dead_and_one_that_beats_is_not() {
    on_virtual_time(|| async {
        let path = socket("silent");
        let spec = spec(&path);
        let server = identity(&spec);
        let runtime = start(spec).expect("it starts");
        let waited = end_of(&mut greet(&path, &server).await).await;
        assert!((SILENCE_MAX..SILENCE_MAX * 2).contains(&waited), "{waited:?}");
        let mut alive = greet(&path, &server).await;
        for _ in 0..10 {
            sleep(SILENCE_MAX / 2).await;
            alive.write_all(&BEAT).await.expect("the connection is open");
        }
        assert!(end_of(&mut alive).await >= SILENCE_MAX, "it was open until it fell silent");
        let mut mute = UnixStream::connect(&path).await.expect("the gate is open");
        assert!(end_of(&mut mute).await >= PATIENCE, "a greeting may take a while");
        runtime.drain(Duration::ZERO).await;
    });
}

#[test]
fn a_later_connection_takes_the_place_of_an_earlier_one() {
    on_virtual_time(|| async {
        let path = socket("later");
        let spec = spec(&path);
        let server = identity(&spec);
        let runtime = start(spec).expect("it starts");
        let mut earlier = greet(&path, &server).await;
        let mut later = greet(&path, &server).await;
        assert!(end_of(&mut earlier).await < Duration::from_secs(1), "cut at once");
        assert!(end_of(&mut later).await >= SILENCE_MAX, "stays");
        runtime.drain(Duration::ZERO).await;
    });
}

fn frame(seq: u64, bytes: usize) -> Envelope {
    let failure = Failure::Internal("x".repeat(bytes));
    Envelope { from: FROM, stamp: Stamp { life: 1, seq }, frame: PeerFrame::Failed(RequestId(seq), failure) }
}

/// Greets one connection of the link and returns it.
async fn welcome(listener: &UnixListener) -> UnixStream {
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let hello = decode_hello(&read_frame(&mut stream, 1 << 16).await.expect("a frame")).expect("a greeting");
    assert_eq!((hello.from, hello.to), (FROM, TO));
    stream.write_all(&encode(&Answer::Welcome).expect("it is short")).await.expect("it is read");
    stream
}

/// A peer that takes connections and reads nothing: what waits is bounded, and the end is told.
fn check_stalled(name: &str, bytes: usize, frames_max: usize) {
    let path = socket(name);
    on_virtual_time(|| async {
        let listener = UnixListener::bind(&path).expect("a free address");
        let (ear, mut events) = mpsc::channel(16);
        let ends = Ends { from: FROM, to: TO, address: Address::Unix(path.clone()), server: identity(&spec(&path)) };
        let (link, connection) = Socket::new(ends, Mailbox::new(Ear(ear).start(), Meter::default()).outlet());
        let task = actix_rt::spawn(connection);
        let stalled = welcome(&listener).await;
        assert_eq!(events.recv().await, Some(LinkEvent::Reached(TO)));
        assert!(link.is_up());
        let mut taken = 0;
        while link.send(frame(taken, bytes)).is_ok() {
            taken += 1;
            tokio::task::yield_now().await;
            assert!(taken <= frames_max as u64, "{taken} frames wait");
        }
        assert!(taken > frames_max as u64 / 4, "{taken} frames were taken");
        link.send(frame(taken, 1)).expect_err("nothing follows a gap");
        let begin = Instant::now();
        assert_eq!(events.recv().await, Some(LinkEvent::Unreached(TO)));
        assert!((PATIENCE / 2..PATIENCE * 2).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        drop(stalled);
        // The next connection starts with an empty queue.
        let mut healthy = welcome(&listener).await;
        assert_eq!(events.recv().await, Some(LinkEvent::Reached(TO)));
        link.send(frame(7, 1)).expect("it is up again");
        drop(link);
        let parcel = loop {
            let content = read_frame(&mut healthy, 1 << 16).await.expect("a frame");
            if !content.is_empty() {
                break decode::<tokenrouter_actors::link::wire::Parcel>(&content).expect("a parcel");
            }
        };
        assert_eq!(parcel.envelope.stamp.seq, 7);
        task.await.expect("it ends with its link");
    });
    std::fs::remove_file(&path).expect("the socket is there");
}

#[test]
fn bytes_that_wait_are_bounded() {
    check_stalled("bytes", 1 << 20, QUEUE_BYTES_MAX / (1 << 20) + 4);
}

#[test]
fn frames_that_wait_are_bounded() {
    check_stalled("frames", 1000, QUEUE_FRAMES_MAX + 1000);
}
