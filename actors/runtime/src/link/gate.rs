//! Where peers in other processes come in: accepts connections, checks who speaks and what, and hands frames to the
//! subserver addressed. Owner: of every incoming connection. Invariant: a subserver hears `Heard`, then frames, then
//! `Unheard` of a connection, and of two connections from the same peer never the earlier one's frames after the later.

use super::Address;
use super::check::Bounds;
use super::identity::Identity;
use super::local::{self, Directory};
use super::net::{Bound, Listener, Stream};
use super::socket::PATIENCE;
use super::wire::{
    Answer, FRAME_BYTES_MAX, HELLO_BYTES_MAX, Hello, Parcel, WireError, decode, decode_hello, encode, read_frame,
};
use crate::mailbox::Mailbox;
use crate::messages::{Frame, LinkEvent, Stop};
use crate::runtime::Server;
use crate::subserver::Subserver;
use actix::prelude::*;
use futures_util::future::{AbortHandle, Abortable};
use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokenrouter_core::ids::ModelIdx;
use tokio::io::{AsyncWriteExt, BufReader};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// Connections open at once, greeted or not; further ones are closed at once.
pub const CONNECTIONS_MAX: usize = 512;

/// A connection that says nothing for this long is dead; its sender would have said at least that it is alive.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Pause after a connection could not be accepted (no file descriptor left, for example).
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The actor.
#[derive(Debug)]
pub struct Gate {
    bound: Option<Bound>,
    house: Rc<House>,
}

/// What all connections share.
#[derive(Debug)]
struct House {
    address: Address,
    server: Arc<Server>,
    identity: Identity,
    directory: Directory,
    guests: RefCell<Guests>,
}

/// The open connections.
#[derive(Debug, Default)]
struct Guests {
    last: u64,
    open: HashMap<u64, AbortHandle>,
    /// The one that speaks for a subserver to another: `(from, to)`.
    speaking: HashMap<(ModelIdx, ModelIdx), u64>,
}

/// What a gate is made of; may move between threads.
#[derive(Debug)]
pub struct Plan {
    /// The address taken.
    pub bound: Bound,
    /// The same, for logs.
    pub address: Address,
    /// The whole server.
    pub server: Arc<Server>,
    /// The subservers here.
    pub directory: Directory,
}

impl Gate {
    /// A gate that accepts connections once it is started. Must be called on the thread it will live on.
    pub fn new(plan: Plan) -> Self {
        let Plan { bound, address, server, directory } = plan;
        let identity = Identity::of(&server);
        let house = House { address, identity, server, directory, guests: RefCell::default() };
        Gate { bound: Some(bound), house: Rc::new(house) }
    }
}

impl Actor for Gate {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        match self.bound.take().map(Bound::listen) {
            Some(Ok(listener)) => {
                info!(address = %self.house.address, "peers may connect");
                ctx.spawn(Rc::clone(&self.house).accept(listener).into_actor(self));
            }
            Some(Err(error)) => warn!(address = %self.house.address, %error, "peers cannot connect"),
            None => {}
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        for (_, guest) in self.house.guests.borrow_mut().open.drain() {
            guest.abort();
        }
    }
}

impl Handler<Stop> for Gate {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl House {
    async fn accept(self: Rc<Self>, listener: Listener) {
        loop {
            match listener.accept().await {
                Ok(stream) => self.let_in(stream),
                Err(error) => {
                    warn!(address = %self.address, %error, "a peer's connection was not accepted");
                    sleep(ACCEPT_RETRY).await;
                }
            }
        }
    }

    fn let_in(self: &Rc<Self>, stream: Box<dyn Stream>) {
        let mut guests = self.guests.borrow_mut();
        if guests.open.len() >= CONNECTIONS_MAX {
            return warn!(address = %self.address, CONNECTIONS_MAX, "a peer's connection was closed: too many are open");
        }
        let (handle, registration) = AbortHandle::new_pair();
        guests.last += 1;
        let guest = guests.last;
        guests.open.insert(guest, handle);
        let house = Rc::clone(self);
        let stay = async move {
            house.receive(guest, stream).await;
            house.guests.borrow_mut().open.remove(&guest);
        };
        // Aborted when the gate goes or a later connection takes its place.
        actix_rt::spawn(Abortable::new(stay, registration));
    }

