//! Streams and listeners of both kinds of address. Owner: of a listener the gate, of a stream one link. Invariant: a
//! Unix socket left behind by a dead process is replaced, that of a living one never.

use super::Address;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net as unix;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// Only the owner may connect.
const SOCKET_MODE: u32 = 0o600;

/// Either kind of stream.
pub trait Stream: AsyncRead + AsyncWrite + Unpin {}

impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

/// Connects to a process.
///
/// # Errors
/// As the operating system says.
pub async fn connect(to: &Address) -> io::Result<Box<dyn Stream>> {
    Ok(match to {
        Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
        Address::Tcp(address) => {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Box::new(stream)
        }
    })
}

/// A bound address that has not been given to an event loop yet.
#[derive(Debug)]
pub enum Bound {
    /// A Unix socket and its file.
    Unix(unix::UnixListener, SocketFile),
    /// A TCP port.
    Tcp(std::net::TcpListener),
}

impl Bound {
    /// Takes the address. A Unix socket nobody listens at is replaced.
    ///
    /// # Errors
    /// As the operating system says; `AddrInUse` when a process listens there.
    pub fn new(at: &Address) -> io::Result<Self> {
        let bound = match at {
            Address::Unix(path) => {
                let listener = bind_unix(path)?;
                let file = SocketFile(path.clone());
                fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))?;
                listener.set_nonblocking(true)?;
                Bound::Unix(listener, file)
            }
            Address::Tcp(address) => {
                let listener = std::net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Bound::Tcp(listener)
            }
        };
        Ok(bound)
    }

    /// A listener on the event loop of the calling thread.
    ///
    /// # Errors
    /// As the operating system says.
    pub fn listen(self) -> io::Result<Listener> {
        Ok(match self {
            Bound::Unix(listener, file) => Listener::Unix(UnixListener::from_std(listener)?, file),
            Bound::Tcp(listener) => Listener::Tcp(TcpListener::from_std(listener)?),
        })
    }
}

fn bind_unix(path: &Path) -> io::Result<unix::UnixListener> {
    match unix::UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && is_abandoned(path) => {
            fs::remove_file(path)?;
            unix::UnixListener::bind(path)
        }
        other => other,
    }
}

fn is_abandoned(path: &Path) -> bool {
    unix::UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// The file of a Unix socket; removed with it.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::debug!(path = %self.0.display(), %error, "socket file not removed");
        }
    }
}

/// Waits for connections.
#[derive(Debug)]
pub enum Listener {
    /// At a Unix socket.
    Unix(UnixListener, SocketFile),
    /// At a TCP port.
    Tcp(TcpListener),
}

impl Listener {
    /// The next connection.
    ///
    /// # Errors
    /// As the operating system says.
    pub async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Listener::Unix(listener, _) => Box::new(listener.accept().await?.0),
            Listener::Tcp(listener) => {
                let stream = listener.accept().await?.0;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        })
    }
}
