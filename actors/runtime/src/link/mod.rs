//! How InterModel reaches a peer. Owner: one link per peer. Invariant: frames arrive in the order sent, or not at all;
//! when any are lost both sides are told so ([`crate::messages::LinkEvent`]).

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use tokenrouter_core::peer::Envelope;

pub mod check;
pub mod faulty;
pub mod gate;
pub mod identity;
pub mod local;
pub mod net;
pub mod process;
pub mod socket;
pub mod wire;

/// One direction to one peer.
pub trait Link: Send + fmt::Debug {
    /// Hands a frame over without waiting.
    ///
    /// # Errors
    /// [`LinkDown`] when the peer cannot be reached; the frame is lost then and the caller must act on it.
    fn send(&self, envelope: Envelope) -> Result<(), LinkDown>;

    /// Whether frames reach the peer now.
    fn is_up(&self) -> bool {
        true
    }

    /// The peer was heard of: if it could not be reached before, it can now.
    fn wake(&self) {}
}

/// The peer cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("peer unreachable: {0}")]
pub struct LinkDown(pub String);

/// Where a process is reached, written `unix:PATH` or `tcp:IP:PORT`. What goes over it is neither encrypted nor
/// authenticated: a Unix socket is guarded by the rights of its file, a TCP port by nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// Not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an address; write unix:PATH or tcp:IP:PORT")]
pub struct NoAddress(String);

impl FromStr for Address {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let address = match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Some(Address::Unix(path.into())),
            Some(("tcp", at)) => at.parse().ok().map(Address::Tcp),
            _ => None,
        };
        address.ok_or_else(|| NoAddress(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["unix:/run/a b.sock", "tcp:127.0.0.1:7000", "tcp:[::1]:7000"] {
            assert_eq!(text.parse::<Address>().map(|address| address.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "unix:", "tcp:host:7000", "tcp:127.0.0.1", "/run/a.sock", "http:127.0.0.1:1"] {
            assert_eq!(text.parse::<Address>(), Err(NoAddress(text.to_owned())));
        }
    }
}