    async fn receive(&self, guest: u64, stream: Box<dyn Stream>) {
        let mut stream = BufReader::new(stream);
        let (hello, subserver) = match timeout(PATIENCE, self.greet(&mut stream)).await {
            Ok(Ok(greeted)) => greeted,
            Ok(Err(error)) => return warn!(address = %self.address, %error, "a peer's connection was refused"),
            Err(_) => return warn!(address = %self.address, "a peer's connection was closed: no greeting"),
        };
        let Hello { from, to, .. } = hello;
        if self.take_over(guest, (from, to)) {
            subserver.send(LinkEvent::Unheard(from)).await.ok();
        }
        subserver.send(LinkEvent::Heard(from)).await.ok();
        let bounds = Bounds::new(&self.server, from, to);
        let end = match welcome(&mut stream).await {
            Ok(()) => hand_on(&mut stream, &bounds, &subserver).await,
            Err(error) => error,
        };
        info!(%from, %to, %end, "a peer's connection ended");
        self.guests.borrow_mut().speaking.retain(|_, speaker| *speaker != guest);
        subserver.send(LinkEvent::Unheard(from)).await.ok();
    }

    /// This connection speaks for the pair from now on; returns whether another was in its place, which is cut.
    fn take_over(&self, guest: u64, pair: (ModelIdx, ModelIdx)) -> bool {
        let mut guests = self.guests.borrow_mut();
        let Some(former) = guests.speaking.insert(pair, guest) else { return false };
        if let Some(handle) = guests.open.remove(&former) {
            handle.abort();
        }
        true
    }

    /// Who speaks, and to whom. The reason of a refusal is said to the peer too.
    async fn greet<S: Stream>(&self, stream: &mut S) -> Result<(Hello, Mailbox<Subserver>), WireError> {
        let content = read_frame(stream, HELLO_BYTES_MAX).await?;
        let greeted = decode_hello(&content).and_then(|hello| match self.door(&hello) {
            Ok(subserver) => Ok((hello, subserver)),
            Err(reason) => Err(WireError::Refused(reason)),
        });
        if let Err(error) = &greeted {
            let reason = match error {
                WireError::Refused(reason) => reason.clone(),
                other => other.to_string(),
            };
            stream.write_all(&encode(&Answer::Refused(reason))?).await?;
            stream.flush().await?;
        }
        greeted
    }

    fn door(&self, hello: &Hello) -> Result<Mailbox<Subserver>, String> {
        if let Some(difference) = self.identity.difference(&hello.server) {
            return Err(difference);
        }
        let Hello { from, to, .. } = hello;
        let site = self.server.models.get(from.index()).map(|model| &model.site);
        if site.is_none_or(|site| site.peer().is_none()) {
            return Err(format!("model {from} is not in another process as seen from {}", self.address));
        }
        let subserver = local::find(&self.directory, *to).cloned();
        subserver.ok_or_else(|| format!("model {to} is not in the process at {}", self.address))
    }
}

async fn welcome<S: Stream>(stream: &mut S) -> Result<(), WireError> {
    stream.write_all(&encode(&Answer::Welcome)?).await?;
    Ok(stream.flush().await?)
}

/// Hands frames on until the connection ends; returns why.
async fn hand_on<S: Stream>(stream: &mut S, bounds: &Bounds, subserver: &Mailbox<Subserver>) -> WireError {
    loop {
        match timeout(SILENCE_MAX, read_frame(stream, FRAME_BYTES_MAX)).await {
            Ok(Ok(content)) if content.is_empty() => {}
            Ok(Ok(content)) => {
                if let Err(error) = pass(&content, bounds, subserver).await {
                    return error;
                }
            }
            Ok(Err(error)) => return error,
            Err(_) => {
                return io::Error::new(io::ErrorKind::TimedOut, format!("silent for {SILENCE_MAX:?}")).into();
            }
        }
    }
}

async fn pass(content: &[u8], bounds: &Bounds, subserver: &Mailbox<Subserver>) -> Result<(), WireError> {
    let parcel: Parcel = decode(content)?;
    if let Some(fault) = bounds.fault(&parcel) {
        return Err(WireError::Refused(fault));
    }
    let delivered = match subserver.try_send(Frame(parcel.envelope)) {
        // The peer has to wait while the mailbox is full: nothing more is read.
        Err(SendError::Full(frame)) => subserver.send(frame).await.is_ok(),
        other => other.is_ok(),
    };
    match delivered {
        true => Ok(()),
        false => Err(WireError::Refused(format!("model {} has stopped", bounds.to))),
    }
}
